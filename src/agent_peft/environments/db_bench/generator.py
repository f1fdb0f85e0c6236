"""Tasks made up in LifelongAgentBench's format: a table, a statement of a drawn shape, and how a person asks
for it.

Every clause, comparator and direction of a statement matters to its answer (`generation.mutation`), no tie
leaves an answer open, and answers are short. A held-out split changes one thing only: the words, the
phrasing, or which features meet (``heldout``: all three).
"""

from __future__ import annotations

import json
import random
import sqlite3
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from agent_peft.environments.contract import configured
from agent_peft.environments.db_bench.config import GenerateConfig, SplitName
from agent_peft.environments.db_bench.database import Row, other_orders
from agent_peft.environments.db_bench.generation.conditions import Unsatisfiable
from agent_peft.environments.db_bench.generation.grammar import Derivation, Side
from agent_peft.environments.db_bench.generation.mutation import every_part_matters, is_determined
from agent_peft.environments.db_bench.generation.phrasing import Phrasing
from agent_peft.environments.db_bench.generation.plan import (
    Insert,
    Select,
    Sort,
    Statement,
    name_sql,
    qualified,
    skeleton,
    sql,
    wrapped,
)
from agent_peft.environments.db_bench.generation.sampler import StatementSampler
from agent_peft.environments.db_bench.generation.schemas import Schema, draw_rows, draw_schema
from agent_peft.environments.db_bench.generation.shapes import ALONE, Shape, shape_for
from agent_peft.environments.db_bench.grader import rounded_number
from agent_peft.environments.db_bench.tasks import table_md5
from agent_peft.seeding import derive, generator
from agent_peft.types import AgentPeftError

GENERATED_SKILLS = tuple(ALONE)


@dataclass(frozen=True)
class Split:
    """What a split holds out: ``words``, the alternatives of the grammar, and which features meet."""

    words_held_out: bool = False
    phrases: Side = "train"
    composition: str = "train"


SPLITS: dict[SplitName, Split] = {
    "train": Split(),
    "words": Split(words_held_out=True),
    "phrasing": Split(phrases="heldout"),
    "composition": Split(composition="heldout"),
    "heldout": Split(True, "heldout", "any"),
}
_MOST_ROWS = {6: 0.3, 12: 0.3, 25: 0.4}  # of an answer, and how often that is the bound
_TASKS_PER_REPEAT = 1_667  # after so many tasks a skeleton may be used once more
_TRIES_OF_TABLE = 4  # statements drawn for a table
_TRIES_OF_SHAPE = 5  # tables drawn for a shape
_PATIENCE = 30  # tables in search of a new skeleton
_ATTEMPTS = 300


def generate(
    num_tasks: int, seed: int, skills: Sequence[str] | None = None, split: SplitName = "train", **others: Any
) -> dict[str, dict[str, Any]]:
    """Entries by id. The same arguments, which are the keys of `GenerateConfig`, give the same entries, and
    fewer are the first of more. ``skills`` take turns as the primary skill, or in a held-out composition as
    one of the skills.
    """
    drawn = None if skills is None else tuple(skills)
    keys = {"num_tasks": num_tasks, "seed": seed, "skills": drawn, "split": split, **others}
    maker = TaskMaker(configured(GenerateConfig, keys, "generate"))
    entries = {}
    for i in range(num_tasks):
        focus = skills[i % len(skills)] if skills else None
        rng = generator(seed, "db_bench", split, focus or "any", i)
        entries[f"{split}-{i:04d}-{focus or 'any'}"] = maker.entry(i, focus, rng)
    return entries


class _Repeated(Exception):
    """The statement's skeleton was used often enough."""


@dataclass(frozen=True)
class Draft:
    """A task before it is written as an entry; ``bits``: of the phrasing's derivation."""

    schema: Schema
    rows: tuple[Row, ...]
    statement: Statement
    skills: tuple[str, ...]
    answer: list[Row]
    instruction: str
    bits: float


class TaskMaker:
    """Draws tasks one after the other, and remembers the statements' skeletons so that they do not repeat."""

    def __init__(self, config: GenerateConfig) -> None:
        self.config, self.split = config, SPLITS[config.split]
        self._skeletons: Counter[str] = Counter()
        self._instructions: set[str] = set()

    def entry(self, index: int, skill: str | None, rng: random.Random) -> dict[str, Any]:
        """The next task as an entry."""
        draft = self.draft(index, skill, rng)
        gold = sql(draft.statement) + ";"
        rows = [[rounded_number(cell) for cell in row] for row in draft.answer]
        asks = isinstance(draft.statement, Select)
        return {
            "sample_index": index,
            "answer_info": {
                "direct": rows if asks else None,
                "md5": None if asks else table_md5(draft.answer),
                "sql": gold,
            },
            "table_info": {
                "name": draft.schema.table,
                "column_info_list": [
                    {"name": column.name, "type": column.type} for column in draft.schema.columns
                ],
                "row_list": [list(row) for row in draft.rows],
            },
            "instruction": draft.instruction,
            "skill_list": list(draft.skills),
            "sql_instruction_row_list_entry_hash": derive(
                0, gold, json.dumps([draft.instruction, draft.rows])
            ),
        }

    def draft(self, index: int, skill: str | None, rng: random.Random) -> Draft:
        """The next task."""
        tries = 0
        for attempt in range(_ATTEMPTS):
            if tries <= 0:
                tries = _TRIES_OF_SHAPE
                try:
                    shape = shape_for(skill, self.config.combined, self.split.composition, rng)
                except LookupError as error:
                    raise AgentPeftError(str(error)) from None
            most = rng.choices(list(_MOST_ROWS), list(_MOST_ROWS.values()))[0]
            schema = draw_schema(rng, self.split.words_held_out, self.config.plain)
            rows = draw_rows(schema, rng)
            if shape.statement == "select" and not (
                shape.where or shape.limit or shape.groups or shape.aggregates
            ):
                rows = rows[: rng.randint(5, max(most, 8))]  # the answer has them all
            tries -= 1
            table = Scratch(schema, rows)
            sampler = StatementSampler(schema, rows, table.query, rng, self.config.plain)
            try:
                for _ in range(_TRIES_OF_TABLE):
                    found = self._try(sampler, shape, table, most, index if attempt < _PATIENCE else None)
                    if found is not None:
                        plan, answer = found
                        derivation = Derivation(rng, side=self.split.phrases, plain=self.config.plain)
                        instruction = Phrasing(schema, derivation).say(plan)
                        if instruction not in self._instructions:
                            self._instructions.add(instruction)
                            statement = wrapped(plan)
                            self._skeletons[skeleton(statement)] += 1
                            return Draft(
                                schema,
                                rows,
                                qualified(statement),
                                shape.skills,
                                list(answer),
                                instruction,
                                derivation.bits,
                            )
            except _Repeated:
                tries = 0
            finally:
                table.close()
        raise AgentPeftError(
            f"no further task for skill {skill} was found in {_ATTEMPTS} draws; ask for fewer tasks, or for "
            "a larger max_answer_chars"
        )

    def _try(
        self, sampler: StatementSampler, shape: Shape, table: Scratch, most: int, index: int | None
    ) -> tuple[Statement, tuple[Row, ...]] | None:
        """A statement worth asking for, and its answer. ``index``: of a task whose skeleton has to be new."""
        try:
            plan = sampler.statement(shape)
        except Unsatisfiable:
            return None
        statement = wrapped(plan)
        # an INSERT of values has but two skeletons
        listed = isinstance(statement, Insert) and not isinstance(statement.source, Select)
        most_repeats = None if index is None or listed else index // _TASKS_PER_REPEAT
        if most_repeats is not None and self._skeletons[skeleton(statement)] > most_repeats:
            raise _Repeated
        answer = table.answer(statement)
        usable = (
            answer is not None
            and _is_worth_asking(statement, answer, sampler.rows, most, self.config.max_answer_chars)
            and every_part_matters(statement, answer, table.answer)
            and is_determined(statement, sampler.schema.columns, table.answer)
            and _is_stable(statement, answer, sampler)
        )
        return (plan, answer) if usable and answer is not None else None


def _is_stable(statement: Statement, answer: tuple[Row, ...], sampler: StatementSampler) -> bool:
    """Whether a statement answers the same in whatever order the rows are stored. Of three rows that tie in a
    subquery, both orders may keep the middle one; and SQLite may evaluate a subquery of a change when some
    rows are changed already.
    """
    if isinstance(statement, Select) and statement.limit and not statement.order:
        statement = replace(statement, order=(Sort(sampler.schema.columns[0], False),))
    for rows in other_orders(sampler.rows):
        with closing(Scratch(sampler.schema, tuple(map(tuple, rows)))) as table:
            again = table.answer(statement)
            if again is None or [*map(_shown, again)] != [*map(_shown, answer)]:
                return False
    return True


def _shown(row: Row) -> Row:
    return tuple(map(rounded_number, row))


class Scratch:
    """A table in memory, on which statements are tried and undone."""

    def __init__(self, schema: Schema, rows: tuple[Row, ...]) -> None:
        self._schema, self._rows, self._table = schema, rows, name_sql(schema.table)

    @cached_property
    def _connection(self) -> sqlite3.Connection:
        """Made when it is first used: most tables give way to another one before anything is tried."""
        # hardly a statement comes twice, and one transaction for all rows is faster than one for each
        connection = sqlite3.connect(":memory:", isolation_level=None, cached_statements=0)
        connection.execute("BEGIN")
        columns = ", ".join(f"{name_sql(column.name)} {column.type}" for column in self._schema.columns)
        connection.execute(f"CREATE TABLE {self._table} ({columns})")
        connection.executemany(
            f"INSERT INTO {self._table} VALUES ({', '.join('?' * len(self._schema.columns))})", self._rows
        )
        connection.execute("COMMIT")
        return connection

    def query(self, query: Select) -> list[Row]:
        return self._connection.execute(sql(query)).fetchall()

    def answer(self, statement: Statement) -> tuple[Row, ...] | None:
        """The rows of a query, sorted unless it sorts them; or the table after a change. None: it fails."""
        try:
            if isinstance(statement, Select):
                rows = self.query(statement)
                return tuple(rows if statement.order or statement.limit else sorted(rows, key=repr))
            self._connection.execute("BEGIN")
            try:
                self._connection.execute(sql(statement))
                return tuple(sorted(self._connection.execute(f"SELECT * FROM {self._table}"), key=repr))
            finally:
                self._connection.execute("ROLLBACK")
        except sqlite3.Error:
            return None

    def close(self) -> None:
        if "_connection" in self.__dict__:
            self._connection.close()


def _is_worth_asking(
    statement: Statement, answer: tuple[Row, ...], rows: tuple[Row, ...], most: int, max_chars: int
) -> bool:
    if not isinstance(statement, Select):
        changed = sum((Counter(answer) - Counter(rows)).values()) or len(rows) - len(answer)
        return 0 < changed < len(rows) and not any(isinstance(cell, float) for row in answer for cell in row)
    return (
        1 <= len(answer) <= most
        and None not in {cell for row in answer for cell in row}
        and len(repr(list(answer))) <= max_chars
    )
