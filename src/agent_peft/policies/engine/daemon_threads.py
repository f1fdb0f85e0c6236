"""Threads for environments, and a limit on their time. One that hangs does not keep the process alive."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

Result = TypeVar("Result")


class DaemonThreads:
    """At most ``number`` daemon threads, each started when it is needed. ``ThreadPoolExecutor`` has threads
    that Python waits for at its end.
    """

    def __init__(self, number: int, name: str) -> None:
        self._number, self._name = number, name
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []

    def submit(self, call: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """Call on a thread. Only one thread may submit."""
        future: Future[Result] = Future()
        self._calls.put((future, lambda: call(*arguments)))
        if not self._idle.acquire(blocking=False) and len(self._threads) < self._number:
            name = f"{self._name}_{len(self._threads)}"
            self._threads.append(threading.Thread(target=self._work, name=name, daemon=True))
            self._threads[-1].start()
        return future

    def shutdown(self, seconds: float) -> None:
        """Cancel the calls that have not begun, and wait so many seconds for the others."""
        try:
            while (item := self._calls.get_nowait()) is not None:
                item[0].cancel()
        except Empty:
            pass
        for _ in self._threads:
            self._calls.put(None)
        end = time.monotonic() + seconds
        for thread in self._threads:
            if thread.is_alive():  # an interrupt may have come before its start
                thread.join(max(0.0, end - time.monotonic()))

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)
            del item, future, call
            self._idle.release()


class EnvironmentTimeout(Exception):
    """An environment took longer than ``engine.environment_seconds``."""


def within(seconds: float | None, call: Callable[[], Result]) -> Result:
    """Call, on its own thread if there is a limit. A call that takes longer is left behind.

    Raises:
        EnvironmentTimeout: it takes longer.
    """
    if seconds is None:
        return call()
    threads = DaemonThreads(1, "environment")
    future = threads.submit(call)
    done = wait([future], seconds).done
    threads.shutdown(0.0)
    if not done:
        raise EnvironmentTimeout
    return future.result()
