"""An episode of DB Bench: the database, the agent's replies, and the grade."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from agent_peft.environments.base import Episode
from agent_peft.environments.clock import Clock
from agent_peft.environments.db_bench.config import DBBenchConfig, system_prompt_of
from agent_peft.environments.db_bench.database import Database, DatabaseStopped, Executed, Row, Table
from agent_peft.environments.db_bench.grader import (
    answer_is_correct,
    answer_matches,
    answer_score,
    change_score,
    rounded_number,
    tables_are_equal,
)
from agent_peft.environments.db_bench.isolated import IsolatedDatabase
from agent_peft.environments.db_bench.protocol import PROTOCOLS, FinalAnswer, Protocol, Reply
from agent_peft.environments.db_bench.servers.database import ServerDatabase
from agent_peft.environments.db_bench.tasks import SQLProblem
from agent_peft.environments.templates import fill
from agent_peft.environments.tool_calls import MalformedReply
from agent_peft.types import Message, Outcome, StepResult, StopReason

CUT_MARK = " ... (cut)"


def open_database(config: DBBenchConfig, table: Table, seed: int) -> Database:
    """Open a new database that holds ``table``."""
    seconds = config.statement_seconds
    if config.database == "sqlite":
        return IsolatedDatabase(table, seconds=seconds, steps=config.statement_steps, seed=seed)
    return ServerDatabase(config.database, table, seconds=seconds, seed=seed)


class DBBenchEpisode(Episode):
    """An episode: at most ``max_turns`` replies, of which the last should be an ``Action: Answer``.

    The SQL runs in another process. If a statement can be stopped only by ending that process, the agent has
    failed. Another thread may close the episode: ``close`` waits until the current step is done.
    """

    def __init__(self, problem: SQLProblem, config: DBBenchConfig, seed: int) -> None:
        self._problem, self._config, self._seed = problem, config, seed
        self.tools = PROTOCOLS[config.protocol].tools
        self._database: Database | None = None
        self._turns = 0
        self._done = False
        self._clock = Clock(config.episode_seconds)
        self._lock = threading.RLock()  # a worker that is given back must not owe an answer

    def start(self) -> Sequence[Message]:
        table = self._problem.table
        with self._lock:
            if self._done or self._database is not None:
                raise RuntimeError("the episode was started before")
            self._database = open_database(self._config, table, self._seed)
        values = {
            "instruction": self._problem.instruction,
            "table": table.name,
            "headers": ", ".join(table.headers),
        }
        system = fill(system_prompt_of(self._config), {"max_turns": self._config.max_turns})
        user = Message("user", fill(self._config.prompt, values))
        return (Message("system", system), user) if system else (user,)

    def step(self, action: str) -> StepResult:
        with self._lock:
            if self._done or self._database is None:
                raise RuntimeError(
                    "the episode is done or closed" if self._done else "the episode was not started"
                )
            return self._act(self._database, action)

    def _act(self, database: Database, action: str) -> StepResult:
        self._turns += 1
        reply: Reply | None = None
        try:
            reply = PROTOCOLS[self._config.protocol].parse(action)
        except MalformedReply as malformed:
            why = str(malformed)
        if isinstance(reply, FinalAnswer):
            correct, score = self._grade(reply.text, database)
            outcome = Outcome.CORRECT if correct else Outcome.INCORRECT
            return self._end(StopReason.FINISHED, outcome, valid=True, score=score)
        if self._turns >= self._config.max_turns:  # nobody would see what the statement did
            return self._end(StopReason.TURN_LIMIT, Outcome.INCORRECT, valid=reply is not None)
        if reply is None:
            return StepResult(why, valid=False)
        try:
            with self._clock.running():
                executed = database.execute(reply.sql, self._clock.left)
        except DatabaseStopped as stopped:  # by what the agent wrote
            return self._end(stopped.reason, Outcome.INCORRECT, valid=True)
        if self._clock.ran_out:
            return self._end(StopReason.TIMEOUT, Outcome.INCORRECT, valid=True)
        written = PROTOCOLS[self._config.protocol].rows
        return StepResult(observation(executed, self._config.max_observation_chars, written))

    def close(self) -> None:
        with self._lock:
            self._done = True
            if self._database is not None:
                self._database.close()

    def _end(
        self, reason: StopReason, outcome: Outcome, valid: bool, score: float | None = None
    ) -> StepResult:
        self.close()
        return StepResult("", done=True, outcome=outcome, stop_reason=reason, valid=valid, score=score)

    def _grade(self, text: str, database: Database) -> tuple[bool, float | None]:
        """Whether the answer is right, and its score."""
        problem = self._problem
        if problem.labels is not None:
            return answer_matches(text, problem.labels), None
        if problem.direct is not None:
            correct = answer_is_correct(text, problem.direct, problem.order)
            return correct, 1.0 if correct else answer_score(text, problem.direct)
        # only the task's own table counts, with all its rows and columns; other tables that the agent made
        # are ignored
        try:
            actual = database.table()
            if actual is None:
                return False, 0.0
            database.reset()
            before = database.table() or ()
            gold = database.execute(problem.sql)
            right = database.table()
            if gold.error is not None or right is None:
                return False, 0.0
            correct = tables_are_equal(actual, right)
            return correct, 1.0 if correct else change_score(before, actual, right)
        except DatabaseStopped:
            return False, 0.0


def run_gold(problem: SQLProblem, config: DBBenchConfig) -> tuple[Executed, tuple[Row, ...] | None]:
    """Run the gold SQL on a new copy of the table. Return its result, and the whole table after it."""
    database = open_database(config, problem.table, seed=0)
    try:
        return database.execute(problem.sql), database.table()
    except DatabaseStopped as stopped:
        return Executed(error=str(stopped)), None
    finally:
        database.close()


def replies_of(problem: SQLProblem, executed: Executed, protocol: Protocol) -> tuple[str, str] | None:
    """Replies that solve the problem: the gold SQL, and an answer with its rows. None if the gold did not
    run, or gives another answer than AgentBench's.
    """
    if executed.error is not None:
        return None
    rows = None if problem.is_change or executed.rows is None else shown(executed.rows)
    if problem.labels is not None and (rows is None or not answer_matches(repr(rows), problem.labels)):
        return None
    return protocol.operation(problem.sql), protocol.answer("done" if rows is None else rows)


def observation(executed: Executed, limit: int, written: Callable[[list[Row]], str] = repr) -> str:
    """A statement's result as the agent reads it, in at most ``limit`` characters. Its numbers have at most
    four decimals, since most tokens of a long fraction are noise. ``written``: its rows as text.

    >>> observation(Executed(rows=((1, "a"),)), 400), observation(Executed(changed=3), 400)
    ("[(1, 'a')]", 'Done. 3 rows changed.')
    >>> observation(Executed(error="no column b"), 400)
    'Error: no column b'
    """
    if executed.error is not None:
        text = "Error: " + printable_line(executed.error, limit + 1)
    elif executed.rows is not None:
        text = written(shown(executed.rows)) + (CUT_MARK if executed.cut else "")
    else:
        text = f"Done. {executed.changed} row{'' if executed.changed == 1 else 's'} changed."
    if len(text) <= limit:
        return text
    return text[: max(limit - len(CUT_MARK), 0)] + CUT_MARK


def shown(rows: Sequence[Row]) -> list[Row]:
    """The rows with their numbers `rounded`.

    >>> shown([(1, 2 / 3)])
    [(1, 0.6667)]
    """
    return [tuple(map(rounded_number, row)) for row in rows]


def printable_line(text: str, limit: int) -> str:
    """The first ``limit`` characters, with a blank for each that does not print.

    >>> printable_line("no such table: a\\nb", 400)
    'no such table: a b'
    """
    return "".join(c if c.isprintable() else " " for c in text[:limit])
