"""The rows of policy gradients. Each is a configuration whose ``build`` names its parts, and
``PolicyGradientConfig`` has the parts as keys, for any combination of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from agent_peft.algorithms.advantages import AdvantageName
from agent_peft.algorithms.base import AlgorithmConfig
from agent_peft.algorithms.parts import BaselineName, ConstantLength, Parts
from agent_peft.algorithms.policy_gradient import (
    ClipHigh,
    ClipLow,
    DualClip,
    EntropyCoef,
    KlCoef,
    Minibatches,
    PolicyGradient,
    RewardKlCoef,
    TurnDiscount,
    UpdateEpochs,
    WeightingKey,
)
from agent_peft.algorithms.surrogates import SurrogateName
from agent_peft.algorithms.weightings import WeightingName


class ReinforceConfig(AlgorithmConfig):
    """REINFORCE with a moving-average baseline. It makes one update per step, because its gradient is right
    only for the policy that acted.
    """

    kind: Literal["reinforce"] = "reinforce"
    kl_coef: KlCoef = 0.0
    reward_kl_coef: RewardKlCoef = 0.0
    entropy_coef: EntropyCoef = 0.0
    baseline_momentum: float | None = Field(
        default=0.9,
        ge=0,
        le=1,
        description="m in baseline ← m · baseline + (1 - m) · mean reward; with 1 it stays baseline_start, "
        "and with null there is none",
    )
    baseline_start: float = Field(default=0.0, description="the baseline of the first step")
    turn_discount: TurnDiscount = None
    weighting: WeightingKey = "sequence_sum"

    def build(self) -> PolicyGradient:
        baseline: BaselineName = "none" if self.baseline_momentum is None else "moving_average"
        return _preset(
            self, "Williams, 1992", advantage="plain_return", baseline=baseline, surrogate="score_function"
        )

    @model_validator(mode="after")
    def _effective(self) -> ReinforceConfig:
        if self.baseline_momentum is None and self.baseline_start:
            raise ValueError("baseline_start has no effect with baseline_momentum: null; leave it out")
        return self


class ReinforcePlusPlusConfig(AlgorithmConfig):
    """REINFORCE++: advantages are normalized over the step and not over a group, and the KL is in the
    reward.
    """

    kind: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    reward_kl_coef: RewardKlCoef = 0.0
    entropy_coef: EntropyCoef = 0.0
    group_baseline: bool = Field(
        default=False,
        description="subtract the mean of each group first, which needs groups of two or more",
    )
    update_epochs: UpdateEpochs = 1
    minibatches: Minibatches = 1
    clip_low: ClipLow = 0.2
    clip_high: ClipHigh = 0.2
    weighting: WeightingKey = "sequence_mean"

    def build(self) -> PolicyGradient:
        return _preset(
            self,
            "Hu et al., 2025, https://arxiv.org/abs/2501.03262",
            advantage="group_centered" if self.group_baseline else "plain_return",
            baseline="batch_normalized",
            surrogate="clipped",
        )


class RlooConfig(AlgorithmConfig):
    """REINFORCE leave-one-out. The surrogate is the ratio: equal to REINFORCE's on policy, and corrected in
    later updates of a step.
    """

    kind: Literal["rloo"] = "rloo"
    kl_coef: KlCoef = 0.0
    reward_kl_coef: RewardKlCoef = 0.0
    entropy_coef: EntropyCoef = 0.0
    update_epochs: UpdateEpochs = 1
    minibatches: Minibatches = 1
    turn_discount: TurnDiscount = None
    weighting: WeightingKey = "sequence_sum"

    def build(self) -> PolicyGradient:
        paper = "Ahmadian et al., 2024, https://arxiv.org/abs/2402.14740"
        return _preset(self, paper, advantage="leave_one_out", surrogate="ratio")


class GrpoConfig(AlgorithmConfig):
    """Group relative policy optimization."""

    kind: Literal["grpo"] = "grpo"
    kl_coef: KlCoef = 0.0
    reward_kl_coef: RewardKlCoef = 0.0
    entropy_coef: EntropyCoef = 0.0
    update_epochs: UpdateEpochs = 1
    minibatches: Minibatches = 1
    clip_low: ClipLow = 0.2
    clip_high: ClipHigh = 0.2
    dual_clip: DualClip = None
    turn_discount: TurnDiscount = None
    weighting: WeightingKey = "sequence_mean"

    def build(self) -> PolicyGradient:
        paper = "Shao et al., 2024, https://arxiv.org/abs/2402.03300"
        return _preset(self, paper, advantage="group_normalized", surrogate="clipped")


class DapoConfig(AlgorithmConfig):
    """Decoupled clip and dynamic sampling policy optimization: GRPO with a wider clip above, and one mean
    over all tokens.
    """

    kind: Literal["dapo"] = "dapo"
    kl_coef: KlCoef = 0.0
    reward_kl_coef: RewardKlCoef = 0.0
    entropy_coef: EntropyCoef = 0.0
    update_epochs: UpdateEpochs = 1
    minibatches: Minibatches = 1
    clip_low: ClipLow = 0.2
    clip_high: ClipHigh = 0.28
    dual_clip: DualClip = None

    def build(self) -> PolicyGradient:
        paper = "Yu et al., 2025, https://arxiv.org/abs/2503.14476"
        return _preset(self, paper, advantage="group_normalized", surrogate="clipped", weighting="token_mean")


class DrGrpoConfig(AlgorithmConfig):
    """GRPO done right: no division by the group's standard deviation, and none by a trajectory's length."""

    kind: Literal["dr_grpo"] = "dr_grpo"
    kl_coef: KlCoef = 0.0
    reward_kl_coef: RewardKlCoef = 0.0
    entropy_coef: EntropyCoef = 0.0
    update_epochs: UpdateEpochs = 1
    minibatches: Minibatches = 1
    clip_low: ClipLow = 0.2
    clip_high: ClipHigh = 0.2
    dual_clip: DualClip = None
    constant_length: int = Field(
        ge=1, description="tokens that each trajectory's sum is divided by, such as the most it may sample"
    )

    def build(self) -> PolicyGradient:
        paper = "Liu et al., 2025, https://arxiv.org/abs/2503.20783"
        return _preset(
            self, paper, advantage="group_centered", surrogate="clipped", weighting="constant_length"
        )


class GspoConfig(AlgorithmConfig):
    """Group sequence policy optimization: GRPO with one ratio per trajectory, so its ε are far smaller."""

    kind: Literal["gspo"] = "gspo"
    kl_coef: KlCoef = 0.0
    reward_kl_coef: RewardKlCoef = 0.0
    entropy_coef: EntropyCoef = 0.0
    update_epochs: UpdateEpochs = 1
    minibatches: Minibatches = 1
    clip_low: ClipLow = 3e-4
    clip_high: ClipHigh = 4e-4

    def build(self) -> PolicyGradient:
        paper = "Zheng et al., 2025, https://arxiv.org/abs/2507.18071"
        parts = {"surrogate": "sequence_clipped", "weighting": "sequence_mean"}
        return _preset(self, paper, advantage="group_normalized", **parts)


class CispoConfig(AlgorithmConfig):
    """Clipped importance sampling policy optimization: the ratio is clipped as a weight, so that no token
    loses its gradient.
    """

    kind: Literal["cispo"] = "cispo"
    kl_coef: KlCoef = 0.0
    reward_kl_coef: RewardKlCoef = 0.0
    entropy_coef: EntropyCoef = 0.0
    update_epochs: UpdateEpochs = 1
    minibatches: Minibatches = 1
    clip_high: ClipHigh = 4.0

    def build(self) -> PolicyGradient:
        paper = "MiniMax, 2025, https://arxiv.org/abs/2506.13585"
        parts = {"surrogate": "truncated", "weighting": "token_mean"}
        return _preset(self, paper, advantage="group_normalized", **parts)


class MaxRlConfig(AlgorithmConfig):
    """Maximum likelihood reinforcement learning: advantages are relative to the group's rate of success, so
    that hard tasks count for more.
    """

    kind: Literal["maxrl"] = "maxrl"
    kl_coef: KlCoef = 0.0
    reward_kl_coef: RewardKlCoef = 0.0
    entropy_coef: EntropyCoef = 0.0
    update_epochs: UpdateEpochs = 1
    minibatches: Minibatches = 1
    weighting: WeightingKey = "sequence_sum"

    def build(self) -> PolicyGradient:
        paper = "Tajwar et al., 2026, https://arxiv.org/abs/2602.02710"
        return _preset(self, paper, advantage="mean_normalized", surrogate="ratio")


CLIPS: dict[SurrogateName, dict[str, float | None]] = {
    "score_function": {},
    "ratio": {},
    "clipped": {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None},
    "sequence_clipped": {"clip_low": 3e-4, "clip_high": 4e-4},
    "truncated": {"clip_high": 1.0},
    "band": {"clip_low": 0.5, "clip_high": 4.0},
}
"""The keys that a surrogate has, and their values where none is given."""


class PolicyGradientConfig(AlgorithmConfig):
    """A policy gradient of any parts. Each other row is this one with fixed parts."""

    kind: Literal["policy_gradient"] = "policy_gradient"
    advantage: AdvantageName = Field(
        default="group_normalized",
        description="how returns become advantages: as they are, less the mean of the others in the group, "
        "less the group's mean, or that divided by the group's standard deviation or by its mean",
    )
    baseline: BaselineName = Field(
        default="none",
        description="nothing more, less a moving average of the returns of earlier steps, or scaled to mean "
        "0 and standard deviation 1 over all sampled tokens of the step",
    )
    surrogate: SurrogateName = Field(
        default="clipped",
        description="the loss per token: Â log π, the ratio times Â, that clipped by token (PPO) or by "
        "trajectory (GSPO), Â log π times the truncated ratio (CISPO), or the ratio times Â within a band "
        "(IcePop)",
    )
    weighting: WeightingName | ConstantLength = Field(
        default="sequence_mean",
        description="the loss is a mean over tokens, over turns' means, over trajectories' means, over "
        "trajectories' sums, or over those divided by constant_length",
    )
    clip_low: ClipLow | None = Field(
        default=None, description="ε: the surrogate's limit below is 1 - ε; null where it has none"
    )
    clip_high: ClipHigh | None = Field(
        default=None, description="ε: the surrogate's limit above is 1 + ε; null where it has none"
    )
    dual_clip: DualClip = None
    baseline_momentum: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="m of the moving average; null where there is none",
    )
    constant_length: int | None = Field(
        default=None, ge=1, description="tokens that each trajectory's sum is divided by; null where none is"
    )
    turn_discount: TurnDiscount = None
    kl_coef: KlCoef = 0.0
    reward_kl_coef: RewardKlCoef = 0.0
    entropy_coef: EntropyCoef = 0.0
    update_epochs: UpdateEpochs = 1
    minibatches: Minibatches = 1

    def build(self) -> PolicyGradient:
        return _preset(self, "")

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, keys: Any) -> Any:
        """The limits of the surrogate and the momentum of the baseline, where none are given."""
        if not isinstance(keys, Mapping):
            return keys
        limits = CLIPS.get(keys.get("surrogate", "clipped"), {})
        momentum = {"baseline_momentum": 0.9} if keys.get("baseline") == "moving_average" else {}
        return {**limits, **momentum, **keys}

    @model_validator(mode="after")
    def _effective(self) -> PolicyGradientConfig:
        for key in ("clip_low", "clip_high", "dual_clip"):
            if getattr(self, key) is not None and key not in CLIPS[self.surrogate]:
                raise ValueError(f"{key} has no effect with surrogate: {self.surrogate}; leave it out")
            if getattr(self, key) is None and CLIPS[self.surrogate].get(key) is not None:
                raise ValueError(
                    f"{key}: surrogate {self.surrogate} needs a number; give one or leave it out"
                )
        if (self.baseline_momentum is None) == (self.baseline == "moving_average"):
            raise ValueError("baseline_momentum belongs to baseline: moving_average; give both or neither")
        if (self.constant_length is None) == (self.weighting == "constant_length"):
            raise ValueError("constant_length belongs to weighting: constant_length; give both or neither")
        if self.baseline == "moving_average" and self.advantage != "plain_return":
            raise ValueError(
                f"baseline: moving_average has no effect on advantage: {self.advantage}, whose mean is 0 in "
                "every group; leave it out, or set advantage: plain_return"
            )
        if self.surrogate == "score_function" and self.update_epochs * self.minibatches > 1:
            raise ValueError(
                "surrogate: score_function is right only for the policy that acted, so for one update per "
                "step; set update_epochs: 1 and minibatches: 1, or take surrogate: ratio"
            )
        if self.turn_discount is not None and self.surrogate == "sequence_clipped":
            raise ValueError(
                "turn_discount: surrogate sequence_clipped has one ratio, and so one advantage, for a "
                "trajectory; take surrogate: clipped"
            )
        if self.turn_discount is not None and self.advantage == "mean_normalized":
            raise ValueError(
                "turn_discount: advantage mean_normalized divides by a rate of success, and what is still to "
                "come at a later turn is none; take advantage: group_centered"
            )
        return self


def _preset(config: AlgorithmConfig, paper: str, **parts: Any) -> PolicyGradient:
    """The algorithm of a row: the fixed parts that are given, and the row's own keys."""
    return Parts(**parts, **config.model_dump(exclude={"kind", "group_baseline"})).build(config.kind, paper)
