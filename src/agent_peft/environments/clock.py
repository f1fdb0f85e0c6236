"""The clock of an episode: seconds in which its environment works for the agent."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """It runs while the agent's commands or statements run, and stands while the agent thinks, so that a slow
    policy loses nothing.

    It also stands while a machine starts, while a task's scripts run, and during grading, which have other
    limits.

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
