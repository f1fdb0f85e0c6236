"""Where a run goes on: its newest whole checkpoint. A damaged one is put aside, and what was written after
the whole one is forgotten.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from agent_peft.configuration.run_config import TrainConfig
from agent_peft.files import MEGABYTE, check_regular, parse_json, read_text
from agent_peft.runs.checkpoint import POSITION, checkpoints, put_aside
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


def newest_whole(root: Path, config: TrainConfig) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint in ``root`` that is whole, and its position; None where there is no checkpoint at
    all.

    Newer ones are damaged: they are renamed, never removed, and a warning tells of each.

    Raises:
        AgentPeftError: there are checkpoints, and none is whole. Nothing was touched.
    """
    damaged: list[tuple[Path, Exception]] = []
    for checkpoint in reversed(checkpoints(root)):
        try:
            position = read_position(checkpoint, config)
            _check_whole(checkpoint)
        except Exception as error:  # torch and safetensors raise of many kinds
            damaged.append((checkpoint, error))
            continue
        for newer, cause in damaged:
            aside = put_aside(newer)
            logger.warning(
                "%s: is damaged (%s); it is now %s, and the run goes on from %s",
                newer,
                _told(cause),
                aside.name,
                checkpoint.name,
            )
        return checkpoint, position
    if damaged:
        newest, cause = damaged[0]
        others = (
            f", and none of the {len(damaged) - 1} before it is whole"
            if len(damaged) > 1
            else ", and there is no other"
        )
        raise AgentPeftError(
            f"{newest}: is damaged ({_told(cause)}){others}; put one back from a backup, or start over with --fresh"
        )
    return None


def read_position(checkpoint: Path, config: TrainConfig) -> dict[str, Any]:
    """What a checkpoint says of how far the run was: ``stage``, ``steps`` and ``ranks``.

    Raises:
        AgentPeftError: it cannot be read, or is no JSON of ours (an AttributeError, KeyError, TypeError or
            ValueError says so, too).
    """
    with _naming(checkpoint / POSITION):
        position = parse_json(read_text(checkpoint / POSITION, "a JSON file", MEGABYTE))
    found = {"stage": position["stage"], "steps": position["steps"], "ranks": position.get("ranks", 1)}
    if not all(type(number) is int and number >= 0 for number in found.values()) or found["stage"] >= len(
        config.stages
    ):
        raise ValueError(f"{POSITION} names no place of this run")
    return found


def _check_whole(checkpoint: Path) -> None:
    """Whether each file is there and has its beginning and its end, without reading all weights. What only
    shows when they are put into the model, ``restore`` tells.

    Raises:
        Exception: something is not.
    """
    check_regular(checkpoint)
    with _naming(checkpoint / STATE):
        load_state(checkpoint / STATE, mapped=True)
    for path in checkpoint.glob("*.json"):
        with _naming(path):
            content = parse_json(read_text(path, "a JSON file", 64 * MEGABYTE))
        if path.name == _INDEX and (
            absent := {part for part in content["weight_map"].values() if not (checkpoint / part).is_file()}
        ):
            raise ValueError(f"{min(absent)} is gone")
    for path in checkpoint.glob("*.safetensors"):
        with _naming(path), safe_open(path, "pt") as file:
            file.keys()
    if not any(all((checkpoint / name).is_file() for name in layout) for layout in _LAYOUTS):
        raise ValueError("it holds no weights, or does not say of what")


def restore(trainer: Trainer, checkpoint: Path) -> None:
    """
    Raises:
        AgentPeftError: the checkpoint is damaged.
    """
    try:
        trainer.load(checkpoint)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # torch, safetensors and PEFT raise of many kinds
        raise AgentPeftError(
            f"{checkpoint}: is damaged ({_told(error)}); move it elsewhere, and the run goes on from the one before"
        ) from error


def steps_written(metrics: Path) -> int:
    """How many steps a run has written down."""
    return metrics.read_bytes().count(b"\n") if metrics.is_file() else 0


def forget_after(folder: Path, steps: int, evaluations: Collection[Path]) -> None:
    """Remove the trajectories of the steps from number ``steps`` on, and those ``evaluations`` that came
    later: they are made again.
    """
    for path in (folder / "trajectories").glob("step_*.jsonl"):
        if int(path.stem.removeprefix("step_")) >= steps:
            path.unlink()
    for path in evaluations:
        path.unlink(missing_ok=True)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """What is wrong with a file, with its name."""
    try:
        yield
    except Exception as error:  # torch and safetensors raise of many kinds
        raise ValueError(f"{path.name}: {_told(error)}") from error


def _told(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
