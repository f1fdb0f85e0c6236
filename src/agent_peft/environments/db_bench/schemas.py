"""Made-up tables: what their columns hold, and how their rows are drawn."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from agent_peft.environments.db_bench.database import Row

Kind = Literal["label", "category", "number", "day", "id"]


@dataclass(frozen=True)
class Field:
    """A column: ``label`` names a row, ``category`` repeats, ``number``, ``day`` and ``id`` never do.

    >>> Field("unit_price", "number", low=5, high=90).said
    'unit price'
    """

    name: str
    kind: Kind
    values: tuple[str, ...] = ()
    low: int = 0
    high: int = 0
    step: int = 1

    @property
    def said(self) -> str:
        """The name as a person would say it."""
        return self.name.replace("_", " ")

    @property
    def type(self) -> str:
        return "INT" if self.kind in ("number", "id") else "TEXT"

    def draw(self, count: int, rng: random.Random) -> list[str | int]:
        """``count`` values."""
        if self.kind == "category":
            shown = rng.sample(self.values, rng.randint(2, min(4, len(self.values))))
            first = rng.sample(shown, len(shown))  # each of them at least once
            return [*first, *(rng.choice(shown) for _ in range(count - len(first)))]
        if self.kind == "label":
            return list(rng.sample(self.values, count))
        if self.kind == "day":
            days = rng.sample(range(2 * 12 * 28), count)
            return [f"{2023 + day // 336}-{day % 336 // 28 + 1:02d}-{day % 28 + 1:02d}" for day in days]
        return list(rng.sample(range(self.low, self.high + 1, self.step), count))

    def draw_one(self, rng: random.Random) -> str | int:
        """One value, which a table may or may not hold."""
        return rng.choice(self.values) if self.kind in ("category", "label") else self.draw(1, rng)[0]


@dataclass(frozen=True)
class Schema:
    """A table's name, what one of its rows and several of them are called, and its columns.

    >>> Schema("pets", "pet", "pets", (Field("name", "label", ("Rex", "Tom")),)).one
    'pet'
    """

    table: str
    one: str
    many: str
    fields: tuple[Field, ...]

    def of(self, *kinds: Kind) -> list[Field]:
        """The columns of these kinds."""
        return [field for field in self.fields if field.kind in kinds]

    def rows(self, count: int, rng: random.Random) -> tuple[Row, ...]:
        return tuple(zip(*(field.draw(count, rng) for field in self.fields), strict=True))


def read_schemas(lines: str, labels: Mapping[str, str]) -> tuple[Schema, ...]:
    """Tables written one a line, as `schema_pools` explains; ``labels`` holds pools of label values, with
    ``|`` between two of them.

    >>> read_schemas("pets: pet, pets: name @dogs, weight_kg 2..60", {"dogs": "Rex|Tom"})[0].fields[0].values
    ('Rex', 'Tom')
    """
    pools = {name: tuple(values.replace("\n", "").split("|")) for name, values in labels.items()}
    schemas = []
    for line in lines.strip().splitlines():
        table, called, columns = line.split(": ", 2)
        one, many = called.split(", ")
        schemas.append(
            Schema(table, one, many, tuple(_read_field(column, pools) for column in columns.split(", ")))
        )
    return tuple(schemas)


def _read_field(text: str, pools: Mapping[str, tuple[str, ...]]) -> Field:
    name, values = text.split(" ", 1)
    if values == "date":
        return Field(name, "day")
    if values.startswith("@"):
        return Field(name, "label", pools[values[1:]])
    if ".." in values:
        low, high, *step = values.removeprefix("#").split("..")
        return Field(
            name,
            "id" if values.startswith("#") else "number",
            low=int(low),
            high=int(high),
            step=int(*step) if step else 1,
        )
    return Field(name, "category", tuple(values.split("|")))
