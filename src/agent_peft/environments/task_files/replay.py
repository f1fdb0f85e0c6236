"""What replaying a task shows: the gold must pass, and doing nothing must not."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rejection:
    """A task that cannot be used, and why.

    >>> Rejection("7", "the gold SQL fails: no such function: STDDEV").id
    '7'
    """

    id: str
    cause: str


@dataclass(frozen=True)
class Inspection:
    """What the replay of one task showed; ``cause`` is None where the task can be used.

    >>> Inspection(gold_is_correct=True, nothing_is_correct=False, cause=None).cause is None
    True
    """

    gold_is_correct: bool
    nothing_is_correct: bool
    cause: str | None
