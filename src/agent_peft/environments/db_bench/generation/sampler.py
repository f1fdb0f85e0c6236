"""Draws a statement of a given shape for a table, with values at which its conditions split the rows."""

from __future__ import annotations

import random
from dataclasses import replace

from sqlglot.generators.mysql import MySQLGenerator

from agent_peft.environments.db_bench.generation.conditions import GROUPING, ConditionSampler, Unsatisfiable
from agent_peft.environments.db_bench.generation.plan import (
    Aggregate,
    Alias,
    Calculation,
    Condition,
    Delete,
    Derived,
    Expression,
    Function,
    Insert,
    Junction,
    Projection,
    Relation,
    Scalar,
    Select,
    Sort,
    Statement,
    Update,
)
from agent_peft.environments.db_bench.generation.schemas import Column, Schema, draw_cell
from agent_peft.environments.db_bench.generation.shapes import Shape


class StatementSampler(ConditionSampler):
    """Draws the parts of one statement. A column that a condition uses is not used by another one."""

    def statement(self, shape: Shape) -> Statement:
        """A statement of the shape, its subqueries not yet wrapped (`wrapped`), or `Unsatisfiable`."""
        self._used = set()
        match shape.statement:
            case "insert":
                return self._insert(shape)
            case "update":
                return self._update(shape)
            case "delete":
                return Delete(
                    self.schema.table, self._where(shape)[0], self._one_sort(shape), self._few(shape)
                )
        return self._derived(shape) if shape.derived else self._select(shape)

    # Queries

    def _select(self, shape: Shape) -> Select:
        groups = self._groups(shape.groups)
        where, left = self._where(shape)
        having = self._having(shape, groups, where, left)
        if groups or shape.aggregates:
            outputs = self._aggregates(groups, shape, having)
        else:
            outputs = tuple(map(Projection, self._columns()))
        if shape.column_alias:
            outputs = self._aliased(outputs)
        order = self._order(shape, outputs, groups)
        if shape.limit and not order and self.schema.columns[0].role != "id":
            raise Unsatisfiable  # rows have an order of their own where they have ascending ids
        alias = table_alias(self.schema.table, self.rng) if shape.table_alias else None
        query = Select(outputs, self.schema.table, where, groups, having, order, alias=alias)
        return self._limited(query, shape) if shape.limit else query

    def _limited(self, query: Select, shape: Shape) -> Select:
        """The query with a limit (and an offset) that cuts something off."""
        count = len(self.query(query))
        offsets = [offset for offset in _OFFSETS if offset < count - 1] if shape.limit == "offset" else [0]
        if not offsets:
            raise Unsatisfiable
        offset = self.rng.choice(offsets)
        limits = [limit for limit in _LIMITS if limit < count - offset]
        if not limits:
            raise Unsatisfiable
        return replace(query, limit=self.rng.choice(limits), offset=offset or None)

    def _derived(self, shape: Shape) -> Select:
        """An aggregate over the aggregates of groups."""
        where, _ = self._where(replace(shape, subqueries=""))
        groups = self._groups(shape.groups)
        inner = self._aliased((Projection(self._aggregate(("SUM", "COUNT", "AVG"))),))[0]
        query = Select((*map(Projection, groups), inner), self.schema.table, where, groups)
        assert inner.alias is not None
        function: Function = self.rng.choice(("AVG", "MAX", "MIN"))
        return Select(
            (Projection(Aggregate(function, inner.alias), f"{function.lower()}_{inner.alias}"),),
            Derived(query, "sub"),
        )

    def _groups(self, count: int) -> tuple[Column, ...]:
        options = [
            column for column in self.schema.of(*GROUPING) if self._distinct(column) < len(self.rows) * 0.6
        ]
        weights = {"category": 6, "ref": 3, "flag": 1, "name": 1.5}
        groups: list[Column] = []
        while len(groups) < count:
            options = [column for column in options if column not in groups]
            if not options:
                raise Unsatisfiable
            groups.append(self.rng.choices(options, [weights[column.role] for column in options])[0])
        return tuple(groups)

    def _columns(self) -> list[Column]:
        count = self.rng.choices((1, 2, 3, 4, 5), (13, 38, 33, 12, 4))[0]
        count = min(count, len(self.schema.columns))
        chosen = self.rng.sample(self.schema.columns, count)
        if self.rng.random() < 0.75:  # mostly as the table has them, what names a row first
            chosen.sort(key=self.schema.columns.index)
        return chosen

    def _aggregates(
        self, groups: tuple[Column, ...], shape: Shape, having: Condition | None
    ) -> tuple[Projection, ...]:
        count = self.rng.choices((0, 1, 2, 3), (4 if shape.having else 0, 52, 34, 10))[0]
        chosen: list[Expression] = [self._calculation()] if count and self.rng.random() < 0.07 else []
        shown = [part for part in _terms(having) if not isinstance(part, Scalar)]
        if count and shown and self.rng.random() < 0.64:
            chosen.append(shown[0])
        for _ in range(20):
            if len(chosen) >= count:
                break
            ties = shape.order in ("same", "different") and len(groups) == 1 and not chosen
            term = self._aggregate(("COUNT", "COUNT", "MAX", "MIN")) if ties else self._aggregate()
            if term not in chosen:
                chosen.append(term)
        outputs = [Projection(term) for term in dict.fromkeys(chosen)]
        return (*map(Projection, groups), *outputs)

    def _aliased(self, outputs: tuple[Projection, ...]) -> tuple[Projection, ...]:
        """Names for what is computed; where nothing is, for some of the columns."""
        names = {column.name.lower() for column in self.schema.columns}
        named, computed = [], any(not isinstance(output.expression, Column) for output in outputs)
        renamed = (
            set()
            if computed
            else set(self.rng.sample(range(len(outputs)), self.rng.randint(1, min(2, len(outputs)))))
        )
        for i, output in enumerate(outputs):
            alias = output.alias
            if not isinstance(output.expression, Column):
                alias = alias_of(output.expression, self.schema, None if self.plain else self.rng)
            elif i in renamed:
                alias = other_name(output.expression, self.rng)
            while alias in names:
                alias = f"{alias}_value"
            if alias:
                names.add(alias)
            named.append(Projection(output.expression, alias))
        return tuple(named)

    def _order(
        self, shape: Shape, outputs: tuple[Projection, ...], groups: tuple[Column, ...]
    ) -> tuple[Sort, ...]:
        if not shape.order:
            return ()
        count = 1 if shape.order == "single" else 2 if self.rng.random() < 0.93 else 3
        keys: list[Expression] = [
            Alias(output.alias, output.expression)
            if output.alias and not isinstance(output.expression, Column)
            else output.expression
            for output in outputs
        ]
        if groups:
            if not any(isinstance(key, Aggregate | Alias) for key in keys) or self.rng.random() < 0.08:
                keys.append(
                    self._aggregate(
                        ("COUNT", "MAX", "MIN") if count > 1 else ("AVG", "SUM", "COUNT", "MAX", "MIN")
                    )
                )
        else:
            keys += [
                column for column in self.schema.columns if column not in keys and self.rng.random() < 0.35
            ]
            if count > 1 and not any(
                self._distinct(key) < len(self.rows) for key in keys if isinstance(key, Column)
            ):
                keys += self.schema.of("category", "total", "measure")
        weights = [_SORT_WEIGHTS[key.role] if isinstance(key, Column) else 8 for key in keys]
        chosen: list[Expression] = []
        for _ in range(count):
            options = [(key, weight) for key, weight in zip(keys, weights, strict=True) if key not in chosen]
            if not options:
                raise Unsatisfiable
            chosen.append(self.rng.choices([key for key, _ in options], [weight for _, weight in options])[0])
        if count > 1 and not groups:  # the key with the most ties first: only then the others matter
            chosen.sort(key=lambda key: self._distinct(key) if isinstance(key, Column) else 99)
        elif count > 1:  # of one group the aggregate, which may tie; of two a group
            chosen.sort(key=lambda key: isinstance(key, Column) == (len(groups) == 1))
        descending = [
            self.rng.random() < (0.35 if isinstance(key, Column) and key.role in GROUPING else 0.6)
            for key in chosen
        ]
        if shape.order == "same":
            descending = descending[:1] * count
        elif shape.order == "different" and len(set(descending)) == 1:
            descending[-1] = not descending[-1]
        return tuple(map(Sort, chosen, descending))

    def _one_sort(self, shape: Shape) -> tuple[Sort, ...]:
        if not shape.order:
            return ()
        return (
            Sort(
                self._pick(self.schema.of("total", "measure", "date", "id", "year")), self.rng.random() < 0.5
            ),
        )

    def _few(self, shape: Shape) -> int | None:
        return self.rng.choice((1, 2, 3, 3, 4, 5)) if shape.limit else None

    # Changes

    def _insert(self, shape: Shape) -> Insert:
        columns = list(self.schema.columns)
        if len(columns) > 3 and self.rng.random() < 0.6:
            removed = self.rng.sample(columns[1:], self.rng.randint(1, min(2, len(columns) - 3)))
            columns = [column for column in columns if column not in removed]
        if shape.copies:
            where, _ = self._where(shape)
            kept: list[Expression] = list(columns)
            if columns[0].role == "id" and self.rng.random() < 0.4:
                kept[0] = Calculation("+", columns[0], self.rng.choice((100, 200, 500, 1000, 5000)))
            return Insert(
                self.schema.table,
                tuple(columns),
                Select(tuple(map(Projection, kept)), self.schema.table, where),
            )
        count = 1 if self.plain else self.rng.choices((1, 2, 3), (78, 16, 6))[0]
        values: list[tuple[str | int, ...]] = []
        for i in range(count):
            cells = [
                draw_cell(column, self.rows, self.schema.columns.index(column), self.rng)
                for column in columns
            ]
            if columns[0].role == "id" and values:
                cells[0] = int(values[0][0]) + i
            values.append(tuple(cells))
        return Insert(self.schema.table, tuple(columns), tuple(values))

    def _update(self, shape: Shape) -> Update:
        options = self.schema.of("category", "flag", "total", "measure", "date", "name", "ref")
        count = 1 if self.plain else min(self.rng.choices((1, 2), (78, 22))[0], len(options))
        weights = {"category": 6, "flag": 3, "total": 4, "measure": 2, "date": 2, "name": 1, "ref": 1}
        targets: list[Column] = []
        while len(targets) < count:
            column = self.rng.choices(options, [weights[option.role] for option in options])[0]
            if column not in targets:
                targets.append(column)
        assignments = tuple((column, self._new_value(column)) for column in targets)
        self._used |= set(targets) if self.rng.random() < 0.5 else set()
        return Update(
            self.schema.table, assignments, self._where(shape)[0], self._one_sort(shape), self._few(shape)
        )

    def _new_value(self, column: Column) -> Expression:
        if not self.plain and column.role == "total" and self.rng.random() < 0.6:
            operator = self._weighted({"+": 5, "-": 4, "*": 2})
            amount = (
                self.rng.choice((2, 3))
                if operator == "*"
                else self.rng.choice((1, 2, 3, 5, 10, 15, 20, 50, 100))
            )
            return Calculation(operator, column, amount)
        return draw_cell(column, self.rows, self.schema.columns.index(column), self.rng)


_LIMITS = (1, 2, 3, 3, 3, 4, 5, 5, 5, 6, 7, 8, 10, 10, 10)
_OFFSETS = (1, 1, 2, 2, 2, 3, 4, 5, 5)
_SORT_WEIGHTS = {
    "total": 7,
    "measure": 7,
    "date": 6,
    "year": 5,
    "category": 3,
    "flag": 1,
    "name": 4,
    "ref": 2,
    "id": 3,
}


def _terms(condition: Condition | None) -> list[Expression]:
    """What a HAVING compares."""
    match condition:
        case Relation(left):
            return [left]
        case Junction(_, parts):
            return [term for part in parts for term in _terms(part)]
    return []


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
        case Calculation("-", Aggregate("MAX", Column() as column)):
            return f"{_short(column, rng)}_{rng.choices(['range', 'diff'], [65, 35])[0] if rng else 'range'}"
        case Calculation(operator):
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
