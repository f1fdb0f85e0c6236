"""The interface between an algorithm and the trainer, with a default for everything but the loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, Self

from agent_peft.algorithms.surrogates import token_mean
from agent_peft.batch import Batch, PolicyOutput
from agent_peft.config import Config
from agent_peft.lazy_torch import Tensor, torch
from agent_peft.ranks import EXTREMES
from agent_peft.types import AgentPeftError

Metrics = dict[str, Tensor]
PreferenceForm = Literal["pairs", "labels"]

SumOverRanks = Callable[[Tensor], Tensor]


def one_rank(tensor: Tensor) -> Tensor:
    """The sum over ranks where there is one rank."""
    return tensor


@dataclass(frozen=True)
class Critic:
    """The value head that an algorithm asks for.

    >>> Critic(learning_rate=1e-2).detach
    False
    """

    learning_rate: float  # of the head alone
    detach: bool = False  # the value loss does not train the model under the head


class Algorithm:
    """Turns rewarded trajectories into a loss. The trainer calls ``prepare`` once per step, ``weigh`` once
    per minibatch and ``loss`` once per microbatch. A subclass must define ``loss``.

    Attributes:
        kind: its name in messages.
        on_policy: it learns from episodes of the policy itself; False: from demonstrations, in groups of one,
            or from preferences.
        preferences: those that it learns from: "pairs", groups of a chosen and a rejected trajectory, or
            "labels", trajectories whose labels or returns state which are desirable.
        needs_reference: the batch must hold ``reference_logprobs``.
        needs_scores: the batch must hold ``scored_logprobs``, too.
        needs_entropy: the policy's output must hold ``entropy``.
        divergence: (log-probabilities (n, V) of the policy and of its teacher) -> (n,) nats; the policy's
            output must hold it as ``divergence``.
        bounds_ratio: its loss weighs a token by its ratio to the policy that sampled, and bounds that weight,
            so it may learn from tokens of an earlier version (``lag``).
        critic: the value head it trains. With one, ``prepare`` can read the batch's ``values``, and ``loss``
            those of the output.
        learns_at_zero_advantage: a token whose advantage is zero still has a gradient. Where none has, the
            trajectory needs no forward.
        compares_groups: it compares the trajectories of a group, so a group needs two of them.
        keeps_groups_whole: its loss needs all trajectories of a group in one microbatch, such as pairs.
        update_epochs: passes over the batch of one step.
        minibatches: optimizer updates per pass.
        metrics: the names of all that ``loss`` and ``observe`` may report, as ``averages`` names them.
        formula, paper: the loss in one line and its source, for ``explain``; empty where they are not known.
    """

    kind: str = "custom"
    on_policy: bool = True
    preferences: PreferenceForm | None = None
    needs_reference: bool = False
    needs_scores: bool = False
    needs_entropy: bool = False
    divergence: Callable[[Tensor, Tensor], Tensor] | None = None
    bounds_ratio: bool = False
    critic: Critic | None = None
    learns_at_zero_advantage: bool = False
    compares_groups: bool = False
    keeps_groups_whole: bool = False
    update_epochs: int = 1
    minibatches: int = 1
    metrics: tuple[str, ...] = ()
    formula: str = ""
    paper: str = ""

    def prepare(self, batch: Batch, sum_over_ranks: SumOverRanks = one_rank) -> Batch:
        """Set ``advantages`` (B, T). The batch is this rank's share of a whole step; a group is never split
        over ranks.
        """
        return batch

    def observe(self, batch: Batch, sum_over_ranks: SumOverRanks = one_rank) -> dict[str, float]:
        """Metrics of the prepared step that are not means over updates. They must be equal on every rank."""
        return {}

    def weigh(self, minibatch: Batch) -> tuple[Batch, Tensor]:
        """Set ``weights`` (B, T), not normalised, and return this rank's share of their denominator (scalar).

        The trainer sums the denominators over ranks and divides the weights by the sum before it cuts
        microbatches, so that microbatches and ranks only ever sum. The default is the mean over tokens.
        """
        return weighted(minibatch, token_mean)

    def loss(self, output: PolicyOutput, microbatch: Batch) -> tuple[Tensor, Metrics]:
        """This microbatch's share of the minibatch's loss, a scalar with gradient, and of the metrics.

        Every metric is ``(weights * x).sum()``, and "weight" is the same with x = 1. The trainer sums them
        over microbatches and ranks, then takes ``averages``. Those that are named …_min and …_max are
        extremes of x, and stay so.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no loss(output, microbatch)")

    def is_done(self, metrics: Mapping[str, float]) -> bool:
        """Whether the step's remaining epochs are left out. The trainer asks after each epoch, with the
        means of the metrics over the updates of that epoch and all ranks.
        """
        return False

    def state_dict(self) -> dict[str, Any]:
        """The state that a checkpoint must hold; fit for JSON."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what ``state_dict`` gave."""
        if set(state) != set(self.state_dict()):
            raise AgentPeftError(
                f"the checkpoint's algorithm state holds {sorted(state)} but {self.kind} needs "
                f"{sorted(self.state_dict())}: resume with the algorithm that wrote it, or start a fresh run"
            )


def fault_under_lag(algorithm: Algorithm) -> str:
    """Why an algorithm cannot learn from what an earlier version sampled, and what to set; empty if it can do
    so.
    """
    if not algorithm.bounds_ratio:
        return (
            "does not bound the weight of a token that an earlier version drew; take grpo, ppo, cispo, or "
            "policy_gradient with surrogate clipped, truncated or band; or set lag: 0"
        )
    if algorithm.needs_scores:
        return (
            "has a reward_kl_coef, whose KL is that of the version that sampled, and it is gone; set kl_coef "
            "if it has that key, or lag: 0"
        )
    return ""


def weighted(minibatch: Batch, weighting: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Batch, Tensor]:
    """The minibatch with the weights of a ``weighting``, and their denominator."""
    mask = minibatch.action_mask
    if minibatch.forced is None:
        weights, denominator = weighting(mask)
        return replace(minibatch, weights=weights), denominator
    # forced tokens move to the end, so that they do not part a turn in two
    order = minibatch.forced.int().argsort(dim=1, stable=True)
    moved, denominator = weighting(mask.gather(1, order))
    return replace(minibatch, weights=torch.zeros_like(moved).scatter(1, order, moved)), denominator


def weighted_sums(per_token: Mapping[str, Tensor], microbatch: Batch) -> Metrics:
    """``(weights * x).sum()`` of each x (B, T), and the least and the greatest ratio."""
    sums = {name: (microbatch.weights * x).sum() for name, x in per_token.items()}
    if (rho := per_token.get("ratio")) is not None and rho.numel():
        sums["ratio_min"] = rho.masked_fill(~microbatch.action_mask, math.inf).amin()
        sums["ratio_max"] = rho.masked_fill(~microbatch.action_mask, -math.inf).amax()
    return sums


def averages(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    """Summed metrics as means over the tokens, weighted as the loss weights them.

    They are means whatever the weighting: ``sequence_sum`` divides the loss by the number of trajectories,
    but a ratio of 1 should still read 1.

    Extremes (…_min, …_max) are taken as they are. ``ratio_square`` becomes ``effective_sample_size``, the
    share of the tokens that would be worth as much if all their ratios were equal: mean(ρ)² / mean(ρ²) (Kish,
    1965). It is 1 on policy.

    >>> import torch
    >>> averages({"ratio": torch.tensor(30.0), "weight": torch.tensor(30.0)})
    {'ratio': 1.0}
    """
    weight = float(metrics["weight"])
    means = {
        name: float(value) if name.endswith(EXTREMES) else float(value) / weight if weight else 0.0
        for name, value in metrics.items()
        if name != "weight"
    }
    if (square := means.pop("ratio_square", None)) is not None:
        means["effective_sample_size"] = means["ratio"] ** 2 / square if square else 0.0
    return means


def restore_algorithm(algorithm: Algorithm, state: Mapping[str, Any]) -> list[str]:
    """Load a checkpoint's state of an algorithm, whose keys may have changed since. What is missing starts
    again, and what the algorithm no longer keeps is dropped. Return a line about each of both.
    """
    try:
        algorithm.load_state_dict(state)
    except Exception:  # of the user's code, too
        fresh = algorithm.state_dict()
        if state.keys() == fresh.keys():
            raise
        algorithm.load_state_dict({name: state.get(name, value) for name, value in fresh.items()})
        missing, dropped = sorted(fresh.keys() - state.keys()), sorted(state.keys() - fresh.keys())
        return [f"{name} of {algorithm.kind} starts again: the checkpoint has none" for name in missing] + [
            f"{name} of {algorithm.kind} is dropped: it has no effect any more" for name in dropped
        ]
    return []


class AlgorithmConfig(Config):
    """The base of every algorithm's configuration. A key that has no effect on the algorithm is unknown.

    A subclass adds its keys and defines ``build``.
    """

    kind: str = "custom"  # a row of ALGORITHMS, or package.module:row

    def build(self) -> Algorithm:
        """A new algorithm, which may keep state from step to step."""
        raise NotImplementedError(f"{type(self).__name__} defines no build()")

    @cached_property
    def facts(self) -> Algorithm:
        """An algorithm to read the attributes of, such as ``facts.on_policy``; nothing is trained with it."""
        return self.build()

    def __copy__(self) -> Self:
        copied = super().__copy__()
        copied.__dict__.pop("facts", None)  # a copy may be given other values
        return copied
