"""Names that a statement gives: of computed columns, and other ones for the table and its columns."""

from __future__ import annotations

import random

from sqlglot.generators.mysql import MySQLGenerator

from agent_peft.environments.db_bench.generation.plan import Aggregate, Arithmetic, Expression
from agent_peft.environments.db_bench.generation.schemas import Column, Schema

# the words that MySQL keeps to itself, and further ones that SQLite does
RESERVED = frozenset(word.lower() for word in MySQLGenerator.RESERVED_KEYWORDS) | frozenset(
    {"commit", "escape", "offset", "returning", "transaction"}
)
_PREFIXES = {"AVG": "avg", "SUM": "total", "MAX": "max", "MIN": "min"}


def alias_of(expression: Expression, schema: Schema, rng: random.Random | None = None) -> str:
    """What a computed column is called: ``avg_unit_price``, ``total_orders``, ``unit_price_range``.

    With ``rng`` also shorter or otherwise, as people do: ``avg_price``, ``num_orders``, ``unit_diff``.
    """
    match expression:
        case Aggregate("COUNT"):
            names = ["total_{}", "num_{}", "{}_count"]
            name = rng.choices(names, [70, 20, 10])[0] if rng else names[0]
            rows = schema.entity.name if name.endswith("count") else schema.entity.plural
            return name.format(rows.replace(" ", "_"))
        case Aggregate(function, Column() as column):
            name = _short(column, rng)
            return (
                f"{'sum' if function == 'SUM' and name.startswith('total') else _PREFIXES[function]}_{name}"
            )
        case Arithmetic("-", Aggregate("MAX", Column() as column)):
            return f"{_short(column, rng)}_{rng.choices(['range', 'diff'], [65, 35])[0] if rng else 'range'}"
        case Arithmetic(operator):
            return {"+": "combined_total", "-": "net_total", "*": "scaled_total", "/": "ratio"}[operator]
    raise TypeError(f"nothing computed: {expression!r}")


def _short(column: Column, rng: random.Random | None) -> str:
    words = column.name.lower().replace(" ", "_").split("_")
    options = ["_".join(words), words[0], words[-1]]
    return rng.choices(options, [45, 30, 25])[0] if rng else options[0]


def table_alias(table: str, rng: random.Random) -> str:
    """Another name for a table: its initials, or its first letter."""
    words = table.lower().replace(" ", "_").split("_")
    options = ["".join(word[:1] for word in words), words[0][0]]
    name = rng.choices(options, [3, 1])[0]
    return "t" if name in RESERVED or name == "a" else name  # "a" would be read as an article


def other_name(column: Column, rng: random.Random) -> str:
    """Another name for a column: shorter, or just other."""
    words = column.name.lower().replace(" ", "_").split("_")
    options = [
        words[0],
        words[-1],
        "".join(word[0] for word in words),
        words[0][:3] + "_" + words[-1],
        f"the_{words[-1]}",
        "_".join(reversed(words)),
    ]
    options = [
        option
        for option in options
        if option not in RESERVED and len(option) > 2 and option != column.name.lower()
    ]
    return rng.choice(options) if options else f"{words[0]}_value"
