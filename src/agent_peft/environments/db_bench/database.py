"""What the environment needs of a database, whichever engine is underneath."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from agent_peft.environments.db_bench.tasks import Row


@dataclass(frozen=True)
class Executed:
    """What one statement did: ``rows`` of a query (None if it was none), or how many rows it ``changed``, or the ``error`` as text.

    ``cut`` says that there were more rows than were fetched.

    >>> Executed(rows=((1, "a"),)).error is None
    True
    """

    rows: tuple[Row, ...] | None = None
    changed: int = 0
    error: str | None = None
    cut: bool = False


class Database(Protocol):
    """A throwaway database that holds the table of one task. Used by one thread at a time."""

    def execute(self, sql: str) -> Executed:
        """Run one statement, whatever it is, within limits. Never raises for what the statement says."""
        ...

    def table(self) -> tuple[Row, ...] | None:
        """All rows of the task's table as it is now; None if the table is gone or has other columns than at first."""
        ...

    def close(self) -> None:
        """Drop everything. May be called twice."""
        ...
