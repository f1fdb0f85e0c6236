"""What an algorithm is to the trainer, and what it reads of a policy's forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict
from torch import Tensor

from agent_peft.batch import Batch, PolicyOutput

Metrics = dict[str, Tensor]

SumOverRanks = Callable[[Tensor], Tensor]


def one_rank(tensor: Tensor) -> Tensor:
    """The sum over ranks where there is one rank."""
    return tensor


@dataclass(frozen=True)
class Critic:
    """What an algorithm asks of the value head it learns with.

    >>> Critic(learning_rate=1e-2, trunk_gradient=True).trunk_gradient
    True
    """

    learning_rate: float  # the head's own
    trunk_gradient: bool  # whether the value loss also trains the model under the head


class Algorithm(Protocol):
    """Turns rewarded trajectories into a loss. Called as ``prepare`` once per step, ``weigh`` per
    minibatch, ``loss`` per microbatch.
    """

    @property
    def kind(self) -> str: ...

    @property
    def needs_reference(self) -> bool: ...

    @property
    def needs_entropy(self) -> bool: ...

    @property
    def critic(self) -> Critic | None:
        """The value head it needs. Where it does, ``prepare`` finds the batch's ``values`` set, and
        ``loss`` the output's.
        """

    @property
    def learns_at_zero_advantage(self) -> bool:
        """Whether a token whose advantage is zero still has a gradient; where none has, its trajectory
        needs no forward.
        """

    @property
    def on_policy(self) -> bool:
        """Whether it learns from rollouts of the policy itself (False: from an offline dataset)."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of all that ``loss`` and ``observe`` may report, "weight" apart."""

    @property
    def update_epochs(self) -> int: ...

    @property
    def minibatches(self) -> int: ...

    def prepare(self, batch: Batch, sum_over_ranks: SumOverRanks = one_rank) -> Batch:
        """Set ``advantages`` (B, T). Sees this rank's share of a whole step; groups are never split over
        ranks.
        """

    def observe(self, batch: Batch, sum_over_ranks: SumOverRanks = one_rank) -> dict[str, float]:
        """What the prepared step says in numbers that are no means over updates; the same on every rank."""

    def weigh(self, minibatch: Batch) -> tuple[Batch, Tensor]:
        """Set ``weights`` (B, T), not normalised, and return what normalises them: this rank's share of the
        denominator, a scalar.

        The trainer sums the denominators over ranks and divides the weights by the sum before it cuts
        microbatches.
        """

    def loss(self, output: PolicyOutput, microbatch: Batch) -> tuple[Tensor, Metrics]:
        """This microbatch's share of the minibatch's loss, a scalar with gradient, and its share of the
        metrics.

        Every metric is ``(weights * x).sum()`` and so is ``"weight"``, with x = 1: sum all over microbatches
        and ranks, then ``averages``.
        """

    def is_done(self, metrics: Mapping[str, float]) -> bool:
        """Asked after each epoch with the metrics of its last update, all ranks together: are the step's
        further epochs left out?
        """

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must remember; fit for JSON."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def averages(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    """Summed metrics as means over the tokens, weighted as the loss weights them.

    A mean, whatever the weighting: ``sequence_sum`` divides the loss by the trajectories, but a ratio of 1
    should still read 1.

    >>> import torch
    >>> averages({"ratio": torch.tensor(30.0), "weight": torch.tensor(30.0)})
    {'ratio': 1.0}
    """
    weight = float(metrics["weight"])
    return {
        name: float(value) / weight if weight else 0.0 for name, value in metrics.items() if name != "weight"
    }


class BaseAlgorithmConfig(BaseModel):
    """Base of every algorithm's configuration: frozen, and a key that has no effect on the algorithm is an
    unknown key.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
