"""Episodes of one reply, and graders: exact, by the last number, by a pattern, or by a user's function."""

from __future__ import annotations

import inspect
import logging
import numbers
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Any

from agent_peft.environments import expressions
from agent_peft.environments.base import Episode
from agent_peft.environments.quantities import last_quantity
from agent_peft.lookup import find, may_import, nearest
from agent_peft.types import AgentPeftError, Message, Outcome, StepResult, StopReason, Task

logger = logging.getLogger(__name__)

CUSTOM = "your own as package.module:function"


@dataclass(frozen=True)
class Grade:
    """The grade of a reply. ``correct`` is None where it is not known; ``valid`` is False where the reply
    holds no answer; ``score``, if the grader has one, is from 0 to 1.

    >>> Grade(correct=True).valid
    True
    """

    correct: bool | None
    valid: bool = True
    score: float | None = None


Grader = Callable[[str, Any, Task], Grade]
OUTCOMES = {True: Outcome.CORRECT, False: Outcome.INCORRECT, None: Outcome.UNKNOWN}


class QuestionEpisode(Episode):
    """One question and one reply."""

    def __init__(self, opening: Sequence[Message], grade: Callable[[str], Grade]) -> None:
        self._opening, self._grade = opening, grade
        self._over = False

    def start(self) -> Sequence[Message]:
        return self._opening

    def step(self, action: str) -> StepResult:
        if self._over:
            raise RuntimeError("the episode is over")
        self._over = True
        grade = self._grade(action)
        outcome = OUTCOMES[grade.correct]
        return StepResult("", True, outcome, StopReason.FINISHED, grade.valid, grade.score)

    def close(self) -> None:
        self._over = True


def normalized(text: str) -> str:
    """A text as ``exact`` compares it: its white space is one blank between words, and a letter is one
    character however it is composed (Unicode's NFC). Case and punctuation count.

    >>> normalized(" New\\n York ")
    'New York'
    """
    return unicodedata.normalize("NFC", " ".join(text.split()))


def spelled(answer: object) -> str:
    """An answer of a table as text; a number without an exponent.

    >>> spelled(1e-05), spelled("1e-05")
    ('0.00001', '1e-05')
    """
    return format(Decimal(str(answer)), "f") if isinstance(answer, int | float) else str(answer)


def _exact(reply: str, answer: Any, task: Task) -> Grade:
    return Grade(normalized(reply) == normalized(spelled(answer)), valid=bool(reply.strip()))


def _number(reply: str, answer: Any, task: Task) -> Grade:
    found, expected = last_quantity(reply), last_quantity(spelled(answer))
    return Grade(found is not None and expected is not None and found.equals(expected), found is not None)


def _by_pattern(pattern: str) -> Grader:
    def grade(reply: str, answer: Any, task: Task) -> Grade:
        try:
            found = expressions.last_group(pattern, reply)
        except TimeoutError:
            _warn_of_time(pattern)
            found = None
        return Grade(
            found is not None and normalized(found) == normalized(spelled(answer)), valid=found is not None
        )

    return grade


@lru_cache(256)
def _warn_of_time(pattern: str) -> None:
    """Log once for each pattern."""
    logger.warning(
        "grader regex: the pattern %.200r took too much time or memory on a reply, which is incorrect; "
        "write a pattern with fewer ways to match",
        pattern,
    )


def _by_function(name: str) -> Grader:
    function = _find_function(name)

    def grade(reply: str, answer: Any, task: Task) -> Grade:
        result = function(reply, answer, task)
        if isinstance(result, bool):
            return Grade(result)
        if isinstance(result, numbers.Real) and 0 <= float(result) <= 1:
            return Grade(float(result) == 1, score=float(result))
        raise AgentPeftError(
            f"grader {name!r}, task {task.id!r}: returned {result!r:.60}; return True, False, or a score "
            "from 0 to 1"
        )

    return grade


BUILT_IN: dict[str, Grader | None] = {"exact": _exact, "number": _number, "regex": None}


def find_grader(name: str, pattern: str | None = None) -> Grader:
    """Return the grader that a configuration names."""
    if name == "regex":
        return _by_pattern(pattern or "()")
    try:
        return BUILT_IN.get(name) or _by_function(name)
    except ValueError as error:
        raise AgentPeftError(f"grader: {error}") from error


def check_grader(name: str) -> str:
    """Return the name; raise ValueError if there is no such grader, or a function takes other arguments."""
    if name in BUILT_IN:
        return name
    if ":" not in name:
        raise ValueError(f"there is no grader {name!r}; {nearest(name, BUILT_IN.keys(), CUSTOM)}")
    if may_import(name):
        _find_function(name)
    return name


def check_pattern(pattern: str | None) -> str | None:
    """Return the pattern; raise ValueError if it is not a regular expression with a group."""
    if pattern is not None and (fault := expressions.fault(pattern, group=True)) is not None:
        if fault == expressions.NO_GROUP:
            raise ValueError(
                f"{pattern!r:.60} has no group; put parentheses around the answer, as in 'Answer: (.+)'"
            )
        raise ValueError(f"{pattern!r:.60} is not a regular expression ({fault})")
    return pattern


def _find_function(name: str) -> Callable[[str, Any, Task], Any]:
    function = find(name, "package.module:function")
    if not callable(function):
        raise ValueError(f"{name!r} is not a function but {function!r:.60}; name a function")
    try:
        inspect.signature(function).bind("", "", None)
    except TypeError as error:
        raise ValueError(
            f"{name!r} cannot be called as a grader ({error}); write it as def f(response, answer, task)"
        ) from error
    except ValueError:  # not all that is built in says what it takes
        pass
    return function  # type: ignore[no-any-return]
