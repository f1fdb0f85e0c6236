"""Replaces the attention of a model for as long as a context lasts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

from transformers import PreTrainedConfig

from agent_peft.hardware import is_out_of_memory
from agent_peft.policies.models.positions import window_of

# Terms that a model may add to its attention scores, and that our attention does not compute.
_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "sliding_window")
# Exceptions that a model may raise when its attention cannot be overridden. Callers fall back or report it.
_REFUSALS = (
    AssertionError,
    AttributeError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)
T = TypeVar("T")


def attempt(work: Callable[[], T]) -> T | Exception:
    """The result of ``work``, or the exception with which the model refuses it.

    Running out of memory says nothing about the model, so that error is raised.

    >>> attempt(lambda: 1), attempt(lambda: int("one"))
    (1, ValueError("invalid literal for int() with base 10: 'one'"))
    """
    try:
        return work()
    except _REFUSALS as error:
        if is_out_of_memory(error):
            raise
        return error


@dataclass(frozen=True)
class Override:
    """The attention registered as ``name`` acts in models of ``config`` (the text model's). It gets its
    ``context``, such as tiles or a cache, from ``override_context``.
    """

    config: PreTrainedConfig
    name: str
    context: Any


_current: ContextVar[Override | None] = ContextVar("override", default=None)


@contextmanager
def overriding(override: Override) -> Iterator[None]:
    """Inside, the model uses another attention.

    Raises:
        ValueError: the model has a sliding window. Our attention does not apply it, and not every model
            passes its window to the attention function.
    """
    if (window := window_of(override.config)) is not None:
        raise ValueError(f"our attention does not apply a sliding window (of {window} tokens)")
    config, before, token = override.config, override.config._attn_implementation, _current.set(override)
    config._attn_implementation = override.name
    try:
        yield
    finally:
        config._attn_implementation = before
        _current.reset(token)


def current_override() -> AbstractContextManager[None]:
    """Capture the current override, so that activation checkpointing can re-enter it during the backward."""
    override = _current.get()
    return nullcontext() if override is None else overriding(override)


def override_context(arguments: dict[str, Any]) -> Any:
    """The context of the current override.

    Args:
        arguments: the remaining keyword arguments that the model passes to its attention function.

    Raises:
        ValueError: one of them adds something to the scores that our attention does not compute.
    """
    override = _current.get()
    window = None if override is None else getattr(override.config, "sliding_window", None)
    unsupported = [name for name in _UNSUPPORTED if arguments.get(name) is not None]
    if window is not None and arguments.get("sliding_window") == window:
        unsupported.remove("sliding_window")  # too wide to cut anything: `overriding` has checked that
    if unsupported:
        raise ValueError(f"our attention does not support {', '.join(unsupported)}")
    assert override is not None
    return override.context
