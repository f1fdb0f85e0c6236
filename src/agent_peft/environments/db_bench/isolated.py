"""SQLite in worker processes: whatever a statement does, it ends in time, and nothing else ends with it.

Each process that plays episodes has one fork server, started when first needed. It does not come from
`multiprocessing`, whose children import the main module again: a script without a ``__main__`` guard fails in
each of them, and one that imports torch takes seconds and 200 MB a worker.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

from agent_peft.environments.db_bench.database import DatabaseStopped, Executed, Row, Table, text_refusal
from agent_peft.environments.db_bench.worker import Channel, frame
from agent_peft.types import AgentPeftError, InfrastructureError, StopReason

_MAX_TABLE = 4 << 20  # bytes of a table as JSON
_MAX_SECONDS = 86_400.0
# seconds after its limit that a statement's answer may take: the worker's own clock is the one that ends it
_GRACE_SECONDS = 30.0
_MAX_IDLE = 64  # workers that wait: each takes about two megabytes
_START_SECONDS = 60.0
_ATTEMPTS = 3
_TABLE, _RESET, _CLOSE = frame(["table"]), frame(["reset"]), frame(["close"])
# The packages above the worker are only names in that process: ours import much, and the worker needs the
# standard library alone.
_START = """
import sys, types
folder, descriptor = sys.argv[1:]
for name in ("agent_peft", "agent_peft.environments", "agent_peft.environments.db_bench"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = ["/".join([folder, *name.split(".")])]
from agent_peft.environments.db_bench import worker
worker.serve_workers(int(descriptor))
"""


class IsolatedDatabase:
    """`Database` for untrusted SQL: a `SQLiteDatabase` in a worker, with the same arguments."""

    def __init__(self, table: Table, *, seconds: float, steps: int, seed: int) -> None:
        self._seconds = min(seconds, _MAX_SECONDS)
        columns = [[column.name, column.type] for column in table.columns]
        try:
            opening = frame(["open", table.name, columns, table.rows, self._seconds, steps, seed])
        except ValueError as error:
            raise AgentPeftError(f"SQLite does not accept the table {table.name!r}: {error}") from error
        if len(opening) > _MAX_TABLE:
            raise AgentPeftError(
                f"the table {table.name!r} is too large: {len(opening)} bytes, and at most {_MAX_TABLE} "
                "can be used"
            )
        self._closed = False
        self._worker, refusal = acquire(opening)
        if refusal is not None:
            self.close()
            raise AgentPeftError(refusal)
        self._worker.set_timeout(self._seconds + _GRACE_SECONDS)

    def execute(self, sql: str, seconds: float | None = None) -> Executed:
        if (refusal := text_refusal(sql)) is not None:
            return Executed(error=refusal)
        seconds = self._seconds if seconds is None else min(self._seconds, seconds)
        rows, changed, error, cut = self._ask(frame(["execute", sql, seconds]), seconds)
        return Executed(_as_rows(rows), changed, error, cut)

    def table(self) -> tuple[Row, ...] | None:
        return _as_rows(self._ask(_TABLE, self._seconds))

    def reset(self) -> None:
        if self._closed or not self._worker.post(_RESET):
            raise DatabaseStopped(StopReason.CRASHED)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            release(self._worker)

    def _ask(self, request: bytes, seconds: float) -> Any:
        start = time.monotonic()
        try:
            return self._worker.ask(request)
        except WorkerGone as error:
            late = time.monotonic() - start > seconds
            raise DatabaseStopped(StopReason.TIMEOUT if late else StopReason.CRASHED) from error


def _as_rows(rows: list[list[Any]] | None) -> tuple[Row, ...] | None:
    return None if rows is None else tuple(map(tuple, rows))


class WorkerGone(Exception):
    """A worker died, or did not answer in time."""


class Worker(Channel):
    """One worker, from outside, which ends when it is closed. Used by one thread at a time."""

    _owes = False  # an answer: the caller was interrupted while it waited

    def ask(self, request: bytes) -> Any:
        """Send a request, and return the answer. Raises `WorkerGone`."""
        self._owes = True
        try:
            self.send(request)
            answer = self.receive()
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise WorkerGone from error
        self._owes = False
        return answer

    def post(self, request: bytes) -> bool:
        """Send a request that has no answer. Returns whether the worker took it, and owes none."""
        with contextlib.suppress(OSError):
            self.send(request)
            return not self._owes
        return False


class ForkServer:
    """The process that forks workers. It ends with us; a worker ends when its socket is closed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        command = [sys.executable, "-I", "-S", "-c", _START, str(Path(__file__).parents[3])]
        libraries = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
        self._caller, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [*command, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    cwd="/",
                    env={name: os.environ[name] for name in libraries if name in os.environ},
                    start_new_session=True,  # an interrupt at the terminal is for us
                )
            self._caller.settimeout(_START_SECONDS)
            if not self._caller.recv(1):
                raise ConnectionError("it ended as it started")
        except BaseException:
            self.close()
            raise

    def fork(self) -> Worker:
        """A new worker. Raises ConnectionError if this process is gone, OSError without descriptors."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self._caller, [b"w"], [theirs.fileno()])
        except BaseException as error:
            ours.close()
            if self._caller.fileno() < 0:  # another thread has closed it
                raise ConnectionError("it was closed") from error
            raise
        worker = Worker(ours)
        _workers.add(worker)
        return worker

    def close(self) -> None:
        self._caller.close()
        if self._process is not None:
            self._process.kill()  # the workers do not need it
            self._process.wait()

    def detach(self) -> None:
        """Release it in a fork of the process that it belongs to."""
        self._caller.close()
        if self._process is not None:
            self._process.returncode = 0  # the parent waits for it


_lock = threading.Lock()
_server: ForkServer | None = None
_idle: list[Worker] = []
_workers: weakref.WeakSet[Worker] = weakref.WeakSet()


def acquire(opening: bytes) -> tuple[Worker, Any]:
    """A worker, and its answer to its first request."""
    with contextlib.suppress(IndexError):
        while True:
            with contextlib.suppress(WorkerGone):  # it may have ended since
                return _first_answer(_idle.pop(), opening)
    cause = "they end at once"
    for _ in range(_ATTEMPTS):
        server = _running()
        try:
            return _first_answer(server.fork(), opening)
        except WorkerGone:
            pass
        except ConnectionError as error:
            cause = str(error)
            _drop(server)
        except OSError as error:
            raise InfrastructureError(f"a process that runs SQL cannot be started: {error}") from error
    raise InfrastructureError(f"no process that runs SQL can be started: {cause}")


def release(worker: Worker) -> None:
    """Have a worker drop its database and wait for more work, or end."""
    if len(_idle) < _MAX_IDLE and worker.post(_CLOSE):
        _idle.append(worker)
    else:
        worker.close()


def end_idle() -> None:
    """End the workers that wait for work."""
    with contextlib.suppress(IndexError):
        while True:
            _idle.pop().close()


@atexit.register
def stop_workers() -> None:
    """End this process's fork server and its idle workers. The next database starts another."""
    _drop(_server)
    end_idle()


def _running() -> ForkServer:
    global _server
    with _lock:
        if _server is None:
            try:
                _server = ForkServer()
            except OSError as error:
                raise InfrastructureError(f"the process that runs SQL cannot be started: {error}") from error
        return _server


def _drop(server: ForkServer | None) -> None:
    global _server
    with _lock:
        if server is not None and _server is server:
            _server = None
            server.close()


def _first_answer(worker: Worker, opening: bytes) -> tuple[Worker, Any]:
    try:
        worker.set_timeout(_START_SECONDS)
        return worker, worker.ask(opening)
    except BaseException:
        worker.close()
        raise


def _after_fork() -> None:
    """Release the parent's processes in a forked process, because they end with the parent."""
    global _lock, _server
    _lock = threading.Lock()  # the other may be held by a thread that this process does not have
    if _server is not None:
        _server.detach()
        _server = None
    _idle.clear()
    for worker in list(_workers):
        worker.close()


os.register_at_fork(after_in_child=_after_fork)
