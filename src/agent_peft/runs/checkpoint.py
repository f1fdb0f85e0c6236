"""Checkpoints that are whole or absent, whenever the process is killed: written aside, synced, renamed."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Container
from contextlib import suppress
from itertools import count
from pathlib import Path

from safetensors import SafetensorError

from agent_peft.files import check_tree, sync
from agent_peft.types import AgentPeftError, InfrastructureError

POSITION = "position.json"  # the file in a checkpoint that says how far the run is
KEEP = "keep"  # a checkpoint with a file of this name is never removed
BEST = "best.json"  # the file next to the checkpoints that names the best one
_NAME = re.compile(r"(?:\.replaced-)?step_(\d{6,})")
_DAMAGED = re.compile(r"damaged_step_\d{6,}(_\d+)?")  # a checkpoint that could not be read
_ASIDE = ".aside-"  # the prefix of a checkpoint that is being written or removed
_REPLACED = ".replaced-"  # the prefix of one that is whole, and valid until another of its step is


def save_checkpoint(
    root: Path,
    step: int,
    write: Callable[[Path], None],
    keep_last: int,
    keep: bool = False,
    best: Callable[[], str | None] = lambda: None,
) -> Path:
    """Write ``root/step_000012`` and remove older checkpoints.

    If the process is killed at any moment, ``latest_checkpoint`` is whole and on the disk. A checkpoint of
    the same step is replaced.

    Args:
        write: is called with an empty folder and fills it.
        keep_last: how many of the newest checkpoints stay.
        keep: never remove this checkpoint. A replacement inherits this.
        best: called when the checkpoint is written; returns the name of one that stays.

    Raises:
        ValueError: ``keep_last`` is below 1.
        InfrastructureError: the disk is full, or the checkpoint cannot be written for another reason.
    """
    if keep_last < 1:
        raise ValueError("at least the newest checkpoint is kept")
    try:
        return _save(root, step, write, keep_last, keep, best)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            clean(root)  # the space may be needed
        cause = " ".join(str(error).split())[:200]
        with suppress(OSError):
            cause += f"; {shutil.disk_usage(root).free >> 20} MB are free there"
        raise InfrastructureError(
            f"{root}: no checkpoint can be written ({cause}); the existing ones are whole: make room, then "
            "run the same command to continue"
        ) from error


def _save(
    root: Path,
    step: int,
    write: Callable[[Path], None],
    keep_last: int,
    keep: bool,
    best: Callable[[], str | None],
) -> Path:
    check_tree(root, depth=0)
    root.mkdir(parents=True, exist_ok=True)
    sync(root.parent)
    clean(root)
    target = root / f"step_{step:06d}"
    aside = root / f"{_ASIDE}{target.name}"
    aside.mkdir()
    write(aside)
    if keep or (target / KEEP).exists():
        (aside / KEEP).touch()
    sync_tree(aside)
    replaced = root / f"{_REPLACED}{target.name}"
    if target.exists():
        target.rename(replaced)
    aside.rename(target)
    sync(root)
    if replaced.exists():
        shutil.rmtree(replaced)
    remove_old(root, keep_last, (target.name, best()))
    return target


def remove_old(root: Path, keep_last: int, stays: Container[str | None]) -> None:
    """Remove all checkpoints but the newest ones, those with the file ``keep``, and those named ``stays``."""
    for old in checkpoints(root)[:-keep_last]:
        if not (old / KEEP).exists() and old.name not in stays:
            gone = root / f"{_ASIDE}{old.name}"
            old.rename(gone)  # first, so that nobody loads half of it
            shutil.rmtree(gone)


def clean(root: Path) -> None:
    """Remove the remains of a write that was killed, and restore a checkpoint that was not replaced yet."""
    for leftover in root.glob(f"{_ASIDE}*"):
        remove(leftover)
    for replaced in root.glob(f"{_REPLACED}*"):
        name = root / replaced.name.removeprefix(_REPLACED)
        if name.exists():
            remove(replaced)
        else:
            replaced.rename(name)


def remove(path: Path) -> None:
    """Remove a file, a link or a whole folder, if it exists. A link is not followed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def is_ours(path: Path) -> bool:
    """Whether ``save_checkpoint`` of a run wrote a path in the folder of checkpoints, or began to."""
    if path.name in (BEST, f".{BEST}.aside"):
        return path.is_file() and not path.is_symlink()
    if path.is_symlink() or not path.is_dir():
        return False
    if path.name.startswith((_ASIDE, _REPLACED)):
        return _NAME.fullmatch(path.name.removeprefix(_ASIDE).removeprefix(_REPLACED)) is not None
    if _DAMAGED.fullmatch(path.name):
        return True
    return _NAME.fullmatch(path.name) is not None and (path / POSITION).is_file()


def checkpoints(root: Path) -> list[Path]:
    """Return the whole checkpoints in ``root``, oldest first."""
    if not root.is_dir():
        return []
    folders = [path for path in root.iterdir() if path.is_dir() and not path.is_symlink()]
    names = sorted(path for path in folders if _NAME.fullmatch(path.name))
    by_step = {checkpoint_step(path): path for path in names}  # ".replaced-…" sorts first, so "step_…" wins
    return [by_step[step] for step in sorted(by_step)]


def latest_checkpoint(root: Path) -> Path | None:
    """Return the newest whole checkpoint, if there is one."""
    return next(reversed(checkpoints(root)), None)


def put_aside(checkpoint: Path) -> Path:
    """Rename a damaged checkpoint to ``damaged_step_000012``, so that it is ignored. Returns its new path."""
    names = (f"damaged_{checkpoint.name}" + (f"_{number}" if number else "") for number in count())
    aside = next(path for name in names if not os.path.lexists(path := checkpoint.with_name(name)))
    checkpoint.rename(aside)
    sync(checkpoint.parent)
    return aside


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
