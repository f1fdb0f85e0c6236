"""Tables, and what the environment needs of a database, whichever engine is underneath. Workers load it
too: standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from agent_peft.seeding import generator
from agent_peft.types import StopReason

Cell = str | int | float | bytes | None
Row = tuple[Cell, ...]

MAX_SQL = 10_000  # characters of a statement
NO_STATEMENT = "no statement was written"  # but comments, blanks or semicolons


@dataclass(frozen=True)
class DeclaredColumn:
    """A column's name and declared type.

    >>> DeclaredColumn("unit price", "INT").type
    'INT'
    """

    name: str
    type: str


@dataclass(frozen=True)
class Table:
    """The table of a task before the agent acts.

    >>> Table("orders", (DeclaredColumn("id", "INT"),), ((1,), (2,))).headers
    ('id',)
    """

    name: str
    columns: tuple[DeclaredColumn, ...]
    rows: Sequence[Sequence[Cell]]

    @property
    def headers(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)


@dataclass(frozen=True)
class Executed:
    """The result of one statement: the ``rows`` of a query (None for other statements), the number of rows
    that it ``changed``, or the ``error`` as text.

    ``cut``: there were more rows than were fetched.

    >>> Executed(rows=((1, "a"),)).error is None
    True
    """

    rows: tuple[Row, ...] | None = None
    changed: int = 0
    error: str | None = None
    cut: bool = False


class DatabaseStopped(Exception):
    """A statement had to be ended together with its database, for the ``reason``. The agent wrote it."""

    def __init__(self, reason: StopReason) -> None:
        super().__init__(
            "the statement was stopped, and its database with it "
            f"({'time' if reason is StopReason.TIMEOUT else 'memory'})"
        )
        self.reason = reason


class Database(Protocol):
    """A throwaway database that holds the table of one task. Used by one thread at a time."""

    def execute(self, sql: str, seconds: float | None = None) -> Executed:
        """Run one statement, whatever it is, within limits: in ``seconds``, where they are fewer than those
        of every statement. Raises `DatabaseStopped`: it could only be ended with the database.
        """
        ...

    def table(self) -> tuple[Row, ...] | None:
        """All rows of the task's table as it is now, read within the same limits. None if it is gone, has
        other columns than at first, is far larger, or cannot be read in time. Raises as `execute`.
        """
        ...

    def reset(self) -> None:
        """Make the database as it was at first: the same table, and the same random numbers to come. Raises
        `DatabaseStopped` if it was gone before.
        """
        ...

    def close(self) -> None:
        """Drop everything. May be called twice."""
        ...


def text_refusal(sql: str) -> str | None:
    """Why a text cannot be sent to a database at all, or None."""
    if len(sql) > MAX_SQL:
        return "the statement is too large"
    try:
        sql.encode()
    except UnicodeEncodeError:
        return "the statement is not valid Unicode"
    return None


def other_orders(rows: Sequence[Sequence[Cell]]) -> list[list[Sequence[Cell]]]:
    """The rows of a table in other orders. A statement that answers one of them in another way depends on the
    order in which rows happen to be stored, as where rows tie at a LIMIT.

    >>> other_orders([(1,), (2,)])[0]
    [(2,), (1,)]
    """
    return [list(rows)[::-1], *(generator(0, "order", k).sample(rows, len(rows)) for k in range(4))]


def size(cells: Iterable[Cell]) -> int:
    """About how many bytes a row takes.

    >>> size((1, "abc", None))
    83
    """
    return 64 + sum(len(cell) if isinstance(cell, str | bytes) else 8 for cell in cells)


def fetched(cursor: Iterable[Row], most_rows: int | None, most_bytes: int) -> tuple[tuple[Row, ...], bool]:
    """The rows of a result within the limits, and whether there are more."""
    rows: list[Row] = []
    for row in cursor:
        if len(rows) == most_rows or most_bytes < 0:
            return tuple(rows), True
        rows.append(row)
        most_bytes -= size(row)
    return tuple(rows), False
