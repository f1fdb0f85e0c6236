"""Draws conditions, with values at which they split the rows of a table."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agent_peft.environments.db_bench.database import Row
from agent_peft.environments.db_bench.generation.plan import (
    Aggregate,
    Among,
    Between,
    Calculation,
    Condition,
    Connector,
    Derived,
    Expression,
    Function,
    Junction,
    Operator,
    Projection,
    Relation,
    Scalar,
    Select,
    Sort,
)
from agent_peft.environments.db_bench.generation.schemas import Column, Role, Schema
from agent_peft.environments.db_bench.generation.shapes import Shape

GROUPING: tuple[Role, ...] = ("category", "ref", "flag", "name")
# what conditions are about: a role named twice counts twice
_COMPARED: tuple[Role, ...] = (
    *("category", "category", "total", "total", "measure", "date"),
    *("date", "year", "flag", "name", "ref", "id"),
)

Query = Callable[[Select], Sequence[Row]]  # runs a query on the table


class Unsatisfiable(Exception):
    """The table has not what the shape needs; draw again."""


class ConditionSampler:
    """Draws conditions on one table. A column that a condition uses is not used by another one."""

    def __init__(
        self, schema: Schema, rows: tuple[Row, ...], query: Query, rng: random.Random, plain: bool = False
    ) -> None:
        self.schema, self.rows, self.query, self.rng, self.plain = schema, rows, query, rng, plain
        self._used: set[Column] = set()
        self._values: dict[str, list[Any]] = {}  # of each column, sorted
        self._share = (0.1, 0.6)  # of the rows, how many a comparison should keep
        self._derives = True  # whether a derived table, which has an alias, may stand in a condition

    def _where(self, shape: Shape) -> tuple[Condition | None, int]:
        """The condition, and how many subqueries are left for HAVING."""
        if not shape.where:
            return None, _COUNT[shape.subqueries]
        self._derives = shape.statement != "insert"
        slots = {1: 1, 2: 2 if self.rng.random() < 0.75 else 3, 3: 3 if self.rng.random() < 0.8 else 4}[
            shape.where
        ]
        queries = min(_COUNT[shape.subqueries], slots)
        left = _COUNT[shape.subqueries] - queries
        if queries and left < shape.having and self.rng.random() < 0.5:
            queries -= 1
        left = _COUNT[shape.subqueries] - queries
        nested = shape.subqueries == "nested"
        chosen = set(self.rng.sample(range(slots), queries))
        every = shape.where == 2 and self.rng.random() < 0.76
        wide = every or shape.groups or shape.having
        self._share = (0.35, 0.9) if wide else (0.1, 0.5) if shape.where == 1 else (0.15, 0.6)
        atoms = [self._with_query(nested) if i in chosen else self._atom() for i in range(slots)]
        if shape.where == 1:
            return atoms[0], left
        if shape.where == 2:
            return Junction("AND" if every else "OR", tuple(atoms)), left
        outer: Connector = "OR" if self.rng.random() < 0.68 else "AND"
        inner: Connector = "AND" if outer == "OR" else "OR"
        pair = Junction(inner, tuple(atoms[:2]))
        rest: Condition = Junction(inner, tuple(atoms[2:])) if slots == 4 else atoms[2]
        return Junction(outer, (pair, rest) if self.rng.random() < 0.7 else (rest, pair)), left

    def _atom(self, roles: Sequence[str] | None = None) -> Condition:
        """A comparison of a column with values near those in the table."""
        column = self._take(*(roles or _COMPARED))
        values = self._sorted(column)
        if self.plain:
            compares = column.type == "INT" and column.role not in ("id", "ref", "flag")
            return Relation(
                column,
                self.rng.choice(("=", ">", "<", ">=", "<=")) if compares else "=",
                self.rng.choice(values),
            )
        draw = self.rng.random()
        if column.role in ("category", "flag", "name", "ref"):
            distinct = list(dict.fromkeys(values))
            if draw < 0.1 and len(distinct) > 3:
                return Among(column, tuple(self.rng.sample(distinct, self.rng.choice((2, 2, 3)))))
            if column.role == "name" and draw < 0.3:
                word = str(self.rng.choice(values)).split()[0 if draw < 0.2 else -1]
                return Relation(
                    column, "LIKE", f"{word}%" if draw < 0.2 else f"%{word}%" if draw < 0.27 else f"%{word}"
                )
            return Relation(
                column, "<>" if draw > 0.93 and column.role != "flag" else "=", self.rng.choice(values)
            )
        kept = self.rng.uniform(*self._share)
        if draw < 0.08:
            start = self.rng.uniform(0, 1 - kept)
            low, high = self._at(values, start), self._at(values, start + kept)
            if low != high:
                return Between(column, low, high)
        if column.role in ("date", "year") and draw > 0.93:
            return Relation(column, "=", self.rng.choice(values))
        operator: Operator = self._weighted({">": 45, "<": 32, ">=": 14, "<=": 9})
        return Relation(column, operator, self._at(values, kept if operator[0] == "<" else 1 - kept))

    def _at(self, values: Sequence[Any], quantile: float) -> Any:
        return values[min(int(len(values) * quantile), len(values) - 1)]

    def _with_query(self, nested: bool) -> Condition:
        """A condition with a query in it; ``nested``: with another query in that."""
        if self.rng.random() < (0.4 if nested else 0.7):
            return self._against_aggregate(nested)
        column = self._pick(
            [
                column
                for column in self.schema.of("category", "ref", "name", "id", "flag")
                if column not in self._used
            ]
        )
        self._used.add(column)
        draw = self.rng.random()
        table, output = self.schema.table, (Projection(column),)
        if nested and draw < 0.45 and column.role == "id" and self._derives:
            key = self._pick(self.schema.of("total", "measure", "date"))
            sort = (Sort(key, self.rng.random() < 0.7),)
            return Among(
                column,
                Select(
                    output, Derived(Select(output, table, order=sort, limit=self.rng.randint(3, 9)), "sub")
                ),
            )
        if draw < 0.55 and column.role != "id":
            term = self._aggregate()
            threshold: Expression = self._between_groups(term, (column,), None, self.rng.uniform(0.3, 0.85))
            if nested:
                while term.function not in ("AVG", "MAX", "MIN"):
                    term = self._aggregate()
                threshold = Scalar(Select((Projection(Aggregate("AVG", term.column)),), table))
            having: Condition = Relation(term, self.rng.choice((">", ">", "<", ">=")), threshold)
            if not nested and self.rng.random() < 0.3:
                other: Expression = self._calculation() if self.rng.random() < 0.5 else self._aggregate()
                second = Relation(
                    other, ">", self._between_groups(other, (column,), None, self.rng.uniform(0.2, 0.5))
                )
                having = second if self.rng.random() < 0.4 else Junction("AND", (having, second))
            return Among(column, Select(output, table, groups=(column,), having=having))
        inner = self._against_aggregate(False) if nested else self._atom()
        return Among(column, Select(output, table, where=inner))

    def _against_aggregate(self, nested: bool) -> Condition:
        """A number against an aggregate of all rows, or of some."""
        column = (
            self._take("total", "total", "measure", "date")
            if self.rng.random() < 0.15
            else self._take("total", "measure")
        )
        function: Function = (
            self.rng.choices(("AVG", "MAX", "MIN"), (78, 11, 11))[0]
            if column.role != "date"
            else self.rng.choice(("MAX", "MIN"))
        )
        where: Condition | None = None
        if nested:
            where = self._against_aggregate(False) if self.rng.random() < 0.7 else self._with_query(False)
        elif self.rng.random() < 0.3:
            where = self._atom(("category", "category", "ref", "flag", "date"))
        query = Scalar(Select((Projection(Aggregate(function, column)),), self.schema.table, where))
        if function == "AVG":
            return Relation(column, self._weighted({">": 66, "<": 28, ">=": 6}), query)
        if where is None:
            return Relation(
                column, "=" if self.rng.random() < 0.6 else "<" if function == "MAX" else ">", query
            )
        return Relation(column, ">" if function == "MIN" or self.rng.random() < 0.6 else "<", query)

    def _having(
        self, shape: Shape, groups: tuple[Column, ...], where: Condition | None, queries: int
    ) -> Condition | None:
        if not shape.having:
            return None
        count = shape.having if shape.having == 1 or self.rng.random() < 0.9 else 3
        atoms: list[Condition] = []
        for i in range(count):
            if i < queries:
                function: Function = self.rng.choices(("AVG", "MAX", "MIN", "SUM"), (70, 10, 10, 10))[0]
                column = self._pick(
                    self.schema.of("total") if function == "SUM" else self.schema.of("total", "measure")
                )
                nested = shape.subqueries == "nested"
                inner = (
                    self._against_aggregate(False)
                    if nested
                    else self._atom(("category", "flag", "ref", "date"))
                    if self.rng.random() < 0.2
                    else None
                )
                query: Expression = Scalar(
                    Select((Projection(Aggregate("AVG", column)),), self.schema.table, inner)
                )
                if shape.calculation and i == count - 1:  # no condition is left for it
                    query = Calculation("*", query, self.rng.choice((2, 3)))
                atoms.append(Relation(Aggregate(function, column), self.rng.choice((">", ">", "<")), query))
                continue
            calculates = shape.calculation and i == count - 1
            term: Expression = self._calculation() if calculates else self._aggregate()
            operator: Operator = self._weighted({">": 60, "<": 22, ">=": 13, "<=": 5})
            kept = self.rng.uniform(0.2, 0.75) if count == 1 else self.rng.uniform(0.45, 0.9)
            quantile = kept if operator[0] == "<" else 1 - kept
            atoms.append(Relation(term, operator, self._between_groups(term, groups, where, quantile)))
        return atoms[0] if count == 1 else Junction("AND" if self.rng.random() < 0.85 else "OR", tuple(atoms))

    def _between_groups(
        self, term: Expression, groups: tuple[Column, ...], where: Condition | None, quantile: float
    ) -> Any:
        """A number that some groups reach and others do not, round where it can be."""
        values: list[Any] = sorted(
            row[0] for row in self.query(Select((Projection(term),), self.schema.table, where, groups))
        )
        if len(values) < 2 or values[0] == values[-1]:
            raise Unsatisfiable
        value = self._at(values, quantile)
        if isinstance(value, str) or (isinstance(value, int) and self.rng.random() < 0.5):
            return value
        unit = 10 ** max(len(str(abs(int(value)))) - 2, 0)
        return int(value // unit * unit)

    def _sorted(self, column: Column) -> list[Any]:
        if column.name not in self._values:
            index = self.schema.columns.index(column)
            self._values[column.name] = sorted(row[index] for row in self.rows)
        return self._values[column.name]

    def _distinct(self, column: Expression) -> int:
        assert isinstance(column, Column)
        return len(set(self._sorted(column)))

    def _weighted(self, weights: Mapping[Any, float]) -> Any:
        return self.rng.choices(list(weights), list(weights.values()))[0]

    def _take(self, *roles: Any) -> Column:
        """A column of one of the roles that no condition has yet; a role named twice counts twice."""
        weights = {role: roles.count(role) for role in roles}
        options = [column for column in self.schema.of(*weights) if column not in self._used]
        if not options:
            raise Unsatisfiable
        column = self.rng.choices(options, [weights[option.role] for option in options])[0]
        self._used.add(column)
        return column

    def _pick(self, columns: Sequence[Column]) -> Column:
        if not columns:
            raise Unsatisfiable
        return self.rng.choice(columns)

    def _aggregate(self, functions: Sequence[Function] = ("AVG", "SUM", "COUNT", "MAX", "MIN")) -> Aggregate:
        weights = {"AVG": 40, "SUM": 30, "COUNT": 22, "MAX": 12, "MIN": 8}
        function = self.rng.choices(functions, [weights[name] for name in functions])[0]
        if function == "COUNT":
            return Aggregate("COUNT")
        numbers = self.schema.of("total") if function == "SUM" else self.schema.of("total", "measure")
        if function in ("MAX", "MIN") and self.rng.random() < 0.25:
            numbers = self.schema.of("date", "year") or numbers
        if not numbers:
            raise Unsatisfiable
        return Aggregate(function, self.rng.choice(numbers))

    def _calculation(self) -> Calculation:
        numbers, totals = self.schema.of("total", "measure"), self.schema.of("total")
        draw = self.rng.random()
        if draw < 0.62 or not totals:
            column = self._pick(numbers)
            return Calculation("-", Aggregate("MAX", column), Aggregate("MIN", column))
        if draw < 0.8 or len(totals) < 2:
            return Calculation("*", Aggregate("AVG", self._pick(totals)), Aggregate("COUNT"))
        first, second = self.rng.sample(totals, 2)
        return Calculation(self.rng.choice(("-", "+")), Aggregate("SUM", first), Aggregate("SUM", second))


_COUNT = {"": 0, "single": 1, "multiple": 2, "nested": 1}
