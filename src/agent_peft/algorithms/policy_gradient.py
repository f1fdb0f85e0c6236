"""REINFORCE and its kin: advantage × surrogate × weighting (+ penalties). An algorithm is a row here, not
a branch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from agent_peft.algorithms import penalties
from agent_peft.algorithms.advantages import (
    Advantage,
    MovingAverageBaseline,
    group_centered,
    group_normalized,
    leave_one_out,
    plain_return,
)
from agent_peft.algorithms.base import BaseAlgorithmConfig, Metrics, SumOverRanks, one_rank
from agent_peft.algorithms.surrogates import Surrogate, clipped, ratio, score_function
from agent_peft.algorithms.weightings import WEIGHTINGS, Weighting, constant_length
from agent_peft.batch import Batch, PolicyOutput
from agent_peft.types import AgentPeftError


@dataclass(frozen=True)
class PolicyGradient:
    """loss = Σ weights · (surrogate(Â) + β KL(π ‖ reference) - c2 entropy)

    >>> from agent_peft.algorithms.weightings import sequence_mean
    >>> grpo = PolicyGradient("grpo", group_normalized, clipped(0.2, 0.2), sequence_mean)
    >>> grpo.needs_reference
    False
    """

    kind: str
    advantage: Advantage
    surrogate: Surrogate
    weighting: Weighting
    baseline: MovingAverageBaseline | None = None
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    update_epochs: int = 1
    minibatches: int = 1

    on_policy: ClassVar[bool] = True
    critic: ClassVar[None] = None

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef > 0

    @property
    def needs_entropy(self) -> bool:
        return self.entropy_coef > 0

    @property
    def learns_at_zero_advantage(self) -> bool:
        return self.needs_reference or self.needs_entropy

    @property
    def metrics(self) -> tuple[str, ...]:
        return surrogate_metrics(self.kl_coef, self.entropy_coef)

    def prepare(self, batch: Batch, sum_over_ranks: SumOverRanks = one_rank) -> Batch:
        advantages = self.advantage(batch.returns, batch.groups)
        if self.baseline is not None:
            advantages = self.baseline.subtract(advantages, sum_over_ranks)
        return replace(batch, advantages=advantages[:, None] * batch.action_mask)

    def observe(self, batch: Batch, sum_over_ranks: SumOverRanks = one_rank) -> dict[str, float]:
        return {}

    def weigh(self, minibatch: Batch) -> tuple[Batch, Tensor]:
        weights, denominator = self.weighting(minibatch.action_mask)
        return replace(minibatch, weights=weights), denominator

    def loss(self, output: PolicyOutput, microbatch: Batch) -> tuple[Tensor, Metrics]:
        """Metrics: those of ``surrogate_and_penalties``."""
        per_token, shown = surrogate_and_penalties(
            output, microbatch, self.surrogate, self.kl_coef, self.entropy_coef
        )
        weights = microbatch.weights
        return (weights * per_token).sum(), {name: (weights * x).sum() for name, x in shown.items()}

    def is_done(self, metrics: Mapping[str, float]) -> bool:
        return False

    def state_dict(self) -> dict[str, Any]:
        return {} if self.baseline is None else {"baseline": self.baseline.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if set(state) != set(self.state_dict()):
            raise AgentPeftError(
                f"the checkpoint's algorithm state holds {sorted(state)} but {self.kind} needs {sorted(self.state_dict())}: "
                "resume with the algorithm that wrote it, or start a fresh run"
            )
        if self.baseline is not None:
            self.baseline.value = float(state["baseline"])


def surrogate_and_penalties(
    output: PolicyOutput, microbatch: Batch, surrogate: Surrogate, kl_coef: float, entropy_coef: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """surrogate(Â) + β KL(π ‖ reference) - c2 entropy, per token (B, T) with gradient, and what there is to
    show of it.

    Shown: weight (1), ratio, clip_fraction, approx_kl (k3, sampler ‖ policy), surprisal (an estimate of the
    entropy), entropy, kl (k3, to the reference); where there is nothing to make one of, it is left out.
    """
    logprobs, sampled = output.logprobs, microbatch.logprobs
    per_token, cut = surrogate(logprobs, sampled, microbatch.advantages)
    with torch.no_grad():
        shown = {
            "weight": torch.ones_like(logprobs),
            "ratio": (logprobs - sampled).exp(),
            "clip_fraction": cut.float(),
            "approx_kl": penalties.k3(sampled, logprobs),
            "surprisal": -logprobs,
        }
    if kl_coef:
        if microbatch.reference_logprobs is None:
            raise ValueError("kl_coef needs the reference's log-probabilities in the batch")
        kl = penalties.reverse_kl(logprobs, sampled, microbatch.reference_logprobs)
        per_token = per_token + kl_coef * kl
        shown["kl"] = kl.detach()
    if entropy_coef and output.entropy is None:
        raise ValueError("entropy_coef needs the policy's entropy")
    if output.entropy is not None:
        per_token = per_token - entropy_coef * output.entropy
        shown["entropy"] = output.entropy.detach()
    return per_token, shown


def surrogate_metrics(kl_coef: float, entropy_coef: float) -> tuple[str, ...]:
    """The names of what ``surrogate_and_penalties`` shows, "weight" apart."""
    penalties = [name for name, coefficient in (("kl", kl_coef), ("entropy", entropy_coef)) if coefficient]
    return ("ratio", "clip_fraction", "approx_kl", "surprisal", *penalties)


class _Penalized(BaseAlgorithmConfig):
    kl_coef: float = Field(default=0.0, ge=0, description="β of the KL divergence to the reference")
    entropy_coef: float = Field(default=0.0, ge=0, description="c2 of the entropy bonus")


class _Reused(_Penalized):
    update_epochs: int = Field(default=1, ge=1, description="K: trips through the batch of one step")
    minibatches: int = Field(default=1, ge=1, description="optimizer updates per trip")


class ReinforceConfig(_Penalized):
    """REINFORCE with a moving-average baseline. One update per batch: its gradient is right only on the
    policy that acted.
    """

    kind: Literal["reinforce"] = "reinforce"
    baseline_momentum: float = Field(default=0.9, ge=0, lt=1)
    baseline_start: float = Field(default=0.0, description="the baseline of the first step")
    weighting: Literal["token_mean", "sequence_mean", "sequence_sum"] = "sequence_sum"


class RlooConfig(_Reused):
    """REINFORCE leave-one-out. The surrogate is the ratio: the same on policy, and corrected in later
    updates of a batch.
    """

    kind: Literal["rloo"] = "rloo"
    weighting: Literal["token_mean", "sequence_mean", "sequence_sum"] = "sequence_sum"


class _Clipped(_Reused):
    clip_low: float = Field(default=0.2, gt=0, lt=1, description="ε below 1")
    clip_high: float = Field(default=0.2, gt=0, description="ε above 1")


class GrpoConfig(_Clipped):
    """Group relative policy optimization."""

    kind: Literal["grpo"] = "grpo"
    weighting: Literal["token_mean", "sequence_mean", "sequence_sum"] = "sequence_mean"


class DrGrpoConfig(_Clipped):
    """GRPO done right: no division by the group's spread, none by a trajectory's own length."""

    kind: Literal["dr_grpo"] = "dr_grpo"
    constant_length: int = Field(
        ge=1, description="tokens that a trajectory's sum is divided by, such as the most it may sample"
    )


def reinforce(config: ReinforceConfig) -> PolicyGradient:
    baseline = MovingAverageBaseline(config.baseline_momentum, config.baseline_start)
    rest = config.model_dump(exclude={"weighting", "baseline_momentum", "baseline_start"})
    return PolicyGradient(
        advantage=plain_return,
        baseline=baseline,
        surrogate=score_function,
        weighting=WEIGHTINGS[config.weighting],
        **rest,
    )


def rloo(config: RlooConfig) -> PolicyGradient:
    rest = config.model_dump(exclude={"weighting"})
    return PolicyGradient(
        advantage=leave_one_out, surrogate=ratio, weighting=WEIGHTINGS[config.weighting], **rest
    )


def grpo(config: GrpoConfig) -> PolicyGradient:
    surrogate = clipped(config.clip_low, config.clip_high)
    rest = config.model_dump(exclude={"weighting", "clip_low", "clip_high"})
    return PolicyGradient(
        advantage=group_normalized, surrogate=surrogate, weighting=WEIGHTINGS[config.weighting], **rest
    )


def dr_grpo(config: DrGrpoConfig) -> PolicyGradient:
    surrogate = clipped(config.clip_low, config.clip_high)
    rest = config.model_dump(exclude={"constant_length", "clip_low", "clip_high"})
    return PolicyGradient(
        advantage=group_centered,
        surrogate=surrogate,
        weighting=constant_length(config.constant_length),
        **rest,
    )
