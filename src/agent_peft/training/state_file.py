"""What a trainer remembers, as a file whose bytes depend on the values alone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch


def save_state(state: Any, path: Path) -> None:
    """Write tensors, numbers and texts in dicts, lists and tuples. What was loaded and saved again has the same bytes as what was not."""
    torch.save(_alone(state), path)


def load_state(path: Path) -> Any:
    """Read what ``save_state`` wrote. Only such values are read: a file of anybody's runs no code.

    Raises:
        Exception: it is damaged; torch raises of many kinds.
    """
    return torch.load(path, weights_only=True)


def _alone(value: Any) -> Any:
    """A copy in which no two objects are one, but for equal texts: pickle writes an object once and then refers to it."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {_alone(key): _alone(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_alone(inner) for inner in value)
    return sys.intern(value) if type(value) is str else value
