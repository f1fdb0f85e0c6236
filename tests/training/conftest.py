"""A policy small enough to train in a test, and trainers on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_peft.environments.arithmetic import ALPHABET, Arithmetic, ArithmeticConfig
from agent_peft.policies.adapters import LoraSettings
from agent_peft.policies.config import ScratchConfig
from agent_peft.policies.engine.base import EngineConfig
from agent_peft.policies.engine.local import Engine
from agent_peft.policies.policy import load_policy
from agent_peft.training.stage import StageConfig
from agent_peft.training.trainer import Trainer

ARCHITECTURE = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,  # a peaked distribution, so that a wrong temperature or a wrong token shows
}

MakeTrainer = Callable[..., Trainer]


@pytest.fixture
def policy_config() -> ScratchConfig:
    return ScratchConfig(
        architecture=ARCHITECTURE, alphabet=ALPHABET, lora=LoraSettings(rank=4, alpha=8), device="cpu"
    )


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
            "steps": 2,
            "tasks_per_step": 4,
            "sampling": {"max_new_tokens": 3},
            "rewards": {
                "invalid_action": -0.5
            },  # a random policy is never right, but says digits now and then
            "optimizer": {"learning_rate": 1e-2},
        }
        settings = StageConfig.model_validate({"algorithm": algorithm, **defaults, **on_policy, **stage})
        acting = load_policy(policy_config.model_copy(update=policy or {}), seed)
        return Trainer(
            settings,
            acting,
            Engine(acting, EngineConfig()),
            Arithmetic(ArithmeticConfig(digits=1, num_tasks=10)),
            seed,
        )

    return make


@pytest.fixture
def run_contents() -> Callable[[Path], dict[str, bytes]]:
    """The bytes of every file that the configuration alone decides."""

    def contents(folder: Path) -> dict[str, bytes]:
        files = [
            path
            for path in sorted(folder.rglob("*"))
            if path.is_file() and path.name not in ("timing.jsonl", ".lock")
        ]
        return {str(path.relative_to(folder)): path.read_bytes() for path in files}

    return contents
