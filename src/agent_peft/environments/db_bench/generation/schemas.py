"""The columns and rows of generated tables: entities and attributes from the word lists beside this module.

A row's entity and its attributes share a topic, so that columns make sense together. Words are held out by
a hash of their name: the ``words`` split uses only entities and attributes that training never shows.
"""

from __future__ import annotations

import datetime
import functools
import random
import re
from dataclasses import dataclass
from typing import Literal

from agent_peft.environments.db_bench.database import Row
from agent_peft.environments.db_bench.generation.english import phrase_lines, plural
from agent_peft.seeding import derive

Role = Literal["id", "ref", "name", "category", "flag", "measure", "total", "year", "date"]
_HELD_OUT_SHARE = 0.22


@dataclass(frozen=True)
class Attribute:
    """What a column may hold and how people speak of it; ``sayings`` are (operator, words) pairs, such as
    ``(">", "older than {v}")``.

    >>> attributes()["weight_kg"].short
    'weight'
    """

    name: str
    role: Role
    values: str
    topics: frozenset[str]
    sayings: tuple[tuple[str, str], ...] = ()
    short: str = ""

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """What people may call it."""
        return frozenset({self.name.replace("_", " "), self.short} - {""})


@dataclass(frozen=True)
class Entity:
    """What a row is.

    >>> entities()["library loan"].plural
    'library loans'
    """

    name: str
    plural: str
    topics: frozenset[str]
    main: str = ""  # the first of the topics


@dataclass(frozen=True)
class Column:
    """A column of one table. ``name`` is how SQL knows it (with a blank in it, it needs quotes).

    >>> Column(attributes()["weight_kg"], "weight_kg").said
    'weight'
    """

    attribute: Attribute
    name: str

    @property
    def role(self) -> Role:
        return self.attribute.role

    @property
    def said(self) -> str:
        """The name as words: an id as people write it, without a unit, a flag as a status."""
        words = self.name.replace("_", " ").lower().split()
        if self.unit and len(words) > 1:
            words.pop()
        if self.role == "flag":
            words = [*words[1:], "status"]
        return " ".join("ID" if word == "id" else word for word in words)

    @property
    def unit(self) -> str:
        """What follows the name of a measure ("kg"), or nothing."""
        *words, last = self.name.lower().replace("_", " ").split()
        if last in ("minutes", "days", "tons"):
            return last if self.attribute.short == " ".join(words) else ""
        return UNITS.get(last, "")

    @property
    def type(self) -> str:
        numeric = self.role in ("id", "ref", "measure", "total", "year") or self.attribute.values == "0/1"
        return "INT" if numeric else "TEXT"


@dataclass(frozen=True)
class Schema:
    """A table's name, the entity its rows are, and its columns."""

    table: str
    entity: Entity
    columns: tuple[Column, ...]

    def of(self, *roles: Role) -> list[Column]:
        """The columns of these roles."""
        return [column for column in self.columns if column.role in roles]


UNITS = {
    "kg": "kg",
    "cm": "cm",
    "km": "km",
    "ml": "ml",
    "gb": "GB",
    "mg": "mg",
    "sqm": "square meters",
    "kmh": "km/h",
    "m": "meters",
}


@functools.cache
def attributes() -> dict[str, Attribute]:
    """The attributes of ``attributes.txt`` by name."""
    found = {}
    for line in phrase_lines("attributes.txt"):
        name, role, values, topics, sayings = (part.strip() for part in line.split(":", 4))
        short, pairs = "", []
        for saying in filter(None, (part.strip() for part in sayings.split(";"))):
            kind, words = saying.split(" ", 1)
            if kind == "short":
                short = words
            else:
                pairs.append((kind, words))
        found[name] = Attribute(name, role, values, frozenset(topics.split()), tuple(pairs), short)  # type: ignore[arg-type]
    return found


@functools.cache
def entities() -> dict[str, Entity]:
    """The entities of ``entities.txt`` by name."""
    found = {}
    for line in phrase_lines("entities.txt"):
        names, topics = line.split(" : ")
        name, _, many = names.partition(", ")
        found[name] = Entity(name, many or plural(name), frozenset(topics.split()), topics.split()[0])
    return found


def held_out(kind: str, name: str, share: float = _HELD_OUT_SHARE) -> bool:
    """Whether a word or a phrase belongs to a held-out split: the same for every seed."""
    return derive(0, "held out", kind, name) % 10_000 < share * 10_000


@functools.cache
def _pool(words_held_out: bool) -> tuple[tuple[Entity, ...], dict[str, tuple[Attribute, ...]]]:
    """The entities of one side, and the attributes of that side by topic."""
    sides = tuple(
        entity for entity in entities().values() if held_out("entity", entity.name) == words_held_out
    )
    topics = {topic for entity in sides for topic in entity.topics}
    usable = [
        attribute
        for attribute in attributes().values()
        if "*" in attribute.topics or held_out("attribute", attribute.name) == words_held_out
    ]
    return sides, {
        topic: tuple(item for item in usable if item.topics & {topic, "*"}) for topic in sorted(topics)
    }


@functools.cache
def _usable(entity: Entity, words_held_out: bool) -> tuple[Attribute, ...]:
    """The attributes that share a topic with the entity and are not what its own columns are called."""
    _, by_topic = _pool(words_held_out)
    base = entity.name.replace(" ", "_")
    related = {item for topic in entity.topics for item in by_topic[topic]}
    kept = (item for item in related if item.name not in (f"{base}_id", f"{base}_name", base))
    return tuple(sorted(kept, key=lambda item: item.name))


@functools.cache
def _weighted(
    entity: Entity, words_held_out: bool, roles: tuple[Role, ...]
) -> tuple[tuple[Attribute, int], ...]:
    """The usable attributes of these roles, each with how well it fits the entity."""

    def fit(item: Attribute) -> int:
        return (len(item.topics & entity.topics) * (3 if entity.main in item.topics else 1)) ** 2 or 1

    return tuple((item, fit(item)) for item in _usable(entity, words_held_out) if item.role in roles)


def draw_schema(rng: random.Random, words_held_out: bool = False, plain: bool = False) -> Schema:
    """A table of four to seven columns: at least one category (or flag, or ref) and one number. A plain one
    has four at most, and is called by the plural of what its rows are.
    """
    all_entities, _ = _pool(words_held_out)
    while True:
        entity = rng.choice(all_entities)
        wanted: list[tuple[Role, ...]] = [("category",), ("total", "measure"), ("total",)]
        for chance, roles in () if plain else _OPTIONAL:
            if rng.random() < chance:
                wanted.append(roles)
        chosen: list[Attribute] = []
        names: set[str] = set()  # no two columns are called by one name, short or long
        for roles in wanted:
            options = [
                (item, fit)
                for item, fit in _weighted(entity, words_held_out, roles)
                if item.names.isdisjoint(names)
            ]
            if options:
                chosen.append(rng.choices([item for item, _ in options], [fit for _, fit in options])[0])
                names |= chosen[-1].names
        if len({item.role for item in chosen} & {"category", "flag", "ref"}) and len(chosen) >= 3:
            return _schema(entity, chosen, rng, plain)


_OPTIONAL: tuple[tuple[float, tuple[Role, ...]], ...] = (
    (0.5, ("name",)),
    (0.45, ("category",)),
    (0.55, ("date",)),
    (0.35, ("ref",)),
    (0.25, ("total", "measure", "year")),
    (0.12, ("flag",)),
    (0.1, ("date",)),
    (0.1, ("name",)),
    (0.12, ("ref",)),
)


def _schema(entity: Entity, chosen: list[Attribute], rng: random.Random, plain: bool) -> Schema:
    base = entity.name.replace(" ", "_")
    order = sorted(
        chosen,
        key=lambda item: (
            ("name", "ref").index(item.role) if item.role in ("name", "ref") else 2,
            rng.random(),
        ),
    )
    columns = [Column(item, item.name) for item in order]
    draw = rng.random()
    if draw < 0.85:
        columns.insert(
            0, Column(Attribute("id", "id", "", frozenset()), f"{base}_id" if draw < 0.72 else "id")
        )
    if not plain and rng.random() < 0.3 and not any(column.role == "name" for column in columns):
        name = Attribute(f"{base}_name", "name", "title", frozenset())
        columns.insert(1, Column(name, f"{base}_name"))
    many = entity.plural.replace(" ", "_")
    if plain:
        return Schema(many, entity, tuple(columns))
    table = rng.choices(
        (
            many,
            f"{rng.choice(value_words('owners'))}_{many}",
            f"{base}_records",
            f"{base}_logs",
            f"{base}_details",
            f"{base}_data",
        ),
        (55, 25, 7, 5, 5, 3),
    )[0]
    if rng.random() < 0.04:  # as a spreadsheet has them
        columns = [
            Column(column.attribute, column.name.replace("_", " ").title().replace("Id", "ID"))
            for column in columns
        ]
        table = table.replace("_", " ").title()
    return Schema(table, entity, tuple(columns))


@functools.cache
def value_words(kind: str) -> tuple[str, ...]:
    """The words of ``values.txt`` of one kind."""
    lines = dict(line.split(": ") for line in phrase_lines("values.txt"))
    return tuple(lines[kind].split())


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
    return re.sub(r"<([\w ]+)>", lambda match: rng.choice(value_words(match[1])), _NAMES[kind]).replace(
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
