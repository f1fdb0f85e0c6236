"""Tasks with one focus skill each, made up in LifelongAgentBench's format.

Everything an agent needs is in the instruction and the headers: which columns to return and in which order,
every value, every sort. Results are short, and a sort or a limit never meets a tie.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from agent_peft.environments.db_bench import phrasings, schema_pools
from agent_peft.environments.db_bench.database import Cell, Column, Row, Table
from agent_peft.environments.db_bench.phrasings import Phrasings
from agent_peft.environments.db_bench.schemas import Field, Schema
from agent_peft.environments.db_bench.sqlite import SQLiteDatabase
from agent_peft.environments.db_bench.syntax import skills_of
from agent_peft.environments.db_bench.tasks import table_md5
from agent_peft.seeding import derive, generator
from agent_peft.types import AgentPeftError

SPLITS: dict[str, tuple[Sequence[Schema], Phrasings]] = {
    "train": (schema_pools.TRAIN, phrasings.TRAIN),
    "heldout": (schema_pools.HELDOUT, phrasings.HELDOUT),
}
_MAX_RESULT_ROWS = 5
_FRESH_ATTEMPTS = (
    100  # draws in search of a statement not yet used; after that only the whole task must be new
)
_ATTEMPTS = 1_000


@dataclass(frozen=True)
class _Draw:
    """What a skill's maker draws from."""

    schema: Schema
    rows: tuple[Row, ...]
    wordings: Phrasings
    rng: random.Random


Made = tuple[str, dict[str, object]]  # the SQL, and what fills the template


def generate(
    num_tasks: int, seed: int, skills: Sequence[str] | None = None, split: str = "train"
) -> dict[str, dict[str, Any]]:
    """Entries by id, the skills taking turns. The same arguments give the same entries.

    Args:
        num_tasks: how many.
        seed: another seed gives other tasks.
        skills: some of `GENERATED_SKILLS` (default: all).
        split: ``train`` or ``heldout``, which share no table name and no phrasing.

    Raises:
        AgentPeftError: an argument is wrong.
    """
    skills = tuple(skills or GENERATED_SKILLS)
    for skill in skills:
        if skill not in _MAKERS:
            raise AgentPeftError(
                f"no tasks can be generated for skill {skill!r}; choose among {', '.join(_MAKERS)}"
            )
    if split not in SPLITS:
        raise AgentPeftError(f"there is no split {split!r}; choose train or heldout")
    if num_tasks < 1:
        raise AgentPeftError(f"num_tasks must be at least 1, not {num_tasks}")
    entries: dict[str, dict[str, Any]] = {}
    statements: set[str] = set()
    tasks: set[str] = set()
    for i in range(num_tasks):
        skill = skills[i % len(skills)]
        name = f"{split}-{i:04d}-{skill}"
        entries[name] = _distinct_entry(
            i, skill, split, generator(seed, "db_bench", split, skill, i), statements, tasks
        )
    return entries


def _distinct_entry(
    index: int, skill: str, split: str, rng: random.Random, statements: set[str], tasks: set[str]
) -> dict[str, Any]:
    for attempt in range(_ATTEMPTS):
        schemas, wordings = SPLITS[split]
        schema = rng.choice(schemas)
        few = skill in ("select", "order_by_single_column")  # their result is the whole table
        rows = schema.rows(5 if few else rng.randint(6, 10), rng)
        made = _MAKERS[skill](_Draw(schema, rows, wordings, rng))
        if made is None:
            continue
        sql, slots = made
        if sql in statements and attempt < _FRESH_ATTEMPTS:
            continue
        instruction = rng.choice(wordings.templates[skill]).format(
            table=schema.table, one=schema.one, many=schema.many, **slots
        )
        instruction = instruction[0].upper() + instruction[1:]
        whole = json.dumps([instruction, rows])
        answer = _answer(
            Table(schema.table, tuple(Column(field.name, field.type) for field in schema.fields), rows), sql
        )
        if answer is None or whole in tasks:
            continue
        statements.add(sql)
        tasks.add(whole)
        return {
            "sample_index": index,
            "answer_info": answer,
            "table_info": {
                "name": schema.table,
                "column_info_list": [{"name": field.name, "type": field.type} for field in schema.fields],
                "row_list": [list(row) for row in rows],
            },
            "instruction": instruction,
            "skill_list": [skill, *(other for other in skills_of(sql) if other != skill)],
            "sql_instruction_row_list_entry_hash": derive(0, sql, whole),
        }
    raise AgentPeftError(
        f"no further distinct {skill} task was found in {_ATTEMPTS} draws; ask for fewer tasks"
    )


def _answer(table: Table, sql: str) -> dict[str, Any] | None:
    """The entry's ``answer_info``, or None if the statement is not worth asking for."""
    database = SQLiteDatabase(table, seconds=2.0, steps=1_000_000, seed=0)
    try:
        executed, after = database.execute(sql), database.table()
    finally:
        database.close()
    if executed.error is not None or after is None:
        raise RuntimeError(f"a generated statement fails ({executed.error}): {sql}")
    if executed.rows is not None:
        fits = 1 <= len(executed.rows) <= _MAX_RESULT_ROWS and len(executed.rows[0]) <= 3
        return {"direct": [list(row) for row in executed.rows], "md5": None, "sql": sql} if fits else None
    if sorted(map(repr, after)) == sorted(map(repr, table.rows)) or (executed.changed >= len(table.rows)):
        return None
    return {"direct": None, "md5": table_md5(after), "sql": sql}


def _insert(draw: _Draw) -> Made:
    schema, rng = draw.schema, draw.rng
    cells = []
    for i, field in enumerate(schema.fields):
        taken = {row[i] for row in draw.rows} if field.kind != "category" else set()
        while (cell := field.draw_one(rng)) in taken:
            pass
        cells.append(cell)
    names = ", ".join(field.name for field in schema.fields)
    values = ", ".join(map(_sql, cells))
    pairs = list(zip(schema.fields, cells, strict=True))
    return f"INSERT INTO {schema.table} ({names}) VALUES ({values});", {
        "cells": ", ".join(f"{field.name} = {_shown(cell)}" for field, cell in pairs),
        "cells_said": _joined([f"{field.said} {_shown(cell)}" for field, cell in pairs]),
    }


def _update(draw: _Draw) -> Made:
    target = draw.rng.choice(draw.schema.of("category", "number", "day"))
    value = target.draw_one(draw.rng)
    where, slots = _condition(draw, besides=target)
    sql = f"UPDATE {draw.schema.table} SET {target.name} = {_sql(value)} WHERE {where};"
    return sql, {**slots, "column": target.name, "column_said": target.said, "value": _shown(value)}


def _delete(draw: _Draw) -> Made:
    where, slots = _condition(draw)
    return f"DELETE FROM {draw.schema.table} WHERE {where};", slots


def _select(draw: _Draw) -> Made:
    names, slots = _columns(draw, most=2)
    return f"SELECT {names} FROM {draw.schema.table};", slots


def _where(draw: _Draw) -> Made:
    where, condition = _condition(draw)
    names, slots = _columns(draw, most=3)
    return f"SELECT {names} FROM {draw.schema.table} WHERE {where};", {**condition, **slots}


def _order_by(draw: _Draw) -> Made:
    key, descending, slots = _sort(draw)
    names, columns = _columns(draw, most=2)
    sql = f"SELECT {names} FROM {draw.schema.table} ORDER BY {key.name} {'DESC' if descending else 'ASC'};"
    return sql, {**slots, **columns}


def _limit(draw: _Draw) -> Made:
    key, descending, slots = _sort(draw)
    names, columns = _columns(draw, most=3)
    count = draw.rng.randint(2, 4)
    sql = f"SELECT {names} FROM {draw.schema.table} ORDER BY {key.name} {'DESC' if descending else 'ASC'} LIMIT {count};"  # noqa: E501
    return sql, {**slots, **columns, "count": count}


def _group_by(draw: _Draw) -> Made:
    schema, rng = draw.schema, draw.rng
    group, column = rng.choice(schema.of("category")), rng.choice(schema.of("number"))
    function = rng.choice(list(draw.wordings.aggregates))
    wording = draw.wordings.aggregates[function]
    said = wording.format(many=schema.many, column=column.said)
    literal = wording.format(many=schema.many, column=column.name)
    first = rng.random() < 0.75  # the group before the aggregate
    expressions = [group.name, "COUNT(*)" if function == "COUNT" else f"{function}({column.name})"]
    outputs, outputs_said = [group.name, literal], [group.said, said]
    if not first:
        expressions, outputs, outputs_said = expressions[::-1], outputs[::-1], outputs_said[::-1]
    return f"SELECT {', '.join(expressions)} FROM {schema.table} GROUP BY {group.name};", {
        "group": group.name,
        "group_said": group.said,
        "aggregate": literal,
        "aggregate_said": said,
        "outputs": _joined([f"the {output}" for output in outputs]),
        "outputs_said": _joined([f"the {output}" for output in outputs_said]),
    }


_MAKERS: dict[str, Callable[[_Draw], Made]] = {
    "insert": _insert,
    "update": _update,
    "delete": _delete,
    "select": _select,
    "where_single_condition": _where,
    "order_by_single_column": _order_by,
    "limit_only": _limit,
    "group_by_single_column": _group_by,
}
GENERATED_SKILLS = tuple(_MAKERS)


def _condition(draw: _Draw, besides: Field | None = None) -> Made:
    """A comparison of a column with a value near those in the table."""
    field = draw.rng.choice([field for field in draw.schema.fields if field is not besides])
    cell = draw.rng.choice(draw.rows)[draw.schema.fields.index(field)]
    operators = {"number": ("=", ">", "<", ">=", "<="), "day": ("=", ">", "<")}.get(field.kind, ("=",))
    operator = draw.rng.choice(operators)
    words = (draw.wordings.day_comparisons if field.kind == "day" else draw.wordings.comparisons)[operator]
    return f"{field.name} {operator} {_sql(cell)}", {
        "condition": f"{field.name} {words} {_shown(cell)}",
        "condition_said": f"{field.said} {words} {_shown(cell)}",
    }


def _columns(draw: _Draw, most: int) -> Made:
    """Some columns, in an order of their own."""
    fields = draw.rng.sample(draw.schema.fields, draw.rng.randint(1, min(most, len(draw.schema.fields))))
    return ", ".join(field.name for field in fields), {
        "columns": _joined([field.name for field in fields]),
        "columns_said": _joined([field.said for field in fields]),
    }


def _sort(draw: _Draw) -> tuple[Field, bool, dict[str, object]]:
    """A column without ties to sort by."""
    key, descending = draw.rng.choice(draw.schema.of("number", "day")), draw.rng.random() < 0.5
    return (
        key,
        descending,
        {
            "key": key.name,
            "key_said": key.said,
            "direction": draw.wordings.directions[key.kind, descending],
            "extreme": draw.wordings.extremes[key.kind, descending],
        },
    )


def _joined(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def _sql(cell: Cell) -> str:
    return "'" + cell.replace("'", "''") + "'" if isinstance(cell, str) else str(cell)


def _shown(cell: Cell) -> str:
    """A value as an instruction writes it."""
    return str(cell) if not isinstance(cell, str) else f'"{cell}"' if "'" in cell else f"'{cell}'"
