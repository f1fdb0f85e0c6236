"""Reading a statement's syntax tree (sqlglot): its skills, and the output columns that sort its rows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from sqlglot import exp
from sqlglot.dialects.mysql import MySQL
from sqlglot.parsers.mysql import MySQLParser

from agent_peft.environments.db_bench.database import MAX_SQL

# it warns about dialects; a statement that it cannot parse is an exception
logging.getLogger("sqlglot").setLevel(logging.ERROR)

# From the most to the least telling. What a statement does to the table comes first, then what is hardest
# about it, and last what nearly every statement has. `primary_skill` is the first of this list that a task
# has.
SKILLS = (
    "insert",
    "update",
    "delete",
    "subquery_nested",
    "subquery_multiple",
    "subquery_single",
    "having_aggregate_calculation",
    "having_multiple_conditions_with_aggregate",
    "having_single_condition_with_aggregate",
    "limit_and_offset",
    "limit_only",
    "order_by_multiple_columns_different_directions",
    "order_by_multiple_columns_same_direction",
    "order_by_single_column",
    "group_by_multiple_columns",
    "group_by_single_column",
    "where_nested_conditions",
    "where_multiple_conditions",
    "where_single_condition",
    "table_alias",
    "column_alias",
    "select",
)


def primary_skill(skills: Sequence[str]) -> str:
    """The skill that represents a task: the first of ``SKILLS`` that it has. So each task counts once.

    >>> primary_skill(("select", "order_by_single_column", "limit_only"))
    'limit_only'
    """
    ranks = {skill: rank for rank, skill in enumerate(SKILLS)}
    return min(skills, key=lambda skill: ranks.get(skill, len(SKILLS)))


class _TooLong(Exception):
    pass


class _Parser(MySQLParser):
    """Gives up where it goes back and forth: types within types double sqlglot's time with each."""

    steps_left = 0

    def _advance(self, times: int = 1) -> None:
        self.steps_left -= 1
        if self.steps_left < 0:
            raise _TooLong
        super()._advance(times)


def parse_sql(sql: str) -> exp.Expr | None:
    """The syntax tree in MySQL's dialect, LifelongAgentBench's; None where sqlglot cannot read it."""
    if len(sql) > MAX_SQL:
        return None
    dialect = MySQL()
    try:
        tokens = dialect.tokenize(sql)
        parser = _Parser(dialect=dialect)
        parser.steps_left = 500 + 20 * len(tokens)  # LifelongAgentBench's statements take 1.5 for each token
        trees = parser.parse(tokens, sql)
    except Exception:  # KeyError, AttributeError, RecursionError and more, for odd statements
        return None
    return trees[0] if trees else None


def in_order_of(column: str, sql: str) -> str | None:
    """The statement with a sort by the column wherever it has a LIMIT and no sort; None where it has no such
    place, or cannot be read.

    >>> in_order_of("id", "SELECT a FROM t LIMIT 2")
    'SELECT a FROM t ORDER BY `id` LIMIT 2'
    """

    def keys(node: exp.Expr) -> list[exp.Expr]:
        unsorted = node.args.get("limit") is not None and node.args.get("order") is None
        return [exp.Ordered(this=exp.column(column, quoted=True), nulls_first=True)] if unsorted else []

    return _sorted_further(sql, keys)


def with_ties_broken(sql: str, headers: Sequence[str], width: int, descending: bool) -> str | None:
    """The statement with further sort keys after its own wherever it sorts: the output columns of a query
    (``width`` of them in the outermost one), the table's columns of a change. None where it sorts nowhere, or
    cannot be read.

    >>> with_ties_broken("SELECT a, COUNT(*) FROM t GROUP BY a ORDER BY 2 LIMIT 1", ["a"], 2, descending=True)
    'SELECT a, COUNT(*) FROM t GROUP BY a ORDER BY 2, 1 DESC, 2 DESC LIMIT 1'
    """

    def keys(node: exp.Expr) -> list[exp.Expr]:
        if node.args.get("order") is None:
            return []
        if isinstance(node, exp.Select):
            inner = sum(len(headers) if column.is_star else 1 for column in node.selects)
            number = inner if node.parent else width  # a star may be of a subquery
            columns: list[exp.Expr] = [exp.Literal.number(i + 1) for i in range(number)]
        else:
            columns = [exp.column(header, quoted=True) for header in headers]
        return [exp.Ordered(this=key, desc=descending, nulls_first=not descending) for key in columns]

    return _sorted_further(sql, keys)


def respelled(sql: str) -> str | None:
    """The statement as sqlglot writes it, which may mean something else in another dialect than MySQL's."""
    tree = parse_sql(sql)
    return None if tree is None else tree.sql(dialect="mysql")


def _sorted_further(sql: str, keys: Callable[[exp.Expr], list[exp.Expr]]) -> str | None:
    """The statement with ``keys`` of each of its parts that can sort; None where there are none."""
    tree, changed = parse_sql(sql), False
    try:
        for node in [] if tree is None else list(tree.find_all(exp.Select, exp.Update, exp.Delete)):
            if added := keys(node):
                order = node.args.get("order")
                node.set("order", exp.Order(expressions=[*(order.expressions if order else ()), *added]))
                changed = True
        return tree.sql(dialect="mysql") if tree is not None and changed else None
    except (RecursionError, ValueError):
        return None


def skills_of(sql: str) -> tuple[str, ...]:
    """The skills a statement uses, the primary one first; empty where it cannot be parsed.

    As in LifelongAgentBench, clauses (WHERE, GROUP BY, HAVING, ORDER BY, LIMIT, column aliases) count where
    they belong to the statement itself, not to a query inside it; those count as subqueries.

    >>> skills_of("SELECT a FROM t ORDER BY b LIMIT 3")
    ('limit_only', 'order_by_single_column', 'select')
    """
    tree = parse_sql(sql)
    try:
        return _skills(tree) if tree is not None else ()
    except (RecursionError, ValueError):  # it is nested too deeply, or holds a number of thousands of digits
        return ()


def _skills(tree: exp.Expr) -> tuple[str, ...]:
    names = {name for name, kind in _STATEMENTS.items() if isinstance(tree, kind)}
    if tree.find(exp.Select):
        names.add("select")
    sources: tuple[type[exp.Expr], ...] = (
        (exp.Table,) if isinstance(tree, exp.Select) else (exp.Table, exp.Subquery)
    )
    if any(source.alias for source in tree.find_all(*sources)):
        names.add("table_alias")
    query = tree.expression if isinstance(tree, exp.Insert) else tree
    if isinstance(tree, exp.Select):
        names |= _select_skills(tree)
    elif tree.args.get("limit") is not None:
        names.add("limit_only")
    if query is not None and (where := query.args.get("where")) is not None:
        names.add(_where_skill(where.this))
    names |= _subquery_skills(tree, query)
    return tuple(skill for skill in SKILLS if skill in names)


def order_keys(sql: str, headers: Sequence[str], width: int) -> tuple[int, ...] | None:
    """By which output columns the rows of a SELECT are sorted; None where their order is free (no top-level
    ORDER BY).

    Rows with equal keys may come in any order, so only the sequence of the keys can be graded. Where a key is
    not among the output columns its ties cannot be seen: then all ``width`` columns are named, and the order
    counts.

    >>> order_keys("SELECT name, AVG(x) AS m FROM t GROUP BY name ORDER BY m DESC", ["name", "x"], 2)
    (1,)
    """
    tree = parse_sql(sql)
    order = tree.args.get("order") if tree is not None else None
    if tree is None or order is None:
        return None
    try:
        return _keys(tree, order, headers, width)
    except (RecursionError, ValueError):
        return tuple(range(width))  # the order of the whole rows counts


def _keys(tree: exp.Expr, order: exp.Expr, headers: Sequence[str], width: int) -> tuple[int, ...]:
    if not tree.args.get("joins"):  # of one table, t.a is a
        for node in tree.find_all(exp.Column):
            node.set("table", None)
    outputs: list[tuple[str, str]] = []  # (name in the result, expression) of each column
    for column in getattr(tree, "selects", []):
        if column.is_star:
            outputs += [(header.lower(), header.lower()) for header in headers]
        else:
            outputs.append((column.alias_or_name.lower(), column.unalias().sql().lower()))
    if len(outputs) != width:  # a star of a join, or of a subquery, has other columns than the table
        return tuple(range(width))
    keys = []
    for term in order.expressions:
        key = term.this
        if isinstance(key, exp.Literal) and key.is_int:
            keys.append(int(key.this) - 1)
            continue
        name = key.name.lower() if isinstance(key, exp.Column) and not key.table else None
        text = key.sql().lower()
        matches = [i for i, (alias, expression) in enumerate(outputs) if alias == name or expression == text]
        if not matches:
            return tuple(range(width))
        keys.append(matches[0])
    return tuple(keys) if all(0 <= key < width for key in keys) else tuple(range(width))


_STATEMENTS: dict[str, type[exp.Expr]] = {"insert": exp.Insert, "update": exp.Update, "delete": exp.Delete}


def _own(condition: exp.Expr) -> list[exp.Expr]:
    """The nodes of a condition, without those of the queries inside it."""
    return list(condition.walk(prune=lambda node: isinstance(node, exp.Select)))


def _where_skill(condition: exp.Expr) -> str:
    connectors = [node for node in _own(condition.unnest()) if isinstance(node, exp.Connector)]
    if not connectors:
        return "where_single_condition"
    nested = any(isinstance(side, exp.Paren) for node in connectors for side in (node.left, node.right))
    return "where_nested_conditions" if nested else "where_multiple_conditions"


def _select_skills(select: exp.Select) -> set[str]:
    """The skills of the clauses of a SELECT."""
    names = set()
    if any(isinstance(column, exp.Alias) for column in select.expressions):
        names.add("column_alias")
    if (group := select.args.get("group")) is not None:
        names.add("group_by_single_column" if len(group.expressions) == 1 else "group_by_multiple_columns")
    if (having := select.args.get("having")) is not None:
        nodes = _own(having.this)
        several = any(isinstance(node, exp.Connector) for node in nodes)
        names.add(f"having_{'multiple_conditions' if several else 'single_condition'}_with_aggregate")
        if any(isinstance(node, exp.Add | exp.Sub | exp.Mul | exp.Div) for node in nodes):
            names.add("having_aggregate_calculation")
    if (order := select.args.get("order")) is not None:
        directions = {bool(term.args.get("desc")) for term in order.expressions}
        columns = f"multiple_columns_{'same_direction' if len(directions) == 1 else 'different_directions'}"
        names.add(f"order_by_{'single_column' if len(order.expressions) == 1 else columns}")
    if select.args.get("limit") is not None:
        names.add("limit_and_offset" if select.args.get("offset") else "limit_only")
    return names


def _subquery_skills(tree: exp.Expr, query: exp.Expr | None) -> set[str]:
    inner = [select for select in tree.find_all(exp.Select) if select is not query]
    outermost = [select for select in inner if select.parent_select is None or select.parent_select is query]
    names = set()
    if len(outermost) < len(inner):
        names.add("subquery_nested")
    if len(outermost) > 1:
        names.add("subquery_multiple")
    return names or ({"subquery_single"} if inner else set())
