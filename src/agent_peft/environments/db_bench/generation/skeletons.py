"""What is left of a statement without its names and values."""

from __future__ import annotations

import re

from agent_peft.environments.db_bench.generation.plan import Statement, sql

_TOKEN = re.compile(r"'(?:[^']|'')*'|`[^`]*`|[A-Za-z_]\w*|-?\d+(?:\.\d+)?|[<>=]+|\S")
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

    >>> from agent_peft.environments.db_bench.generation.plan import Comparison, Delete
    >>> skeleton(Delete("t", Comparison("a", "=", 5)))
    'DELETE FROM x WHERE v = v'
    """
    return skeleton_of_sql(sql(statement))


def skeleton_of_sql(text: str) -> str:
    """The same for SQL as text, case and layout apart."""
    signs = []
    for token in _TOKEN.findall(_ALIAS.sub("", text.rstrip("; \n"))):
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
