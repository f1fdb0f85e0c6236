"""Recognises errors that mean "out of memory", and reports them in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from agent_peft.types import AgentPeftError

# Messages of torch, its CPU allocator and CUDA's libraries, where they raise a plain RuntimeError.
_WORDS = (
    "can't allocate memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the memory of the CPU or of a GPU is full.

    >>> is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ..."))
    True
    >>> is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory.")), is_out_of_memory(ValueError("a bug"))
    (True, False)
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


@contextmanager
def explain_oom(action: str, hint: str) -> Iterator[None]:
    """Convert an out-of-memory error to ``AgentPeftError``.

    Args:
        action: the clause that follows "out of memory".
        hint: what the user can do.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise AgentPeftError(f"out of memory {action}: {hint}") from error
