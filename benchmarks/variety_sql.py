"""What is read off the gold SQL of a task: its skeleton and its features. Part of ``variety.py``."""

from __future__ import annotations

import re

from sqlglot import exp

from agent_peft.environments.db_bench.syntax import parse


def skeleton(sql: str) -> str:
    """The statement without its names, values and aliases; lists of names or values collapse."""
    tree = parse(sql)
    assert tree is not None, sql

    def bare(node: exp.Expr) -> exp.Expr:
        if isinstance(node, exp.Alias):
            return node.this
        if isinstance(node, exp.Column):
            return exp.column("x")
        if isinstance(node, exp.Literal):
            return exp.column("v")
        if isinstance(node, exp.Table):
            return exp.to_table("t")
        if isinstance(node, exp.Subquery | exp.Select | exp.Delete | exp.Update):
            node.set("alias", None)
        if isinstance(node, exp.Identifier):
            return exp.to_identifier("x")
        return node

    text = tree.transform(bare).sql("mysql").replace("`", "")
    text = re.sub(r"\b([xv])(?:, [xv])+", r"\1s", text)
    return re.sub(r"\(vs?\)(?:, \(vs?\))*", "(vs)", text)


def features(sql: str) -> frozenset[str]:
    """What a statement is made of, clause by clause."""
    tree = parse(sql)
    assert tree is not None, sql
    found = {type(tree).__name__}
    query = tree.expression if isinstance(tree, exp.Insert) else tree
    if isinstance(tree, exp.Insert):
        found.add("insert select" if isinstance(query, exp.Select) else "insert values")
    inner = [select for select in tree.find_all(exp.Select) if select is not query]
    outermost = [select for select in inner if select.parent_select in (None, query)]
    if len(outermost) > 1:
        found.add("several subqueries")
    for select in [query, *inner]:
        if not isinstance(select, exp.Select | exp.Update | exp.Delete):
            continue
        where = "" if select is query else "inner "
        found |= {where + feature for feature in _clauses(select)}
    if any(
        select.find(exp.From) and isinstance(select.find(exp.From).this, exp.Subquery)
        for select in [query]
        if isinstance(select, exp.Select)
    ):
        found.add("derived table")
    return frozenset(found)


def _clauses(select: exp.Expr) -> set[str]:
    found = set()
    for name in ("where", "having"):
        if (clause := select.args.get(name)) is not None:
            found |= {f"{name}: {feature}" for feature in _conditions(clause.this)}
    if (group := select.args.get("group")) is not None:
        found.add(f"group by {min(len(group.expressions), 2)}")
    if (order := select.args.get("order")) is not None:
        found.add(f"order by {min(len(order.expressions), 2)}")
        aggregates = {
            column.alias for column in getattr(select, "expressions", []) if column.find(exp.AggFunc)
        }
        if any(key.find(exp.AggFunc) or key.this.name in aggregates for key in order.expressions):
            found.add("order by aggregate")
    if select.args.get("limit") is not None:
        found.add(
            ("offset" if select.args.get("offset") else "limit") + ("" if order is not None else " unsorted")
        )
    outputs = select.expressions
    if isinstance(select, exp.Select):
        found.add("many columns" if len(outputs) > 3 else "columns")
        computed = [column for column in outputs if column.find(exp.AggFunc)]
        found |= {
            f"output {type(node).__name__}"
            for column in outputs
            for node in column.find_all(exp.AggFunc, exp.Binary)
        }
        if len(computed) > 1:
            found.add("several aggregates")
        if computed and group is None:
            found.add("aggregate of all")
    if isinstance(select, exp.Update):
        found |= {"several sets"} if len(outputs) > 1 else set()
        for assignment in outputs:
            value = assignment.expression
            found.add(
                "set query"
                if value.find(exp.Select)
                else f"set {type(value).__name__}"
                if isinstance(value, exp.Binary)
                else "set value"
            )
    return found


def _conditions(condition: exp.Expr) -> set[str]:
    found = set()
    nodes = list(condition.walk(prune=lambda node: isinstance(node, exp.Select)))
    connectors = [node for node in nodes if isinstance(node, exp.Connector)]
    found |= {type(node).__name__ for node in connectors}
    if any(isinstance(side, exp.Paren) for node in connectors for side in (node.left, node.right)):
        found.add("parentheses")
    for node in nodes:
        if isinstance(node, exp.Predicate) and not isinstance(node, exp.Connector):
            right = node.args.get("query") or node.args.get("expression")
            kind = "IN query" if isinstance(node, exp.In) and node.args.get("query") else type(node).__name__
            found.add(kind + (" query" if isinstance(right, exp.Subquery) and kind != "IN query" else ""))
        elif isinstance(node, exp.AggFunc | exp.Add | exp.Sub | exp.Mul | exp.Div):
            found.add(type(node).__name__)
    return found
