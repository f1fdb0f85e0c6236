"""REINFORCE and its relatives: advantage × surrogate × weighting (+ penalties). ``rows`` has the rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from agent_peft.algorithms.advantages import Advantage, MovingAverageBaseline, Turns, moments, standardized
from agent_peft.algorithms.base import (
    Algorithm,
    Metrics,
    SumOverRanks,
    one_rank,
    weighted,
    weighted_sums,
)
from agent_peft.algorithms.surrogates import (
    Surrogate,
    Weighting,
    WeightingName,
    k1,
    k3,
    ratio,
    reverse_kl,
    score_function,
    to_go,
)
from agent_peft.batch import Batch, PolicyOutput
from agent_peft.lazy_torch import Tensor, torch
from agent_peft.types import AgentPeftError


class PolicyGradient(Algorithm):
    """loss = Σ weights · (surrogate(Â) + β KL(π ‖ reference) - c2 entropy)

    Args:
        advantage: (returns (B,), groups (B,)) -> advantages (B,).
        baseline: subtracted from the advantages; it moves once per step.
        normalizes: scale the advantages to mean 0 and standard deviation 1, over the sampled tokens of the
            step, after all else.
        kl_coef, entropy_coef: β and c2. At 0 the penalty is not computed.
        reward_kl_coef: β of the KL in the reward. Each token's advantage loses that of itself and of the
            tokens after it.
        compares_groups: whether ``advantage`` refuses a group of one.
        turn_discount: γ per turn, where advantages are of turns (``Turns``) and not of trajectories.
        formula, paper: for ``explain``.

    >>> from agent_peft.algorithms.advantages import group_normalized
    >>> from agent_peft.algorithms.surrogates import clipped, sequence_mean
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
        normalizes: bool = False,
        kl_coef: float = 0.0,
        reward_kl_coef: float = 0.0,
        entropy_coef: float = 0.0,
        update_epochs: int = 1,
        minibatches: int = 1,
        compares_groups: bool = False,
        turn_discount: float | None = None,
        formula: str = "",
        paper: str = "",
    ) -> None:
        self.kind, self.advantage, self.surrogate, self.weighting = kind, advantage, surrogate, weighting
        self.baseline, self.normalizes = baseline, normalizes
        self.kl_coef, self.reward_kl_coef, self.entropy_coef = kl_coef, reward_kl_coef, entropy_coef
        self.update_epochs, self.minibatches = update_epochs, minibatches
        self.compares_groups, self.turn_discount = compares_groups, turn_discount
        self.needs_reference, self.needs_entropy = kl_coef > 0 or reward_kl_coef > 0, entropy_coef > 0
        self.needs_scores = reward_kl_coef > 0
        self.bounds_ratio = surrogate not in (score_function, ratio)
        self.learns_at_zero_advantage = kl_coef > 0 or self.needs_entropy
        self.formula, self.paper = formula, paper
        self.metrics = (
            *surrogate_metrics(self.needs_reference, entropy_coef),
            "advantage_std",
            *(() if baseline is None else ("baseline",)),
        )

    def prepare(self, batch: Batch, sum_over_ranks: SumOverRanks = one_rank) -> Batch:
        per_token = self._per_token(batch, sum_over_ranks)

        def scaled(values: Tensor) -> Tensor:
            return standardized(values, batch.action_mask, sum_over_ranks) if self.normalizes else values

        if not self.reward_kl_coef:
            return replace(batch, advantages=scaled(per_token))
        kl = to_go(reward_kl(batch), batch.action_mask)
        signal = (scaled(per_token) != 0).any(1)
        return replace(batch, advantages=scaled(per_token - self.reward_kl_coef * kl), signal=signal)

    def _per_token(self, batch: Batch, sum_over_ranks: SumOverRanks) -> Tensor:
        """(B, T) the advantages of the trajectories, or of their turns."""
        turns = None if self.turn_discount is None else Turns.of(batch, self.turn_discount)
        if turns is None:
            advantages = self._advantages(batch.returns, batch.groups)
        else:
            groups = batch.groups[turns.rows]
            compares = self.compares_groups
            found = self._advantages
            advantages = turns.compared(found) if compares else found(turns.returns, groups)
        if self.baseline is not None:
            advantages = self.baseline.subtract(advantages, sum_over_ranks)
        return advantages[:, None] * batch.action_mask if turns is None else turns.per_token(advantages)

    def _advantages(self, returns: Tensor, groups: Tensor) -> Tensor:
        """(B,) what the advantage returns, which may be a user's function."""
        return _shaped(self.advantage(returns, groups), returns, f"the advantage of {self.kind}")

    def observe(self, batch: Batch, sum_over_ranks: SumOverRanks = one_rank) -> dict[str, float]:
        """advantage_std: of the step's sampled tokens. baseline: that of the next step."""
        _, variance = moments(batch.advantages, batch.action_mask, sum_over_ranks)
        baseline = {} if self.baseline is None else {"baseline": self.baseline.value}
        return {"advantage_std": float(variance.sqrt()), **baseline}

    def weigh(self, minibatch: Batch) -> tuple[Batch, Tensor]:
        return weighted(minibatch, self.weighting)

    def loss(self, output: PolicyOutput, microbatch: Batch) -> tuple[Tensor, Metrics]:
        """Metrics: those of ``surrogate_and_penalties``."""
        per_token, metrics = surrogate_and_penalties(
            output,
            microbatch,
            self.surrogate,
            self.kl_coef,
            self.entropy_coef,
            measures_kl=self.needs_reference,
        )
        return (microbatch.weights * per_token).sum(), weighted_sums(metrics, microbatch)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.baseline is None else {"baseline": self.baseline.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if self.baseline is not None:
            self.baseline.value = float(state["baseline"])


def reward_kl(batch: Batch) -> Tensor:
    """(B, T) k1 from the policy that sampled to the reference: what each token's KL costs in the reward,
    without β. It stays that of the policy that sampled, as a reward must.

    Both sides are scored in the same way, so it is exactly 0 where the policy is its reference. The sampler's
    log-probabilities differ by rounding, and advantages that are scaled to a standard deviation of 1 would
    make a signal of that.

    Raises:
        ValueError: the batch has no ``reference_logprobs`` or no ``scored_logprobs``.
    """
    if batch.reference_logprobs is None or batch.scored_logprobs is None:
        raise ValueError(
            "reward_kl_coef needs the reference's and the policy's log-probabilities in the batch"
        )
    return k1(batch.scored_logprobs, batch.reference_logprobs) * batch.action_mask


def _shaped(values: Tensor, like: Tensor, place: str) -> Tensor:
    """Refuse what is not a tensor of the shape of ``like``: it would be broadcast."""
    shape = tuple(values.shape) if isinstance(values, torch.Tensor) else None
    if shape != like.shape:
        returned = f"{values!r:.40}" if shape is None else f"a tensor of shape {shape}"
        needed = "the loss per token, and whether it was clipped" if like.dim() > 1 else "one number for each"
        raise AgentPeftError(
            f"{place} returned {returned} where one of shape {tuple(like.shape)} belongs: {needed}"
        )
    return values


def surrogate_and_penalties(
    output: PolicyOutput,
    microbatch: Batch,
    surrogate: Surrogate,
    kl_coef: float,
    entropy_coef: float,
    *,
    measures_kl: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """surrogate(Â) + β KL(π ‖ reference) - c2 entropy per token, with gradient, and its metrics; all (B, T).

    ``measures_kl``: kl is a metric also where ``kl_coef`` is 0.

    Metrics: weight (1), ratio and its square, clip_fraction, approx_kl (k3, sampler ‖ policy), entropy, kl
    (k3, to the reference). Those that have nothing to be computed from are left out.
    """
    logprobs, sampled = output.logprobs, microbatch.logprobs
    parts = surrogate(logprobs, sampled, microbatch.advantages, microbatch.action_mask)
    per_token, cut = (_shaped(part, logprobs, "the surrogate") for part in parts)
    with torch.no_grad():
        rho = (logprobs - sampled).exp()
        metrics = {
            "weight": torch.ones_like(logprobs),
            "ratio": rho,
            "ratio_square": rho.square(),
            "clip_fraction": cut.float(),
            "approx_kl": k3(sampled, logprobs),
        }
    reference = microbatch.reference_logprobs
    if kl_coef or measures_kl:
        if reference is None:
            raise ValueError("kl_coef needs the reference's log-probabilities in the batch")
        kl = reverse_kl(logprobs, sampled, reference)
        per_token = per_token + kl_coef * kl if kl_coef else per_token
        metrics["kl"] = kl.detach()
    if entropy_coef and output.entropy is None:
        raise ValueError("entropy_coef needs the policy's entropy")
    if output.entropy is not None:
        per_token = per_token - entropy_coef * output.entropy
        metrics["entropy"] = output.entropy.detach()
    return per_token, metrics


def surrogate_metrics(measures_kl: bool, entropy_coef: float) -> tuple[str, ...]:
    """The names that the metrics of ``surrogate_and_penalties`` have as ``averages``."""
    penalties = [name for name, is_there in (("kl", measures_kl), ("entropy", entropy_coef)) if is_there]
    extremes = ("ratio_min", "ratio_max", "effective_sample_size")
    return ("ratio", *extremes, "clip_fraction", "approx_kl", *penalties)


KlCoef = Annotated[float, Field(ge=0, description="β of the KL divergence to the reference")]
RewardKlCoef = Annotated[
    float,
    Field(
        ge=0,
        description="β of the KL divergence to the reference in the reward: each token's advantage loses β "
        "times the log-ratios of itself and of the tokens after it",
    ),
]
EntropyCoef = Annotated[float, Field(ge=0, description="c2 of the entropy bonus")]
UpdateEpochs = Annotated[int, Field(ge=1, description="K: passes over the batch of one step")]
Minibatches = Annotated[int, Field(ge=1, description="optimizer updates per pass")]
TurnDiscount = Annotated[
    float | None,
    Field(
        ge=0,
        le=1,
        description="γ per turn: a turn learns from its own reward and the later ones, compared with the "
        "siblings whose episodes were the same until then; null: all turns learn from the episode's reward",
    ),
]
ClipLow = Annotated[float, Field(gt=0, lt=1, description="ε: the ratio is clipped below 1 - ε")]
ClipHigh = Annotated[float, Field(gt=0, description="ε: the ratio is clipped above 1 + ε")]
DualClip = Annotated[
    float | None,
    Field(
        gt=1,
        description="c: a token with a negative advantage loses its gradient where its ratio is above c; "
        "null sets no limit",
    ),
]
WeightingKey = Annotated[
    WeightingName,
    Field(
        description="the loss is a mean over tokens, over turns' means, over trajectories' means, or over "
        "trajectories' sums"
    ),
]
