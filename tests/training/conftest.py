"""Trainers on a policy that is small enough to train in a test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from agent_peft.environments.arithmetic import Arithmetic, ArithmeticConfig
from agent_peft.policies.config import ScratchConfig
from agent_peft.policies.engine import load_sampler
from agent_peft.policies.engine.base import EngineConfig
from agent_peft.training.stage import StageConfig
from agent_peft.training.trainer import Trainer
from tests.conftest import fresh_policy

MakeTrainer = Callable[..., Trainer]


@pytest.fixture
def make_trainer(policy_config: ScratchConfig) -> MakeTrainer:
    """A fresh policy each time, always the same; keywords are those of the stage, or ``policy={...}`` and
    ``seed``.
    """

    def make(
        algorithm: str | dict[str, Any] = "grpo",
        *,
        policy: dict[str, Any] | None = None,
        seed: int = 0,
        **stage: Any,
    ) -> Trainer:
        algorithm = {"kind": algorithm} if isinstance(algorithm, str) else algorithm
        on_policy = {} if algorithm["kind"] == "sft" else {"group_size": 4}
        defaults: dict[str, Any] = {
            **({} if "epochs" in stage else {"steps": 2}),
            "tasks_per_step": 4,
            "sampling": {"max_new_tokens": 3},
            "rewards": {
                "invalid_action": -0.5
            },  # a random policy is never right, but says digits now and then
            "optimizer": {"learning_rate": 1e-2},
        }
        settings = StageConfig.model_validate({"algorithm": algorithm, **defaults, **on_policy, **stage})
        acting = fresh_policy(policy_config.model_copy(update=policy or {}), seed)
        return Trainer(
            acting,
            Arithmetic(ArithmeticConfig(digits=1, num_tasks=10)),
            settings,
            load_sampler(acting, EngineConfig()),
            seed,
        )

    return make


def assert_close(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert len(ours) == len(theirs) > 0
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
