"""Values that a request writes in another form than the table has them, so that a person who is to query the
table would look at its values first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from agent_peft.environments.db_bench.database import Row
from agent_peft.environments.db_bench.generation.plan import (
    Comparison,
    Condition,
    Insert,
    Junction,
    Statement,
)
from agent_peft.environments.db_bench.generation.schemas import Column, Schema

_OF_FLAGS = {
    1: ("yes", "true"),
    0: ("no", "false"),
    "Yes": ("true", "yes", "YES"),
    "No": ("false", "no", "NO"),
}


@dataclass(frozen=True)
class Look:
    """A column, its value in the statement, and how the request writes that.

    >>> from agent_peft.environments.db_bench.generation.schemas import attributes
    >>> Look(Column(attributes()["status"], "status"), "Active", "active").said
    'active'
    """

    column: Column
    value: str | int
    said: str


def looks(statement: Statement, schema: Schema, rows: Sequence[Row]) -> list[Look]:
    """What the conditions of a statement itself, not of a query inside it, allow."""
    query = statement.source if isinstance(statement, Insert) else statement
    where = None if isinstance(query, tuple) else query.where
    found = []
    for column, value in _values(where):
        position = schema.columns.index(column)
        others = {_plain(row[position]) for row in rows if row[position] != value}
        for said in forms(value):
            if said != value and (isinstance(value, int) or _plain(said) not in others):
                found.append(Look(column, value, said))
    return found


def forms(value: str | int) -> tuple[str, ...]:
    """Other ways to write a value: as yes and no, in another case, or with hyphens.

    >>> forms("In Transit"), forms("on hold"), forms(1)
    (('in transit', 'in-transit'), ('On Hold', 'On hold', 'on-hold'), ('yes', 'true'))
    """
    if value in _OF_FLAGS:
        return _OF_FLAGS[value]
    if isinstance(value, int) or not re.search("[A-Za-z]{2}", value):
        return ()
    lower = value.lower()
    cases = (lower,) if value != lower else tuple(dict.fromkeys((value.title(), value.capitalize())))
    hyphens = (lower.replace(" ", "-"),) if " " in value else ()
    return (*cases, *hyphens)


def _values(condition: Condition | None) -> Iterator[tuple[Column, str | int]]:
    """Each column of a few values that is compared with one of them."""
    match condition:
        case Junction(_, parts):
            for part in parts:
                yield from _values(part)
        case Comparison(Column() as column, "=" | "<>", str() | int() as value):
            if column.role in ("category", "flag"):
                yield column, value


def _plain(value: object) -> str:
    return re.sub(r"[\W_]", "", str(value)).lower()
