"""Files that are whole or absent, whenever the process is killed: written aside, synced, renamed."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from agent_peft.files import parse_json, read_bytes, sync, write_atomic
from agent_peft.types import AgentPeftError, InfrastructureError

POSITION = "position.json"  # a file of this name inside a checkpoint tells how far the run is
KEEP = "keep"  # a file of this name inside a checkpoint pins it
MOST_BYTES = 1 << 30  # of a file that is read back
_NAME = re.compile(r"(?:\.replaced-)?step_(\d{6,})")
_DAMAGED = re.compile(
    r"damaged_step_\d{6,}(_\d+)?"
)  # a checkpoint that could not be read, kept for whoever wants to look at it
_ASIDE = ".aside-"  # what begins so is half made or half removed
_REPLACED = ".replaced-"  # what begins so is whole, as long as there is no other of its step


def save_checkpoint(
    root: Path, step: int, write: Callable[[Path], None], keep_last: int, keep: bool = False
) -> Path:
    """``root/step_000012``, with what ``write(folder)`` puts into it; then older checkpoints are removed.

    Killed at any moment, ``latest_checkpoint`` is whole and on the disk. One of the same step is replaced.
    ``keep_last`` of the newest stay, and every one that holds a file ``keep`` (``keep=True`` writes it; it
    outlives a replacement).

    Raises:
        ValueError: ``keep_last`` below 1.
        InfrastructureError: the disk is full, or takes no file for another reason.
    """
    if keep_last < 1:
        raise ValueError("at least the newest checkpoint is kept")
    try:
        return _save(root, step, write, keep_last, keep)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            clean(root)  # the room may be needed
        cause = " ".join(str(error).split())[:200]
        with suppress(OSError):
            cause += f"; {shutil.disk_usage(root).free >> 20} MB are free there"
        raise InfrastructureError(
            f"{root}: no checkpoint can be written ({cause}); those that are there are whole: make room, then run the same command to go on"
        ) from error


def _save(root: Path, step: int, write: Callable[[Path], None], keep_last: int, keep: bool) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    sync(root.parent)
    clean(root)
    target = root / f"step_{step:06d}"
    aside = root / f"{_ASIDE}{target.name}"
    aside.mkdir()
    write(aside)
    if keep or (target / KEEP).exists():
        (aside / KEEP).touch()
    _sync_tree(aside)
    replaced = root / f"{_REPLACED}{target.name}"
    if target.exists():
        target.rename(replaced)
    aside.rename(target)
    sync(root)
    if replaced.exists():
        shutil.rmtree(replaced)
    for old in checkpoints(root)[:-keep_last]:
        if not (old / KEEP).exists() and old != target:
            gone = root / f"{_ASIDE}{old.name}"
            old.rename(gone)  # first out of sight, so that nobody loads half of it
            shutil.rmtree(gone)
    return target


def clean(root: Path) -> None:
    """Remove what a killed write left behind, and put a checkpoint back whose replacement never came."""
    for leftover in root.glob(f"{_ASIDE}*"):
        remove(leftover)
    for replaced in root.glob(f"{_REPLACED}*"):
        name = root / replaced.name.removeprefix(_REPLACED)
        if name.exists():
            remove(replaced)
        else:
            replaced.rename(name)


def remove(path: Path) -> None:
    """A file or a folder with all that is in it; of a link, the link alone. What is not there is no
    mistake.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def is_ours(path: Path) -> bool:
    """Whether something in a folder of checkpoints was written by ``save_checkpoint`` of a run, or left
    half written.
    """
    if path.is_symlink() or not path.is_dir():
        return False
    if path.name.startswith((_ASIDE, _REPLACED)):
        return _NAME.fullmatch(path.name.removeprefix(_ASIDE).removeprefix(_REPLACED)) is not None
    if _DAMAGED.fullmatch(path.name):
        return True
    return _NAME.fullmatch(path.name) is not None and (path / POSITION).is_file()


def checkpoints(root: Path) -> list[Path]:
    """The whole checkpoints in ``root``, oldest first."""
    found = (
        [
            path
            for path in root.iterdir()
            if _NAME.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
        ]
        if root.is_dir()
        else []
    )
    by_step = {
        checkpoint_step(path): path for path in sorted(found)
    }  # ".replaced-…" sorts first, so the one in its place wins
    return [by_step[step] for step in sorted(by_step)]


def latest_checkpoint(root: Path) -> Path | None:
    """The newest whole checkpoint."""
    found = checkpoints(root)
    return found[-1] if found else None


def put_aside(checkpoint: Path) -> Path:
    """Rename a damaged checkpoint to ``damaged_step_000012``, which nothing takes for one. Returns its new
    path.
    """
    names = (f"damaged_{checkpoint.name}" + (f"_{again}" if again else "") for again in count())
    aside = next(path for name in names if not os.path.lexists(path := checkpoint.with_name(name)))
    checkpoint.rename(aside)
    sync(checkpoint.parent)
    return aside


def checkpoint_step(path: Path) -> int:
    """
    >>> checkpoint_step(Path("runs/a/checkpoints/step_000012"))
    12
    """
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise AgentPeftError(f"{path} is not a checkpoint: they are called step_000012 and the like")
    return int(match[1])


def write_json_atomic(path: Path, content: Any) -> None:
    """``write_atomic`` of indented JSON.

    Raises:
        ValueError: not fit for JSON (an infinite number, say); the file stays as it was.
    """
    write_atomic(path, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def truncate_jsonl(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Keep the lines whose record ``keep`` accepts, byte for byte; a torn last line goes. A missing file
    stays missing.

    Raises:
        AgentPeftError: a line before the last is not a JSON object that ``keep`` can read (a KeyError or a
            TypeError says it cannot).
    """
    if not path.exists():
        return
    lines = read_bytes(path, "a JSONL file", MOST_BYTES).splitlines(keepends=True)
    kept = []
    for number, line in enumerate(lines, start=1):
        try:
            record = parse_json(line)
            if not isinstance(record, dict):
                raise ValueError("not an object")
            wanted = keep(record)
        except (KeyError, TypeError, ValueError) as error:
            if number == len(lines):
                break
            raise AgentPeftError(
                f"{path}:{number}: is no record of a step; repair or remove the line"
            ) from error
        if line.endswith(b"\n") and wanted:
            kept.append(line)
    if kept != lines:
        write_atomic(path, b"".join(kept).decode("utf-8"))


def _sync_tree(folder: Path) -> None:
    for parent, _, files in os.walk(folder, topdown=False):
        for name in files:
            sync(Path(parent) / name)
        sync(Path(parent))
