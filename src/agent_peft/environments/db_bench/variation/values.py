"""Other values, in a statement and in its question alike."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sqlglot import exp

from agent_peft.environments.db_bench.database import Row
from agent_peft.environments.db_bench.variation.original import FUNCTIONS, LARGE, Original, Unfit
from agent_peft.environments.db_bench.variation.question import Question


def move_values(
    tree: exp.Expr,
    question: Question,
    original: Original,
    other: Original,
    moved: Mapping[str, str],
    rng: random.Random,
) -> None:
    """Other values where the statement compares with, stores or counts some, in the question, too."""
    roles: dict[str, set[object]] = defaultdict(set)
    literals = [(node, _role(node)) for node in tree.find_all(exp.Literal)]
    for node, role in literals:
        roles[node.name].add(role)
    new: dict[str, str] = {}
    for node, role in literals:
        old, column = node.name, role[0] if role else None
        if old not in new:
            new[old] = old if len(roles[old]) > 1 else _other_value(node, role, other, moved, rng)
            if new[old] != old and not question.replace_value(old, new[old]):
                new[old] = old
            # a text that stays must be one of the column's that it is compared with now
            now = moved.get(column) if column else None
            known = now is not None and old in other.values(now)
            same = original is other and now in (None, column)
            if new[old] == old and node.is_string and not (known or same):
                raise Unfit
        node.set("this", new[old])


_Role = tuple[str | None, type[exp.Expr] | None]  # the column that a literal is for, and the function of it


def _role(node: exp.Literal) -> _Role | None:
    parent = node.parent
    if isinstance(parent, exp.Limit):
        return None, exp.Limit
    if isinstance(parent, exp.Tuple) and isinstance(parent.parent, exp.Values):
        insert = parent.parent.parent
        columns = insert.this.expressions if isinstance(insert, exp.Insert) else []
        at = next(i for i, value in enumerate(parent.expressions) if value is node)
        return (columns[at].name, exp.Insert) if at < len(columns) else None
    if not isinstance(parent, exp.Predicate):
        return None
    side = parent.expression if parent.this is node else parent.this
    if isinstance(side, exp.Column):
        return side.name, None
    if isinstance(side, exp.Count):
        return None, exp.Count
    if isinstance(side, exp.AggFunc) and type(side) in FUNCTIONS and isinstance(side.this, exp.Column):
        return side.this.name, type(side)
    return None


def _other_value(
    node: exp.Literal, role: _Role | None, other: Original, moved: Mapping[str, str], rng: random.Random
) -> str:
    """Another value for a literal; the same one where none is known."""
    old = str(node.name)
    match role:
        case (None, exp.Limit):
            return str(rng.choice((2, 3, 4, 5, 6, 8, 10)))
        case (None, exp.Count):
            return str(rng.randint(1, 5))
        case (str(column), function) if column in moved and not isinstance(node.parent, exp.Like):
            values = other.values(moved[column])
        case _:
            return old
    if function is not None and function in FUNCTIONS:
        group = node.find_ancestor(exp.Select)
        parts = group.args["group"].expressions if group and group.args.get("group") else ()
        names = [moved[part.name] for part in parts if part.name in moved]
        if not names or len(names) < len(parts) or node.is_string:
            return old
        values = _of_groups(other, names, moved[column], FUNCTIONS[function])
    if node.is_string:
        texts = [value for value in values if isinstance(value, str)]
        return rng.choice(texts) if texts else old
    numbers = [value for value in values if isinstance(value, int | float) and abs(value) < LARGE]
    if not numbers:
        return old
    value = rng.choice(numbers)
    if moved[column].lower().endswith("id"):
        return str(value + (rng.randint(1, 50) if function is exp.Insert else 0))
    return str(_round_number(value))


def _of_groups(
    original: Original, groups: Sequence[str], column: str, function: Callable[[list[Any]], float]
) -> list[Any]:
    """A function's value for each group of rows."""
    at, j = [original.table.headers.index(name) for name in groups], original.table.headers.index(column)
    values: dict[Row, list[Any]] = defaultdict(list)
    for row in original.table.rows:
        value = row[j]
        if isinstance(value, int | float) and abs(value) < LARGE:
            values[tuple(row[i] for i in at)].append(value)
    return [function(group) for group in values.values()]


def _round_number(value: float) -> float:
    """A number near ``value`` as people write one in a condition.

    >>> _round_number(78123), _round_number(4.0), _round_number(0.25)
    (75000, 4, 0.25)
    """
    if isinstance(value, float) and not value.is_integer() and abs(value) < 10:
        return value
    whole = int(value)
    step = 10 ** (len(str(abs(whole))) - 1) // 2
    return whole // step * step if step else whole
