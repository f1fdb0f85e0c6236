"""Another attention in a model, for as long as a context lasts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

from transformers import PretrainedConfig

from agent_peft.out_of_memory import is_out_of_memory
from agent_peft.policies.models.positions import window_of

# what a model may add to its scores, and our attention does not know
_UNKNOWN = ("softcap", "s_aux", "position_bias", "sliding_window")
# what a model may raise that cannot work in another way than its own
_MISFITS = (
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
    """What ``work`` gives, or why the model cannot do it: whoever tries it falls back, or says so.

    A full memory says nothing of the model: it is raised.

    >>> attempt(lambda: 1), attempt(lambda: int("one"))
    (1, ValueError("invalid literal for int() with base 10: 'one'"))
    """
    try:
        return work()
    except _MISFITS as error:
        if is_out_of_memory(error):
            raise
        return error


@dataclass(frozen=True)
class Replacement:
    """The attention registered as ``name`` acts in models of ``config`` (the text's), and finds ``reads``
    with ``now_read``.
    """

    config: PretrainedConfig
    name: str
    reads: Any


_now: ContextVar[Replacement | None] = ContextVar("now", default=None)


@contextmanager
def replacing(replacement: Replacement) -> Iterator[None]:
    """Inside, the model attends in another way.

    Raises:
        ValueError: it has a sliding window, which our attention does not cut. Not every model hands that over
            with its scores.
    """
    if (window := window_of(replacement.config)) is not None:
        raise ValueError(f"our attention does not know a sliding window (of {window} tokens)")
    config, before, token = replacement.config, replacement.config._attn_implementation, _now.set(replacement)
    config._attn_implementation = replacement.name
    try:
        yield
    finally:
        config._attn_implementation = before
        _now.reset(token)


def as_now() -> AbstractContextManager[None]:
    """A context, for later, in which attention is what it is now: what is computed again must be what it
    was.
    """
    replacement = _now.get()
    return nullcontext() if replacement is None else replacing(replacement)


def now_read(others: dict[str, Any]) -> Any:
    """What the present replacement reads.

    Raises:
        ValueError: the model passes ``others`` that add something to its scores.
    """
    replacement = _now.get()
    own = None if replacement is None else getattr(replacement.config, "sliding_window", None)
    unknown = [name for name in _UNKNOWN if others.get(name) is not None]
    if own is not None and others.get("sliding_window") == own:
        unknown.remove("sliding_window")  # too wide to cut anything, else there were no replacement
    if unknown:
        raise ValueError(f"our attention does not know {', '.join(unknown)}")
    assert replacement is not None
    return replacement.reads
