"""The rows of policy gradients: ``PolicyGradientConfig`` has the parts as keys, and a preset fixes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, create_model, model_validator

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
        return _algorithm(
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
        return _algorithm(
            self,
            "Hu et al., 2025, https://arxiv.org/abs/2501.03262",
            advantage="group_centered" if self.group_baseline else "plain_return",
            baseline="batch_normalized",
            surrogate="clipped",
        )


_PENALTIES = {"kl_coef": 0.0, "reward_kl_coef": 0.0, "entropy_coef": 0.0}
_UPDATES = {"update_epochs": 1, "minibatches": 1}
_CLIP = {"clip_low": 0.2, "clip_high": 0.2}
_ANNOTATIONS = {  # of the keys that presets share
    "kl_coef": KlCoef,
    "reward_kl_coef": RewardKlCoef,
    "entropy_coef": EntropyCoef,
    "update_epochs": UpdateEpochs,
    "minibatches": Minibatches,
    "clip_low": ClipLow,
    "clip_high": ClipHigh,
    "dual_clip": DualClip,
    "turn_discount": TurnDiscount,
    "weighting": WeightingKey,
    "constant_length": Annotated[
        int,
        Field(
            ge=1,
            description="tokens that each trajectory's sum is divided by, such as the most it may sample",
        ),
    ],
}


class _Preset(AlgorithmConfig):
    """A policy gradient of fixed parts, with some of its keys."""

    paper: ClassVar[str]
    parts: ClassVar[Mapping[str, Any]]

    def build(self) -> PolicyGradient:
        return _algorithm(self, self.paper, **self.parts)


def _preset(kind: str, doc: str, paper: str, keys: Mapping[str, Any], **parts: Any) -> type[AlgorithmConfig]:
    """Make the class of a preset with these ``keys`` and their defaults. It fixes the other ``parts``."""
    name = "".join(word.capitalize() for word in kind.split("_")) + "Config"
    fields: dict[str, Any] = {"kind": (Literal[kind], kind)}
    fields |= {key: (_ANNOTATIONS[key], default) for key, default in keys.items()}
    preset: type[_Preset] = create_model(name, __base__=_Preset, __module__=__name__, __doc__=doc, **fields)
    preset.paper, preset.parts = paper, parts
    return preset


RlooConfig = _preset(
    "rloo",
    "REINFORCE leave-one-out. The surrogate is the ratio: equal to REINFORCE's on policy, and corrected in "
    "later updates of a step.",
    "Ahmadian et al., 2024, https://arxiv.org/abs/2402.14740",
    {**_PENALTIES, **_UPDATES, "turn_discount": None, "weighting": "sequence_sum"},
    advantage="leave_one_out",
    surrogate="ratio",
)
GrpoConfig = _preset(
    "grpo",
    "Group relative policy optimization.",
    "Shao et al., 2024, https://arxiv.org/abs/2402.03300",
    {
        **_PENALTIES,
        **_UPDATES,
        **_CLIP,
        "dual_clip": None,
        "turn_discount": None,
        "weighting": "sequence_mean",
    },
    advantage="group_normalized",
    surrogate="clipped",
)
DapoConfig = _preset(
    "dapo",
    "Decoupled clip and dynamic sampling policy optimization: GRPO with a wider clip above, and one mean "
    "over all tokens.",
    "Yu et al., 2025, https://arxiv.org/abs/2503.14476",
    {**_PENALTIES, **_UPDATES, **_CLIP, "clip_high": 0.28, "dual_clip": None},
    advantage="group_normalized",
    surrogate="clipped",
    weighting="token_mean",
)
DrGrpoConfig = _preset(
    "dr_grpo",
    "GRPO done right: no division by the group's standard deviation, and none by a trajectory's length.",
    "Liu et al., 2025, https://arxiv.org/abs/2503.20783",
    {**_PENALTIES, **_UPDATES, **_CLIP, "dual_clip": None, "constant_length": ...},
    advantage="group_centered",
    surrogate="clipped",
    weighting="constant_length",
)
GspoConfig = _preset(
    "gspo",
    "Group sequence policy optimization: GRPO with one ratio per trajectory, so its ε are far smaller.",
    "Zheng et al., 2025, https://arxiv.org/abs/2507.18071",
    {**_PENALTIES, **_UPDATES, "clip_low": 3e-4, "clip_high": 4e-4},
    advantage="group_normalized",
    surrogate="sequence_clipped",
    weighting="sequence_mean",
)
CispoConfig = _preset(
    "cispo",
    "Clipped importance sampling policy optimization: the ratio is clipped as a weight, so that no token "
    "loses its gradient.",
    "MiniMax, 2025, https://arxiv.org/abs/2506.13585",
    {**_PENALTIES, **_UPDATES, "clip_high": 4.0},
    advantage="group_normalized",
    surrogate="truncated",
    weighting="token_mean",
)
MaxrlConfig = _preset(
    "maxrl",
    "Maximum likelihood reinforcement learning: advantages are relative to the group's rate of success, so "
    "that hard tasks count for more.",
    "Tajwar et al., 2026, https://arxiv.org/abs/2602.02710",
    {**_PENALTIES, **_UPDATES, "weighting": "sequence_sum"},
    advantage="mean_normalized",
    surrogate="ratio",
)


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
        return _algorithm(self, "")

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


def _algorithm(config: AlgorithmConfig, paper: str, **parts: Any) -> PolicyGradient:
    """The algorithm of a row: the fixed parts that are given, and the row's own keys."""
    return Parts(**parts, **config.model_dump(exclude={"kind", "group_baseline"})).build(config.kind, paper)
