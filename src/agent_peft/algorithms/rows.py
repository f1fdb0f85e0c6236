"""The rows of policy gradients: each is ``PolicyGradientConfig`` with fixed parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, create_model, model_validator

from agent_peft.algorithms.base import AlgorithmConfig
from agent_peft.algorithms.parts import BaselineName, PolicyGradientConfig
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
        algorithm = _algorithm(
            self, "Williams, 1992", advantage="plain_return", baseline=baseline, surrogate="score_function"
        )
        if algorithm.baseline is not None:
            algorithm.baseline.value = self.baseline_start
        return algorithm

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


def _algorithm(config: AlgorithmConfig, paper: str, **parts: Any) -> PolicyGradient:
    """The algorithm of a row: the fixed parts that are given, and the row's own keys."""
    keys = config.model_dump(exclude={"kind", "group_baseline", "baseline_start"})
    return PolicyGradientConfig.model_construct(**parts, **keys).algorithm(config.kind, paper)
