"""The clock of decode steps, which decides when an environment's answer joins; and the schedule that
repeats it.

Sums are rounded according to which rows decode together, so a run repeats bit for bit only if answers join at
the same steps. An answer is due ``overlap`` steps after it was asked for. If it has arrived by then, it joins
at that step, in every run. If it is late, the other rows continue; it joins at the first step after it
arrived, and the schedule records that. A run that follows a schedule waits for each answer at its recorded
step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass

logger = logging.getLogger(__name__)

# the number of a conversation, the number of its answer (0 is its prompt), and the decode step at which it
# joined
Join = tuple[int, int, int]
Schedule = tuple[Join, ...]  # of one call: the answers that did not join at the step at which they were due

# The time that a call may wait for late answers while other rows could decode. The system's scheduler delays
# threads by tens of milliseconds, and that must not change the results of a run with fast environments. With
# slow environments this time is spent once, and costs a fiftieth of the time from then on.
PATIENCE = 0.2  # seconds
PATIENCE_SHARE = 0.02  # of the time spent decoding
NOTES = 30.0, 300.0  # seconds until a warning of a wait in which nothing else can be done; and each next one
# seconds before the first step, where all environments start at once and share the cores
FIRST_PATIENCE = 1.0


@dataclass(eq=False)
class PendingTurn:
    """A request to a conversation, on a thread: for the tokens to read next, or None at its end."""

    conversation: int
    turn: int
    due: int
    future: Future[Sequence[int] | None]
    overdue: bool = False  # the engine has waited for it in vain


class DecodeClock:
    """Counts decode steps, and decides at which of them answers join.

    Args:
        overlap: decode steps from a request until its answer is due.
        schedule: the schedule to follow. With None, the clock records one.
        conversations: whose answers join, for warnings: ``where`` names the place that one is at.
    """

    def __init__(
        self, overlap: int, schedule: Schedule | None = None, conversations: Sequence[object] = ()
    ) -> None:
        self.overlap, self._conversations = overlap, conversations
        self.step = 0
        self.waited = 0.0  # seconds without computation, for environments
        self.recorded: list[Join] = []
        self._followed = (
            None
            if schedule is None
            else {(conversation, turn): step for conversation, turn, step in schedule}
        )
        self._patience = FIRST_PATIENCE

    def decoded(self, seconds: float) -> None:
        """A decode step has taken so many seconds."""
        self._patience = (self._patience if self.step else PATIENCE) + PATIENCE_SHARE * seconds
        self.step += 1

    def joins(self, answer: PendingTurn) -> bool:
        """Whether an answer joins at this step. This may wait for it."""
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

    def skip(self, answers: Sequence[PendingTurn]) -> None:
        """Nothing can decode: move on to the step at which the first of these answers joins. That is a later
        step, since each step asks for its answers once. Otherwise the order of two answers that join at one
        step would depend on which of them arrived first.
        """
        self.step = max(self.step + 1, min(map(self._joins_at, answers)))
        if self._followed is not None:
            return
        self._wait(answers, None)  # no row can decode meanwhile
        due = [answer for answer in answers if answer.due <= self.step]
        if not any(answer.future.done() for answer in due):
            self._patience -= self._wait(
                [answer for answer in due if not answer.overdue], max(self._patience, 0.0)
            )
        if not any(answer.future.done() for answer in due):
            self.step = max(self.step, min(answer.due for answer in answers if answer.future.done()))

    def _joins_at(self, answer: PendingTurn) -> int:
        return (
            answer.due
            if self._followed is None
            else self._followed.get((answer.conversation, answer.turn), answer.due)
        )

    def _wait(self, answers: Sequence[PendingTurn], timeout: float | None) -> float:
        """Wait for the first of them, for at most ``timeout`` seconds. Return the seconds that it took."""
        begin = time.perf_counter()
        futures, note = [answer.future for answer in answers], NOTES[0]
        while (
            not wait(futures, note if timeout is None else timeout, FIRST_COMPLETED).done and timeout is None
        ):
            number = answers[0].conversation
            place = getattr(self._conversations[number], "where", number) if self._conversations else number
            seconds, others = time.perf_counter() - begin, len(answers) - 1
            more = f" and {others} more" if others else ""
            logger.warning("waiting for the environment for %.0f s: %s%s", seconds, place, more)
            note = NOTES[1]
        took = time.perf_counter() - begin
        self.waited += took
        return took
