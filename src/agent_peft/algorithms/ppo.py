"""PPO with a critic (Schulman et al., 2017): the parts of ``policy_gradient``, with advantages and a value
loss from the critic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from pydantic import Field, model_validator

from agent_peft.algorithms.advantages import generalized, moments, standardized
from agent_peft.algorithms.base import (
    Algorithm,
    AlgorithmConfig,
    Critic,
    Metrics,
    SumOverRanks,
    one_rank,
    weighted,
    weighted_sums,
)
from agent_peft.algorithms.policy_gradient import (
    ClipHigh,
    ClipLow,
    DualClip,
    EntropyCoef,
    KlCoef,
    Minibatches,
    RewardKlCoef,
    UpdateEpochs,
    WeightingKey,
    reward_kl,
    surrogate_and_penalties,
    surrogate_metrics,
)
from agent_peft.algorithms.surrogates import WEIGHTINGS, clipped
from agent_peft.batch import Batch, PolicyOutput
from agent_peft.lazy_torch import Tensor, torch


class PpoConfig(AlgorithmConfig):
    """Proximal policy optimization. Its critic is a value head on the policy's last layer, so one forward
    gives log-probabilities and values.
    """

    kind: Literal["ppo"] = "ppo"
    gamma: float = Field(default=1.0, ge=0, le=1, description="γ, the discount per sampled token")
    gae_lambda: float = Field(
        default=0.95, ge=0, le=1, description="λ: 1 trusts the rewards alone, 0 the critic after one token"
    )
    normalize_advantages: bool = Field(
        default=True,
        description="scale advantages to mean 0 and standard deviation 1, over all sampled tokens of a step",
    )
    clip_low: ClipLow = 0.2
    clip_high: ClipHigh = 0.2
    dual_clip: DualClip = None
    value_clip: float | None = Field(
        default=0.2, gt=0, description="how far values may move within a step; null sets no limit"
    )
    value_coef: float = Field(default=0.5, gt=0, description="c1 of the value loss")
    value_learning_rate: float = Field(
        default=2e-2, gt=0, le=1, description="learning rate of the value head, for models of any size"
    )
    value_trunk_gradient: bool = Field(
        default=True, description="whether the value loss also trains the weights that the policy acts with"
    )
    entropy_coef: EntropyCoef = 0.0
    kl_coef: KlCoef = 0.0
    reward_kl_coef: RewardKlCoef = 0.0
    update_epochs: UpdateEpochs = 4
    minibatches: Minibatches = 1
    target_kl: float | None = Field(
        default=None,
        gt=0,
        description="a step's epochs end after one whose mean of approx_kl over its updates is above this; "
        "null runs all of them",
    )
    weighting: WeightingKey = "token_mean"

    def build(self) -> Ppo:
        return Ppo(self)

    @model_validator(mode="after")
    def _effective(self) -> PpoConfig:
        if self.target_kl is not None and self.update_epochs == 1:
            raise ValueError(
                "target_kl has no effect with update_epochs: 1, which ends after one epoch anyway; "
                "leave it out"
            )
        return self


class Ppo(Algorithm):
    """loss = Σ weights · (surrogate(Â) + c1 ½ (V - V_target)² + β KL(π ‖ reference) - c2 entropy)

    Â is GAE over sampled tokens (``advantages.generalized``) and V_target = Â + V, both under the critic
    before the update.

    >>> Ppo(PpoConfig(value_learning_rate=1e-3)).critic
    Critic(learning_rate=0.001, detach=False)
    """

    bounds_ratio = True
    learns_at_zero_advantage = True  # the critic does
    formula = (
        "mean of clipped ρ Â + c1 ½ (V - V_target)² + β KL(π ‖ reference) - c2 entropy; Â = GAE; "
        "V_target = Â + V before the update"
    )
    paper = "Schulman et al., 2017, https://arxiv.org/abs/1707.06347"

    def __init__(self, config: PpoConfig) -> None:
        self.config, self.kind = config, config.kind
        self.critic = Critic(config.value_learning_rate, detach=not config.value_trunk_gradient)
        self.surrogate = clipped(config.clip_low, config.clip_high, config.dual_clip)
        self.weighting = WEIGHTINGS[config.weighting]
        self.needs_reference = config.kl_coef > 0 or config.reward_kl_coef > 0
        self.needs_scores = config.reward_kl_coef > 0
        self.needs_entropy = config.entropy_coef > 0
        self.update_epochs, self.minibatches = config.update_epochs, config.minibatches
        self.metrics = (
            *surrogate_metrics(self.needs_reference, config.entropy_coef),
            "value_loss",
            "value_clip_fraction",
            "explained_variance",
        )

    def prepare(self, batch: Batch, sum_over_ranks: SumOverRanks = one_rank) -> Batch:
        values, mask, config = _required(batch.values), batch.action_mask, self.config
        advantages = generalized(self.rewards(batch), values, mask, config.gamma, config.gae_lambda)
        targets = (advantages + values) * mask
        if config.normalize_advantages:
            advantages = standardized(advantages, mask, sum_over_ranks)
        return replace(batch, advantages=advantages, value_targets=targets)

    def rewards(self, batch: Batch) -> Tensor:
        """(B, T) fp32: the rewards, less the KL in them."""
        coef, rewards = self.config.reward_kl_coef, batch.rewards.float()
        return rewards - coef * reward_kl(batch) if coef else rewards

    def observe(self, batch: Batch, sum_over_ranks: SumOverRanks = one_rank) -> dict[str, float]:
        """explained_variance: 1 - Var(G - V) / Var(G), over the step's sampled tokens, of the critic before
        the update.

        G is the discounted reward that came, not the target, which depends on V itself where λ < 1. 1 is a
        perfect critic, and 0 is one as good as a constant. Where all G are equal there is nothing to explain,
        and the metric is left out.
        """
        values, mask = _required(batch.values), batch.action_mask
        returns = generalized(self.rewards(batch), torch.zeros_like(values), mask, self.config.gamma, 1.0)
        _, total = moments(returns, mask, sum_over_ranks)
        _, unexplained = moments(returns - values, mask, sum_over_ranks)
        return {"explained_variance": 1 - float(unexplained / total)} if total > 0 else {}

    def weigh(self, minibatch: Batch) -> tuple[Batch, Tensor]:
        return weighted(minibatch, self.weighting)

    def loss(self, output: PolicyOutput, microbatch: Batch) -> tuple[Tensor, Metrics]:
        """Metrics: those of ``surrogate_and_penalties``, value_loss (½ squared error, without c1) and
        value_clip_fraction.
        """
        config = self.config
        per_token, metrics = surrogate_and_penalties(
            output,
            microbatch,
            self.surrogate,
            config.kl_coef,
            config.entropy_coef,
            measures_kl=self.needs_reference,
        )
        values, targets = _required(output.values), _required(microbatch.value_targets)
        value_loss, cut = squared_error(values, _required(microbatch.values), targets, config.value_clip)
        per_token = per_token + config.value_coef * value_loss
        metrics |= {"value_loss": value_loss.detach(), "value_clip_fraction": cut.float()}
        return (microbatch.weights * per_token).sum(), weighted_sums(metrics, microbatch)

    def is_done(self, metrics: Mapping[str, float]) -> bool:
        target = self.config.target_kl
        return target is not None and metrics.get("approx_kl", 0.0) > target


def squared_error(
    values: Tensor, old: Tensor, targets: Tensor, value_clip: float | None
) -> tuple[Tensor, Tensor]:
    """½ max((V - T)², (V_old + clip(V - V_old, ±ε) - T)²), and where the clip removed the gradient. All are
    (B, T). A ``value_clip`` of None clips nothing. If V_old + (V - V_old) differs from V by rounding
    alone, nothing was clipped.

    The clip follows OpenAI's baselines (ppo2); the paper has the squared error alone.

    >>> new, old, target = torch.tensor([0.5, 0.1, 0.5]), torch.zeros(3), torch.tensor([1.0, 1.0, -1.0])
    >>> loss, cut = squared_error(new, old, target, 0.2)
    >>> [round(x, 3) for x in loss.tolist()], cut.tolist()
    ([0.32, 0.405, 1.125], [True, False, False])
    """
    error = (values - targets).square()
    if value_clip is None:
        return error / 2, torch.zeros_like(error, dtype=torch.bool)
    change = values - old
    bounded = (old + change.clamp(-value_clip, value_clip) - targets).square()
    return torch.maximum(error, bounded) / 2, (bounded > error) & (change.abs() > value_clip)


def _required(values: Tensor | None) -> Tensor:
    if values is None:
        raise ValueError("ppo needs the critic's values, of the batch and of the forward")
    return values
