"""A statement as typed parts, and its SQL: the common subset of SQLite, MySQL and MariaDB.

Plain dataclasses rather than sqlglot's trees: drawing, changing and printing one takes microseconds, and a
task needs a dozen of them (`mutation`). `syntax.skills_of` reads the printed SQL with sqlglot.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal

from agent_peft.environments.db_bench.generation.schemas import Column

Operator = Literal["=", "<>", ">", "<", ">=", "<=", "LIKE"]
Connector = Literal["AND", "OR"]
Function = Literal["COUNT", "SUM", "AVG", "MAX", "MIN"]
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Qualified(Column):
    """A column after the alias of its table: ``od.price``."""

    table: str


@dataclass(frozen=True)
class Aggregate:
    """``COUNT(*)`` where ``column`` is None; a name of a derived table's column is a string."""

    function: Function
    column: Column | str | None = None


@dataclass(frozen=True)
class Calculation:
    operator: Literal["+", "-", "*", "/"]
    left: Expression
    right: Expression


@dataclass(frozen=True)
class Scalar:
    """A query of one value."""

    query: Select


@dataclass(frozen=True)
class Alias:
    """A name given elsewhere in the statement: an output's alias."""

    name: str
    expression: Expression


Expression = Column | Aggregate | Calculation | Scalar | Alias | str | int | float


@dataclass(frozen=True)
class Relation:
    left: Expression
    operator: Operator
    right: Expression


@dataclass(frozen=True)
class Between:
    left: Expression
    low: Expression
    high: Expression


@dataclass(frozen=True)
class Among:
    """``IN`` some values or the column of a query."""

    left: Column
    values: tuple[str | int, ...] | Select


@dataclass(frozen=True)
class Junction:
    """Conditions joined by one connector; a junction inside stands in parentheses."""

    connector: Connector
    parts: tuple[Condition, ...]


Condition = Relation | Between | Among | Junction


@dataclass(frozen=True)
class Projection:
    expression: Expression
    alias: str | None = None


@dataclass(frozen=True)
class Sort:
    expression: Expression
    descending: bool


@dataclass(frozen=True)
class Derived:
    """A query that stands for a table, under a name."""

    query: Select
    alias: str


@dataclass(frozen=True)
class Select:
    """A query; ``alias`` is another name for its table."""

    outputs: tuple[Projection, ...]
    source: str | Derived
    where: Condition | None = None
    groups: tuple[Column, ...] = ()
    having: Condition | None = None
    order: tuple[Sort, ...] = ()
    limit: int | None = None
    offset: int | None = None
    alias: str | None = None


@dataclass(frozen=True)
class Insert:
    table: str
    columns: tuple[Column, ...]
    source: tuple[tuple[str | int, ...], ...] | Select


@dataclass(frozen=True)
class Update:
    table: str
    assignments: tuple[tuple[Column, Expression], ...]
    where: Condition | None = None
    order: tuple[Sort, ...] = ()
    limit: int | None = None


@dataclass(frozen=True)
class Delete:
    table: str
    where: Condition | None = None
    order: tuple[Sort, ...] = ()
    limit: int | None = None


Statement = Select | Insert | Update | Delete
Node = Statement | Expression | Condition | Projection | Sort | Derived


@functools.cache
def name_sql(name: str) -> str:
    """An identifier, in backticks where it needs them."""
    return name if _PLAIN.fullmatch(name) else f"`{name}`"


def sql(node: Node | None) -> str:
    """A part as SQL. A part keeps its text, so that a statement which differs in one part is quickly written.

    >>> sql(Relation(Aggregate("COUNT"), ">", 3))
    'COUNT(*) > 3'
    """
    if isinstance(node, str):
        return "'" + node.replace("'", "''") + "'"
    kept: dict[str, str] | None = getattr(node, "__dict__", None)
    if kept is None or node is None:  # a number
        return str(node)
    if "_sql" not in kept:
        kept["_sql"] = _written(node)
    return kept["_sql"]


def _written(node: Node) -> str:
    match node:
        case Qualified():
            return f"{node.table}.{name_sql(node.name)}"
        case Column():
            return name_sql(node.name)
        case Relation(left, operator, right):
            return f"{sql(left)} {operator} {sql(right)}"
        case Select():
            source = name_sql(node.source) if isinstance(node.source, str) else sql(node.source)
            alias = f" AS {node.alias}" if node.alias else ""
            groups = f" GROUP BY {', '.join(map(sql, node.groups))}" if node.groups else ""
            having = f" HAVING {sql(node.having)}" if node.having else ""
            offset = f" OFFSET {node.offset}" if node.offset else ""
            return (
                f"SELECT {', '.join(map(sql, node.outputs))} FROM {source}{alias}"
                f"{_where(node.where)}{groups}{having}{_tail(node.order, node.limit)}{offset}"
            )
        case Aggregate(function, column):
            inner = "*" if column is None else column if isinstance(column, str) else sql(column)
            return f"{function}({inner})"
        case Calculation(operator, left, right):
            return f"{sql(left)} {operator} {sql(right)}"
        case Scalar(query):
            return f"({sql(query)})"
        case Alias(name):
            return name_sql(name)
        case Between(left, low, high):
            return f"{sql(left)} BETWEEN {sql(low)} AND {sql(high)}"
        case Among(left, values):
            inner = sql(values) if isinstance(values, Select) else ", ".join(map(sql, values))
            return f"{sql(left)} IN ({inner})"
        case Junction(connector, parts):
            texts = [f"({sql(part)})" if isinstance(part, Junction) else sql(part) for part in parts]
            return f" {connector} ".join(texts)
        case Projection(expression, alias):
            return sql(expression) + (f" AS {name_sql(alias)}" if alias else "")
        case Sort(expression, descending):
            return f"{sql(expression)} {'DESC' if descending else 'ASC'}"
        case Derived(query, alias):
            return f"({sql(query)}) AS {alias}"
        case Insert(table, columns, source):
            names = ", ".join(map(sql, columns))
            if isinstance(source, Select):
                return f"INSERT INTO {name_sql(table)} ({names}) {sql(source)}"
            rows = ", ".join(f"({', '.join(map(sql, row))})" for row in source)
            return f"INSERT INTO {name_sql(table)} ({names}) VALUES {rows}"
        case Update():
            sets = ", ".join(f"{sql(column)} = {sql(value)}" for column, value in node.assignments)
            return (
                f"UPDATE {name_sql(node.table)} SET {sets}{_where(node.where)}{_tail(node.order, node.limit)}"
            )
        case Delete():
            return f"DELETE FROM {name_sql(node.table)}{_where(node.where)}{_tail(node.order, node.limit)}"
    raise TypeError(f"no part of a statement: {node!r}")


def _where(condition: Condition | None) -> str:
    return f" WHERE {sql(condition)}" if condition is not None else ""


def _tail(order: tuple[Sort, ...], limit: int | None) -> str:
    return (f" ORDER BY {', '.join(map(sql, order))}" if order else "") + (f" LIMIT {limit}" if limit else "")


def wrapped(statement: Statement) -> Statement:
    """A change whose queries each stand in another: MySQL does not change a table that it reads directly."""
    if isinstance(statement, Update | Delete) and statement.where is not None:
        return replace(statement, where=_wrapped(statement.where, [0]))
    return statement


def _wrapped(condition: Condition, count: list[int]) -> Condition:
    def source(query: Select) -> Derived:
        count[0] += 1
        return Derived(query, "sub" if count[0] == 1 else f"sub{count[0]}")

    match condition:
        case Junction(connector, parts):
            return Junction(connector, tuple(_wrapped(part, count) for part in parts))
        case Relation(left, operator, Scalar(query)):
            aggregate = query.outputs[0].expression
            alias = f"{aggregate.function.lower()}_value" if isinstance(aggregate, Aggregate) else "value"
            inner = replace(query, outputs=(Projection(aggregate, alias),))
            outer = Select((Projection(Alias(alias, aggregate)),), source(inner))
            return Relation(left, operator, Scalar(outer))
        case Among(left, Select() as query) if isinstance(query.source, str):
            return Among(left, Select((Projection(left),), source(query)))
    return condition


def qualified(statement: Statement) -> Statement:
    """A query whose table has an alias, with the alias before each of its columns."""
    if not isinstance(statement, Select) or statement.alias is None:
        return statement
    alias = statement.alias

    def of(part: Any) -> Any:
        match part:
            case Column(attribute, name):
                return Qualified(attribute, name, alias)
            case Select():  # its columns are those of its own table
                return part
            case tuple():
                return tuple(map(of, part))
        return _changed(part, of) if is_dataclass(part) else part

    named: Select = _changed(statement, of)
    return named


def _changed(node: Any, change: Callable[[Any], Any]) -> Any:
    return replace(node, **{field.name: change(getattr(node, field.name)) for field in fields(node)})


_SKELETON_TOKEN = re.compile(r"'(?:[^']|'')*'|`[^`]*`|[A-Za-z_]\w*|-?\d+(?:\.\d+)?|[<>=]+|\S")
_KEYWORDS = (
    {"SELECT", "FROM", "WHERE", "GROUP", "BY", "HAVING", "ORDER", "LIMIT", "OFFSET", "ASC", "DESC"}
    | {"AND", "OR", "IN", "BETWEEN", "LIKE", "COUNT", "SUM", "AVG", "MAX", "MIN"}
    | {"INSERT", "INTO", "VALUES", "UPDATE", "SET", "DELETE"}
)
_ALIAS = re.compile(r"\bAS\s+\w+", re.IGNORECASE)
_LIST = re.compile(r"[xv](?: , [xv])+")
_VALUES = re.compile(r"\( [vx]s? \)(?: , \( [vx]s? \))*")


def skeleton(statement: Statement) -> str:
    """The statement with one sign for all names and one for all values; lists and aliases collapse.

    >>> skeleton(Delete("t", Relation("a", "=", 5)))
    'DELETE FROM x WHERE v = v'
    """
    return skeleton_of_sql(sql(statement))


def skeleton_of_sql(text: str) -> str:
    """The same for SQL as text, case and layout apart."""
    signs = []
    for token in _SKELETON_TOKEN.findall(_ALIAS.sub("", text.rstrip("; \n"))):
        first = token[0]
        if first.isalpha():
            upper = token.upper()
            signs.append(upper if upper in _KEYWORDS else "x")
        elif first in "'-0123456789":
            signs.append("v")
        else:
            signs.append("x" if first in "`_" else token)
    form = _LIST.sub(lambda match: match[0][0] + "s", " ".join(signs))
    return _VALUES.sub("( vs )", form)
