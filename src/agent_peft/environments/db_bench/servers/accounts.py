"""Servers in use: of each, pooled connections of its administrator, and schemas with a user each."""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import itertools
import logging
import os
import re
import secrets
import shutil
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from agent_peft.child_processes import start_of
from agent_peft.environments.db_bench.servers.client import (
    Client,
    ServerAccount,
    ServerError,
    backquoted,
    parse_address,
)
from agent_peft.environments.db_bench.servers.private import PrivateServer, place
from agent_peft.types import AgentPeftError, InfrastructureError

logger = logging.getLogger(__name__)

PREFIX = "ap"  # of a schema and its user, whose name has at most 32 characters
FOLDER_PREFIX = "agent-peft-server"
_RIGHTS = "SELECT, INSERT, UPDATE, DELETE, CREATE, DROP, ALTER, INDEX"
_SETTING = "SET SESSION lock_wait_timeout = 5, sql_mode = 'NO_BACKSLASH_ESCAPES'"
_MAX_IDLE = 32
_SECONDS = 20.0  # for a statement of the administrator
_PING_SECONDS = 5.0
_LOOK_SECONDS = 0.05  # between two looks at the server's memory
_LOOKS_PER_SIZES = 5  # of them between two looks at the sizes of tables
_KILL_SECONDS = 2.0  # until a killed statement has freed its memory
_numbers = itertools.count()
_DENIED = {1044, 1045, 1142, 1227, 1410, 1698}


class DatabaseServer:
    """One server, and the schemas of this process on it. Threads may share it. It raises `ServerError`."""

    def __init__(self, address: ServerAccount, private: PrivateServer | None = None) -> None:
        """Connect, and remove what dead processes of this host have left on the server."""
        self.address, self.private = address, private
        self.needs_ping = False  # a connection was lost: does the server still answer?
        self.is_retired = False  # it keeps memory: it takes no new schemas, and ends with its last one
        self.out_of_memory: set[int] = set()  # connections whose statement was stopped for it
        self._names: set[str] = set()  # of its schemas
        self._pending: set[str] = set()  # those that could not be dropped
        self._idle: list[Client] = []
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
        """Whether the private server has not ended, and answers where that is in doubt."""
        if self.private is None:
            return True
        if self.needs_ping and self.private.running:
            try:
                Client(self.address, seconds=_PING_SECONDS).close()
            except ServerError:
                return False
            self.needs_ping = False
        return self.private.running

    @contextlib.contextmanager
    def administrator(self) -> Iterator[Client]:
        """A connection of the account that makes the others. One that fails is not used again."""
        connection = self._idle_connection() or Client(self.address, None, _SETTING, _SECONDS)
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        if len(self._idle) < _MAX_IDLE:
            self._idle.append(connection)
        else:
            connection.close()

    def make(self) -> ServerAccount:
        """Make a schema, and a user of the same name who has rights on it alone."""
        name, password = f"{self._prefix}_{next(_numbers):x}", secrets.token_hex(16)
        self._names.add(name)
        user, schema = f"'{name}'@'{self._host}'", name.replace("_", r"\_")
        try:
            with self.administrator() as connection:
                connection.run(f"CREATE DATABASE {backquoted(name)} CHARACTER SET utf8mb4")
                connection.run(f"CREATE USER {user} IDENTIFIED BY '{password}'")
                connection.run(f"GRANT {_RIGHTS} ON {backquoted(schema)}.* TO {user}")
        except ServerError as error:
            self.drop(name)
            if error.code in _DENIED and self.private is None:
                raise AgentPeftError(
                    f"database: {self.address.user} may not make schemas and users on {self.address.name} "
                    f"({error.message}); GRANT it ALL PRIVILEGES ON *.* WITH GRANT OPTION"
                ) from error
            raise
        return replace(self.address, user=name, password=password)

    def drop(self, *names: str) -> None:
        """Drop schemas and their users, with those that could not be dropped before."""
        try:
            with self.administrator() as connection:
                for name in (*names, *self._pending):
                    self._drop(connection, name)
                    self._pending.discard(name)
        except (ServerError, AgentPeftError):
            self._pending.update(names)
        self._names.difference_update(names)
        if self.is_retired and not self._names:
            self.stop()

    def remake(self, name: str) -> None:
        """Make a schema empty."""
        with self.administrator() as connection:
            connection.run(f"DROP DATABASE IF EXISTS {backquoted(name)}")
            connection.run(f"CREATE DATABASE {backquoted(name)} CHARACTER SET utf8mb4")

    def kill(self, name: str, thread: int) -> bool:
        """End a user's connection, whatever it does. Returns whether it is gone."""
        self._kill("CONNECTION", thread)
        for wait in (0.0, 0.005, 0.02, 0.1, *[0.25] * 20):
            time.sleep(wait)
            if not self._threads(f"id = {thread} AND user = '{name}'"):
                return True
        return False

    def close_idle(self) -> None:
        """Close the connections that nobody uses, after a last try to drop schemas."""
        self.drop()
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop().close()

    def stop(self) -> None:
        """Close its connections, and end it if it is private."""
        if not self._ended.is_set():
            self._ended.set()
            if self.is_running:
                self.close_idle()
            if self.private is not None:
                self.private.stop()

    def detach(self) -> None:
        """Release it in a fork of the process that it belongs to."""
        for connection in self._idle:
            connection.cut()
        if self.private is not None:
            self.private.detach()

    def _watch(self, private: PrivateServer) -> None:
        """Stop statements whose tables or memory become too large, until the server is stopped. No setting of
        the server bounds all of its memory, and InnoDB ends the whole server when a disk is full.
        """
        for look in itertools.count():
            if self._ended.wait(_LOOK_SECONDS):
                return
            with contextlib.suppress(ServerError, AgentPeftError):
                if private.extra_memory() > 1 and not self.is_retired:
                    self._free_memory(private)
                for name in private.large_schemas(self._prefix) if look % _LOOKS_PER_SIZES == 0 else ():
                    for thread in self._threads(f"command = 'Query' AND user = '{name}'"):
                        self._kill("QUERY", thread)

    def _free_memory(self, private: PrivateServer) -> None:
        """Stop the statement that has run for the longest time. A server that keeps the memory is retired."""
        for thread in self._threads(f"command = 'Query' AND user LIKE '{self._prefix}%'")[:1]:
            logger.warning("database: a statement is stopped, since the server takes too much memory")
            self.out_of_memory.add(thread)
            self._kill("QUERY", thread)
            deadline = time.monotonic() + _KILL_SECONDS
            while self._threads(f"command = 'Query' AND id = {thread}") and time.monotonic() < deadline:
                self._ended.wait(_LOOK_SECONDS)
        self._ended.wait(_LOOK_SECONDS)
        self.is_retired = private.extra_memory() > 1

    def _threads(self, condition: str) -> list[int]:
        """The connections of which the condition holds, those with the longest statement first."""
        elapsed = "time_ms" if self.is_mariadb else "time"
        query = f"SELECT id FROM information_schema.PROCESSLIST WHERE {condition} ORDER BY {elapsed} DESC"
        with self.administrator() as connection:
            return [int(str(row[0])) for row in connection.run(query)]

    def _kill(self, what: str, thread: int) -> None:
        with contextlib.suppress(ServerError), self.administrator() as connection:  # it may have ended
            connection.run(f"KILL {what} {thread}")

    def _idle_connection(self) -> Client | None:
        """One that lives: the server may have closed a connection that was idle for hours."""
        with contextlib.suppress(IndexError):
            while True:
                connection = self._idle.pop()
                if connection.is_alive():
                    return connection
                connection.close()
        return None

    def _drop(self, connection: Client, name: str) -> None:
        connection.run(f"DROP USER IF EXISTS '{name}'@'{self._host}'")
        connection.run(f"DROP DATABASE IF EXISTS {backquoted(name)}")

    def _remove_orphans(self, connection: Client) -> None:
        names = {str(row[0]) for row in connection.run("SHOW DATABASES")}
        with contextlib.suppress(ServerError):  # the account may not read it
            names |= {str(row[0]) for row in connection.run("SELECT User FROM mysql.user")}
        orphans = sorted(name for name in names if is_orphan(name, PREFIX))
        for name in orphans:
            self._drop(connection, name)
        if orphans:
            logger.info("database: removed %d schemas of processes that have ended", len(orphans))


_lock = threading.Lock()
_servers: dict[str, DatabaseServer] = {}
_all: weakref.WeakSet[DatabaseServer] = weakref.WeakSet()  # with those that are retired


def server_of(database: str) -> DatabaseServer:
    """The server that ``database`` names (``mariadb``, or an address), started when first needed."""
    with _lock:
        server = _servers.get(database)
        if server is not None and (server.is_retired or not server.is_running):
            why = "takes too much memory" if server.is_retired else "has ended"
            logger.warning("database: the server %s; another is started", why)
            if server.is_running:
                server.drop()  # which ends it if it has no schema left
            else:
                server.stop()
            server = None
        if server is None:
            if database == "mariadb":
                remove_orphans(place())
                private = PrivateServer(owned_name(FOLDER_PREFIX) + "_")
                server = DatabaseServer(private.address, private)
            else:
                server = DatabaseServer(parse_address(database))
            _servers[database] = server
            _all.add(server)
        return server


def close_idle() -> None:
    """Close connections that nobody uses."""
    for server in list(_servers.values()):
        server.close_idle()


@atexit.register
def stop_servers() -> None:
    """End the private servers, and close the connections to others. The next database starts another."""
    with _lock:
        _servers.clear()
        for server in list(_all):
            server.stop()
            _all.discard(server)


def _after_fork() -> None:
    """Release the parent's servers in a forked process."""
    global _lock
    _lock = threading.Lock()  # the other may be held by a thread that this process does not have
    for server in list(_all):
        server.detach()
    _servers.clear()
    _all.clear()


os.register_at_fork(after_in_child=_after_fork)


def remove_orphans(folder: Path) -> None:
    """Remove the folders of processes that have ended together with their watchdogs."""
    for path in folder.glob(f"{FOLDER_PREFIX}_*"):
        if is_orphan(path.name, FOLDER_PREFIX):
            shutil.rmtree(path, ignore_errors=True)


def owned_name(prefix: str) -> str:
    """A name of this process: the host (with its process namespace), the process id, and when it started."""
    return f"{prefix}_{_host()}_{os.getpid():x}_{_start(os.getpid())}"


def is_orphan(name: str, prefix: str) -> bool:
    """Whether a process of this host made the name, and has ended.

    >>> is_orphan(owned_name("x") + "_1", "x"), is_orphan("x_orders", "x")
    (False, False)
    """
    match = re.fullmatch(rf"{prefix}_{_host()}_([0-9a-f]+)_([0-9a-z]+)(_.*)?", name)
    return match is not None and _start(int(match[1], 16)) != match[2]


@functools.cache
def _host() -> str:
    """Six digits that differ from host to host, and between containers, whose process ids mean others."""
    namespace = os.stat("/proc/self/ns/pid").st_ino if os.path.exists("/proc/self/ns/pid") else 0
    return hashlib.sha256(f"{socket.gethostname()} {namespace}".encode()).hexdigest()[:6]


def _start(pid: int) -> str | None:
    """When a process started, in few characters: MySQL's names are short. None if it has ended."""
    ticks = start_of(pid)
    return None if ticks is None else f"{int(ticks):x}"
