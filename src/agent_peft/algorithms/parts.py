"""A policy gradient as names and numbers: its parts, what they compute, their formulas and their papers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from agent_peft.algorithms.advantages import (
    Advantage,
    AdvantageName,
    MovingAverageBaseline,
    group_centered,
    group_normalized,
    leave_one_out,
    mean_normalized,
    plain_return,
)
from agent_peft.algorithms.base import AlgorithmConfig
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
)
from agent_peft.algorithms.surrogates import (
    WEIGHTINGS,
    Surrogate,
    SurrogateName,
    WeightingName,
    band,
    clipped,
    constant_length,
    ratio,
    score_function,
    sequence_clipped,
    truncated,
)

BaselineName = Literal["none", "moving_average", "batch_normalized"]
ConstantLength = Literal["constant_length"]

# name -> what it computes, its formula and its paper
ADVANTAGE: dict[AdvantageName, tuple[Advantage, str, str]] = {
    "plain_return": (plain_return, "R", "Williams, 1992"),
    "leave_one_out": (leave_one_out, "R - mean of the others of its group", "Ahmadian et al., 2024"),
    "group_centered": (group_centered, "R - mean of its group", "Liu et al., 2025"),
    "group_normalized": (
        group_normalized,
        "(R - mean of its group) / (std of its group + 1e-6)",
        "Shao et al., 2024",
    ),
    "mean_normalized": (
        mean_normalized,
        "(R - mean of its group) / (mean of its group + 1e-6)",
        "Tajwar et al., 2026",
    ),
}
SURROGATE: dict[SurrogateName, tuple[Callable[[float, float, float | None], Surrogate], str, str]] = {
    "score_function": (lambda low, high, dual: score_function, "-Â log π", "Williams, 1992"),
    "ratio": (lambda low, high, dual: ratio, "-ρ Â", "Schulman et al., 2017"),
    "clipped": (clipped, "-min(ρ Â, clip(ρ, {low:.6g}, {high:.6g}) Â)", "Schulman et al., 2017"),
    "sequence_clipped": (
        lambda low, high, dual: sequence_clipped(low, high),
        "-min(s Â, clip(s, {low:.6g}, {high:.6g}) Â)",
        "Zheng et al., 2025",
    ),
    "truncated": (
        lambda low, high, dual: truncated(high),
        "-stop_gradient(min(ρ, {high:.6g})) Â log π",
        "Yao et al., 2025",
    ),
    "band": (
        lambda low, high, dual: band(low, high),
        "-ρ Â where {low:.6g} ≤ ρ ≤ {high:.6g}, else 0",
        "Ling Team, 2025",
    ),
}
WEIGHTING: dict[WeightingName | ConstantLength, str] = {
    "token_mean": "mean over tokens",
    "turn_mean": "mean over turns of the tokens' mean",
    "sequence_mean": "mean over trajectories of the tokens' mean",
    "sequence_sum": "mean over trajectories of the tokens' sum",
    "constant_length": "mean over trajectories of the tokens' sum / {length}",
}

SAME_HISTORY = "siblings with the same tokens before the turn"

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
    """A policy gradient of any parts. Each other row is this one with fixed parts.

    >>> config = PolicyGradientConfig(advantage="leave_one_out", weighting="token_mean", clip_high=0.28)
    >>> print(config.formula)
    mean over tokens of -min(ρ Â, clip(ρ, 0.8, 1.28) Â); Â = R - mean of the others of its group
    """

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
        return self.algorithm(self.kind)

    @property
    def formula(self) -> str:
        """The loss, with its numbers."""
        low, high = 1 - (self.clip_low or 0.0), 1 + (self.clip_high or 0.0)
        per_token = SURROGATE[self.surrogate][1].format(low=low, high=high)
        if self.dual_clip is not None:
            per_token = f"min({per_token}, -{self.dual_clip:g} Â where Â < 0)"
        penalties = f" + {self.kl_coef:g} KL(π ‖ reference)" if self.kl_coef else ""
        penalties += f" - {self.entropy_coef:g} entropy" if self.entropy_coef else ""
        if penalties:
            per_token = f"({per_token}{penalties})"
        value = ADVANTAGE[self.advantage][1]
        value += " - b" if self.baseline == "moving_average" else ""
        if self.reward_kl_coef:
            value += f" - {self.reward_kl_coef:g} KL(π_sampled ‖ reference) from the token on"
        if self.baseline == "batch_normalized":
            value = f"({value}), scaled to mean 0 and std 1 over the step's tokens"
        symbols = "; b = moving average of R" if self.baseline == "moving_average" else ""
        symbols += (
            "; s = geometric mean of the trajectory's ρ" if self.surrogate == "sequence_clipped" else ""
        )
        if self.turn_discount is not None:
            peers = "" if self.advantage == "plain_return" else "; its group = " + SAME_HISTORY
            symbols += f"; R = Σ {self.turn_discount:g}^k r_k over the turn and those after it{peers}"
        weighting = WEIGHTING[self.weighting].format(length=self.constant_length)
        return f"{weighting} of {per_token}; Â = {value}{symbols}"

    @property
    def papers(self) -> str:
        """Of the advantage and of the surrogate."""
        return "; ".join(dict.fromkeys([ADVANTAGE[self.advantage][2], SURROGATE[self.surrogate][2]]))

    def algorithm(self, kind: str, paper: str = "") -> PolicyGradient:
        """The algorithm, by its name in messages, and from the papers of its parts where it has none."""
        momentum, weighting = self.baseline_momentum, constant_length(self.constant_length or 1)
        if self.weighting != "constant_length":
            weighting = WEIGHTINGS[self.weighting]
        return PolicyGradient(
            kind,
            ADVANTAGE[self.advantage][0],
            SURROGATE[self.surrogate][0](self.clip_low or 0.0, self.clip_high or 0.0, self.dual_clip),
            weighting,
            baseline=None if momentum is None else MovingAverageBaseline(momentum),
            normalizes=self.baseline == "batch_normalized",
            kl_coef=self.kl_coef,
            reward_kl_coef=self.reward_kl_coef,
            entropy_coef=self.entropy_coef,
            update_epochs=self.update_epochs,
            minibatches=self.minibatches,
            turn_discount=self.turn_discount,
            compares_groups=self.advantage != "plain_return",
            formula=self.formula,
            paper=paper or self.papers,
        )

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
