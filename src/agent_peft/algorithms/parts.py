"""The parts of a policy gradient by their names: what they compute, their formulas and their papers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from agent_peft.algorithms.advantages import ADVANTAGES, AdvantageName, MovingAverageBaseline
from agent_peft.algorithms.policy_gradient import PolicyGradient
from agent_peft.algorithms.surrogates import (
    Surrogate,
    SurrogateName,
    band,
    clipped,
    ratio,
    score_function,
    sequence_clipped,
    truncated,
)
from agent_peft.algorithms.weightings import WEIGHTINGS, Weighting, WeightingName, constant_length

BaselineName = Literal["none", "moving_average", "batch_normalized"]
ConstantLength = Literal["constant_length"]

ADVANTAGE: dict[AdvantageName, tuple[str, str]] = {
    "plain_return": ("R", "Williams, 1992"),
    "leave_one_out": ("R - mean of the others of its group", "Ahmadian et al., 2024"),
    "group_centered": ("R - mean of its group", "Liu et al., 2025"),
    "group_normalized": ("(R - mean of its group) / (std of its group + 1e-6)", "Shao et al., 2024"),
    "mean_normalized": ("(R - mean of its group) / (mean of its group + 1e-6)", "Tajwar et al., 2026"),
}
SURROGATE: dict[SurrogateName, tuple[str, str]] = {
    "score_function": ("-Â log π", "Williams, 1992"),
    "ratio": ("-ρ Â", "Schulman et al., 2017"),
    "clipped": ("-min(ρ Â, clip(ρ, {low:.6g}, {high:.6g}) Â)", "Schulman et al., 2017"),
    "sequence_clipped": ("-min(s Â, clip(s, {low:.6g}, {high:.6g}) Â)", "Zheng et al., 2025"),
    "truncated": ("-stop_gradient(min(ρ, {high:.6g})) Â log π", "Yao et al., 2025"),
    "band": ("-ρ Â where {low:.6g} ≤ ρ ≤ {high:.6g}, else 0", "Ling Team, 2025"),
}
WEIGHTING: dict[WeightingName | ConstantLength, str] = {
    "token_mean": "mean over tokens",
    "turn_mean": "mean over turns of the tokens' mean",
    "sequence_mean": "mean over trajectories of the tokens' mean",
    "sequence_sum": "mean over trajectories of the tokens' sum",
    "constant_length": "mean over trajectories of the tokens' sum / {length}",
}

SAME_HISTORY = "siblings with the same tokens before the turn"


@dataclass(frozen=True)
class Parts:
    """A policy gradient as names and numbers. What a part does not read stays None.

    >>> print(Parts("leave_one_out", "clipped", "token_mean", clip_low=0.2, clip_high=0.28).formula)
    mean over tokens of -min(ρ Â, clip(ρ, 0.8, 1.28) Â); Â = R - mean of the others of its group
    """

    advantage: AdvantageName
    surrogate: SurrogateName
    weighting: WeightingName | ConstantLength
    baseline: BaselineName = "none"
    baseline_momentum: float | None = None
    baseline_start: float = 0.0
    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = None
    constant_length: int | None = None
    turn_discount: float | None = None
    kl_coef: float = 0.0
    reward_kl_coef: float = 0.0
    entropy_coef: float = 0.0
    update_epochs: int = 1
    minibatches: int = 1

    @property
    def formula(self) -> str:
        """The loss, with its numbers."""
        low, high = 1 - (self.clip_low or 0.0), 1 + (self.clip_high or 0.0)
        per_token = SURROGATE[self.surrogate][0].format(low=low, high=high)
        if self.dual_clip is not None:
            per_token = f"min({per_token}, -{self.dual_clip:g} Â where Â < 0)"
        penalties = f" + {self.kl_coef:g} KL(π ‖ reference)" if self.kl_coef else ""
        penalties += f" - {self.entropy_coef:g} entropy" if self.entropy_coef else ""
        if penalties:
            per_token = f"({per_token}{penalties})"
        value = ADVANTAGE[self.advantage][0]
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
        return "; ".join(dict.fromkeys([ADVANTAGE[self.advantage][1], SURROGATE[self.surrogate][1]]))

    def build(self, kind: str, paper: str = "") -> PolicyGradient:
        """The algorithm."""
        momentum = self.baseline_momentum
        return PolicyGradient(
            kind,
            ADVANTAGES[self.advantage],
            self._surrogate(self.clip_low or 0.0, self.clip_high or 0.0),
            self._weighting(),
            baseline=None if momentum is None else MovingAverageBaseline(momentum, self.baseline_start),
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

    def _surrogate(self, low: float, high: float) -> Surrogate:
        match self.surrogate:
            case "score_function":
                return score_function
            case "ratio":
                return ratio
            case "clipped":
                return clipped(low, high, self.dual_clip)
            case "sequence_clipped":
                return sequence_clipped(low, high)
            case "truncated":
                return truncated(high)
            case "band":
                return band(low, high)

    def _weighting(self) -> Weighting:
        if self.weighting == "constant_length":
            return constant_length(self.constant_length or 1)
        return WEIGHTINGS[self.weighting]
