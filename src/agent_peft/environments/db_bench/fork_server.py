"""Our side of the workers: one fork server per process of ours, started when first needed, and the workers
that wait for work.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

from agent_peft.environments.db_bench.channel import Channel, encode
from agent_peft.types import InfrastructureError

_MAX_IDLE = 64  # workers that wait: each takes about two megabytes
_START_SECONDS = 60.0
_ATTEMPTS = 3
_CLOSE = encode(["close"])
# The packages above the worker are only names in that process: theirs import much, and it has the standard
# library alone.
_START = """
import sys, types
folder, descriptor = sys.argv[1:]
for name in ("agent_peft", "agent_peft.environments", "agent_peft.environments.db_bench"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = ["/".join([folder, *name.split(".")])]
from agent_peft.environments.db_bench import worker
worker.main(int(descriptor))
"""


class WorkerGone(Exception):
    """A worker died, or did not answer in time."""


class Worker:
    """One worker, from outside. Used by one thread at a time."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._owes = False  # an answer: whoever asked has left without it
        self.set_timeout = channel.set_timeout

    def ask(self, message: bytes) -> Any:
        """Send a request, and wait for the answer.

        Raises:
            WorkerGone: there is none.
        """
        self._owes = True
        try:
            self._channel.send(message)
            answer = self._channel.receive()
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise WorkerGone from error
        self._owes = False
        return answer

    def tell(self, message: bytes) -> bool:
        """Send a request that has no answer. Returns whether the worker took it, and owes none."""
        with contextlib.suppress(OSError):
            self._channel.send(message)
            return not self._owes
        return False

    def close(self) -> None:
        """Hang up, upon which it ends. May be called twice."""
        self._channel.close()


class ForkServer:
    """The process that forks workers. It ends with us; a worker ends when we hang up on it."""

    def __init__(self) -> None:
        """
        Raises:
            InfrastructureError: the process cannot be started.
        """
        self._idle: list[Worker] = []
        self._closed = False
        try:
            self._caller, theirs = socket.socketpair()
        except OSError as error:
            raise InfrastructureError(f"the process that runs SQL cannot be started: {error}") from error
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [
                        sys.executable,
                        "-I",
                        "-S",
                        "-c",
                        _START,
                        str(Path(__file__).parents[3]),
                        str(theirs.fileno()),
                    ],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    cwd="/",
                    env={
                        name: os.environ[name]
                        for name in ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
                        if name in os.environ
                    },
                    start_new_session=True,  # an interrupt at the terminal is for us
                )
        except OSError as error:
            self._caller.close()
            raise InfrastructureError(f"the process that runs SQL cannot be started: {error}") from error
        try:
            self._caller.settimeout(_START_SECONDS)
            if not self._caller.recv(1):
                raise ConnectionError("it ended as it started")
        except OSError as error:
            self.close()
            raise InfrastructureError(f"the process that runs SQL cannot be started: {error}") from error
        except BaseException:
            self.close()
            raise

    def idle(self) -> Worker | None:
        """A worker that waits for work, if there is one."""
        with contextlib.suppress(IndexError):
            return self._idle.pop()
        return None

    def fork(self) -> Worker:
        """A new worker.

        Raises:
            ConnectionError: the server is gone.
            OSError: there are no more descriptors.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self._caller, [b"w"], [theirs.fileno()])
        except BaseException as error:
            ours.close()
            if self._closed:  # by another thread: its socket is no longer one
                raise ConnectionError("it was closed") from error
            raise
        worker = Worker(Channel(ours))
        _workers.add(worker)
        return worker

    def take_back(self, worker: Worker) -> None:
        """Have a worker wait for more work, or end."""
        if len(self._idle) < _MAX_IDLE and worker.tell(_CLOSE):
            self._idle.append(worker)
            if self._closed:  # by another thread, which may have ended the others before this one came
                self.end_idle()
        else:
            worker.close()

    def end_idle(self) -> None:
        while (worker := self.idle()) is not None:
            worker.close()

    def close(self) -> None:
        self._closed = True
        self._caller.close()
        self.end_idle()
        self._process.kill()  # the workers at work do not need it
        self._process.wait()

    def detach(self) -> None:
        """Forget it, in a fork of the process that it belongs to."""
        self._caller.close()
        self._process.returncode = 0  # which is not ours to wait for


_lock = threading.Lock()
_server: ForkServer | None = None
_workers: weakref.WeakSet[Worker] = weakref.WeakSet()


def acquire(opening: bytes) -> tuple[Worker, Any]:
    """A worker, and its answer to its first request.

    Raises:
        InfrastructureError: none can be started.
    """
    server = _running()
    while (worker := server.idle()) is not None:  # it may have ended since
        with contextlib.suppress(WorkerGone):
            return worker, _ask_first(worker, opening)
    cause = "they end at once"
    for _ in range(_ATTEMPTS):
        server = _running()
        try:
            worker = server.fork()
            return worker, _ask_first(worker, opening)
        except ConnectionError as error:
            cause = str(error)
            _drop(server)
        except OSError as error:
            raise InfrastructureError(f"a process that runs SQL cannot be started: {error}") from error
        except WorkerGone:
            pass
    raise InfrastructureError(f"no process that runs SQL can be started: {cause}")


def release(worker: Worker) -> None:
    """Give a worker back: its database is dropped."""
    server = _server
    if server is None:
        worker.close()
    else:
        server.take_back(worker)


def end_idle() -> None:
    """End the workers that wait for work."""
    if _server is not None:
        _server.end_idle()


@atexit.register
def stop() -> None:
    """End this process's fork server and its idle workers. The next database starts another."""
    server = _server
    if server is not None:
        _drop(server)


def _running() -> ForkServer:
    global _server
    with _lock:
        if _server is None:
            _server = ForkServer()
        return _server


def _drop(server: ForkServer) -> None:
    global _server
    with _lock:
        if _server is server:
            _server = None
            server.close()


def _ask_first(worker: Worker, opening: bytes) -> Any:
    try:
        worker.set_timeout(_START_SECONDS)
        return worker.ask(opening)
    except BaseException:
        worker.close()
        raise


def _forget() -> None:
    """Forget the parent's fork server in a forked process, because it ends with the parent."""
    global _lock, _server
    _lock = threading.Lock()  # the other may be held by a thread that this process does not have
    if _server is not None:
        _server.detach()
        _server = None
    for worker in list(_workers):
        worker.close()


os.register_at_fork(after_in_child=_forget)
