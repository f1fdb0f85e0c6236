"""At which decode step an environment's answer joins: the clock that everything numeric follows, and the
schedule that repeats it.

Who decodes beside whom decides how sums are rounded, so a run repeats bit for bit only where answers join at
the same steps. An answer is due ``overlap`` steps after it was asked for. One that is there by then joins
exactly then, in every run. One that is late does not hold up the rows that can decode: it joins at the first
step at which it is there, and that is written down. A recorded schedule that is followed decides it all:
answers join where they joined, and are waited for there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass

Join = tuple[
    int, int, int
]  # a conversation, which of its answers (0 is its prompt), and the decode step at which it joined
Schedule = tuple[
    Join, ...
]  # of one call of the engine: the answers that joined at another step than the one they were due at

# What a call may wait for late answers while other rows could decode. Hiccups of the system's scheduler are
# tens of milliseconds: they must not change what a run with fast environments computes. With slow ones it is
# spent once, and costs a fiftieth of the time from then on.
PATIENCE = 0.2  # seconds
PATIENCE_SHARE = 0.02  # of the time spent decoding
FIRST_PATIENCE = (
    1.0  # seconds, before the first step: there all rows are opened at once, and share the processor's cores
)


@dataclass(eq=False)
class Answer:
    """What a conversation was asked for, on a thread: tokens to read next, or None where there are none."""

    conversation: int
    turn: int
    due: int
    future: Future[Sequence[int] | None]
    overdue: bool = False  # it was waited for, and did not come


class Clock:
    """Counts decode steps, and says at which of them answers join.

    Args:
        overlap: decode steps that hide an answer.
        schedule: to be followed; with None, the clock goes by what is there, and records.
    """

    def __init__(self, overlap: int, schedule: Schedule | None = None) -> None:
        self.overlap = overlap
        self.step = 0
        self.waited = 0.0  # seconds in which the engine stood still for environments
        self.recorded: list[Join] = []
        self._followed = (
            None
            if schedule is None
            else {(conversation, turn): step for conversation, turn, step in schedule}
        )
        self._patience = FIRST_PATIENCE

    def decoded(self, seconds: float) -> None:
        """A step was made, in so many seconds."""
        self._patience = (self._patience if self.step else PATIENCE) + PATIENCE_SHARE * seconds
        self.step += 1

    def joins(self, answer: Answer) -> bool:
        """Whether an answer joins at this step. It may be waited for."""
        if self._joins_at(answer) > self.step:
            return False
        if self._followed is not None:
            self._wait([answer], None)
        elif not answer.future.done():
            if not answer.overdue:
                self._patience -= self._wait([answer], max(self._patience, 0.0))
            answer.overdue = not answer.future.done()
            if answer.overdue:
                return False
        if self.step != answer.due:
            self.recorded.append((answer.conversation, answer.turn, self.step))
        return True

    def skip(self, answers: Sequence[Answer]) -> None:
        """Nothing can decode: go on to the step at which the first of these answers joins. It is a later
        one, since each step asks for its answers once: else the order of two that join at one step would
        hang on which of them was there first.
        """
        self.step = max(self.step + 1, min(map(self._joins_at, answers)))
        if self._followed is not None:
            return
        self._wait(answers, None)  # no row could do anything meanwhile
        due = [answer for answer in answers if answer.due <= self.step]
        if not any(answer.future.done() for answer in due):
            self._patience -= self._wait(
                [answer for answer in due if not answer.overdue], max(self._patience, 0.0)
            )
        if not any(answer.future.done() for answer in due):
            self.step = max(self.step, min(answer.due for answer in answers if answer.future.done()))

    def _joins_at(self, answer: Answer) -> int:
        return (
            answer.due
            if self._followed is None
            else self._followed.get((answer.conversation, answer.turn), answer.due)
        )

    def _wait(self, answers: Sequence[Answer], most: float | None) -> float:
        """For the first of them, at most so many seconds. Returns how long it took."""
        begin = time.perf_counter()
        wait([answer.future for answer in answers], most, FIRST_COMPLETED)
        took = time.perf_counter() - begin
        self.waited += took
        return took
