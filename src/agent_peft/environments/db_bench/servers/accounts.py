"""Servers in use: of each, pooled connections of its administrator, and schemas with a user each."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from agent_peft.environments.db_bench.servers.address import Address, parse_address
from agent_peft.environments.db_bench.servers.client import Client, ServerError, quoted
from agent_peft.environments.db_bench.servers.owner import is_orphan, owned_name
from agent_peft.environments.db_bench.servers.private import PrivateServer
from agent_peft.types import AgentPeftError, InfrastructureError

logger = logging.getLogger(__name__)

PREFIX = "ap"  # a user's name has at most 32 characters
_RIGHTS = "SELECT, INSERT, UPDATE, DELETE, CREATE, DROP, ALTER, INDEX"
_SETTING = "SET SESSION lock_wait_timeout = 5, sql_mode = 'NO_BACKSLASH_ESCAPES'"
_MAX_IDLE = 32
_SECONDS = 20.0  # for a statement of ours
_DOUBT_SECONDS = 5.0
_LOOK_SECONDS = 0.05  # between two looks at the server's memory
_LOOKS_PER_SIZES = 5  # of them between two looks at the sizes of tables
_KILL_SECONDS = 2.0  # until a killed statement has given its memory back
_numbers = itertools.count()
_DENIED = {1044, 1045, 1142, 1227, 1410, 1698}


class Server:
    """One server, and what we have made on it. Threads may share it."""

    def __init__(self, address: Address, private: PrivateServer | None = None) -> None:
        """Look at the server, and remove what dead processes of this host have left on it.

        Raises:
            AgentPeftError: the user's server does not answer, or refuses the account.
            InfrastructureError: our own does not answer.
        """
        self.address, self.private = address, private
        self.needs_ping = False  # a connection was lost: does the server still answer?
        self.is_retired = False  # it keeps memory: it takes no new schemas, and ends with its last one
        self.out_of_memory: set[int] = set()  # connections whose statement was stopped for it
        self._names: set[str] = set()  # of its schemas
        self._idle: list[Client] = []
        self._pending_drops: deque[str] = deque()  # names that could not be dropped yet
        self._prefix = owned_name(PREFIX)
        self._ended = threading.Event()
        try:
            with self.administrator() as connection:
                self.is_mariadb = "MariaDB" in str(connection.run("SELECT VERSION()")[0][0])
                # MySQL has users of any host, and a socket's is localhost
                self._host = "localhost" if address.socket else "%"
                self._remove_orphans(connection)
        except ServerError as error:
            if private is not None:
                raise InfrastructureError(f"the database server does not answer: {error}") from error
            raise AgentPeftError(
                f"database: the server {address.name} cannot be used as {address.user}: {error.message}"
            ) from error

        if private is not None:
            threading.Thread(target=self._watch, args=(private,), daemon=True, name="db_bench sizes").start()

    @property
    def is_running(self) -> bool:
        """Whether our own server has not ended, as far as we know, and answers where that is in doubt."""
        if self.private is None:
            return True
        if self.needs_ping and self.private.running:
            try:
                Client(self.address, seconds=_DOUBT_SECONDS).close()
            except ServerError:
                return False
            self.needs_ping = False
        return self.private.running

    @property
    def is_idle(self) -> bool:
        """Whether it has no schema of an episode."""
        return not self._names

    @property
    def is_full(self) -> bool:
        """Whether the disk has no room for another table. Of a server that is not ours nobody knows."""
        return self.private is not None and self.private.is_full

    @contextlib.contextmanager
    def administrator(self) -> Iterator[Client]:
        """A connection of the account that makes the others. One that fails is not used again.

        Raises:
            ServerError: there is none, or a statement failed.
        """
        connection = self._idle_one() or Client(self.address, None, _SETTING, _SECONDS)
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        if len(self._idle) < _MAX_IDLE:
            self._idle.append(connection)
        else:
            connection.close()

    def make(self) -> Address:
        """Make a schema, and a user of the same name who has rights on it alone.

        Raises:
            AgentPeftError: our account may not make them.
            ServerError: anything else.
        """
        name = f"{self._prefix}_{next(_numbers):x}"
        password = secrets.token_hex(16)
        self._names.add(name)
        self._flush_drops()
        try:
            with self.administrator() as connection:
                connection.run(f"CREATE DATABASE {quoted(name)} CHARACTER SET utf8mb4")
                connection.run(f"CREATE USER {self._user(name)} IDENTIFIED BY '{password}'")
                connection.run(f"GRANT {_RIGHTS} ON {quoted(_escaped(name))}.* TO {self._user(name)}")
        except ServerError as error:
            self.drop(name)
            if error.code in _DENIED and self.private is None:
                raise AgentPeftError(
                    f"database: {self.address.user} may not make schemas and users on {self.address.name} "
                    f"({error.message}); GRANT it ALL PRIVILEGES ON *.* WITH GRANT OPTION"
                ) from error
            raise
        return replace(self.address, user=name, password=password)

    def drop(self, name: str) -> None:
        """Drop a schema and its user, now or, if the server does not let us, later."""
        try:
            with self.administrator() as connection:
                self._drop(connection, name)
        except (ServerError, AgentPeftError):
            if self.is_running:
                self._pending_drops.append(name)
        self._names.discard(name)
        if self.is_retired and self.is_idle:
            self.stop()

    def remake(self, name: str) -> None:
        """Make a schema empty.

        Raises:
            ServerError: it fails.
        """
        with self.administrator() as connection:
            connection.run(f"DROP DATABASE IF EXISTS {quoted(name)}")
            connection.run(f"CREATE DATABASE {quoted(name)} CHARACTER SET utf8mb4")

    def kill(self, name: str, thread: int) -> bool:
        """End a user's connection, whatever it does. Returns whether it is gone.

        Raises:
            ServerError: the server does not answer.
        """
        with contextlib.suppress(ServerError), self.administrator() as connection:  # it may have ended
            connection.run(f"KILL CONNECTION {thread}")
        waiting = threading.Event()
        for wait in (0.0, 0.005, 0.02, 0.1, *[0.25] * 20):
            waiting.wait(wait)
            with self.administrator() as connection:
                users = connection.run(
                    f"SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE id = {thread} "
                    f"AND user = '{name}'",
                )
            if users[0][0] == 0:
                return True
        return False

    def close_idle(self) -> None:
        """Close the connections that nobody uses, after a last try to drop what is owed."""
        self._flush_drops()
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop().close()

    def stop(self) -> None:
        """End it, if it is ours."""
        self._ended.set()
        if self.is_running:
            self.close_idle()
        if self.private is not None:
            self.private.stop()

    def detach(self) -> None:
        """Forget it, in a fork of the process that it belongs to."""
        for connection in self._idle:
            connection.cut()
        if self.private is not None:
            self.private.detach()

    def _watch(self, private: PrivateServer) -> None:
        """Stop statements whose tables or memory become too large, until the server is stopped. No setting of
        the server bounds all of its memory, and InnoDB ends the whole server when a disk is full.
        """
        allowed = 1.0
        for look in itertools.count():
            if self._ended.wait(_LOOK_SECONDS):
                return
            with contextlib.suppress(ServerError, AgentPeftError):
                if private.extra_memory() > allowed:
                    allowed = max(self._save_memory(private) + 0.1, 1.0)
                for name in private.large_schemas(self._prefix) if look % _LOOKS_PER_SIZES == 0 else ():
                    for thread in self._running(f"user = '{name}'"):
                        self._kill_query(thread)

    def _save_memory(self, private: PrivateServer) -> float:
        """Stop the statement that has run for the longest time. A server that keeps the memory all the same
        is retired. Returns what it keeps.
        """
        for thread in self._running(f"user LIKE '{_escaped(self._prefix)}%'")[:1]:
            logger.warning("database: a statement is stopped, since the server takes too much memory")
            self.out_of_memory.add(thread)
            self._kill_query(thread)
            deadline = time.monotonic() + _KILL_SECONDS
            while self._running(f"id = {thread}") and time.monotonic() < deadline:
                self._ended.wait(_LOOK_SECONDS)
        self._ended.wait(_LOOK_SECONDS)
        kept = private.extra_memory()
        if kept > 1:
            self.is_retired = True
        return kept

    def _running(self, condition: str) -> list[int]:
        """The connections that run a statement, the longest first."""
        elapsed = "time_ms" if self.is_mariadb else "time"
        with self.administrator() as connection:
            rows = connection.run(
                f"SELECT id FROM information_schema.PROCESSLIST WHERE command = 'Query' AND {condition} "
                f"ORDER BY {elapsed} DESC"
            )
        return [int(str(row[0])) for row in rows]

    def _kill_query(self, thread: int) -> None:
        with contextlib.suppress(ServerError), self.administrator() as connection:  # it may have ended
            connection.run(f"KILL QUERY {thread}")

    def _idle_one(self) -> Client | None:
        """A connection that waits and lives: the server may have hung up on one that was idle for hours."""
        with contextlib.suppress(IndexError):
            while True:
                connection = self._idle.pop()
                if connection.is_alive():
                    return connection
                connection.close()
        return None

    def _flush_drops(self) -> None:
        """Try once more to drop what could not be dropped."""
        with contextlib.suppress(IndexError):
            for _ in range(len(self._pending_drops)):
                self.drop(self._pending_drops.popleft())

    def _user(self, name: str) -> str:
        return f"'{name}'@'{self._host}'"

    def _drop(self, connection: Client, name: str) -> None:
        connection.run(f"DROP USER IF EXISTS {self._user(name)}")
        connection.run(f"DROP DATABASE IF EXISTS {quoted(name)}")

    def _remove_orphans(self, connection: Client) -> None:
        names = {str(row[0]) for row in connection.run("SHOW DATABASES")}
        with contextlib.suppress(ServerError):  # it is not ours, and we may not read it
            names |= {str(row[0]) for row in connection.run("SELECT User FROM mysql.user")}
        orphans = sorted(name for name in names if is_orphan(name, PREFIX))
        for name in orphans:
            self._drop(connection, name)
        if orphans:
            logger.info("database: removed %d schemas of processes that have ended", len(orphans))


_lock = threading.Lock()
_servers: dict[str, Server] = {}
_retired: list[Server] = []


def server_of(database: str) -> Server:
    """The server that ``database`` names (``mariadb``, or an address), started when first needed.

    Raises:
        AgentPeftError: it cannot be used.
        InfrastructureError: our own does not start.
    """
    with _lock:
        server = _servers.get(database)
        if server is not None and (server.is_retired or not server.is_running):
            logger.warning(
                "database: the server %s; another is started",
                "takes too much memory" if server.is_retired else "has ended",
            )
            _retire(_servers.pop(database))
            server = None
        if server is None:
            if database == "mariadb":
                private = PrivateServer()
                server = Server(private.address, private)
            else:
                server = Server(parse_address(database))
            _servers[database] = server
        return server


def _retire(server: Server) -> None:
    """Stop a server, now or with its last schema."""
    _retired[:] = [old for old in _retired if old.is_running]
    if server.is_idle or not server.is_running:
        server.stop()
    else:
        _retired.append(server)


def close_idle() -> None:
    """Close connections that nobody uses."""
    for server in list(_servers.values()):
        server.close_idle()


@atexit.register
def stop() -> None:
    """End this process's own server, and hang up on the others. The next database starts another."""
    with _lock:
        while _servers:
            _servers.popitem()[1].stop()
        while _retired:
            _retired.pop().stop()


def _escaped(name: str) -> str:
    """A schema's name in GRANT, where the underscore stands for any character."""
    return name.replace("_", r"\_")


def _forget() -> None:
    """Forget the parent's servers in a forked process."""
    global _lock
    _lock = threading.Lock()  # the other may be held by a thread that this process does not have
    for server in [*_servers.values(), *_retired]:
        server.detach()
    _servers.clear()
    _retired.clear()


os.register_at_fork(after_in_child=_forget)
