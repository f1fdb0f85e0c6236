"""A memory that is full, told from a model that cannot do what is asked of it, and told to the user in one
line.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from agent_peft.types import AgentPeftError

# how torch, its CPU allocator and CUDA's libraries say it where they raise a plain RuntimeError
_WORDS = (
    "can't allocate memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """
    >>> is_out_of_memory(RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried ...")), \\
    ... is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory.")), is_out_of_memory(RuntimeError("a
    bug")) (True, True, False)
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


@contextmanager
def telling_out_of_memory(doing: str, remedy: str) -> Iterator[None]:
    """Inside, a full memory is one line.

    Raises:
        AgentPeftError: out of memory ``doing`` something; ``remedy`` says what to do.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise AgentPeftError(f"out of memory {doing}: {remedy}") from error
