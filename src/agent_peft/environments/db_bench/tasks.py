"""LifelongAgentBench's entry format: reading files and entries.

An entry is ``{"instruction", "skill_list"?, "table_info": {"name", "column_info_list": [{"name", "type"}],
"row_list"}, "answer_info": {"sql", "direct", "md5"}}``. ``direct`` holds the rows of a SELECT. It is null for
a modification, whose final table ``md5`` identifies.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from agent_peft.environments.db_bench import agentbench
from agent_peft.environments.db_bench.database import Column, Row, Table
from agent_peft.environments.db_bench.problem import SQLProblem
from agent_peft.environments.db_bench.syntax import order_keys, primary_skill, skills_of
from agent_peft.environments.task_files.reading import list_of, object_of, read_tasks, text_of, wrong
from agent_peft.types import AgentPeftError, Task

_TYPE = re.compile(r"[A-Za-z][A-Za-z0-9_ ]*(\([0-9, ]*\))?")


def load_tasks(path: Path) -> tuple[Task, ...]:
    """The tasks of a file: a JSON object of entries (its keys become the ids), a JSON list, or JSON lines.

    Raises:
        AgentPeftError: the file cannot be read, or an entry is not as it should be (the entry and the key are
            named).
    """
    return read_tasks(
        path, "DB Bench", lambda content: "answer_info" in content or agentbench.is_entry(content), task_of
    )


def task_of(name: str, entry: Any) -> Task:
    """An entry as a task; its skills are those the entry names (else those of its SQL), the primary one
    first.

    Raises:
        AgentPeftError: as `read_entry`.
    """
    read_entry(name, entry)
    return generated_task(name, entry)


def generated_task(name: str, entry: Any) -> Task:
    """`task_of` for an entry that need not be checked."""
    if agentbench.is_entry(entry):
        skills = agentbench.skills_of_entry(name, entry)
    else:
        skills = entry.get("skill_list") or skills_of(entry["answer_info"]["sql"])
    if not isinstance(skills, list | tuple) or not all(isinstance(skill, str) for skill in skills):
        raise wrong(name, "skill_list", "a list of skill names")
    first = [primary_skill(skills)] if skills else []
    return Task(id=name, skills=(*first, *(skill for skill in skills if skill not in first)), content=entry)


def read_entry(name: str, entry: Any) -> SQLProblem:
    """Check an entry, and return its content.

    Raises:
        AgentPeftError: with the entry's name, the key that is wrong, and what belongs there.
    """
    if not isinstance(entry, Mapping):
        raise AgentPeftError(f"entry {name!r}: must be a JSON object, not {type(entry).__name__}")
    if agentbench.is_entry(entry):
        return agentbench.read_problem(name, entry)
    instruction = text_of(name, entry, "instruction")
    table_info, answer = object_of(name, entry, "table_info"), object_of(name, entry, "answer_info")
    columns = []
    for i, column in enumerate(list_of(name, table_info, "table_info.column_info_list")):
        key = f"table_info.column_info_list[{i}]"
        if not isinstance(column, Mapping):
            raise wrong(name, key, "an object with name and type")
        columns.append(Column(text_of(name, column, f"{key}.name"), text_of(name, column, f"{key}.type")))
        if not _TYPE.fullmatch(columns[-1].type):
            raise wrong(name, f"{key}.type", "a column type such as INT or TEXT")
    if not columns:
        raise wrong(name, "table_info.column_info_list", "a list of at least one column")
    rows = _rows(name, table_info, "table_info.row_list", width=len(columns))
    table = Table(text_of(name, table_info, "table_info.name"), tuple(columns), rows)
    sql = text_of(name, answer, "answer_info.sql")
    direct = None if answer.get("direct") is None else _rows(name, answer, "answer_info.direct")
    if direct is None and re.match(r"\s*(select|values|with\b[^;]*\)\s*select)\b", sql, re.IGNORECASE):
        raise wrong(name, "answer_info.direct", "the list of rows that the SELECT returns")
    md5 = answer.get("md5")
    if md5 is not None and not (isinstance(md5, str) and re.fullmatch("[0-9a-f]{32}", md5)):
        raise wrong(name, "answer_info.md5", "null or 32 hexadecimal digits")
    order = order_keys(sql, table.headers, len(direct[0])) if direct else None
    return SQLProblem(instruction, table, sql, direct, md5, order)


def table_md5(rows: Iterable[Row]) -> str:
    """LifelongAgentBench's digest of a table, free of order: the MD5 of the sorted first five hexadecimal
    digits of each row's MD5.

    Its MySQL query keeps 1,024 characters of the joined digits, and so do we. Good for telling that a gold
    gave another table than it gave its author; too weak to grade with.
    """
    digests = sorted(
        hashlib.md5(",".join(str(cell) for cell in row if cell is not None).encode()).hexdigest()[:5]
        for row in rows
    )
    return hashlib.md5(",".join(digests)[:1024].encode()).hexdigest()


def _rows(name: str, holder: Mapping[str, Any], key: str, width: int | None = None) -> tuple[Row, ...]:
    rows = []
    for i, row in enumerate(list_of(name, holder, key)):
        if not isinstance(row, list | tuple) or (width is not None and len(row) != width):
            raise wrong(
                name, f"{key}[{i}]", "a list" if width is None else f"a list of {width} cells, one per column"
            )
        for j, cell in enumerate(row):
            if not isinstance(cell, str | int | float | None):
                raise wrong(name, f"{key}[{i}][{j}]", "a text, a number or null")
        rows.append(tuple(row))
    if len({len(row) for row in rows}) > 1:
        raise wrong(name, key, "a list of rows of one length")
    return tuple(rows)
