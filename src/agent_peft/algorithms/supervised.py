"""Supervised fine-tuning: the actions of demonstrations become more likely."""

from __future__ import annotations

from typing import Literal

from agent_peft.algorithms.base import Algorithm, AlgorithmConfig, Metrics, weighted
from agent_peft.algorithms.policy_gradient import WeightingKey
from agent_peft.algorithms.surrogates import WEIGHTINGS, Weighting, token_mean
from agent_peft.batch import Batch, PolicyOutput
from agent_peft.lazy_torch import Tensor


class Supervised(Algorithm):
    """loss = -Σ weights · log π(action token), the cross-entropy. It does not look at returns or groups.

    >>> Supervised().on_policy
    False
    """

    kind = "sft"
    on_policy = False
    learns_at_zero_advantage = True
    formula = "mean of -log π(token of a demonstration)"
    metrics = ("surprisal",)

    def __init__(self, weighting: Weighting = token_mean) -> None:
        self.weighting = weighting

    def weigh(self, minibatch: Batch) -> tuple[Batch, Tensor]:
        return weighted(minibatch, self.weighting)

    def loss(self, output: PolicyOutput, microbatch: Batch) -> tuple[Tensor, Metrics]:
        """Metrics: surprisal (nats per token), which equals the loss."""
        loss = -(microbatch.weights * output.logprobs).sum()
        return loss, {"weight": microbatch.weights.sum(), "surprisal": loss.detach()}


class SftConfig(AlgorithmConfig):
    """Supervised fine-tuning: the mean of -log π, one update per step."""

    kind: Literal["sft"] = "sft"
    weighting: WeightingKey = "token_mean"

    def build(self) -> Supervised:
        return Supervised(WEIGHTINGS[self.weighting])
