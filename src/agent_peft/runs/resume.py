"""Resuming a run: its newest complete checkpoint, and the records that came after it."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from agent_peft.configuration.run_config import TrainConfig
from agent_peft.files import MAX_JSONL_BYTES, read_bytes, truncate_jsonl
from agent_peft.policies import adapters
from agent_peft.policies.policy import Policy
from agent_peft.printable import cause_of
from agent_peft.runs.checkpoint import Position, clean, latest_checkpoint, read_position
from agent_peft.runs.trajectories import remove_step, steps_in
from agent_peft.training.trainer import Trainer
from agent_peft.types import AgentPeftError

logger = logging.getLogger(__name__)


def newest_position(folder: Path, config: TrainConfig) -> Position:
    """Return the position of the newest complete checkpoint of a run directory, or that of the start."""
    checkpoint = latest_checkpoint(folder / "checkpoints")
    return Position() if checkpoint is None else read_position(checkpoint, len(config.stages))


def find_position(config: TrainConfig, world_size: int) -> Position:
    """Return the position at which a run resumes. Half-written checkpoints are removed."""
    folder = config.run_dir
    clean(folder / "checkpoints")
    position = newest_position(folder, config)
    if position.checkpoint is None:
        path = folder / "metrics.jsonl"
        metrics = read_bytes(path, "a JSONL file", MAX_JSONL_BYTES, unlinked=1) if path.is_file() else b""
        if lines := metrics.count(b"\n"):
            logger.warning(
                "%s: holds metrics of %d steps and no checkpoint, so they are made again from the start",
                folder,
                lines,
            )
    elif position.ranks != world_size and not config.ranks.allow_other_number:
        wrote = "1 rank" if position.ranks == 1 else f"{position.ranks} ranks"
        raise AgentPeftError(
            f"{folder}: {wrote} got this far, and now there {'is' if world_size == 1 else 'are'} "
            f"{world_size}; start {wrote} (torchrun --nproc_per_node), or add ranks.allow_other_number=true: "
            "results are then equal up to rounding"
        )
    return position


def restore(trainer: Trainer, checkpoint: Path) -> None:
    """Load a checkpoint into a trainer."""
    try:
        trainer.load(checkpoint)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # torch, safetensors and PEFT raise many kinds
        raise AgentPeftError(
            f"{checkpoint}: is damaged, or does not fit this configuration ({cause_of(error)}); take changes "
            "of the configuration back. If there are none, move it elsewhere, and the run resumes from the "
            "one before"
        ) from error


def load_start(policy: Policy, checkpoint: Path, stage: str) -> None:
    """Load the weights that a stage began with, which are its reference."""
    try:
        adapters.load(policy.model, checkpoint)
    except AgentPeftError as error:
        raise AgentPeftError(
            f"{checkpoint}: the reference of stage {stage!r} is this checkpoint, and it cannot be read "
            f"({error}); put it back from a backup, or start over with --fresh"
        ) from error


def forget_after(folder: Path, steps: int) -> None:
    """Remove what came after ``steps`` steps, and a torn last line: all of that is made again."""
    for name in ("metrics.jsonl", "timing.jsonl"):
        truncate_jsonl(folder / name, lambda record: bool(record["step"] < steps))
    for name, first in (("trajectories", steps), ("evaluations", steps + 1)):
        for step in steps_in(folder / name):
            if step >= first:
                remove_step(folder / name, step)
