"""PPO with a critic (Schulman et al., 2017): the parts of ``policy_gradient``, with advantages and a loss
of the critic's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from agent_peft.algorithms.advantages import generalized, moments, standardized
from agent_peft.algorithms.base import BaseAlgorithmConfig, Critic, Metrics, SumOverRanks, one_rank
from agent_peft.algorithms.policy_gradient import surrogate_and_penalties, surrogate_metrics
from agent_peft.algorithms.surrogates import Surrogate, clipped
from agent_peft.algorithms.weightings import WEIGHTINGS, Weighting
from agent_peft.batch import Batch, PolicyOutput
from agent_peft.types import AgentPeftError


class PpoConfig(BaseAlgorithmConfig):
    """Proximal policy optimization. Its critic is a value head on the policy's own last layer, so that one
    forward gives it all.
    """

    kind: Literal["ppo"] = "ppo"
    gamma: float = Field(default=1.0, ge=0, le=1, description="γ, the discount per sampled token")
    gae_lambda: float = Field(
        default=0.95, ge=0, le=1, description="λ: 1 trusts the rewards alone, 0 the critic after one token"
    )
    normalize_advantages: bool = Field(
        default=True, description="to mean 0 and spread 1, over all sampled tokens of a step"
    )
    clip_low: float = Field(default=0.2, gt=0, lt=1, description="ε below 1")
    clip_high: float = Field(default=0.2, gt=0, description="ε above 1")
    value_clip: float | None = Field(
        default=0.2, gt=0, description="how far values may move within a step; null lets them"
    )
    value_coef: float = Field(default=0.5, gt=0, description="c1 of the value loss")
    value_learning_rate: float = Field(
        default=2e-2, gt=0, description="of the value head, whatever the model's size"
    )
    value_trunk_gradient: bool = Field(
        default=True, description="whether the value loss also trains what the policy acts with"
    )
    entropy_coef: float = Field(default=0.0, ge=0, description="c2 of the entropy bonus")
    kl_coef: float = Field(default=0.0, ge=0, description="β of the KL divergence to the reference")
    update_epochs: int = Field(default=4, ge=1, description="K: trips through the batch of one step")
    minibatches: int = Field(default=1, ge=1, description="optimizer updates per trip")
    target_kl: float | None = Field(
        default=None, gt=0, description="a step's epochs end when approx_kl is above it; null never ends them"
    )
    weighting: Literal["token_mean", "sequence_mean", "sequence_sum"] = "token_mean"

    @model_validator(mode="after")
    def _effective(self) -> PpoConfig:
        if self.target_kl is not None and self.update_epochs == 1:
            raise ValueError(
                "target_kl has no effect with update_epochs: 1, which ends after one epoch anyway; leave it out"
            )
        return self


@dataclass(frozen=True)
class Ppo:
    """loss = Σ weights · (surrogate(Â) + c1 ½ (V - V_target)² + β KL(π ‖ reference) - c2 entropy)

    Â is GAE's over sampled tokens (``advantages.generalized``) and V_target = Â + V, both under the critic as
    it was before the update.

    >>> build_ppo(PpoConfig(value_learning_rate=1e-3)).critic
    Critic(learning_rate=0.001, trunk_gradient=True)
    """

    critic: Critic
    surrogate: Surrogate
    weighting: Weighting
    gamma: float
    gae_lambda: float
    normalize_advantages: bool
    value_clip: float | None
    value_coef: float
    entropy_coef: float
    kl_coef: float
    update_epochs: int
    minibatches: int
    target_kl: float | None

    kind: ClassVar[str] = "ppo"
    on_policy: ClassVar[bool] = True
    learns_at_zero_advantage: ClassVar[bool] = True  # the critic does

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef > 0

    @property
    def needs_entropy(self) -> bool:
        return self.entropy_coef > 0

    @property
    def metrics(self) -> tuple[str, ...]:
        shown = surrogate_metrics(self.kl_coef, self.entropy_coef)
        return (*shown, "value_loss", "value_clip_fraction", "explained_variance")

    def prepare(self, batch: Batch, sum_over_ranks: SumOverRanks = one_rank) -> Batch:
        values, mask = _present(batch.values), batch.action_mask
        advantages = generalized(batch.rewards, values, mask, self.gamma, self.gae_lambda)
        targets = (advantages + values) * mask
        if self.normalize_advantages:
            advantages = standardized(advantages, mask, sum_over_ranks)
        return replace(batch, advantages=advantages, value_targets=targets)

    def observe(self, batch: Batch, sum_over_ranks: SumOverRanks = one_rank) -> dict[str, float]:
        """explained_variance: 1 - Var(G - V) / Var(G), over the step's sampled tokens, of the critic before
        the update.

        G is the discounted reward that came, not the target: that one leans on V itself where λ < 1. 1 is a
        perfect critic, 0 one as good as a constant; where all G are alike there is nothing to explain, and it
        is left out.
        """
        values, mask = _present(batch.values), batch.action_mask
        returns = generalized(batch.rewards, torch.zeros_like(values), mask, self.gamma, 1.0)
        _, total = moments(returns, mask, sum_over_ranks)
        _, unexplained = moments(returns - values, mask, sum_over_ranks)
        return {"explained_variance": 1 - float(unexplained / total)} if total > 0 else {}

    def weigh(self, minibatch: Batch) -> tuple[Batch, Tensor]:
        weights, denominator = self.weighting(minibatch.action_mask)
        return replace(minibatch, weights=weights), denominator

    def loss(self, output: PolicyOutput, microbatch: Batch) -> tuple[Tensor, Metrics]:
        """Metrics: those of ``surrogate_and_penalties``, value_loss (½ squared error, without c1),
        value_clip_fraction.
        """
        per_token, shown = surrogate_and_penalties(
            output, microbatch, self.surrogate, self.kl_coef, self.entropy_coef
        )
        values, targets = _present(output.values), _present(microbatch.value_targets)
        value_loss, cut = squared_error(values, _present(microbatch.values), targets, self.value_clip)
        per_token = per_token + self.value_coef * value_loss
        shown |= {"value_loss": value_loss.detach(), "value_clip_fraction": cut.float()}
        weights = microbatch.weights
        return (weights * per_token).sum(), {name: (weights * x).sum() for name, x in shown.items()}

    def is_done(self, metrics: Mapping[str, float]) -> bool:
        return self.target_kl is not None and metrics.get("approx_kl", 0.0) > self.target_kl

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            raise AgentPeftError(
                f"the checkpoint's algorithm state holds {sorted(state)} but ppo has none: start a fresh run"
            )


def squared_error(
    values: Tensor, old: Tensor, targets: Tensor, value_clip: float | None
) -> tuple[Tensor, Tensor]:
    """½ max((V - T)², (V_old + clip(V - V_old, ±ε) - T)²), and where the clip took the gradient away. All (B,
    T); null clips nothing.

    As in OpenAI's baselines (ppo2): the paper has the squared error alone.

    >>> new, old, target = torch.tensor([0.5, 0.1, 0.5]), torch.zeros(3), torch.tensor([1.0, 1.0, -1.0])
    >>> loss, cut = squared_error(new, old, target, 0.2)
    >>> [round(x, 3) for x in loss.tolist()], cut.tolist()
    ([0.32, 0.405, 1.125], [True, False, False])
    """
    error = (values - targets).square()
    if value_clip is None:
        return error / 2, torch.zeros_like(error, dtype=torch.bool)
    bounded = (old + (values - old).clamp(-value_clip, value_clip) - targets).square()
    return torch.maximum(error, bounded) / 2, bounded > error


def _present(values: Tensor | None) -> Tensor:
    if values is None:
        raise ValueError("ppo needs the critic's values, of the batch and of the forward")
    return values


def build_ppo(config: PpoConfig) -> Ppo:
    apart = {"kind", "weighting", "clip_low", "clip_high", "value_learning_rate", "value_trunk_gradient"}
    return Ppo(
        critic=Critic(config.value_learning_rate, config.value_trunk_gradient),
        surrogate=clipped(config.clip_low, config.clip_high),
        weighting=WEIGHTINGS[config.weighting],
        **config.model_dump(exclude=apart),
    )
