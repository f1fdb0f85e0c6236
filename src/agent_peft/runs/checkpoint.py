"""One checkpoint of a run: written, read and removed.

A checkpoint is complete or absent, whenever the process is killed: it is written aside, synced and renamed.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from agent_peft.files import MEGABYTE, check_tree, opened, parse_json, read_text, sync
from agent_peft.printable import cause_of
from agent_peft.training.state_file import load_state
from agent_peft.types import AgentPeftError, InfrastructureError

POSITION = "position.json"  # the file in a checkpoint that holds the run's position
STATE = "trainer.pt"
KEEP = "keep"  # a checkpoint with a file of this name is never removed
_INDEX = "model.safetensors.index.json"
_LAYOUTS = (
    ("adapter_config.json", "adapter_model.safetensors"),
    ("config.json", "model.safetensors"),
    ("config.json", _INDEX),
)
_NAME = re.compile(r"step_(\d{6,})")
_ASIDE = ".aside-"  # the prefix of a checkpoint that is being written or removed


@dataclass(frozen=True)
class Position:
    """How far a run is: ``steps`` of the run are done, and it resumes in the stage of index ``stage``."""

    stage: int = 0
    steps: int = 0
    ranks: int = 1  # that trained it
    checkpoint: str | None = None  # its name; None at the start


def read_position(checkpoint: Path, stages: int) -> Position:
    """Return the position that a checkpoint of a run with so many ``stages`` holds. Each file must have its
    beginning and its end; faults inside the weights appear when they are loaded.
    """
    check_tree(checkpoint)
    with _damage_of(checkpoint / POSITION):
        content = _read_json(checkpoint / POSITION)
        numbers = content["stage"], content["steps"], content["ranks"]
        if not all(type(number) is int and number >= 0 for number in numbers) or numbers[0] >= stages:
            raise ValueError("it is not the position of this run")
    with _damage_of(checkpoint / STATE):
        load_state(checkpoint / STATE, mapped=True)
    for path in checkpoint.glob("*.json"):
        with _damage_of(path):
            content = _read_json(path)
            if path.name == _INDEX:
                parts = set(content["weight_map"].values())
                if absent := {part for part in parts if not (checkpoint / part).is_file()}:
                    raise ValueError(f"{min(absent)} is gone")
    for path in checkpoint.glob("*.safetensors"):
        with _damage_of(path), opened(path, unlinked=3) as place, safe_open(place, "pt") as file:
            file.keys()
    with _damage_of(checkpoint):
        if not any(all((checkpoint / name).is_file() for name in layout) for layout in _LAYOUTS):
            raise ValueError("its weights or their configuration are gone")
    return Position(*numbers, checkpoint=checkpoint.name)


def _read_json(path: Path) -> Any:
    return parse_json(read_text(path, "a JSON file", 64 * MEGABYTE, unlinked=3))


@contextmanager
def _damage_of(path: Path) -> Iterator[None]:
    """Convert an error to one that names a file of a checkpoint, or the checkpoint."""
    try:
        yield
    except Exception as error:  # torch and safetensors raise many kinds
        checkpoint = path if _NAME.fullmatch(path.name) else path.parent
        raise AgentPeftError(
            f"{path}: is damaged ({cause_of(error)}); put it back from a backup, or move {checkpoint.name} "
            "elsewhere: the checkpoint before it is then the newest"
        ) from error


def save_checkpoint(
    root: Path,
    step: int,
    write: Callable[[Path], None],
    keep_last: int,
    keep: bool = False,
    best: Callable[[], str | None] = lambda: None,
) -> Path:
    """Write ``root/step_000012`` and remove older checkpoints.

    If the process is killed at any moment, ``latest_checkpoint`` is complete and on the disk.

    Args:
        write: fills the empty folder that it is called with.
        keep_last: how many of the newest checkpoints stay, at least 1.
        keep: never remove this checkpoint.
        best: called when the checkpoint is written; returns the name of one that stays.
    """
    target = root / f"step_{step:06d}"
    aside = root / f"{_ASIDE}{target.name}"
    try:
        check_tree(root, depth=0)
        root.mkdir(parents=True, exist_ok=True)
        sync(root.parent)
        clean(root)
        aside.mkdir()
        write(aside)
        if keep:
            (aside / KEEP).touch()
        sync_tree(aside)
        remove(target)
        aside.rename(target)
        sync(root)
        remove_old(root, keep_last, (target.name, best()))
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            clean(root)  # the space may be needed
        cause = cause_of(error)
        with suppress(OSError):
            cause += f"; {shutil.disk_usage(root).free >> 20} MB are free there"
        raise InfrastructureError(
            f"{root}: no checkpoint can be written ({cause}); the existing ones are complete: make "
            "room, then run the same command again"
        ) from error
    return target


def remove_old(root: Path, keep_last: int, stays: Container[str | None]) -> None:
    """Remove all checkpoints but the newest ones, those with the file ``keep``, and those named ``stays``."""
    for old in checkpoints(root)[:-keep_last]:
        if not (old / KEEP).exists() and old.name not in stays:
            gone = root / f"{_ASIDE}{old.name}"
            old.rename(gone)  # first, so that nobody loads half of it
            shutil.rmtree(gone)


def clean(root: Path) -> None:
    """Remove the remains of a write or a removal that was killed."""
    for leftover in root.glob(f"{_ASIDE}*"):
        remove(leftover)


def remove(path: Path) -> None:
    """Remove a file, a link or a whole folder, if it exists. A link is not followed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def checkpoints(root: Path) -> list[Path]:
    """Return the checkpoints in ``root``, oldest first."""
    if not root.is_dir():
        return []
    folders = [path for path in root.iterdir() if path.is_dir() and not path.is_symlink()]
    return sorted((path for path in folders if _NAME.fullmatch(path.name)), key=checkpoint_step)


def latest_checkpoint(root: Path) -> Path | None:
    """Return the newest complete checkpoint, if there is one."""
    return next(reversed(checkpoints(root)), None)


def checkpoint_step(path: Path) -> int:
    """Return the number of steps done when a checkpoint was written.

    >>> checkpoint_step(Path("runs/a/checkpoints/step_000012"))
    12
    """
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise AgentPeftError(f"{path}: not a checkpoint, whose name would be like step_000012; name another")
    return int(match[1])


def sync_tree(folder: Path) -> None:
    """Wait until all files below a folder are on the disk."""
    for parent, _, files in os.walk(folder, topdown=False):
        for name in files:
            sync(Path(parent) / name)
        sync(Path(parent))
