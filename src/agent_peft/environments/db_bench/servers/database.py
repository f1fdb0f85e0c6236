"""`Database` on a server: its own schema and user, on one connection, and which statements it refuses."""

from __future__ import annotations

import re
from collections.abc import Iterator

from agent_peft.environments.db_bench.database import (
    NO_STATEMENT,
    DatabaseStopped,
    Executed,
    Row,
    Table,
    size,
    text_refusal,
)
from agent_peft.environments.db_bench.servers.accounts import server_of
from agent_peft.environments.db_bench.servers.client import (
    KILLED,
    LATE,
    STOPPED,
    Client,
    ServerError,
    StatementResult,
    backquoted,
    literal,
)
from agent_peft.seeding import derive
from agent_peft.types import AgentPeftError, InfrastructureError, StopReason

_FETCHED_ROWS = 1_000
_FETCHED_BYTES = 200_000
_EXTRA_BYTES = 4 << 20  # by which a table may grow and still be read
_MAX_TABLE = 4 << 20  # bytes of a task's table
_INSERT_BYTES = 200_000  # of one statement that fills it
_FILL_SECONDS = 60.0  # of a statement that fills the table
_GRACE_SECONDS = 1.0  # after which a statement is ended from outside: the server's own clock ended most
# MySQL's own default, without ONLY_FULL_GROUP_BY: MariaDB takes that to the letter, and refuses statements
# that MySQL runs
_SQL_MODE = "STRICT_TRANS_TABLES,ERROR_FOR_DIVISION_BY_ZERO,NO_ENGINE_SUBSTITUTION,NO_DIR_IN_CREATE"
_PUBLIC_NAME = "db"  # what the agent reads where the server writes the schema's name

# Strings and comments as MySQL reads them, then words (bare or quoted), and any other character.
_TOKEN = re.compile(
    r"""(?P<executable>/\*M?!)
    |(?P<space>\s+|\#[^\n]*|--(?=[\s\x00-\x1f]|$)[^\n]*|/\*(?:[^*]|\*(?!/))*+(?:\*/|$))
    |(?P<string>'(?:[^'\\]|\\.|'')*+'?|"(?:[^"\\]|\\.|"")*+"?)
    |`(?P<quoted>(?:[^`]|``)*+)`?
    |(?P<word>[\w$]+)
    |(?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
_ALLOWED = re.compile(
    "select|with|values|table|insert|replace|update|delete|create|alter|drop|truncate|rename|show|describe|desc"
    "|explain"
)
_NAMES = dict.fromkeys(("begin", "start", "commit", "rollback", "xa"), "a transaction") | {
    "savepoint": "a savepoint"
}
# locks of the whole server, by which one episode could delay another, or signal to it
_REFUSED_FUNCTIONS = re.compile(
    "get_lock|release_lock|release_all_locks|is_free_lock|is_used_lock|service_(get_read|get_write|release)_locks"
)


class ServerDatabase:
    """`Database` on MariaDB or MySQL (``mariadb``, or a server's address). The untrusted SQL is run by a user
    who has rights on this schema alone. If the server fails, each method raises `InfrastructureError`.
    """

    def __init__(self, database: str, table: Table, *, seconds: float, seed: int) -> None:
        """``seconds``: the wall-clock limit of a statement; ``seed``: of SQL's ``RAND()``."""
        self._table, self._seconds = table, seconds
        self._seeds = [derive(seed, "mysql", part) % (1 << 30) for part in (1, 2)]
        self._closed, self._stopped = False, False
        self._client: Client | None = None
        self._limited_to = 0.0
        self._server = server_of(database)
        try:
            self._address = self._server.make()
            self._name = self._address.user
            try:
                self._open()
                self._fill()
            except BaseException:
                self.close()
                raise
        except ServerError as error:
            raise self._failed(error) from error

    def execute(self, sql: str, seconds: float | None = None) -> Executed:
        if (refusal := text_refusal(sql)) is None:
            sql = bare_statement(sql)
            refusal = statement_refusal(sql) if sql else NO_STATEMENT
        if refusal is not None:
            return Executed(error=refusal)
        limit = self._seconds if seconds is None else min(self._seconds, seconds)
        try:
            answer = self._ask(sql, _FETCHED_ROWS, _FETCHED_BYTES, limit)
        except ServerError as error:
            return Executed(error=self._explained(error, limit))
        if answer.headers is None:
            return Executed(changed=answer.changed)
        rows = (
            tuple(self._public(cell) if isinstance(cell, str) else cell for cell in row)
            for row in answer.rows
        )
        return Executed(tuple(rows), cut=answer.cut)

    def table(self) -> tuple[Row, ...] | None:
        sql = f"SELECT * FROM {backquoted(self._table.name)}"
        most = _EXTRA_BYTES + sum(map(size, self._table.rows))
        try:
            answer = self._ask(sql, None, most, self._seconds)
        except ServerError as error:
            self._explained(error, self._seconds)
            return None
        return None if answer.cut or answer.headers != self._table.headers else answer.rows

    def reset(self) -> None:
        self._running().close()
        try:
            self._server.remake(self._name)
            self._open()
            self._fill()
        except ServerError as error:
            raise self._failed(error) from error

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            if self._client is not None:
                self._client.close()
            self._server.drop(self._name)

    def _ask(self, sql: str, most_rows: int | None, most_bytes: int, seconds: float) -> StatementResult:
        client = self._running()
        if seconds != self._limited_to:
            client.run(self._limit(seconds))
            self._limited_to = seconds
        answer = client.ask(sql, most_rows, most_bytes, seconds + min(seconds, _GRACE_SECONDS))
        if answer.cut:
            self._reconnect()
        return answer

    def _running(self) -> Client:
        if self._stopped or self._client is None:
            raise DatabaseStopped(StopReason.CRASHED)
        return self._client

    def _explained(self, error: ServerError, seconds: float) -> str:
        """What the agent reads of a statement that failed. A failure of the server is raised."""
        client = self._running()
        if error.code == LATE:
            self._reconnect()
        if error.code == LATE or error.code in STOPPED:
            return f"the statement was stopped after {seconds:g} seconds"
        if error.code == KILLED:
            if client.thread in self._server.out_of_memory:
                self._server.out_of_memory.discard(client.thread)
                return "the statement was stopped: out of memory"
            return "the statement was stopped: its table is too large"
        if self._is_failure(error):
            raise self._failed(error) from error
        return self._public(error.message)

    def _is_failure(self, error: ServerError) -> bool:
        private = self._server.private
        return error.is_failure or (error.may_be_full and private is not None and private.is_full)

    def _failed(self, error: ServerError) -> InfrastructureError:
        self._stopped = self._server.needs_ping = True
        return InfrastructureError(f"the database server failed: {error}")

    def _reconnect(self) -> None:
        """End the connection, with what runs on it, and open another."""
        client = self._running()
        client.cut()
        try:
            if not self._server.kill(self._name, client.thread):
                self._stopped = True
                raise DatabaseStopped(StopReason.TIMEOUT)
            self._open()
        except ServerError as error:
            raise self._failed(error) from error

    def _open(self) -> None:
        one, two = self._seeds
        setting = (
            f"{self._limit(_FILL_SECONDS)}, sql_mode = '{_SQL_MODE}', time_zone = '+00:00', "
            f"rand_seed1 = {one}, rand_seed2 = {two}, innodb_lock_wait_timeout = 5, lock_wait_timeout = 5, "
            "group_concat_max_len = 8192"
        )
        self._client = Client(self._address, self._name, setting, _FILL_SECONDS + _GRACE_SECONDS)
        self._limited_to = _FILL_SECONDS  # by the server's own clock

    def _limit(self, seconds: float) -> str:
        if self._server.is_mariadb:
            return f"SET SESSION max_statement_time = {max(seconds, 0.001):.3f}"
        return f"SET SESSION max_execution_time = {max(round(seconds * 1000), 1)}"

    def _fill(self) -> None:
        client, name = self._running(), backquoted(self._table.name)
        columns = ", ".join(f"{backquoted(column.name)} {column.type}" for column in self._table.columns)
        try:
            client.run(f"CREATE TABLE {name} ({columns})")
            for values in self._batches():
                client.run(f"INSERT INTO {name} VALUES {values}")
        except (ServerError, ValueError) as error:  # a number of too many digits, a lone surrogate
            if isinstance(error, ServerError) and self._is_failure(error):
                raise
            raise AgentPeftError(
                f"the database does not accept the table {self._table.name!r}: {self._public(str(error))}"
            ) from error

    def _batches(self) -> Iterator[str]:
        """The rows as SQL, in parts that one statement can insert."""
        rows = [f"({', '.join(map(literal, row))})" for row in self._table.rows]
        if sum(map(len, rows)) > 2 * _MAX_TABLE:  # a text takes two digits a byte
            raise AgentPeftError(
                f"the table {self._table.name!r} is too large: at most {_MAX_TABLE} bytes can be used"
            )
        first = length = 0
        for i, row in enumerate(rows):
            if length + len(row) > _INSERT_BYTES and i > first:
                yield ", ".join(rows[first:i])
                first, length = i, 0
            length += len(row)
        if rows:
            yield ", ".join(rows[first:])

    def _public(self, text: str) -> str:
        """A text without the schema's name, which differs from run to run."""
        return text.replace(f"{self._name}.", "").replace(self._name, _PUBLIC_NAME)


def bare_statement(sql: str) -> str:
    """The text without the comments and semicolons before and after its statements.

    >>> bare_statement("; SELECT 1 ;; -- one"), bare_statement("# none")
    ('SELECT 1', '')
    """
    places = [
        match.span() for match in _TOKEN.finditer(sql) if match.lastgroup != "space" and match[0] != ";"
    ]
    return sql[places[0][0] : places[-1][1]] if places else ""


def statement_refusal(sql: str) -> str | None:
    """Why a statement is not sent, or None. The server refuses what the user has no right to. Refused here is
    what needs no right, and would reach another episode or outlive the statement.

    >>> statement_refusal("SET autocommit = 0"), statement_refusal("SELECT GET_LOCK('a', 9)")
    ('SET is not allowed here', 'the function get_lock is not allowed here')
    >>> statement_refusal("SELECT 'get_lock(1)' -- one"), statement_refusal("SELECT 1; SELECT 2")
    (None, 'write one statement at a time')
    """
    tokens: list[tuple[str, str]] = []
    for match in _TOKEN.finditer(sql):
        kind = match.lastgroup or ""
        if kind == "executable":
            return "a comment that is executed is not allowed here"
        if kind != "space":
            tokens.append((kind, (match[kind] or "").lower()))
    kind, word = next((token for token in tokens if token != ("other", "(")), ("", ""))
    if kind != "word" or not (_ALLOWED.fullmatch(word) or word.isalpha()):
        return None  # no statement begins so: the server's own error is better
    if not _ALLOWED.fullmatch(word):
        return f"{_NAMES.get(word, word.upper())} is not allowed here"
    for (kind, text), following in zip(tokens, [*tokens[1:], ("", "")], strict=True):
        if kind in ("word", "quoted") and _REFUSED_FUNCTIONS.fullmatch(text) and following == ("other", "("):
            return f"the function {text} is not allowed here"
        if (kind, text) == ("other", ";") and following[0]:
            return "write one statement at a time"
    return None
