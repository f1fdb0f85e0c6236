"""Variations of tasks: a question keeps its wording, and has other columns, values, directions, comparisons
or functions, or another table.

A few hundred tasks of a person's own have more ways to ask than a generator, but their tables and
values are few. A variation is changed in the statement and in the question alike: what the question does not
name stays in the statement, too, or the variation is given up. Only what can be used as a task is kept.
"""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Callable, Container, Sequence
from typing import Any

from sqlglot import exp

from agent_peft.environments.db_bench.database import Row, Table
from agent_peft.environments.db_bench.syntax import parse_sql, skills_of
from agent_peft.environments.db_bench.tasks import SQLProblem, read_entry, task_of
from agent_peft.environments.db_bench.variation.columns import moved_aliases, moved_columns
from agent_peft.environments.db_bench.variation.directions import turn_round
from agent_peft.environments.db_bench.variation.original import Original, Unfit
from agent_peft.environments.db_bench.variation.question import MARKS, Question, singular
from agent_peft.environments.db_bench.variation.values import move_values
from agent_peft.seeding import generator
from agent_peft.types import Task

logger = logging.getLogger(__name__)

_TRIES = 60  # of a task, for each variation
_ELSEWHERE = 40  # of them, in which another table may be taken
_OWN_TABLE = 0.1  # how often one of these stays in its own table
# words that are in many names, and mean nothing when one is left
_COMMON = frozenset(("date", "number", "total", "time", "count", "name", "type", "year", "average"))


def variations(
    tasks: Sequence[Task], number: int, answer_of: Callable[[SQLProblem], tuple[Row, ...] | None]
) -> tuple[Task, ...]:
    """``number`` tasks made from ``tasks`` in turn, the same ones for the same tasks. Fewer, with a warning,
    where the questions do not name their columns and values.

    Args:
        answer_of: runs a gold statement; the rows of its answer or, after a change, of its table. None if it
            makes no usable task.
    """
    problems = {task.id: read_entry(task.id, task.content) for task in tasks}
    originals = {name: original for name, problem in problems.items() if (original := _original(problem))}
    made: dict[str, Task] = {}
    texts = {problem.instruction for problem in problems.values()}
    turn = 0
    while originals and len(made) < number:
        for name in list(originals)[: number - len(made)]:
            rng = generator(0, "db_bench", "variation", name, turn)
            entry = _new_entry(originals[name], list(originals.values()), rng, texts, answer_of)
            if entry is None:
                del originals[name]
            else:
                texts.add(entry["instruction"])
                made[f"{name}~{turn}"] = task_of(f"{name}~{turn}", entry)
        turn += 1
    if len(made) < number:
        logger.warning(
            "db_bench: %d of %d variations could be made of %d tasks", len(made), number, len(tasks)
        )
    return tuple(made.values())


def _original(problem: SQLProblem) -> Original | None:
    tree = parse_sql(problem.sql) if problem.labels is None else None
    kinds = exp.Select | exp.Insert | exp.Update | exp.Delete
    if not isinstance(tree, kinds) or re.search(f"[{MARKS}]", problem.instruction):
        return None
    aliases = {node.alias for node in tree.find_all(exp.Alias, exp.TableAlias)}
    return None if aliases & set(problem.table.headers) else Original(problem, tree)


def _new_entry(
    original: Original,
    tables: Sequence[Original],
    rng: random.Random,
    texts: Container[str],
    answer_of: Callable[[SQLProblem], tuple[Row, ...] | None],
) -> dict[str, Any] | None:
    """A variation of ``original`` whose question is not in ``texts``."""
    for number in range(_TRIES):
        elsewhere = number < _ELSEWHERE and rng.random() >= _OWN_TABLE
        try:
            instruction, sql, table = _varied(original, rng.choice(tables) if elsewhere else original, rng)
        except (Unfit, RecursionError):  # or it is nested too deeply
            continue
        if instruction in texts:
            continue
        asks = original.problem.direct is not None
        answer = answer_of(SQLProblem(instruction, table, sql, () if asks else None, None, None))
        if answer is None:
            continue
        return {
            "instruction": instruction,
            "skill_list": list(skills_of(sql)),
            "table_info": {
                "name": table.name,
                "column_info_list": [{"name": column.name, "type": column.type} for column in table.columns],
                "row_list": [list(row) for row in table.rows],
            },
            "answer_info": {
                "sql": sql,
                "direct": [list(row) for row in answer] if asks else None,
                "md5": None,
            },
        }
    return None


def _varied(original: Original, other: Original, rng: random.Random) -> tuple[str, str, Table]:
    """A question, its statement and its table; the rows are those of ``other``."""
    moved = moved_columns(original, other, rng)
    tree, question = original.tree.copy(), Question(original.problem.instruction)
    if " " in original.table.name:  # a column's name may be a part of it
        question.keep(original.table.name, other.table.name)
    turn_round(tree, question, rng)
    names = moved | moved_aliases(tree, moved, other.table.headers)
    # longer names first: total_price has price in it
    for old in sorted(names, key=len, reverse=True):
        if not question.rename(old, names[old]) and old in moved and moved[old] != old:
            raise Unfit
    if other.table.name != original.table.name:
        question.move_table(original.table.name, other.table.name)
    move_values(tree, question, original, other, moved, rng)
    lost = {word for old in moved if moved[old] != old for word in old.lower().split("_") if len(word) > 2}
    if {singular(word) for word in lost - _COMMON} & question.words_left():
        raise Unfit
    names[original.table.name] = other.table.name
    for node in tree.find_all(exp.Identifier):
        new = names.get(node.name, node.name)
        node.set("this", new)
        node.set("quoted", node.quoted or not re.fullmatch(r"\w+", new))
    return question.finished(), tree.sql(dialect="mysql") + ";", other.table
