"""The processes that run untrusted SQL: each trainer process has a fork server, with its workers.

Nothing in SQLite ends a statement for certain: a single call of a function may take minutes, and an aggregate
all memory, between two calls of a progress handler. The kernel does: a worker that is late is killed by its
own alarm, whatever it is doing; its memory is bounded, SQLite's by SQLite and the whole by the kernel; and it
can open no file. It ends when the other end of its socket is closed, as it is when our process ends.

macOS has no bound on a process's address space: there SQLite's own bound is the only one.

Standard library only, so that a fork is small and quick.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import signal
import socket
import sqlite3
import sys
from collections.abc import Iterator
from typing import Any

from agent_peft.environments.db_bench.database import DeclaredColumn, Table
from agent_peft.environments.db_bench.sqlite import SQLiteDatabase
from agent_peft.types import AgentPeftError

# seconds after its limit, or as many as its limit, after which a statement is ended together with its worker
_GRACE = 1.0
_OPEN_SECONDS = 60.0
_HEAP_BYTES = 16 << 20  # what SQLite may hold: a table is at most a quarter of it
_ADDRESS_BYTES = 256 << 20  # what the worker may hold above what it starts with
_GROWTH_BYTES = 8 << 20  # a worker that has grown by more is not used again
_MAX_MESSAGE = 1 << 26  # bytes
_ENCODER = json.JSONEncoder(
    default=lambda cell: {"hex": cell.hex()}, check_circular=False, separators=(",", ":")
)
_DECODER = json.JSONDecoder(object_hook=lambda cell: bytes.fromhex(cell["hex"]))


def frame(message: Any) -> bytes:
    """A message of lists, texts, numbers, None and bytes, as it is sent: a line of JSON. Raises ValueError if
    a number has too many digits.

    >>> frame(["a", b"b"])
    b'["a",{"hex":"62"}]\\n'
    """
    return _ENCODER.encode(message).encode() + b"\n"


class Channel:
    """One end of a socket."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(True)  # whatever Python's default for sockets was set to
        self._end, self._unread = end, b""
        self.send, self.set_timeout, self.close = end.sendall, end.settimeout, end.close

    def receive(self) -> Any:
        """The next message. Raises `OSError`: it did not come in time, or the other end was closed;
        `ValueError, LookupError, TypeError, RecursionError`: it is not as `encode` writes one.
        """
        chunks, length = [self._unread], 0
        while b"\n" not in chunks[-1]:
            chunks.append(self._end.recv(1 << 16))
            length += len(chunks[-1])
            if not chunks[-1] or length > _MAX_MESSAGE:
                raise ConnectionResetError("the other end was closed, or sent too much")
        line, _, self._unread = b"".join(chunks).partition(b"\n")
        return _DECODER.decode(line.decode())


def serve_workers(descriptor: int) -> None:
    """Fork a worker for each socket that comes, until the other end is closed."""
    caller = socket.socket(fileno=descriptor)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    heap = sqlite3.connect(":memory:")
    heap.execute(f"PRAGMA hard_heap_limit = {_HEAP_BYTES}")  # of this process and those it forks
    heap.close()
    _set_limits()
    gc.freeze()
    caller.send(b"+")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a worker ended
    while True:
        message, descriptors, _, _ = socket.recv_fds(caller, 1, 1)
        if not message:
            return
        for each in descriptors:
            with contextlib.suppress(OSError):  # no more processes: the caller finds the socket closed
                if os.fork() == 0:
                    caller.close()
                    _work(socket.socket(fileno=each))
            os.close(each)


def _work(end: socket.socket) -> None:
    status = 1
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))  # what is open stays open, and nothing more can be
        _serve(Channel(end))
        status = 0
    finally:
        os._exit(status)  # the caller finds the socket closed


def _set_limits() -> None:
    """Set the limits of this process and its children."""
    if sys.platform.startswith("linux"):
        with open("/proc/self/statm", encoding="ascii") as file:
            pages = int(file.read().split()[0])
        most = pages * resource.getpagesize() + _ADDRESS_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def _serve(channel: Channel) -> None:
    """Answer ``open``, then ``execute`` and ``table``. To ``reset`` and ``close`` there is no answer."""
    before = _peak_bytes()
    database: SQLiteDatabase | None = None
    while True:
        try:
            what, *arguments = channel.receive()
        except OSError:
            return
        if what == "open":
            refusal = None
            with _alarm(_OPEN_SECONDS):
                try:
                    database = _opened(*arguments)
                except AgentPeftError as error:
                    refusal = str(error)
            channel.send(frame(refusal))
        elif database is None:  # its table was refused
            return
        elif what == "execute":
            sql, seconds = arguments
            with _alarm(seconds + min(database.seconds, _GRACE)):
                done = database.execute(sql, seconds)
                answer = frame([done.rows, done.changed, done.error, done.cut])
            channel.send(answer)
        elif what == "table":
            with _alarm(database.seconds + min(database.seconds, _GRACE)):
                answer = frame(database.table())
            channel.send(answer)
        elif what == "reset":
            with _alarm(_OPEN_SECONDS):
                database.reset()
        else:
            database.close()
            database = None
            if _peak_bytes() - before > _GROWTH_BYTES:
                return


def _opened(
    name: str, columns: list[tuple[str, str]], rows: list[list[Any]], seconds: float, steps: int, seed: int
) -> SQLiteDatabase:
    table = Table(name, tuple(DeclaredColumn(*column) for column in columns), rows)
    return SQLiteDatabase(table, seconds=seconds, steps=steps, seed=seed)


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """The kernel ends this process if the block takes longer."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
