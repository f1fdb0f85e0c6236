"""The clock of an episode: seconds in which its environment works for the agent."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """It runs while the agent's commands or statements do, and stands while the agent thinks, so that a slow
    policy loses nothing by it.

    What is the environment's own (starting a machine, a task's scripts, grading) is not counted either; it
    has limits of its own.

    >>> Clock(None).left, Clock(2.5).left
    (inf, 2.5)
    """

    def __init__(self, seconds: float | None) -> None:
        """``seconds`` are all there is; None is a clock that never runs out."""
        self.left = math.inf if seconds is None else seconds

    @contextmanager
    def running(self) -> Iterator[None]:
        begun = time.monotonic()
        try:
            yield
        finally:
            self.left -= time.monotonic() - begun

    @property
    def ran_out(self) -> bool:
        return self.left <= 0
