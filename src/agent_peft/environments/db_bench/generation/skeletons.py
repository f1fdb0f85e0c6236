"""What is left of a statement without its names and values."""

from __future__ import annotations

import re

from agent_peft.environments.db_bench.generation.plan import Statement, sql

_TOKEN = re.compile(r"'(?:[^']|'')*'|`[^`]*`|[A-Za-z_]\w*|-?\d+(?:\.\d+)?|[<>=]+|\S")
_KEYWORDS = re.compile(
    "SELECT|FROM|WHERE|GROUP|BY|HAVING|ORDER|LIMIT|OFFSET|AND|OR|IN|BETWEEN|LIKE|COUNT|SUM|AVG|MAX|MIN|ASC|DESC|"
    "INSERT|INTO|VALUES|UPDATE|SET|DELETE"
)


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
    for token in _TOKEN.findall(re.sub(r"(?i)\bAS\s+\w+", "", text.rstrip("; \n"))):
        upper = token.upper()
        if _KEYWORDS.fullmatch(upper):
            signs.append(upper)
        elif token[0] in "'-0123456789":
            signs.append("v")
        else:
            signs.append("x" if token[0] in "`_" or token[0].isalpha() else token)
    form = " ".join(signs)
    form = re.sub(r"[xv](?: , [xv])+", lambda match: match[0][0] + "s", form)
    return re.sub(r"\( [vx]s? \)(?: , \( [vx]s? \))*", "( vs )", form)
