"""AgentBench's entry format and its comparison of answers (dbbench, Liu et al., 2023).

An entry is ``{"description", "type": [NAME], "table": {"table_name", "table_info": {"columns": [{"name"}],
"rows"}}, "label", "sql"?: {"query"}, "answer_md5"?}``. A change (INSERT, UPDATE or DELETE) has its statement
as ``label``, and ``answer_md5`` tells the final table. A question has its answer as ``label``, a list of
texts, and mostly a statement, which need not give that answer: its author was a language model.

All columns are TEXT and all cells texts, whatever the entry declares.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from agent_peft.environments.db_bench.database import Cell, Column, Table
from agent_peft.environments.db_bench.literals import read_literal
from agent_peft.environments.db_bench.problem import SQLProblem
from agent_peft.environments.db_bench.syntax import skills_of
from agent_peft.environments.task_files.reading import list_of, object_of, text_of, wrong

CHANGES = ("INSERT", "UPDATE", "DELETE")
_MAX_ANSWER = 100_000  # characters
_TOLERANCE = 1e-2  # of two numbers
# what AgentBench takes for 0, but for the empty text: who writes nothing is never right
_ZEROS = frozenset(["none", "null", "undefined", "nan", "inf", "infinity", "-inf", "-infinity"])


def is_entry(entry: Mapping[str, Any]) -> bool:
    """Whether an entry is one of AgentBench's."""
    return "description" in entry and "table" in entry


def read_problem(name: str, entry: Mapping[str, Any]) -> SQLProblem:
    """Check an entry, and return its content.

    Raises:
        AgentPeftError: with the entry's name, the key that is wrong, and what belongs there.
    """
    description = text_of(name, entry, "description")
    table = _table(name, object_of(name, entry, "table"))
    label = entry.get("label")
    labels = (label,) if isinstance(label, str) else label
    if not isinstance(labels, list | tuple) or not all(isinstance(text, str) for text in labels):
        raise wrong(name, "label", "a list of texts")
    gold = entry.get("sql")
    sql = gold.get("query") if isinstance(gold, Mapping) else None
    if _type(name, entry) not in CHANGES:
        sql = sql if isinstance(sql, str) else ""
        return SQLProblem(description, table, sql, direct=None, md5=None, order=None, labels=tuple(labels))
    sql = sql or (labels[0] if labels else None)
    if not isinstance(sql, str) or not sql.strip():
        raise wrong(name, "label", "a list with the SQL that makes the change")
    md5 = re.search("[0-9a-f]{32}", str(entry.get("answer_md5") or ""))  # it stands in a printed result
    return SQLProblem(description, table, sql, direct=None, md5=md5[0] if md5 else None, order=None)


def skills_of_entry(name: str, entry: Mapping[str, Any]) -> Sequence[str]:
    """The skills of a change are those of its SQL; that of a question is its type, such as ``counting``."""
    kind = _type(name, entry)
    return skills_of(read_problem(name, entry).sql) if kind in CHANGES else (kind,)


def answer_matches(text: str, labels: Sequence[str]) -> bool:
    """Grade an answer as AgentBench does: as a set of texts, where thousands commas and percent signs do not
    count, and numbers are equal within 0.01.

    >>> answer_matches("[('1,250',), ('b',)]", ["b", "1250"]), answer_matches("2.0", ["2"])
    (True, True)
    """
    answered = _values(text) if len(text) <= _MAX_ANSWER else []
    answers, truth = list(map(_plain, answered)), list(map(_plain, labels))
    if not answers or "" in answers:
        return False
    numbers, true_numbers = _numbers(answers), _numbers(truth)
    if numbers is None or true_numbers is None:
        return set(answers) == set(truth)
    if len(numbers) != len(true_numbers):
        return False
    pairs = zip(sorted(numbers), sorted(true_numbers), strict=True)
    return all(abs(a - b) <= _TOLERANCE for a, b in pairs)


def _type(name: str, entry: Mapping[str, Any]) -> str:
    kinds = entry.get("type")
    if not isinstance(kinds, list | tuple) or not kinds or not isinstance(kinds[0], str):
        raise wrong(name, "type", "a list with a name, such as INSERT or counting")
    return kinds[0]


def _table(name: str, table: Mapping[str, Any]) -> Table:
    info = object_of(name, table, "table.table_info")
    columns = []
    for i, column in enumerate(list_of(name, info, "table.table_info.columns")):
        # a few names are empty, which some databases accept
        if not isinstance(column, Mapping) or not isinstance(column.get("name"), str):
            raise wrong(name, f"table.table_info.columns[{i}]", "an object with a name")
        columns.append(Column(column["name"], "TEXT"))
    if not columns:
        raise wrong(name, "table.table_info.columns", "a list of at least one column")
    rows = []
    for i, row in enumerate(list_of(name, info, "table.table_info.rows")):
        if not isinstance(row, list | tuple) or len(row) != len(columns):
            raise wrong(
                name, f"table.table_info.rows[{i}]", f"a list of {len(columns)} cells, one per column"
            )
        if not all(isinstance(cell, str | int | float | None) for cell in row):
            raise wrong(name, f"table.table_info.rows[{i}]", "a list of texts")
        rows.append(tuple(map(str, row)))
    return Table(text_of(name, table, "table.table_name"), tuple(columns), rows)


def _values(text: str) -> list[Cell]:
    """The values of an answer: those of a list, or of rows with one cell each; else the whole text is one."""
    text = text.strip().strip("`").strip()
    if not text.startswith(("[", "(")):
        return [text.strip("'\"")]
    try:
        values = read_literal(text)
    except ValueError:
        return [text]
    cells = [value[0] if isinstance(value, list) and len(value) == 1 else value for value in values]
    return [] if any(isinstance(cell, list) for cell in cells) else cells


def _plain(cell: Cell) -> str:
    text = str(cell).strip().removesuffix("%").strip().replace(",", "")
    return "0" if text.lower() in _ZEROS else text


def _numbers(texts: Sequence[str]) -> list[float] | None:
    try:
        return list(map(float, texts))
    except ValueError:
        return None
