"""Another attention in a model, for as long as a context lasts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

# what a model may add to its scores, and our attention does not know
_UNKNOWN = ("softcap", "s_aux", "position_bias", "sliding_window")
# what a model may raise that cannot work in another way than its own; whoever tries it falls back, or says so
MISFITS = (AssertionError, AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class Replacement:
    """The attention registered as ``name`` acts in models of ``config`` (the text's), and finds ``reads`` with ``now_read``."""

    config: PretrainedConfig
    name: str
    reads: Any


_now: ContextVar[Replacement | None] = ContextVar("now", default=None)


@contextmanager
def replacing(replacement: Replacement) -> Iterator[None]:
    """Inside, the model attends in another way."""
    config, before, token = replacement.config, replacement.config._attn_implementation, _now.set(replacement)
    config._attn_implementation = replacement.name
    try:
        yield
    finally:
        config._attn_implementation = before
        _now.reset(token)


def as_now() -> AbstractContextManager[None]:
    """A context, for later, in which attention is what it is now: what is computed again must be what it was."""
    replacement = _now.get()
    return nullcontext() if replacement is None else replacing(replacement)


def now_read(others: dict[str, Any]) -> Any:
    """What the present replacement reads.

    Raises:
        ValueError: the model passes ``others`` that add something to its scores.
    """
    if found := [name for name in _UNKNOWN if others.get(name) is not None]:
        raise ValueError(f"our attention does not know {', '.join(found)}")
    replacement = _now.get()
    assert replacement is not None
    return replacement.reads
