"""A trainer's state as a file whose bytes depend on the values alone."""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from typing import Any

from agent_peft.files import opened
from agent_peft.lazy_torch import torch


def save_state(state: Any, path: Path) -> None:
    """Write tensors, numbers and texts in dicts, lists and tuples. A state that was loaded and saved again
    has the same bytes.

    Raises:
        OSError: it cannot be written, for example because the disk is full.
    """
    copy = _unshared(state)
    try:
        torch.save(copy, path)
    except RuntimeError as error:  # torch's writer hides the operating system's error
        raise OSError(errno.EIO, str(error).splitlines()[0], str(path)) from error


def load_state(path: Path, *, mapped: bool = False) -> Any:
    """Read a file of ``save_state``. Only values are read, so a file from a stranger runs no code.

    The tensors are on the CPU, whatever device they were saved from. The caller moves them.

    Args:
        mapped: read the tensors' bytes on first use, which is enough to check that the file is complete.

    Raises:
        Exception: the file is damaged; torch raises exceptions of many kinds.
    """
    with opened(path) as place:
        return torch.load(place, weights_only=True, map_location="cpu", mmap=mapped)


def _unshared(value: Any) -> Any:
    """A copy that shares no objects except equal texts: pickle writes a shared one once, as other bytes."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {_unshared(key): _unshared(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_unshared(inner) for inner in value)
    return sys.intern(value) if type(value) is str else value
