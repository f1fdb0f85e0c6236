"""Tasks in two formats: reading files and entries.

An entry of LifelongAgentBench is ``{"instruction", "skill_list"?, "table_info": {"name", "column_info_list":
[{"name", "type"}], "row_list"}, "answer_info": {"sql", "direct", "md5"}}``. ``direct`` holds the rows of a
SELECT. It is null for a change, whose final table ``md5`` identifies.

An entry of AgentBench (dbbench, Liu et al., 2023) is ``{"description", "type": [NAME], "table":
{"table_name", "table_info": {"columns": [{"name"}], "rows"}}, "label", "sql"?: {"query"}, "answer_md5"?}``. A
change has its statement as ``label``, and ``answer_md5`` identifies the final table. A question has its
answer as ``label``, a list of texts, and mostly a statement, which need not give that answer: its author was
a language model. All columns are TEXT and all cells texts, whatever the entry declares.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_peft.environments.db_bench.database import DeclaredColumn, Row, Table
from agent_peft.environments.db_bench.syntax import order_keys, primary_skill, skills_of
from agent_peft.environments.task_files.reading import list_of, object_of, read_tasks, text_of, wrong
from agent_peft.types import AgentPeftError, Task

CHANGES = ("INSERT", "UPDATE", "DELETE")
# WITH … INSERT INTO t (a) SELECT … is not a query
_QUERY = re.compile(r"\s*(select|values|with\b(?![^;]*\binto\b)[^;]*\)\s*select)\b", re.IGNORECASE)
_TYPE = re.compile(r"[A-Za-z][A-Za-z0-9_ ]*(\([0-9, ]*\)[A-Za-z0-9_ ]*)?")  # VARCHAR(255) NOT NULL


@dataclass(frozen=True)
class SQLProblem:
    """The checked content of an entry. ``direct`` is the answer of a SELECT, None for a modification;
    ``order`` is `order_keys` of its SQL. ``labels`` is the answer of a question of AgentBench, which has no
    ``direct``, and whose SQL may be empty or give another answer.

    >>> from agent_peft.environments.db_bench.database import DeclaredColumn
    >>> table = Table("t", (DeclaredColumn("a", "INT"),), ((1,),))
    >>> SQLProblem("Delete all.", table, "DELETE FROM t", direct=None, md5=None, order=None).table.name
    't'
    """

    instruction: str
    table: Table
    sql: str
    direct: tuple[Row, ...] | None
    md5: str | None
    order: tuple[int, ...] | None
    labels: tuple[str, ...] | None = None

    @property
    def is_change(self) -> bool:
        return self.direct is None and self.labels is None


def load_tasks(path: Path) -> tuple[Task, ...]:
    """The tasks of a file: a JSON object of entries (its keys become the ids), a JSON list, or JSON lines."""
    return read_tasks(
        path, "DB Bench", lambda content: "answer_info" in content or is_agentbench(content), task_of
    )


def task_of(name: str, entry: Any) -> Task:
    """An entry, checked, as a task. Its skills are those that the entry names, or those of its SQL; the
    primary one is the first. The skill of AgentBench's questions is their type, such as ``counting``.
    """
    read_entry(name, entry)
    return generated_task(name, entry)


def generated_task(name: str, entry: Any) -> Task:
    """`task_of` for an entry that need not be checked."""
    if is_agentbench(entry):
        kind = _type(name, entry)
        skills = skills_of(_read_agentbench(name, entry).sql) if kind in CHANGES else (kind,)
    else:
        skills = entry.get("skill_list") or skills_of(entry["answer_info"]["sql"])
    if not isinstance(skills, list | tuple) or not all(isinstance(skill, str) for skill in skills):
        raise wrong(name, "skill_list", "a list of skill names")
    first = [primary_skill(skills)] if skills else []
    return Task(id=name, skills=(*first, *(skill for skill in skills if skill not in first)), content=entry)


def read_entry(name: str, entry: Any) -> SQLProblem:
    """Check an entry, and return its content. An error names the entry and its key."""
    if not isinstance(entry, Mapping):
        raise AgentPeftError(f"entry {name!r}: must be a JSON object, not {type(entry).__name__}")
    if is_agentbench(entry):
        return _read_agentbench(name, entry)
    instruction = text_of(name, entry, "instruction")
    table_info, answer = object_of(name, entry, "table_info"), object_of(name, entry, "answer_info")
    columns = []
    for i, column in enumerate(list_of(name, table_info, "table_info.column_info_list")):
        key = f"table_info.column_info_list[{i}]"
        if not isinstance(column, Mapping):
            raise wrong(name, key, "an object with name and type")
        columns.append(
            DeclaredColumn(text_of(name, column, f"{key}.name"), text_of(name, column, f"{key}.type"))
        )
        if not _TYPE.fullmatch(columns[-1].type):
            raise wrong(name, f"{key}.type", "a column type such as INT or TEXT")
    if not columns:
        raise wrong(name, "table_info.column_info_list", "a list of at least one column")
    rows = _rows(name, table_info, "table_info.row_list", width=len(columns))
    table = Table(text_of(name, table_info, "table_info.name"), tuple(columns), rows)
    sql = text_of(name, answer, "answer_info.sql")
    direct = None if answer.get("direct") is None else _rows(name, answer, "answer_info.direct")
    if direct is None and _QUERY.match(sql):
        raise wrong(name, "answer_info.direct", "the list of rows that the SELECT returns")
    md5 = answer.get("md5")
    if md5 is not None and not (isinstance(md5, str) and re.fullmatch("[0-9a-f]{32}", md5)):
        raise wrong(name, "answer_info.md5", "null or 32 hexadecimal digits")
    order = order_keys(sql, table.headers, len(direct[0])) if direct else None
    return SQLProblem(instruction, table, sql, direct, md5, order)


def is_agentbench(entry: Mapping[str, Any]) -> bool:
    """Whether an entry is one of AgentBench's."""
    return "description" in entry and "table" in entry


def _read_agentbench(name: str, entry: Mapping[str, Any]) -> SQLProblem:
    description = text_of(name, entry, "description")
    table = object_of(name, entry, "table")
    info = object_of(name, table, "table.table_info")
    columns = []
    for i, column in enumerate(list_of(name, info, "table.table_info.columns")):
        # a few names are empty, which some databases accept
        if not isinstance(column, Mapping) or not isinstance(column.get("name"), str):
            raise wrong(name, f"table.table_info.columns[{i}]", "an object with a name")
        columns.append(DeclaredColumn(column["name"], "TEXT"))
    if not columns:
        raise wrong(name, "table.table_info.columns", "a list of at least one column")
    rows = [tuple(map(str, row)) for row in _rows(name, info, "table.table_info.rows", len(columns))]
    texts = Table(text_of(name, table, "table.table_name"), tuple(columns), rows)
    label = entry.get("label")
    labels = (label,) if isinstance(label, str) else label
    if not isinstance(labels, list | tuple) or not all(isinstance(text, str) for text in labels):
        raise wrong(name, "label", "a list of texts")
    gold = entry.get("sql")
    sql = gold.get("query") if isinstance(gold, Mapping) else None
    if _type(name, entry) not in CHANGES:
        sql = sql if isinstance(sql, str) else ""
        return SQLProblem(description, texts, sql, direct=None, md5=None, order=None, labels=tuple(labels))
    sql = sql or (labels[0] if labels else None)
    if not isinstance(sql, str) or not sql.strip():
        raise wrong(name, "label", "a list with the SQL that makes the change")
    md5 = re.search("[0-9a-f]{32}", str(entry.get("answer_md5") or ""))  # it is part of a printed result
    return SQLProblem(description, texts, sql, direct=None, md5=md5[0] if md5 else None, order=None)


def _type(name: str, entry: Mapping[str, Any]) -> str:
    kinds = entry.get("type")
    if not isinstance(kinds, list | tuple) or not kinds or not isinstance(kinds[0], str):
        raise wrong(name, "type", "a list with a name, such as INSERT or counting")
    return kinds[0]


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
