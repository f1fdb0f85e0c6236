"""Supervised fine-tuning: the actions of demonstrations are made likelier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from torch import Tensor

from agent_peft.algorithms.base import BaseAlgorithmConfig, Metrics, SumOverRanks, one_rank
from agent_peft.algorithms.weightings import token_mean
from agent_peft.batch import Batch, PolicyOutput
from agent_peft.types import AgentPeftError


class SftConfig(BaseAlgorithmConfig):
    """Nothing to choose: the mean over tokens of -log π, one update per batch."""

    kind: Literal["sft"] = "sft"


@dataclass(frozen=True)
class Supervised:
    """loss = -Σ weights · log π(action token), the cross-entropy. Returns and groups are not looked at.

    >>> Supervised().on_policy
    False
    """

    kind: ClassVar[str] = "sft"
    needs_reference: ClassVar[bool] = False
    needs_entropy: ClassVar[bool] = False
    critic: ClassVar[None] = None
    learns_at_zero_advantage: ClassVar[bool] = True
    on_policy: ClassVar[bool] = False
    update_epochs: ClassVar[int] = 1
    minibatches: ClassVar[int] = 1
    metrics: ClassVar[tuple[str, ...]] = ("surprisal",)

    def prepare(self, batch: Batch, sum_over_ranks: SumOverRanks = one_rank) -> Batch:
        return batch

    def observe(self, batch: Batch, sum_over_ranks: SumOverRanks = one_rank) -> dict[str, float]:
        return {}

    def weigh(self, minibatch: Batch) -> tuple[Batch, Tensor]:
        weights, denominator = token_mean(minibatch.action_mask)
        return replace(minibatch, weights=weights), denominator

    def loss(self, output: PolicyOutput, microbatch: Batch) -> tuple[Tensor, Metrics]:
        """Metrics: surprisal (nats per token), which is the loss itself."""
        loss = -(microbatch.weights * output.logprobs).sum()
        return loss, {"weight": microbatch.weights.sum(), "surprisal": loss.detach()}

    def is_done(self, metrics: Mapping[str, float]) -> bool:
        return False

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            raise AgentPeftError(
                f"the checkpoint's algorithm state holds {sorted(state)} but sft has none: start a fresh run"
            )


def sft(config: SftConfig) -> Supervised:
    return Supervised()
