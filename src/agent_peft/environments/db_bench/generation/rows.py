"""The rows of generated tables: values as the roles of their columns ask for."""

from __future__ import annotations

import datetime
import random
import re

from agent_peft.environments.db_bench.database import Row
from agent_peft.environments.db_bench.generation.schemas import Column, Schema, words_of


def draw_rows(schema: Schema, rng: random.Random) -> tuple[Row, ...]:
    """20 to 34 rows."""
    count = rng.randint(20, 34)
    return tuple(zip(*(_cells(column, count, rng) for column in schema.columns), strict=True))


def draw_cell(column: Column, rows: tuple[Row, ...], position: int, rng: random.Random) -> str | int:
    """A value for a row still to come: an id or a name not yet there, any other as those that are."""
    if column.role == "id":
        return int(max(int(row[position]) for row in rows)) + rng.randint(1, 60)  # type: ignore[arg-type]
    return _cells(column, 8, rng)[rng.randrange(8)]


def _cells(column: Column, count: int, rng: random.Random) -> list[str | int]:
    attribute = column.attribute
    if column.role == "id":
        first = rng.choice((1, 1, 1, 101, 1001, 501))
        return list(range(first, first + count))
    if column.role in ("category", "flag"):
        values = attribute.values.split("/")
        options: list[str | int] = [
            int(value) if value.isdigit() and column.type == "INT" else value for value in values
        ]
        options = rng.sample(options, rng.randint(min(3, len(options)), len(options)))
        return rng.choices(options, [rng.uniform(0.5, 2) for _ in options], k=count)
    if column.role == "name":
        if rng.random() < 0.4:  # people and products come back
            few = [_composed(attribute.values, rng) for _ in range(rng.randint(5, 9))]
            return [rng.choice(few) for _ in range(count)]
        return [_composed(attribute.values, rng) for _ in range(count)]
    if column.role == "date":
        earliest, latest = map(int, (attribute.values or "2022..2024").split(".."))
        start = datetime.date(rng.randint(earliest, latest), 1, 1)
        days = min(540 if latest - earliest < 5 else 3000, 365 * (latest - start.year + 1))
        every = rng.choice((1, 1, 7, 15))
        return [
            (start + datetime.timedelta(days=rng.randrange(0, days, every))).isoformat() for _ in range(count)
        ]
    bounds = [int(part) for part in attribute.values.replace("..", " ").split()]
    low, high, unit = bounds[0], bounds[1], bounds[2] if len(bounds) > 2 else 1
    span = (high - low) // unit
    if column.role == "ref":
        ids = rng.sample(range(low, high + 1), min(rng.randint(4, 8), high - low + 1))
        return [rng.choice(ids) for _ in range(count)]
    if rng.random() < 0.6:  # of few sizes, so that sorts need their second key
        sizes = [low + unit * rng.randint(0, span) for _ in range(rng.randint(6, 14))]
        return [rng.choice(sizes) for _ in range(count)]
    return [low + unit * int(span * rng.random() ** 1.5) for _ in range(count)]


def _composed(kind: str, rng: random.Random) -> str:
    """A value made of words."""
    return re.sub(r"<([\w ]+)>", lambda match: rng.choice(words_of(match[1])), _NAMES[kind]).replace(
        "#", str(rng.randint(*_NUMBERS_OF_NAMES.get(kind, (0, 0))))
    )


_NAMES = {
    "person": "<first names> <last names>",
    "first": "<first names>",
    "last": "<last names>",
    "title": "<adjectives> <nouns>",
    "thing": "<adjectives> <things>",
    "company": "<last names> <companies>",
    "address": "# <streets> <roads>",
    "location": "<places> #",
    "code": "<letters><letters>-#",
}
_NUMBERS_OF_NAMES = {"address": (1, 120), "location": (1, 9), "code": (100, 999)}
