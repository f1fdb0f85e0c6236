"""A database in a worker process: whatever a statement does there, it ends in time, and
takes nothing else with it.
"""

from __future__ import annotations

import time
from typing import Any

from agent_peft.environments.db_bench import fork_server
from agent_peft.environments.db_bench.channel import encode
from agent_peft.environments.db_bench.database import DatabaseStopped, Executed, Row, Table, text_refusal
from agent_peft.environments.db_bench.fork_server import WorkerGone
from agent_peft.types import AgentPeftError, StopReason

_MAX_TABLE = 4 << 20  # bytes of a table as JSON
_MAX_SECONDS = 86_400.0
# seconds after its limit that a statement's answer may take: the worker's own clock is the one that ends it
_GRACE_SECONDS = 30.0
_TABLE, _RESET = encode(["table"]), encode(["reset"])


class IsolatedDatabase:
    """`Database` for SQL of strangers: a `SQLiteDatabase` in a worker.

    >>> from agent_peft.environments.db_bench.database import Column
    >>> table = Table("t", (Column("a", "INT"),), ((1,), (2,)))
    >>> database = IsolatedDatabase(table, seconds=2.0, steps=20_000_000, seed=0)
    >>> database.execute("SELECT SUM(a) FROM t").rows
    ((3,),)
    >>> database.execute("DELETE FROM t WHERE a = 1").changed, database.table()
    (1, ((2,),))
    >>> database.close()
    """

    def __init__(self, table: Table, *, seconds: float, steps: int, seed: int) -> None:
        """As `SQLiteDatabase`.

        Raises:
            AgentPeftError: SQLite does not accept the table, or it is too large.
            InfrastructureError: no worker can be started.
        """
        self._seconds = min(seconds, _MAX_SECONDS)
        columns = [[column.name, column.type] for column in table.columns]
        try:
            opening = encode(["open", table.name, columns, table.rows, self._seconds, steps, seed])
        except ValueError as error:
            raise AgentPeftError(f"SQLite does not accept the table {table.name!r}: {error}") from error
        if len(opening) > _MAX_TABLE:
            raise AgentPeftError(
                f"the table {table.name!r} is too large: {len(opening)} bytes, and at most {_MAX_TABLE} "
                "can be used"
            )
        self._closed = False
        self._worker, refusal = fork_server.acquire(opening)
        if refusal is not None:
            self.close()
            raise AgentPeftError(refusal)
        self._worker.set_timeout(self._seconds + _GRACE_SECONDS)

    def execute(self, sql: str, seconds: float | None = None) -> Executed:
        if (refusal := text_refusal(sql)) is not None:
            return Executed(error=refusal)
        seconds = self._seconds if seconds is None else min(self._seconds, seconds)
        rows, changed, error, cut = self._ask(encode(["execute", sql, seconds]), seconds)
        return Executed(_as_rows(rows), changed, error, cut)

    def table(self) -> tuple[Row, ...] | None:
        return _as_rows(self._ask(_TABLE, self._seconds))

    def reset(self) -> None:
        if self._closed or not self._worker.tell(_RESET):
            raise DatabaseStopped(StopReason.CRASHED)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            fork_server.release(self._worker)

    def _ask(self, request: bytes, seconds: float) -> Any:
        begun = time.monotonic()
        try:
            return self._worker.ask(request)
        except WorkerGone as error:
            raise DatabaseStopped(
                StopReason.TIMEOUT if time.monotonic() - begun > seconds else StopReason.CRASHED
            ) from error


def _as_rows(rows: list[list[Any]] | None) -> tuple[Row, ...] | None:
    return None if rows is None else tuple(map(tuple, rows))
