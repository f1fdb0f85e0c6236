"""The position at which a run resumes: its newest whole checkpoint. Damaged checkpoints are renamed, and
records that came later are removed.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from agent_peft.configuration.run_config import TrainConfig
from agent_peft.files import (
    MAX_JSONL_BYTES,
    MEGABYTE,
    check_tree,
    opened,
    parse_json,
    read_bytes,
    read_text,
    truncate_jsonl,
)
from agent_peft.policies import adapters
from agent_peft.policies.policy import Policy
from agent_peft.runs.checkpoint import POSITION, checkpoints, clean, put_aside
from agent_peft.runs.trajectories import remove_step, steps_in
from agent_peft.training.stage import StageConfig
from agent_peft.training.state_file import load_state
from agent_peft.training.trainer import Trainer
from agent_peft.types import AgentPeftError

logger = logging.getLogger(__name__)

STATE = "trainer.pt"
_INDEX = "model.safetensors.index.json"
_LAYOUTS = (
    ("adapter_config.json", "adapter_model.safetensors"),
    ("config.json", "model.safetensors"),
    ("config.json", _INDEX),
)


@dataclass(frozen=True)
class Position:
    """How far a run is: ``steps`` of the run are done, and it continues in the stage of index ``stage``."""

    stage: int = 0
    steps: int = 0
    ranks: int = 1  # that trained it
    checkpoint: str | None = None  # its name; None at the start


def find_position(config: TrainConfig, world_size: int) -> Position:
    """Return the position of the newest whole checkpoint of the run directory, or that of the start.

    Half-written checkpoints are removed and damaged ones renamed.

    Raises:
        AgentPeftError: no checkpoint is whole, or another number of ranks wrote it.
    """
    folder = config.run_dir
    clean(folder / "checkpoints")
    position = newest_whole(folder / "checkpoints", config) or Position()
    if position.checkpoint is None:
        if made := count_lines(folder / "metrics.jsonl"):
            logger.warning(
                "%s: holds metrics of %d steps and no checkpoint, so they are made again from the start",
                folder,
                made,
            )
    elif position.ranks != world_size and not config.ranks.allow_other_number:
        wrote = "1 rank" if position.ranks == 1 else f"{position.ranks} ranks"
        raise AgentPeftError(
            f"{folder}: {wrote} got this far, and now there {'is' if world_size == 1 else 'are'} "
            f"{world_size}; start {wrote} (torchrun --nproc_per_node), or add ranks.allow_other_number=true: "
            "results are then equal up to rounding"
        )
    return position


def look_up_position(root: Path, config: TrainConfig) -> Position:
    """Return the position of the newest whole checkpoint in ``root``, or that of the start. Nothing is
    changed.
    """
    for checkpoint in reversed(checkpoints(root)):
        with suppress(Exception):  # it is damaged, which ``newest_whole`` tells
            return read_whole(checkpoint, config)
    return Position()


def read_whole(checkpoint: Path, config: TrainConfig) -> Position:
    """Return the position that a whole checkpoint holds.

    Raises:
        Exception: it is damaged; torch and safetensors raise many kinds.
    """
    position = read_position(checkpoint, config)
    _check_whole(checkpoint)
    return position


def newest_whole(root: Path, config: TrainConfig) -> Position | None:
    """Return the position of the newest whole checkpoint in ``root``; None where there is no checkpoint.

    Newer ones are damaged: they are renamed, never removed, and a warning names each.

    Raises:
        AgentPeftError: there are checkpoints, and none is whole. Nothing was changed.
    """
    damaged: list[tuple[Path, Exception]] = []
    for checkpoint in reversed(checkpoints(root)):
        try:
            position = read_whole(checkpoint, config)
        except Exception as error:
            damaged.append((checkpoint, error))
            continue
        for newer, cause in damaged:
            aside = put_aside(newer)
            logger.warning(
                "%s: is damaged (%s); it is now %s, and the run continues from %s",
                newer,
                _message(cause),
                aside.name,
                checkpoint.name,
            )
        return position
    if damaged:
        newest, cause = damaged[0]
        others = (
            f", and none of the {len(damaged) - 1} before it is whole"
            if len(damaged) > 1
            else ", and there is no other"
        )
        raise AgentPeftError(
            f"{newest}: is damaged ({_message(cause)}){others}; put one back from a backup, or start over "
            "with --fresh"
        )
    return None


def read_position(checkpoint: Path, config: TrainConfig) -> Position:
    """Return the position that a checkpoint holds.

    Raises:
        AgentPeftError: it cannot be read, or is not in our format (an AttributeError, KeyError, TypeError or
            ValueError says so, too).
    """
    with _naming(checkpoint / POSITION):
        content = parse_json(read_text(checkpoint / POSITION, "a JSON file", MEGABYTE, unlinked=3))
    numbers = content["stage"], content["steps"], content.get("ranks", 1)
    if not all(type(number) is int and number >= 0 for number in numbers) or numbers[0] >= len(config.stages):
        raise ValueError(f"{POSITION} names no place of this run")
    return Position(*numbers, checkpoint=checkpoint.name)


def _check_whole(checkpoint: Path) -> None:
    """Check that each file exists and has its beginning and its end, without reading all weights. Faults
    inside the weights are found by ``restore``.

    Raises:
        Exception: a file is damaged or gone.
    """
    check_tree(checkpoint)
    with _naming(checkpoint / STATE):
        load_state(checkpoint / STATE, mapped=True)
    for path in checkpoint.glob("*.json"):
        with _naming(path):
            content = parse_json(read_text(path, "a JSON file", 64 * MEGABYTE, unlinked=3))
        if path.name == _INDEX and (
            absent := {part for part in content["weight_map"].values() if not (checkpoint / part).is_file()}
        ):
            raise ValueError(f"{min(absent)} is gone")
    for path in checkpoint.glob("*.safetensors"):
        with _naming(path), opened(path, unlinked=3) as place, safe_open(place, "pt") as file:
            file.keys()
    if not any(all((checkpoint / name).is_file() for name in layout) for layout in _LAYOUTS):
        raise ValueError("it holds no weights, or does not say of what")


def restore(trainer: Trainer, checkpoint: Path) -> None:
    """Load a checkpoint into a trainer.

    Raises:
        AgentPeftError: the checkpoint is damaged, or of other keys than the trainer's.
    """
    try:
        trainer.load(checkpoint)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # torch, safetensors and PEFT raise many kinds
        raise AgentPeftError(
            f"{checkpoint}: is damaged, or does not fit this configuration ({_message(error)}); take changes "
            "of the configuration back. If there are none, move it elsewhere, and the run resumes from the "
            "one before"
        ) from error


def measures_kl_to_its_start(stage: StageConfig) -> bool:
    return stage.algorithm.facts.needs_reference and stage.reference != "base"


def load_start(policy: Policy, checkpoint: Path, stage: str) -> None:
    """Load the weights that a stage began with, to which its KL is measured. Their checkpoint is always kept.

    Raises:
        AgentPeftError: the checkpoint is gone or damaged.
    """
    try:
        adapters.load(policy.model, checkpoint)
    except AgentPeftError as error:
        raise AgentPeftError(
            f"{checkpoint}: the KL of stage {stage!r} is measured to this checkpoint, and it cannot be read "
            f"({error}); put it back from a backup, or start over with --fresh"
        ) from error


def count_lines(path: Path) -> int:
    if not path.is_file():
        return 0
    return read_bytes(path, "a JSONL file", MAX_JSONL_BYTES, unlinked=1).count(b"\n")


def forget_after(folder: Path, steps: int, evaluations: Collection[Path]) -> None:
    """Remove the records of the steps from number ``steps`` on, and ``evaluations``: they are made again. A
    torn last line goes, too.
    """
    for name in ("metrics.jsonl", "timing.jsonl"):
        truncate_jsonl(folder / name, lambda record: bool(record["step"] < steps))
    for step in steps_in(folder / "trajectories"):
        if step >= steps:
            remove_step(folder / "trajectories", step)
    for path in evaluations:
        path.unlink(missing_ok=True)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Put the file's name in front of an error."""
    try:
        yield
    except Exception as error:  # torch and safetensors raise many kinds
        raise ValueError(f"{path.name}: {_message(error)}") from error


def _message(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
