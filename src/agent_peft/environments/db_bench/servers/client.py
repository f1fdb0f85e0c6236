"""Addresses of servers, and connections to them with PyMySQL, which no other module imports."""

from __future__ import annotations

import functools
import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from agent_peft.environments.db_bench.database import Cell, Row, fetched
from agent_peft.lookup import install
from agent_peft.types import AgentPeftError

_FORM = "write mysql://user:password@host:port, or mysql://user:password@localhost?unix_socket=/path"
LATE = -1  # not MySQL's: the answer did not come in time
_CONNECT_SECONDS = 20
_FAILURES = {2003, 2006, 2013, 2014, 2055, 1053, 1927, 1077, 1079}  # the connection or the server is lost
_FAILURES |= {1037, 1038, 1040, 1041, 1135, 1203, 1021}  # or there is no memory, connection or disk left
_DISK_FULL = ("rrno: 28", "rrcode: 28", "No space left")
_NO_DISK = {3, 1005, 1021, 1026, 1030, 1114}
STOPPED = {1969, 3024}  # by the server's clock
KILLED = 1317  # by KILL QUERY


@dataclass(frozen=True)
class ServerAccount:
    """Where a server listens, and the account that is used.

    >>> ServerAccount(host="db", port=3307, user="me").name
    'db:3307'
    """

    user: str
    password: str = ""
    host: str = "localhost"
    port: int = 3306
    socket: str | None = None

    @property
    def name(self) -> str:
        return self.socket or f"{self.host}:{self.port}"


def parse_address(url: str) -> ServerAccount:
    """Read ``mysql://user:password@host:port`` or ``mysql://…?unix_socket=PATH``, or raise ValueError. The
    password may also be in the environment variable ``MYSQL_PWD``.

    >>> parse_address("mysql://me:p%40ss@db:3307").password
    'p@ss'
    """
    try:
        parts = urlsplit(url)
        port = parts.port or 3306
        query = parse_qs(parts.query, strict_parsing=True) if parts.query else {}
    except ValueError as error:
        raise ValueError(f"this is not an address of a server ({error}); {_FORM}") from None
    if parts.scheme != "mysql" or not parts.username or not (parts.hostname or "unix_socket" in query):
        raise ValueError(f"this is not an address of a server; {_FORM}")
    if parts.path.strip("/") or parts.fragment:
        raise ValueError("name no database: each episode gets one of its own; " + _FORM)
    if set(query) - {"unix_socket"}:
        raise ValueError(f"only unix_socket may be given after the question mark; {_FORM}")
    return ServerAccount(
        user=unquote(parts.username),
        password=unquote(parts.password) if parts.password else os.environ.get("MYSQL_PWD", ""),
        host=parts.hostname or "localhost",
        port=port,
        socket=query["unix_socket"][-1] if query else None,
    )


class ServerError(Exception):
    """What a server answers instead of a result; ``code`` is MySQL's number."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message

    @property
    def is_failure(self) -> bool:
        """Whether the connection is lost, or the server lacks memory, connections or disk space."""
        return self.code in _FAILURES or any(text in self.message for text in _DISK_FULL)

    @property
    def may_be_full(self) -> bool:
        """Whether a disk that is full could be the cause, or a table that is as large as one may be."""
        return self.code in _NO_DISK


@dataclass(frozen=True)
class StatementResult:
    """The result of a statement: of a query its ``headers`` and rows, or how many rows it ``changed``.

    Where it is ``cut`` there were more rows, and the client can only be closed.

    >>> StatementResult(("a",), ((1,),)).cut
    False
    """

    headers: tuple[str, ...] | None
    rows: tuple[Row, ...] = ()
    changed: int = 0
    cut: bool = False


class Client:
    """A connection; ``thread`` is its number on the server. Results are read row by row, and a change counts
    the rows that it matched. Used by one thread at a time.
    """

    def __init__(
        self,
        address: ServerAccount,
        schema: str | None = None,
        setting: str | None = None,
        seconds: float = 60.0,
    ) -> None:
        """Connect, and run the ``setting``. ``seconds``: how long an answer may take."""
        try:
            import pymysql
            from pymysql.constants import CLIENT
            from pymysql.cursors import SSCursor
        except ImportError as error:
            raise AgentPeftError(f"databases other than sqlite need PyMySQL; {install('mysql')}") from error
        local = address.socket is not None
        open_connection: Any = pymysql.connect  # its types leave out what is read here
        with _errors():
            ours = _socket(address)
            self._connection = open_connection(
                defer_connect=True,
                user=address.user,
                password=address.password,
                host=address.host,
                port=address.port,
                unix_socket=address.socket,
                database=schema,
                charset="utf8mb4",
                autocommit=True,
                init_command=setting,
                client_flag=CLIENT.FOUND_ROWS,
                connect_timeout=_CONNECT_SECONDS,
                read_timeout=seconds,
                write_timeout=seconds,
                conv=_decoders(),
                cursorclass=SSCursor,
                ssl_disabled=local,
                ssl=None if local else _tls(),
            )
            self._connection._secure = local  # nobody reads along, so a password may be sent
            self._connection.connect(ours)
        self.thread: int = self._connection.thread_id()

    def run(self, sql: str) -> tuple[Row, ...]:
        """All rows of a trusted statement. Raises `ServerError`."""
        return self.ask(sql, None, 1 << 40).rows

    def ask(
        self, sql: str, most_rows: int | None, most_bytes: int, seconds: float | None = None
    ) -> StatementResult:
        """Run a statement; ``seconds``: how long an answer may take from now on. Raises `ServerError`."""
        if seconds is not None:
            self._connection._read_timeout = seconds
        with _errors():
            cursor = self._connection.cursor()
            try:
                cursor.execute(sql)
                if cursor.description is None:
                    cursor.close()
                    return StatementResult(None, changed=max(cursor.rowcount, 0))
                rows, cut = fetched(cursor.fetchall_unbuffered(), most_rows, most_bytes)
                headers = tuple(column[0] for column in cursor.description)
                if not cut:
                    cursor.close()
                return StatementResult(headers, rows, 0, cut)
            finally:
                # what is left unread would be read, for as long as it takes, when the cursor is deleted
                if cursor._result is not None:
                    cursor._result.unbuffered_active, cursor._result.connection = False, None

    def is_alive(self) -> bool:
        """Whether the server still answers."""
        try:
            self._connection.ping(reconnect=False)
        except Exception:
            return False
        return True

    def cut(self) -> None:
        """Close this end without a message to the server."""
        self._connection._force_close()

    def close(self) -> None:
        """Close it, whatever state it is in. May be called twice."""
        try:
            self._connection.close()
        except Exception:
            self.cut()


def _socket(address: ServerAccount) -> socket.socket | None:
    """A connected Unix socket, which PyMySQL would leak where nobody listens; None for a network address."""
    if address.socket is None:
        return None
    end = socket.socket(socket.AF_UNIX)
    try:
        end.settimeout(_CONNECT_SECONDS)
        end.connect(address.socket)
    except OSError as error:
        end.close()
        raise ServerError(2003, str(error)) from error
    return end


@contextmanager
def _errors() -> Iterator[None]:
    """Turn PyMySQL's errors, and what it raises where an answer is none, into `ServerError`."""
    import pymysql

    try:
        yield
    except pymysql.MySQLError as error:
        code, message = (*error.args, "", "")[:2]
        if isinstance(error.__context__, TimeoutError):
            code = LATE
        elif not isinstance(code, int) or code == 0:
            code, message = 2013, str(error)
        raise ServerError(code, str(message)) from error
    except UnicodeDecodeError as error:
        raise ServerError(1300, "the result is not valid Unicode") from error
    except (OSError, struct.error, IndexError, AssertionError, RuntimeError, ValueError) as error:
        raise ServerError(2013, str(error)) from error


def literal(cell: Cell) -> str:
    """A cell in SQL, whatever the server's mode.

    >>> literal("O'Neil"), literal(1.5), literal(None)
    ("_utf8mb4 x'4f274e65696c'", '1.5e0', 'NULL')
    """
    if cell is None:
        return "NULL"
    if isinstance(cell, str):
        return f"_utf8mb4 x'{cell.encode().hex()}'"
    if isinstance(cell, bytes):
        return f"x'{cell.hex()}'"
    if isinstance(cell, float):
        text = repr(cell)
        return text if "e" in text or "n" in text else text + "e0"
    return str(int(cell))


def backquoted(name: str) -> str:
    """An identifier of MySQL, whatever characters it holds.

    >>> backquoted("a`b")
    '`a``b`'
    """
    return "`" + name.replace("`", "``") + "`"


@functools.cache
def _tls() -> Any:
    """Encryption without a check of the server's certificate, as MySQL's own client does by default."""
    import ssl

    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


@functools.cache
def _decoders() -> dict[Any, Callable[[Any], Cell]]:
    """Numbers become Python's; dates and times stay text, as MySQL writes them."""
    from pymysql.constants import FIELD_TYPE as KIND

    whole = (KIND.TINY, KIND.SHORT, KIND.LONG, KIND.INT24, KIND.LONGLONG, KIND.YEAR)
    return {
        **dict.fromkeys(whole, _whole),
        **dict.fromkeys((KIND.FLOAT, KIND.DOUBLE), float),
        **dict.fromkeys((KIND.DECIMAL, KIND.NEWDECIMAL), _exact),
        KIND.BIT: lambda data: int.from_bytes(data, "big"),
    }


def _whole(text: str) -> int | None:
    return int(text) if text else None  # of a statement that is ended in the middle of a row


def _exact(text: str) -> int | float | None:
    """A DECIMAL: whole where it has no decimals, as SUM of whole numbers has none."""
    return float(text) if "." in text else _whole(text)
