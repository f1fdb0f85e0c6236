"""A throwaway SQLite database in memory, in which nearly any statement ends soon and touches nothing else.

Time: a progress handler counts the machine steps of a statement and looks at the clock. The step limit ends a
runaway statement at the same place on every machine; the clock is for steps that are slow. Memory: no text or
blob above ``_VALUE_BYTES``, no more pages than the table had plus ``_EXTRA_PAGES``, and few rows are fetched.
The outside: no temporary files (``temp_store``), and an authorizer refuses ATTACH, PRAGMA, extensions,
virtual tables and triggers.

A single step can take any time, and an aggregate any memory. So the SQL of strangers runs here only inside a
worker, which the kernel bounds (`isolated`, `worker`).
"""

from __future__ import annotations

import random
import re
import sqlite3
import time
from collections.abc import Iterable

from agent_peft.environments.db_bench.database import (
    MAX_SQL,
    NO_STATEMENT,
    Cell,
    Executed,
    Row,
    Table,
    fetched,
    size,
)
from agent_peft.seeding import generator
from agent_peft.types import AgentPeftError

_STEPS_PER_LOOK = 1_000  # machine steps between two calls of the progress handler
_VALUE_BYTES = 8_192  # with longer values one step (instr, replace) could take seconds
_EXTRA_PAGES = 1_024  # of 4 KiB
_EXTRA_BYTES = 4 << 20  # by which a table may grow and still be read
_FETCHED_ROWS = 1_000
_FETCHED_BYTES = 200_000
_MAX_EXPANSIONS = 10_000
_LIMITS = {
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: MAX_SQL,
    sqlite3.SQLITE_LIMIT_COLUMN: 200,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 200,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 200,
    sqlite3.SQLITE_LIMIT_VDBE_OP: 20_000,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 100,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}
_REFUSED = {
    sqlite3.SQLITE_ATTACH: "ATTACH and VACUUM",
    sqlite3.SQLITE_DETACH: "DETACH",
    sqlite3.SQLITE_PRAGMA: "this PRAGMA",
    sqlite3.SQLITE_TRANSACTION: "a transaction",
    sqlite3.SQLITE_SAVEPOINT: "a savepoint",
    sqlite3.SQLITE_CREATE_TRIGGER: "a trigger",
    sqlite3.SQLITE_CREATE_TEMP_TRIGGER: "a trigger",
    sqlite3.SQLITE_CREATE_VIEW: "a view",
    sqlite3.SQLITE_CREATE_TEMP_VIEW: "a view",
    sqlite3.SQLITE_CREATE_TEMP_TABLE: "a temporary table",
    sqlite3.SQLITE_CREATE_TEMP_INDEX: "a temporary index",
    sqlite3.SQLITE_CREATE_VTABLE: "a virtual table",
    sqlite3.SQLITE_DROP_VTABLE: "a virtual table",
    sqlite3.SQLITE_ANALYZE: "ANALYZE",
}
# printf's precision may run for seconds in one step; the others reach out of the database
_REFUSED_FUNCTIONS = {"printf", "format", "load_extension", "fts3_tokenizer"}
_REFUSED_FUNCTIONS |= {"readfile", "writefile", "edit", "sqlite_log"}
_READING_PRAGMAS = {"table_info", "table_xinfo", "table_list", "index_list", "index_info"}


class SQLiteDatabase:
    """`Database` on the standard library's sqlite3.

    >>> from agent_peft.environments.db_bench.database import DeclaredColumn
    >>> table = Table("t", (DeclaredColumn("a", "INT"),), ((1,), (2,)))
    >>> database = SQLiteDatabase(table, seconds=2.0, steps=20_000_000, seed=0)
    >>> database.execute("SELECT SUM(a) FROM t").rows
    ((3,),)
    >>> database.execute("DELETE FROM t WHERE a = 1").changed, database.table()
    (1, ((2,),))
    >>> database.close()
    """

    def __init__(self, table: Table, *, seconds: float, steps: int, seed: int) -> None:
        """Create and fill the table.

        Args:
            seconds: the wall-clock limit of a statement.
            steps: its limit in SQLite machine steps; a million take about 10 ms.
            seed: what SQL's ``random()`` draws from.
        """
        self._opening = (table, seed)
        self.seconds, self._steps = seconds, steps
        self._refusal: str | None = None
        self._statement = ""
        self._altering = False
        self._connection = self._opened()

    def _opened(self) -> sqlite3.Connection:
        table, seed = self._opening
        # autocommit, and threads may take turns: an episode is created in one and stepped in another
        connection = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
        connection.text_factory = lambda text: text.decode("utf-8", "replace")
        columns = ", ".join(f"{quoted(column.name)} {column.type}" for column in table.columns)
        try:
            connection.execute("PRAGMA temp_store = MEMORY")
            connection.execute(f"CREATE TABLE main.{quoted(table.name)} ({columns})")
            marks = ", ".join("?" * len(table.columns))
            connection.execute("BEGIN")
            connection.executemany(f"INSERT INTO main.{quoted(table.name)} VALUES ({marks})", table.rows)
            connection.execute("COMMIT")
        except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError, MemoryError) as error:
            connection.close()
            raise AgentPeftError(
                f"SQLite does not accept the table {table.name!r}: {error or 'it is too large'}"
            ) from error
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages + _EXTRA_PAGES}")
        connection.setlimit(
            sqlite3.SQLITE_LIMIT_LENGTH,
            max(_VALUE_BYTES, 2 * max((_stored(row) for row in table.rows), default=0)),
        )
        for limit, most in _LIMITS.items():
            connection.setlimit(limit, most)
        draw = generator(seed, "sqlite")
        connection.create_function("random", 0, lambda: draw.randrange(-(2**63), 2**63))
        connection.create_function("randomblob", 1, lambda length: _random_blob(draw, length))
        connection.set_authorizer(self._authorize)
        return connection

    def execute(self, sql: str, seconds: float | None = None) -> Executed:
        sql = bare_statement(sql)
        if not sql:
            return Executed(error=NO_STATEMENT)
        if expansions(sql) > _MAX_EXPANSIONS:
            return Executed(error="the common table expressions refer to each other too often")
        before = self._connection.total_changes
        clock = self._begin(sql, seconds)
        try:
            cursor = self._connection.execute(sql)
            try:
                rows, cut = fetched(cursor, _FETCHED_ROWS, _FETCHED_BYTES)
                is_query = cursor.description is not None
            finally:
                cursor.close()
        except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError, MemoryError) as error:
            return Executed(error=self._explained(error, clock))
        return Executed(
            rows=rows if is_query else None, changed=self._connection.total_changes - before, cut=cut
        )

    def table(self) -> tuple[Row, ...] | None:
        table, _ = self._opening
        sql = f"SELECT * FROM main.{quoted(table.name)}"
        self._begin(sql)
        try:
            cursor = self._connection.execute(sql)
            try:
                if tuple(column[0] for column in cursor.description) != table.headers:
                    return None
                rows, cut = fetched(cursor, None, _EXTRA_BYTES + sum(map(size, table.rows)))
            finally:
                cursor.close()
        except (sqlite3.Error, MemoryError):
            return None
        return None if cut else rows

    def reset(self) -> None:
        self._connection.close()
        self._connection = self._opened()

    def close(self) -> None:
        self._connection.close()

    def _begin(self, sql: str, seconds: float | None = None) -> _Clock:
        """Reset the state and the clock for a new statement."""
        self._refusal, self._statement, self._altering = None, sql.lower(), False
        clock = _Clock(self.seconds if seconds is None else min(self.seconds, seconds), self._steps)
        self._connection.set_progress_handler(clock.look, _STEPS_PER_LOOK)
        return clock

    def _authorize(self, action: int, first: str | None, second: str | None, *_: str | None) -> int:
        function = (second or "").lower() if action == sqlite3.SQLITE_FUNCTION else ""
        self._altering = self._altering or action == sqlite3.SQLITE_ALTER_TABLE
        # SQLite itself calls printf for ALTER TABLE; elsewhere a default value of the agent's may call it
        if function in _REFUSED_FUNCTIONS and (not self._altering or function in self._statement):
            self._refusal = f"the function {function}"
        elif action in _REFUSED and not (
            action == sqlite3.SQLITE_PRAGMA and (first or "").lower() in _READING_PRAGMAS
        ):
            self._refusal = _REFUSED[action]
        else:
            return sqlite3.SQLITE_OK
        return sqlite3.SQLITE_DENY

    def _explained(self, error: Exception, clock: _Clock) -> str:
        if clock.ended is not None:
            return clock.ended
        if self._refusal is not None:
            return f"{self._refusal} is not allowed here"
        if isinstance(error, UnicodeEncodeError):
            return "the statement is not valid Unicode"
        if isinstance(error, MemoryError):
            return "the statement was stopped: out of memory"
        if "one statement at a time" in str(error):
            return "write one statement at a time"
        return str(error)


class _Clock:
    """Ends a statement by its time or its steps."""

    def __init__(self, seconds: float, steps: int) -> None:
        self._deadline, self._seconds = time.monotonic() + seconds, seconds
        self._looks, self._steps = 0, steps
        self.ended: str | None = None

    def look(self) -> bool:
        self._looks += 1
        if self._looks * _STEPS_PER_LOOK > self._steps:
            self.ended = "the statement was stopped: too many steps"
        elif time.monotonic() > self._deadline:
            self.ended = f"the statement was stopped after {self._seconds:g} seconds"
        return self.ended is not None


def quoted(name: str) -> str:
    """An identifier of SQL, whatever characters it holds.

    >>> quoted('unit "net" price')
    '"unit ""net"" price"'
    """
    return '"' + name.replace('"', '""') + '"'


# Comments and strings, or a name (bare or quoted), or any other character but white space.
_WORD = re.compile(
    r"""--[^\n]*|/\*(?:[^*]|\*(?!/))*+(?:\*/)?|(?P<name>\w+|"[^"]*+"|`[^`]*+`|\[[^\]]*+\]|'[^']*+')|\S"""
)


def expansions(sql: str) -> int:
    """An upper bound of how many queries SQLite will prepare for the common table expressions of a statement.

    ``a AS (…), b AS (… a, a), c AS (… b, b)`` doubles with every step, in memory, before any limit of
    SQLite's is looked at. Every name before ``AS (`` or ``(columns) AS (`` multiplies by how
    often it is used after that.

    >>> expansions("WITH a AS (SELECT 1), b AS (SELECT 1 FROM a x, a y) SELECT * FROM b")
    2
    """
    if len(sql) > MAX_SQL:
        return 0  # refused by its length
    found = (match for match in _WORD.finditer(sql) if not match[0].startswith(("--", "/*")))
    words = [match["name"].strip("\"`[]'").lower() if match["name"] else match[0] for match in found]
    if "with" not in words:
        return 0
    counts: dict[str, int] = {}
    for word in words:
        counts[word] = counts.get(word, 0) + 1
    product = 1
    for name in set(_defined(words)):
        product = min(product * max(counts[name] - 1, 1), 10**9)
    return product


def bare_statement(sql: str) -> str:
    """The text without the comments and semicolons before and after its statements.

    >>> bare_statement("; SELECT 1 ;; -- one"), bare_statement("/* none */ ;")
    ('SELECT 1', '')
    """
    if len(sql) > MAX_SQL:
        return sql
    places = [match.span() for match in _WORD.finditer(sql) if not match[0].startswith(("--", "/*", ";"))]
    return sql[places[0][0] : places[-1][1]] if places else ""


def _defined(words: list[str]) -> Iterable[str]:
    """The names that may be common table expressions."""
    for i, word in enumerate(words):
        if word != "as" or "(" not in words[i + 1 : i + 4]:
            continue
        j = i - 1
        if j >= 0 and words[j] == ")":  # step over a list of columns
            while j >= 0 and words[j] != "(":
                j -= 1
            j -= 1
        if j >= 0:
            yield words[j]


def _stored(row: Iterable[Cell]) -> int:
    """At most how many bytes SQLite needs for a row."""
    return sum(9 + (4 * len(cell) if isinstance(cell, str) else 0) for cell in row)


def _random_blob(draw: random.Random, length: object) -> bytes:
    return draw.randbytes(min(max(length, 1), _VALUE_BYTES) if isinstance(length, int) else 1)
