"""The shape of a statement: which clauses it has, and so which skills it shows."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from agent_peft.environments.db_bench.syntax import SKILLS, primary_skill


@dataclass(frozen=True)
class Shape:
    """``where``: 0 none, 1 one condition, 2 several, 3 conditions in parentheses. ``order``: the sort keys'
    directions. ``subqueries``: each is one query deep, or ``nested``. ``aggregates`` are for a query that
    does not group. ``copies``: an INSERT from a SELECT.

    >>> Shape(where=1, order="same").skills
    ('order_by_multiple_columns_same_direction', 'where_single_condition', 'select')
    """

    statement: Literal["select", "insert", "update", "delete"] = "select"
    where: Literal[0, 1, 2, 3] = 0
    groups: Literal[0, 1, 2] = 0
    having: Literal[0, 1, 2] = 0
    calculation: bool = False
    order: Literal["", "single", "same", "different"] = ""
    limit: Literal["", "only", "offset"] = ""
    subqueries: Literal["", "single", "multiple", "nested"] = ""
    column_alias: bool = False
    table_alias: bool = False
    aggregates: bool = False
    copies: bool = False
    derived: bool = False

    @property
    def skills(self) -> tuple[str, ...]:
        """As `syntax.skills_of` reads them off the SQL: a change needs its subqueries wrapped in another
        (MySQL's rule), which nests them and gives them a name.
        """
        change = self.statement in ("update", "delete")
        found = {self.statement, *_WHERE[0 if self.derived else self.where], *_SUBQUERY[self.subqueries]}
        if self.copies or self.subqueries:
            found.add("select")
        if change and self.subqueries:
            found = (found - {"subquery_single"}) | {"subquery_nested", "table_alias"}
        if self.groups and not self.derived:  # a derived table's own clauses do not count
            found.add(f"group_by_{'single_column' if self.groups == 1 else 'multiple_columns'}")
        if self.having:
            found.add(
                f"having_{'single_condition' if self.having == 1 else 'multiple_conditions'}_with_aggregate"
            )
        if self.calculation:
            found.add("having_aggregate_calculation")
        if self.order and self.statement == "select":
            found.add(
                "order_by_single_column"
                if self.order == "single"
                else f"order_by_multiple_columns_{_DIRECTIONS[self.order]}"
            )
        if self.limit and not self.copies:
            found.add("limit_only" if self.limit == "only" else "limit_and_offset")
        found |= {name for name in ("column_alias", "table_alias") if getattr(self, name)}
        return tuple(skill for skill in SKILLS if skill in found)

    @property
    def features(self) -> frozenset[str]:
        """What held-out combinations are made of."""
        queries = {"multiple": "several subqueries", "nested": "nested query", "single": "subquery"}
        present = {
            self.statement: True,
            "grouping": self.groups > 0,
            "two groups": self.groups == 2,
            "having": self.having > 0,
            "calculation": self.calculation,
            "conditions": self.where >= 2,
            "parentheses": self.where == 3,
            "two sorts": self.order in ("same", "different"),
            "limit": bool(self.limit),
            "offset": self.limit == "offset",
            **{name: self.subqueries == kind for kind, name in queries.items()},
        }
        return frozenset(name for name, holds in present.items() if holds)


_WHERE: dict[int, set[str]] = {
    0: set(),
    1: {"where_single_condition"},
    2: {"where_multiple_conditions"},
    3: {"where_nested_conditions"},
}
_SUBQUERY = {name: {f"subquery_{name}"} if name else set() for name in ("", "single", "multiple", "nested")}
_DIRECTIONS = {"same": "same_direction", "different": "different_directions"}

# What each skill needs about it to stand alone.
ALONE: dict[str, Shape] = {
    "insert": Shape("insert"),
    "update": Shape("update", where=1),
    "delete": Shape("delete", where=1),
    "subquery_nested": Shape(where=1, subqueries="nested"),
    "subquery_multiple": Shape(where=2, subqueries="multiple"),
    "subquery_single": Shape(where=1, subqueries="single"),
    "having_aggregate_calculation": Shape(groups=1, having=1, calculation=True),
    "having_multiple_conditions_with_aggregate": Shape(groups=1, having=2),
    "having_single_condition_with_aggregate": Shape(groups=1, having=1),
    "limit_and_offset": Shape(order="single", limit="offset"),
    "limit_only": Shape(order="single", limit="only"),
    "order_by_multiple_columns_different_directions": Shape(order="different"),
    "order_by_multiple_columns_same_direction": Shape(order="same"),
    "order_by_single_column": Shape(order="single"),
    "group_by_multiple_columns": Shape(groups=2),
    "group_by_single_column": Shape(groups=1),
    "where_nested_conditions": Shape(where=3),
    "where_multiple_conditions": Shape(where=2),
    "where_single_condition": Shape(where=1),
    "table_alias": Shape(table_alias=True),
    "column_alias": Shape(column_alias=True),
    "select": Shape(),
}
assert tuple(ALONE) == SKILLS

# Pairs of features that training never joins: the ``composition`` split always joins one of them.
HELD_OUT_PAIRS = (
    frozenset({"parentheses", "two sorts"}),
    frozenset({"two groups", "offset"}),
    frozenset({"calculation", "conditions"}),
    frozenset({"having", "several subqueries"}),
    frozenset({"delete", "parentheses"}),
    frozenset({"insert", "parentheses"}),
    frozenset({"nested query", "limit"}),
    frozenset({"update", "several subqueries"}),
)

# How often free drawing takes each; a clause's chance is given what was drawn before it.
_CHANCES: Mapping[str, Mapping[Any, float]] = {
    "statement": {"select": 0.68, "insert": 0.09, "update": 0.115, "delete": 0.115},
    "groups": {0: 0.45, 1: 0.37, 2: 0.18},
    "having": {0: 0.27, 1: 0.38, 2: 0.35},
    "where": {0: 0.2, 1: 0.36, 2: 0.3, 3: 0.14},
    "where of groups": {0: 0.6, 1: 0.22, 2: 0.13, 3: 0.05},
    "where of changes": {1: 0.45, 2: 0.38, 3: 0.17},
    "order": {"": 0.48, "single": 0.2, "same": 0.11, "different": 0.21},
    "limit": {"": 0.35, "only": 0.34, "offset": 0.31},
    "limit without order": {"": 0.85, "only": 0.1, "offset": 0.05},
    "limit of changes": {"": 0.85, "only": 0.15},
    "subqueries": {"": 0.48, "single": 0.18, "multiple": 0.2, "nested": 0.14},
}


def draw_shape(rng: random.Random) -> Shape:
    """A shape as people's requests have them."""

    def draw(name: str) -> Any:
        return rng.choices(list(_CHANCES[name]), list(_CHANCES[name].values()))[0]

    def chance(probability: float) -> bool:
        return rng.random() < probability

    statement = draw("statement")
    if statement == "insert":
        if chance(0.6):
            return Shape("insert")
        where = draw("where of changes")
        return Shape("insert", where=where, copies=True, subqueries=_subqueries(draw("subqueries"), where, 0))
    if statement in ("update", "delete"):
        where = draw("where of changes")
        few = draw("limit of changes")
        return Shape(
            statement,
            where,
            limit=few,
            order="single" if few else "",
            subqueries=_subqueries(draw("subqueries"), where, 0),
        )
    groups = draw("groups")
    having: Any = draw("having") if groups else 0
    where = draw("where of groups" if groups else "where")
    aggregates = not groups and chance(0.07)
    order: Any = "" if aggregates else draw("order")
    # Without a sort, the first rows are those with the lowest ids; groups have no such order.
    limit: Any = (
        draw("limit" if order else "limit without order") if order or not (groups or aggregates) else ""
    )
    shape = Shape(
        where=where,
        groups=groups,
        having=having,
        calculation=bool(having) and chance(0.28),
        order=order,
        limit=limit,
        subqueries=_subqueries(draw("subqueries"), where, having),
        column_alias=chance(0.95 if groups or aggregates else 0.05),
        table_alias=chance(0.12),
        aggregates=aggregates,
    )
    derived = (
        groups and not (having or order or limit or shape.subqueries or shape.table_alias) and chance(0.2)
    )
    return replace(shape, derived=True, subqueries="single", column_alias=True) if derived else shape


def _subqueries(drawn: str, where: int, having: int) -> Any:
    slots = where + having
    return "" if slots == 0 or (drawn == "multiple" and slots < 2) else drawn


def shape_for(skill: str | None, combined: float, composition: str, rng: random.Random) -> Shape:
    """A shape whose primary skill is ``skill`` (None: any). A held-out combination only has to show it.
    ``combined``: the chance of more clauses than the skill needs. ``composition``: ``any``, ``train``
    (without a held-out pair) or ``heldout`` (with one of them at least).
    """
    alone = ALONE[skill] if skill is not None else None
    if alone is not None and composition != "heldout" and rng.random() >= combined:
        return alone
    for _ in range(2_000):
        shape = draw_shape(rng)
        if alone is not None:
            needs = {name: value for name, value in vars(alone).items() if value != getattr(_NOTHING, name)}
            shape = replace(
                shape,
                **{"statement": alone.statement, "copies": shape.copies and alone.statement == "insert"}
                | needs,
            )
            first = primary_skill(shape.skills) == skill or composition == "heldout"
            if not _is_possible(shape) or not first:
                continue
        joins = any(pair <= shape.features for pair in HELD_OUT_PAIRS)
        if composition == "any" or joins == (composition == "heldout"):
            return shape
    if alone is None or composition == "heldout":
        raise LookupError(f"no held-out combination shows {skill} first")
    return alone


_NOTHING = Shape()


def _is_possible(shape: Shape) -> bool:
    """Whether the clauses fit together, after those that a skill needs were set."""
    slots = shape.having if shape.statement == "select" else 0
    if not shape.derived and _subqueries(shape.subqueries, shape.where, slots) != shape.subqueries:
        return False
    if shape.statement == "select":
        ordered = shape.order or shape.limit
        return not (
            (shape.having and not shape.groups)
            or (shape.calculation and not shape.having)
            or (shape.aggregates and (shape.groups or ordered))
            or (shape.limit and shape.groups and not shape.order)
            or (
                shape.derived
                and (shape.having or ordered or not shape.groups or shape.subqueries != "single")
            )
        )
    if shape.groups or shape.having or shape.derived or shape.aggregates:
        return False
    if shape.column_alias or shape.table_alias:
        return False
    if shape.statement == "insert":
        return not (shape.order or shape.limit) and (shape.copies or not (shape.where or shape.subqueries))
    return (
        shape.limit != "offset"
        and bool(shape.where)
        and bool(shape.order) == bool(shape.limit)
        and shape.order in ("", "single")
    )
