"""Inspection of tasks: the gold must pass, and doing nothing must not, each in a new episode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from agent_peft.environments.base import Inspection
from agent_peft.environments.db_bench.config import DBBenchConfig
from agent_peft.environments.db_bench.database import Cell, Row, other_orders
from agent_peft.environments.db_bench.episode import (
    DBBenchEpisode,
    printable_line,
    replies_of,
    run_gold,
    shown,
)
from agent_peft.environments.db_bench.grader import answer_is_correct, tables_are_equal
from agent_peft.environments.db_bench.protocol import PROTOCOLS
from agent_peft.environments.db_bench.syntax import in_order_of, order_keys, respelled, with_ties_broken
from agent_peft.environments.db_bench.tasks import SQLProblem, table_md5
from agent_peft.environments.task_files.replay import replay
from agent_peft.types import AgentPeftError, Outcome, StepResult, StopReason

MAX_CAUSE = 400  # characters: statements and names of strangers are quoted
DO_NOTHING = ("done", "")  # answers
MOST_ROWS = 12  # of an answer that is not stored


def inspect(problem: SQLProblem, config: DBBenchConfig) -> Inspection:
    """Replay the gold, then replies that do nothing, through episodes."""
    try:
        cause = _fault_of_gold(problem, config)
        write = PROTOCOLS[config.protocol].answer
        nothing = any(
            _replay(problem, config, (write(text),)).outcome is Outcome.CORRECT for text in DO_NOTHING
        )
    except AgentPeftError as error:
        return Inspection(False, False, printable_line(str(error), MAX_CAUSE))
    return Inspection(cause is None, nothing, cause or ("doing nothing passes" if nothing else None))


def answer_of(problem: SQLProblem, config: DBBenchConfig) -> tuple[Row, ...] | None:
    """What the gold SQL gives, whatever answer is stored: the rows of a query, or those of the table after a
    change. None where they make no task that can be used, or the answer of a query has no row, more than
    `MOST_ROWS` or nothing in its first one.
    """
    executed, table = run_gold(problem, config)
    if executed.error is not None:
        return None
    if problem.is_change:
        return table if table and inspect(problem, config).cause is None else None
    rows = tuple(shown(executed.rows or ()))
    if not 0 < len(rows) <= MOST_ROWS or all(cell is None for cell in rows[0]):
        return None
    order = order_keys(problem.sql, problem.table.headers, len(rows[0]))
    return rows if inspect(replace(problem, direct=rows, order=order), config).cause is None else None


def _fault_of_gold(problem: SQLProblem, config: DBBenchConfig) -> str | None:
    if problem.labels is not None:  # its answer decides, whatever its SQL gives
        reply = PROTOCOLS[config.protocol].answer([(label,) for label in problem.labels])
        correct = _replay(problem, config, (reply,)).outcome is Outcome.CORRECT
        return None if correct else "its label is not an answer"
    executed, table = run_gold(problem, config)
    if executed.error is not None:
        return printable_line(f"the gold SQL fails: {executed.error}", MAX_CAUSE)
    replies = replies_of(problem, executed, PROTOCOLS[config.protocol])
    last = None if replies is None else _replay(problem, config, replies)
    if last is not None and last.stop_reason is StopReason.TIMEOUT:
        return f"the gold SQL takes longer than episode_seconds = {config.episode_seconds:g}"
    if last is None or last.outcome is not Outcome.CORRECT:
        return (
            "the gold SQL gives other rows than the stored answer"
            if problem.direct is not None
            else "the gold SQL drops the table"
        )
    if problem.is_change and problem.md5 is not None and (table is None or table_md5(table) != problem.md5):
        return "the gold SQL leaves another table than the stored md5 identifies"
    if not _is_determined(problem, config, table):
        return (
            "ties leave the answer open: the gold SQL gives another one where the table's rows are stored in "
            "another order"
        )
    return None


def _is_determined(problem: SQLProblem, config: DBBenchConfig, table: Sequence[Row] | None) -> bool:
    """Whether the gold's answer does not depend on the order in which the table's rows are stored. A LIMIT
    without ORDER BY counts from the lowest number where the first column numbers the rows.
    """

    def gives_answer(sql: str, rows: Sequence[Sequence[Cell]]) -> bool:
        changed = replace(problem, sql=sql, table=replace(problem.table, rows=rows))
        executed, after = run_gold(changed, config)
        if executed.error is not None or problem.direct is None:
            return executed.error is None and tables_are_equal(after, table)
        return answer_is_correct(repr(shown(executed.rows or ())), problem.direct, problem.order)

    rows, headers = problem.table.rows, problem.table.headers
    # groups that tie come in one order, however the rows are stored
    width = len(problem.direct[0]) if problem.direct else 0
    broken = [with_ties_broken(problem.sql, headers, width, descending) for descending in (False, True)]
    if not all(sql is None or gives_answer(sql, rows) for sql in broken):
        same = respelled(problem.sql)  # else sqlglot has changed the meaning
        if same is not None and gives_answer(same, rows):
            return False
    orders = other_orders(rows)
    if all(gives_answer(problem.sql, order) for order in orders):
        return True
    numbers = [row[0] for row in rows if isinstance(row[0], int)]
    numbered = len(numbers) == len(rows) and all(a < b for a, b in pairwise(numbers))
    counted = in_order_of(headers[0], problem.sql) if numbered else None
    return counted is not None and all(gives_answer(counted, order) for order in (rows, *orders))


def _replay(problem: SQLProblem, config: DBBenchConfig, replies: Sequence[str]) -> StepResult:
    return replay(DBBenchEpisode(problem, config, seed=0), replies).results[-1]
