"""Names that a statement gives: of computed columns, and other ones for columns of the table."""

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


def alias_of(expression: Expression, schema: Schema) -> str:
    """What a computed column is called: ``avg_price``, ``total_orders``, ``price_range``."""
    match expression:
        case Aggregate("COUNT"):
            return "total_" + schema.entity.plural.replace(" ", "_")
        case Aggregate(function, Column() as column):
            name = column.name.replace(" ", "_").lower()
            return (
                f"{'sum' if function == 'SUM' and name.startswith('total') else _PREFIXES[function]}_{name}"
            )
        case Arithmetic("-", Aggregate("MAX", Column() as column)):
            return f"{column.name.replace(' ', '_').lower()}_range"
        case Arithmetic(operator):
            return {"+": "combined_total", "-": "net_total", "*": "scaled_total", "/": "ratio"}[operator]
    raise TypeError(f"nothing computed: {expression!r}")


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
