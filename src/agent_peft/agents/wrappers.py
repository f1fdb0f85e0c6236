"""Trainers as classes, one for each way to learn. Each makes the configuration of a run and trains it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ValidationError

from agent_peft.agents.datasets import find_dataset
from agent_peft.agents.keys import TrainingConfig
from agent_peft.agents.rewards import as_term, keep, prices_of
from agent_peft.agents.training import carry_out, config_from
from agent_peft.config import first_error
from agent_peft.runs.checkpoint import latest_checkpoint
from agent_peft.types import AgentPeftError


class SFTTrainerWrapper:
    """Learns from the solutions of a dataset.

    Attributes:
        result: what ``train`` has returned; None before.
    """

    algorithm: ClassVar[str] = "sft"

    def __init__(self, config: TrainingConfig | None = None, dataset: Any = "gsm8k", **keys: Any) -> None:
        """
        Args:
            config: how to train, or instead of it its keys: ``model_name``, ``output_dir``, ``num_epochs`` …
            dataset: of ``create_sft_dataset``; or anything that this function takes as ``dataset``.
        """
        if config is not None and keys:
            raise AgentPeftError(f"{next(iter(keys))}: is a key of config, which is given, too; set it there")
        try:
            self.config = config or TrainingConfig.model_validate(keys)
        except ValidationError as error:
            raise AgentPeftError(first_error(error, "", TrainingConfig)) from error
        self.dataset = find_dataset(dataset, folder=Path(self.config.output_dir).parent / "datasets")
        self.result: dict[str, Any] | None = None

    def train(self) -> dict[str, Any]:
        """Train to the end, and return what the run directory contains: ``accuracy``, ``metrics``,
        ``checkpoint`` and more. An earlier training of another kind in ``output_dir`` is kept next to it.
        """
        self.result = carry_out(config_from(self.config, self.algorithm, self.dataset, self._rewards()))
        return self.result

    def save_model(self, output_dir: str | Path | None = None) -> Path:
        """The folder of what was trained, in PEFT's layout or as a model. With ``output_dir`` it is copied to
        that folder, which must be new or empty.
        """
        folder = latest_checkpoint(Path(self.config.output_dir) / "checkpoints")
        if folder is None:
            raise AgentPeftError(f"{self.config.output_dir}: has no checkpoint yet; call train() first")
        if output_dir is None:
            return folder
        target = Path(output_dir)
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise AgentPeftError(f"{target}: exists and is no empty folder; name another folder")
        return Path(shutil.copytree(folder, target, dirs_exist_ok=True))

    def _rewards(self) -> dict[str, Any] | None:
        return None


class GRPOTrainerWrapper(SFTTrainerWrapper):
    """Learns from groups of its own attempts, with GRPO."""

    algorithm = "grpo"

    def __init__(
        self,
        config: TrainingConfig | None = None,
        dataset: Any = "gsm8k",
        reward_fn: Any = None,
        **keys: Any,
    ) -> None:
        """
        Args:
            reward_fn: None or ``create_accuracy_reward()`` gives 1 for a right answer; or any callable of
                ``completions`` and the columns of the dataset that returns one number for each.
        """
        super().__init__(config, dataset, **keys)
        self.reward_fn = reward_fn
        self._term = None if reward_fn is None or prices_of(reward_fn) is not None else as_term(reward_fn)

    def _rewards(self) -> dict[str, Any] | None:
        if self._term is None:
            return prices_of(self.reward_fn)
        return {"correct": 0.0, "incorrect": 0.0, "terms": [{"kind": keep(self.reward_fn, self._term)}]}


class PPOTrainerWrapper(GRPOTrainerWrapper):
    """Learns from its own attempts, with PPO and a critic on the policy's last layer."""

    algorithm = "ppo"
