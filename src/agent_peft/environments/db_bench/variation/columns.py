"""Other columns, and other names of results."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from sqlglot import exp

from agent_peft.environments.db_bench.variation.original import FUNCTIONS, Original, Unfit, repeats

_FUNCTION_WORDS = ("total", "sum", "avg", "average", "max", "maximum", "min", "minimum", "highest", "lowest")


def moved_columns(original: Original, other: Original, rng: random.Random) -> dict[str, str]:
    """For each column of the statement, one of ``other`` with values of its kind."""
    grouped = {
        node.name for group in original.tree.find_all(exp.Group) for node in group.find_all(exp.Column)
    }
    headers = rng.sample(other.table.headers, len(other.table.headers))
    moved: dict[str, str] = {}
    for name in original.used:
        kind = original.kinds[name]
        if kind in ("flag", "other"):  # a question says "perishable", not "is perishable 1"
            fit = [name] if original is other else []
        else:
            fit = [column for column in headers if other.kinds[column] == kind]
        if name in grouped and kind != "category":
            fit = [column for column in fit if repeats(other.values(column))]
        fit = [column for column in fit if column not in moved.values()]
        if not fit:
            raise Unfit
        moved[name] = fit[0]
    return moved


def moved_aliases(tree: exp.Expr, moved: Mapping[str, str], headers: Sequence[str]) -> dict[str, str]:
    """Other names for results: ``total_price`` is ``total_weight`` where price is weight."""
    names = {}
    for node in tree.find_all(exp.Alias):
        columns = [column.name for column in node.this.find_all(exp.Column) if column.name in moved]
        if not columns or moved[columns[0]] == columns[0]:
            continue
        first, _, rest = node.alias.partition("_")
        words = moved[columns[0]].split("_")
        if isinstance(node.this, exp.Column):
            names[node.alias] = words[-1]
        elif isinstance(node.this, tuple(FUNCTIONS)) and rest and first.lower() in _FUNCTION_WORDS:
            words = words[1:] if words[0].lower() == first.lower() and len(words) > 1 else words
            names[node.alias] = f"{first}_{'_'.join(words)}"
            if first == "avg":
                names[f"average_{rest}"] = f"average_{'_'.join(words)}"
        if names.get(node.alias) in headers:
            raise Unfit
    return names
