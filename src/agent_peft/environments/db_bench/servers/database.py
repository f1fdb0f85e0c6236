"""`Database` on a server: its own schema and user, on one connection."""

from __future__ import annotations

from agent_peft.environments.db_bench.database import (
    MAX_SQL,
    NO_STATEMENT,
    Cell,
    DatabaseStopped,
    Executed,
    Row,
    Table,
    size,
)
from agent_peft.environments.db_bench.servers.accounts import server_of
from agent_peft.environments.db_bench.servers.client import Answer, Client, ServerError, literal, quoted
from agent_peft.environments.db_bench.servers.statements import bare_statement, refusal_of
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


class ServerDatabase:
    """`Database` on MariaDB or MySQL. Only its own user, who has rights on its own schema alone, runs the SQL
    of strangers.
    """

    def __init__(self, database: str, table: Table, *, seconds: float, seed: int) -> None:
        """
        Args:
            database: ``mariadb``, or a server's address.
            seconds: the wall-clock limit of a statement.
            seed: what SQL's ``RAND()`` draws from.

        Raises:
            AgentPeftError: the server cannot be used, or does not accept the table.
            InfrastructureError: the server fails.
        """
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
            raise self._lost(error) from error

    def execute(self, sql: str, seconds: float | None = None) -> Executed:
        """See `Database.execute`.

        Raises:
            InfrastructureError: the server failed, or the connection was cut.
        """
        if len(sql) > MAX_SQL:
            return Executed(error="the statement is too large")
        try:
            sql.encode()
        except UnicodeEncodeError:
            return Executed(error="the statement is not valid Unicode")
        sql = bare_statement(sql)
        if not sql:
            return Executed(error=NO_STATEMENT)
        if (refusal := refusal_of(sql)) is not None:
            return Executed(error=refusal)
        if self._stopped or self._client is None:
            raise DatabaseStopped(StopReason.CRASHED)
        limit = self._seconds if seconds is None else min(self._seconds, seconds)
        try:
            answer = self._ask(sql, _FETCHED_ROWS, _FETCHED_BYTES, limit)
        except ServerError as error:
            return Executed(error=self._told(error, limit))
        if answer.headers is None:
            return Executed(changed=answer.changed)
        return Executed(tuple(map(self._public_row, answer.rows)), cut=answer.cut)

    def table(self) -> tuple[Row, ...] | None:
        """See `Database.table`.

        Raises:
            InfrastructureError: the server failed, or the connection was cut.
        """
        if self._stopped or self._client is None:
            raise DatabaseStopped(StopReason.CRASHED)
        sql = f"SELECT * FROM {quoted(self._table.name)}"
        most = _EXTRA_BYTES + sum(map(size, self._table.rows))
        try:
            answer = self._ask(sql, None, most, self._seconds)
        except ServerError as error:
            self._told(error, self._seconds)
            return None
        return None if answer.cut or answer.headers != self._table.headers else answer.rows

    def reset(self) -> None:
        """See `Database.reset`.

        Raises:
            InfrastructureError: the server failed.
        """
        if self._stopped or self._client is None:
            raise DatabaseStopped(StopReason.CRASHED)
        try:
            self._client.close()
            self._server.remake(self._name)
            self._open()
            self._fill()
        except ServerError as error:
            raise self._lost(error) from error

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            if self._client is not None:
                self._client.close()
            self._server.drop(self._name)

    def _ask(self, sql: str, most_rows: int | None, most_bytes: int, seconds: float) -> Answer:
        assert self._client is not None
        if seconds != self._limited_to:
            self._client.run(self._limit(seconds))
            self._limited_to = seconds
        answer = self._client.ask(sql, most_rows, most_bytes, seconds + min(seconds, _GRACE_SECONDS))
        if answer.cut:
            self._again()
        return answer

    def _told(self, error: ServerError, seconds: float) -> str:
        """What the agent reads of a statement that failed. What is not its doing is raised."""
        if error.is_late:
            self._again()
        if error.is_late or error.is_stopped:
            return f"the statement was stopped after {seconds:g} seconds"
        if error.is_killed:
            assert self._client is not None
            if self._client.thread in self._server.out_of_memory:
                self._server.out_of_memory.discard(self._client.thread)
                return "the statement was stopped: out of memory"
            return "the statement was stopped: its table is too large"
        if error.is_lost or error.is_exhausted or (error.may_be_full and self._server.is_full):
            raise self._lost(error) from error
        return self._public(error.message)

    def _lost(self, error: ServerError) -> InfrastructureError:
        self._stopped = self._server.needs_ping = True
        return InfrastructureError(f"the database server failed: {error}")

    def _again(self) -> None:
        """End our connection, with what runs on it, and open another.

        Raises:
            DatabaseStopped: it does not end.
            InfrastructureError: the server failed.
        """
        assert self._client is not None
        self._client.cut()
        try:
            if not self._server.kill(self._name, self._client.thread):
                self._stopped = True
                raise DatabaseStopped(StopReason.TIMEOUT)
            self._open()
        except ServerError as error:
            raise self._lost(error) from error

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
        assert self._client is not None
        name = quoted(self._table.name)
        columns = ", ".join(f"{quoted(column.name)} {column.type}" for column in self._table.columns)
        try:
            self._client.run(f"CREATE TABLE {name} ({columns})")
            for values in self._batches():
                self._client.run(f"INSERT INTO {name} VALUES {values}")
        except ServerError as error:
            if error.is_lost or error.is_exhausted or (error.may_be_full and self._server.is_full):
                raise
            raise AgentPeftError(
                f"the database does not accept the table {self._table.name!r}: {self._public(error.message)}"
            ) from error

    def _batches(self) -> list[str]:
        batches: list[list[str]] = [[]]
        length = total = 0
        for row in self._table.rows:
            try:
                values = f"({', '.join(map(literal, row))})"
            except ValueError as error:
                raise AgentPeftError(
                    f"the database does not accept the table {self._table.name!r}: {error}"
                ) from error
            length, total = length + len(values), total + len(values)
            if length > _INSERT_BYTES and batches[-1]:
                batches.append([])
                length = len(values)
            batches[-1].append(values)
        if total > 2 * _MAX_TABLE:  # a text takes two digits a byte
            raise AgentPeftError(
                f"the table {self._table.name!r} is too large: at most {_MAX_TABLE} bytes can be used"
            )
        return [", ".join(batch) for batch in batches if batch]

    def _public(self, text: str) -> str:
        """A text without the schema's name, which differs from run to run."""
        return text.replace(f"{self._name}.", "").replace(self._name, _PUBLIC_NAME)

    def _public_row(self, row: Row) -> Row:
        return tuple(map(self._public_cell, row))

    def _public_cell(self, cell: Cell) -> Cell:
        return self._public(cell) if isinstance(cell, str) and self._name in cell else cell
