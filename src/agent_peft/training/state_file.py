"""What a trainer remembers, as a file whose bytes depend on the values alone."""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from typing import Any

import torch


def save_state(state: Any, path: Path) -> None:
    """Write tensors, numbers and texts in dicts, lists and tuples. What was loaded and saved again has the
    same bytes as what was not.

    Raises:
        OSError: it cannot be written, for want of room say.
    """
    copy = _alone(state)
    try:
        torch.save(copy, path)
    except RuntimeError as error:  # of torch's own writer, whatever the operating system said
        raise OSError(errno.EIO, str(error).splitlines()[0], str(path)) from error


def load_state(path: Path, *, mapped: bool = False) -> Any:
    """Read what ``save_state`` wrote. Only such values are read: a file of anybody's runs no code.

    The tensors are on the CPU, whatever device they were saved from: what takes the state moves them to where
    it computes.

    Args:
        mapped: the tensors' bytes are read when they are asked for. Enough to see whether the file is whole.

    Raises:
        Exception: it is damaged; torch raises of many kinds.
    """
    return torch.load(path, weights_only=True, map_location="cpu", mmap=mapped)


def _alone(value: Any) -> Any:
    """A copy in which no two objects are one, but for equal texts: pickle writes an object once and then
    refers to it.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {_alone(key): _alone(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_alone(inner) for inner in value)
    return sys.intern(value) if type(value) is str else value
