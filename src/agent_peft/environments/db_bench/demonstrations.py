"""Demonstrations: the gold SQL and its answer; now and then a mistake comes first."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from agent_peft.environments.base import Mistake
from agent_peft.environments.db_bench.config import REPAIR_TURNS, DBBenchConfig
from agent_peft.environments.db_bench.database import Database, DatabaseStopped
from agent_peft.environments.db_bench.episode import open_database, replies_of
from agent_peft.environments.db_bench.generation.english import plural
from agent_peft.environments.db_bench.generation.plan import name_sql
from agent_peft.environments.db_bench.generation.sampler import RESERVED
from agent_peft.environments.db_bench.protocol import PROTOCOLS
from agent_peft.environments.db_bench.tasks import SQLProblem

_PREFIXES = {"COUNT": "total", "SUM": "total", "AVG": "avg", "MAX": "max", "MIN": "min"}
_NAME = r"(?:`[^`]+`|[A-Za-z_]\w*)"
_AGGREGATE = re.compile(
    rf"\b(COUNT|SUM|AVG|MAX|MIN)\(\s*(?:\w+\.)?({_NAME}|\*)\s*\)(?:\s+AS\s+({_NAME}))?", re.IGNORECASE
)
_RANGE = re.compile(rf"\bMAX\((?:\w+\.)?({_NAME})\) - MIN\((?:\w+\.)?\1\)(?: AS ({_NAME}))?")
_HAVING = re.compile(r"([^;]*?) GROUP BY ([^();]*?) HAVING (.*?)((?: ORDER BY | LIMIT ).*)?;", re.DOTALL)
_TOKEN = re.compile(rf"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|{_NAME}")


def demonstrate(problem: SQLProblem, config: DBBenchConfig, rng: random.Random) -> tuple[str, ...] | None:
    """Replies that solve the problem, or None if the gold SQL does not run. ``rng`` draws whether a mistake
    comes first (``config.repairs``), and which one.
    """
    repairs = rng.random() < config.repairs
    protocol = PROTOCOLS[config.protocol]
    database = open_database(config, problem.table, seed=0)
    try:
        wrong = _wrong_statement(problem, database, rng) if repairs else None
        replies = replies_of(problem, database.execute(problem.sql), protocol)
    except DatabaseStopped:
        return None
    finally:
        database.close()
    if replies is None or config.max_turns < REPAIR_TURNS:
        return replies
    return replies if wrong is None else (Mistake(protocol.operation(wrong)), *replies)


def _wrong_statement(problem: SQLProblem, database: Database, rng: random.Random) -> str | None:
    """The gold SQL with a mistake that the database refuses, or None. Each try is reset."""
    for wrong in wrong_statements(problem, rng):
        if database.execute(wrong).error is not None:
            return wrong
        database.reset()
    return None


def wrong_statements(problem: SQLProblem, rng: random.Random) -> Iterator[str]:
    """The gold SQL with a mistake in it, one of each kind: an aggregate or a range written as a column, a
    column in the plural or by the last word of its name, another name for the table, the sum of what is to be
    counted, and the condition of HAVING in WHERE.
    """
    # a weighted order without repetition (Efraimidis and Spirakis, 2006)
    for made in sorted(_MISTAKES, key=lambda made: rng.random() ** (1 / _MISTAKES[made]), reverse=True):
        if (wrong := made(problem, rng)) is not None and wrong != problem.sql:
            yield wrong


def _aggregate(problem: SQLProblem, rng: random.Random) -> str | None:
    """``SUM(quantity) AS total_quantity`` becomes ``total_quantity``."""
    found = _AGGREGATE.search(problem.sql)
    if found is None:
        return None
    column = "count" if found[2] == "*" else found[2].strip("`")
    name = found[3] or name_sql(f"{_PREFIXES[found[1].upper()]}_{column}")
    return problem.sql[: found.start()] + name + problem.sql[found.end() :]


def _range(problem: SQLProblem, rng: random.Random) -> str | None:
    """``MAX(fee) - MIN(fee)`` becomes ``fee_range``."""
    found = _RANGE.search(problem.sql)
    if found is None:
        return None
    name = found[2] or name_sql(f"{found[1].strip('`')}_range")
    return _RANGE.sub(lambda _: name, problem.sql)


def _counted(problem: SQLProblem, rng: random.Random) -> str | None:
    """``COUNT(*)`` becomes ``SUM(orders)``."""
    last = re.split(r"[_ ]", problem.table.name)[-1]
    return problem.sql.replace("COUNT(*)", f"SUM({name_sql(last)})")


def _where(problem: SQLProblem, rng: random.Random) -> str | None:
    """``GROUP BY size HAVING AVG(fee) > 5`` becomes ``WHERE AVG(fee) > 5 GROUP BY size``."""
    found = _HAVING.fullmatch(problem.sql)
    if found is None or found[3].count("(") != found[3].count(")") or " WHERE " in found[1]:
        return None
    return f"{found[1]} WHERE {found[3]} GROUP BY {found[2]}{found[4] or ''};"


def _plural(problem: SQLProblem, rng: random.Random) -> str | None:
    words = {name: re.split(r"([_ ])", name) for name in problem.table.headers}
    return _renamed(
        problem, rng, {name: "".join((*parts[:-1], plural(parts[-1]))) for name, parts in words.items()}
    )


def _short(problem: SQLProblem, rng: random.Random) -> str | None:
    """``patient_id`` becomes ``id``."""
    words = {name: re.split(r"[_ ]", name) for name in problem.table.headers}
    return _renamed(problem, rng, {name: parts[-1] for name, parts in words.items() if len(parts) > 1})


def _table(problem: SQLProblem, rng: random.Random) -> str | None:
    """The last word of the table's name, or the name that the prompt's example has."""
    table = problem.table.name
    *others, last = re.split(r"[_ ]", table)
    return _replaced(problem.sql, table, last if others else "t")


def _renamed(problem: SQLProblem, rng: random.Random, names: dict[str, str]) -> str | None:
    """The gold SQL with one of its columns under its other name."""
    headers = {name.lower() for name in problem.table.headers} | {problem.table.name.lower()}
    used = {_bare(token) for token in _TOKEN.findall(problem.sql)}
    options = [
        name
        for name, other in names.items()
        if name.lower() in used and other.lower() not in headers | RESERVED
    ]
    if not options:
        return None
    name = rng.choice(options)
    return _replaced(problem.sql, name, names[name])


def _replaced(sql: str, name: str, other: str) -> str:
    """The statement with ``other`` wherever it has the identifier ``name``."""
    return _TOKEN.sub(lambda token: name_sql(other) if _bare(token[0]) == name.lower() else token[0], sql)


def _bare(token: str) -> str:
    """An identifier without its backticks; a text keeps its quotes."""
    return token.strip("`").lower()


# how often small models make each mistake, where the statement allows it
_MISTAKES = {_aggregate: 35, _plural: 27, _short: 15, _counted: 12, _range: 12, _table: 8, _where: 8}
