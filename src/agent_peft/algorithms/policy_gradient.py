"""REINFORCE and its relatives: advantage × surrogate × weighting (+ penalties). Each algorithm is one row:
a configuration whose ``build`` names its parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

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
from agent_peft.algorithms.base import (
    Algorithm,
    AlgorithmConfig,
    Metrics,
    SumOverRanks,
    one_rank,
    weighted,
    weighted_sums,
)
from agent_peft.algorithms.surrogates import Surrogate, clipped, ratio, score_function, sequence_clipped
from agent_peft.algorithms.weightings import (
    WEIGHTINGS,
    Weighting,
    WeightingName,
    constant_length,
    sequence_mean,
)
from agent_peft.batch import Batch, PolicyOutput


class PolicyGradient(Algorithm):
    """loss = Σ weights · (surrogate(Â) + β KL(π ‖ reference) - c2 entropy)

    Args:
        advantage: (returns (B,), groups (B,)) -> advantages (B,).
        baseline: subtracted from the advantages; it moves once per step.
        kl_coef, entropy_coef: β and c2. At 0 the penalty is not computed.
        compares_groups: whether ``advantage`` refuses a group of one.

    >>> from agent_peft.algorithms.weightings import sequence_mean
    >>> row = PolicyGradient("grpo", group_normalized, clipped(0.2, 0.2), sequence_mean, compares_groups=True)
    >>> row.needs_reference
    False
    """

    def __init__(
        self,
        kind: str,
        advantage: Advantage,
        surrogate: Surrogate,
        weighting: Weighting,
        *,
        baseline: MovingAverageBaseline | None = None,
        kl_coef: float = 0.0,
        entropy_coef: float = 0.0,
        update_epochs: int = 1,
        minibatches: int = 1,
        compares_groups: bool = False,
    ) -> None:
        self.kind, self.advantage, self.surrogate, self.weighting = kind, advantage, surrogate, weighting
        self.baseline, self.kl_coef, self.entropy_coef = baseline, kl_coef, entropy_coef
        self.update_epochs, self.minibatches, self.compares_groups = (
            update_epochs,
            minibatches,
            compares_groups,
        )
        self.needs_reference, self.needs_entropy = kl_coef > 0, entropy_coef > 0
        self.learns_at_zero_advantage = self.needs_reference or self.needs_entropy
        self.metrics = surrogate_metrics(kl_coef, entropy_coef)

    def prepare(self, batch: Batch, sum_over_ranks: SumOverRanks = one_rank) -> Batch:
        advantages = self.advantage(batch.returns, batch.groups)
        if self.baseline is not None:
            advantages = self.baseline.subtract(advantages, sum_over_ranks)
        return replace(batch, advantages=advantages[:, None] * batch.action_mask)

    def weigh(self, minibatch: Batch) -> tuple[Batch, Tensor]:
        return weighted(minibatch, self.weighting)

    def loss(self, output: PolicyOutput, microbatch: Batch) -> tuple[Tensor, Metrics]:
        """Metrics: those of ``surrogate_and_penalties``."""
        per_token, metrics = surrogate_and_penalties(
            output, microbatch, self.surrogate, self.kl_coef, self.entropy_coef
        )
        return (microbatch.weights * per_token).sum(), weighted_sums(metrics, microbatch)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.baseline is None else {"baseline": self.baseline.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if self.baseline is not None:
            self.baseline.value = float(state["baseline"])


def surrogate_and_penalties(
    output: PolicyOutput, microbatch: Batch, surrogate: Surrogate, kl_coef: float, entropy_coef: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """surrogate(Â) + β KL(π ‖ reference) - c2 entropy per token, with gradient, and its metrics; all (B, T).

    Metrics: weight (1), ratio, clip_fraction, approx_kl (k3, sampler ‖ policy), surprisal (an estimate of the
    entropy), entropy, kl (k3, to the reference). Those that have nothing to be computed from are left out.
    """
    logprobs, sampled = output.logprobs, microbatch.logprobs
    per_token, cut = surrogate(logprobs, sampled, microbatch.advantages, microbatch.action_mask)
    with torch.no_grad():
        metrics = {
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
        metrics["kl"] = kl.detach()
    if entropy_coef and output.entropy is None:
        raise ValueError("entropy_coef needs the policy's entropy")
    if output.entropy is not None:
        per_token = per_token - entropy_coef * output.entropy
        metrics["entropy"] = output.entropy.detach()
    return per_token, metrics


def surrogate_metrics(kl_coef: float, entropy_coef: float) -> tuple[str, ...]:
    """The names of the metrics of ``surrogate_and_penalties``, except "weight"."""
    penalties = [name for name, coefficient in (("kl", kl_coef), ("entropy", entropy_coef)) if coefficient]
    return ("ratio", "clip_fraction", "approx_kl", "surprisal", *penalties)


KlCoef = Annotated[float, Field(ge=0, description="β of the KL divergence to the reference")]
EntropyCoef = Annotated[float, Field(ge=0, description="c2 of the entropy bonus")]
UpdateEpochs = Annotated[int, Field(ge=1, description="K: passes over the batch of one step")]
Minibatches = Annotated[int, Field(ge=1, description="optimizer updates per pass")]
ClipLow = Annotated[float, Field(gt=0, lt=1, description="ε: the ratio is clipped below 1 - ε")]
ClipHigh = Annotated[float, Field(gt=0, description="ε: the ratio is clipped above 1 + ε")]
WeightingKey = Annotated[
    WeightingName,
    Field(
        description="the loss is a mean over tokens, over turns' means, over trajectories' means, or over "
        "trajectories' sums"
    ),
]


class ReinforceConfig(AlgorithmConfig):
    """REINFORCE with a moving-average baseline. It makes one update per step, because its gradient is right
    only for the policy that acted.
    """

    kind: Literal["reinforce"] = "reinforce"
    kl_coef: KlCoef = 0.0
    entropy_coef: EntropyCoef = 0.0
    baseline_momentum: float = Field(
        default=0.9,
        ge=0,
        le=1,
        description="m in baseline ← m · baseline + (1 - m) · mean reward; with 1 it stays baseline_start, "
        "which 0 makes REINFORCE without a baseline",
    )
    baseline_start: float = Field(default=0.0, description="the baseline of the first step")
    weighting: WeightingKey = "sequence_sum"

    def build(self) -> PolicyGradient:
        return PolicyGradient(
            self.kind,
            plain_return,
            score_function,
            WEIGHTINGS[self.weighting],
            baseline=MovingAverageBaseline(self.baseline_momentum, self.baseline_start),
            kl_coef=self.kl_coef,
            entropy_coef=self.entropy_coef,
        )


class RlooConfig(AlgorithmConfig):
    """REINFORCE leave-one-out. The surrogate is the ratio: equal to REINFORCE's on policy, and corrected in
    later updates of a step.
    """

    kind: Literal["rloo"] = "rloo"
    kl_coef: KlCoef = 0.0
    entropy_coef: EntropyCoef = 0.0
    update_epochs: UpdateEpochs = 1
    minibatches: Minibatches = 1
    weighting: WeightingKey = "sequence_sum"

    def build(self) -> PolicyGradient:
        return _group_row(self, leave_one_out, ratio, WEIGHTINGS[self.weighting])


class GrpoConfig(AlgorithmConfig):
    """Group relative policy optimization."""

    kind: Literal["grpo"] = "grpo"
    kl_coef: KlCoef = 0.0
    entropy_coef: EntropyCoef = 0.0
    update_epochs: UpdateEpochs = 1
    minibatches: Minibatches = 1
    clip_low: ClipLow = 0.2
    clip_high: ClipHigh = 0.2
    weighting: WeightingKey = "sequence_mean"

    def build(self) -> PolicyGradient:
        return _group_row(
            self, group_normalized, clipped(self.clip_low, self.clip_high), WEIGHTINGS[self.weighting]
        )


class DrGrpoConfig(AlgorithmConfig):
    """GRPO done right: no division by the group's standard deviation, and none by a trajectory's length."""

    kind: Literal["dr_grpo"] = "dr_grpo"
    kl_coef: KlCoef = 0.0
    entropy_coef: EntropyCoef = 0.0
    update_epochs: UpdateEpochs = 1
    minibatches: Minibatches = 1
    clip_low: ClipLow = 0.2
    clip_high: ClipHigh = 0.2
    constant_length: int = Field(
        ge=1, description="tokens that each trajectory's sum is divided by, such as the most it may sample"
    )

    def build(self) -> PolicyGradient:
        return _group_row(
            self,
            group_centered,
            clipped(self.clip_low, self.clip_high),
            constant_length(self.constant_length),
        )


class GspoConfig(AlgorithmConfig):
    """Group sequence policy optimization: GRPO with one ratio per trajectory, so its ε are far smaller."""

    kind: Literal["gspo"] = "gspo"
    kl_coef: KlCoef = 0.0
    entropy_coef: EntropyCoef = 0.0
    update_epochs: UpdateEpochs = 1
    minibatches: Minibatches = 1
    clip_low: ClipLow = 3e-4
    clip_high: ClipHigh = 4e-4

    def build(self) -> PolicyGradient:
        return _group_row(
            self, group_normalized, sequence_clipped(self.clip_low, self.clip_high), sequence_mean
        )


def _group_row(
    config: RlooConfig | GrpoConfig | DrGrpoConfig | GspoConfig,
    advantage: Advantage,
    surrogate: Surrogate,
    weighting: Weighting,
) -> PolicyGradient:
    return PolicyGradient(
        config.kind,
        advantage,
        surrogate,
        weighting,
        kl_coef=config.kl_coef,
        entropy_coef=config.entropy_coef,
        update_epochs=config.update_epochs,
        minibatches=config.minibatches,
        compares_groups=True,
    )
