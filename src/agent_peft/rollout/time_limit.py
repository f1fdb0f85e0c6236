"""A limit on the time that an environment takes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


class EnvironmentTimeout(Exception):
    """An environment took longer than ``engine.environment_seconds``."""


def within(seconds: float | None, call: Callable[[], Result]) -> Result:
    """Call, on its own thread if there is a limit. A call that takes longer is left behind.

    Raises:
        EnvironmentTimeout: it takes longer.
    """
    if seconds is None:
        return call()
    future: Future[Result] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=work, name="environment", daemon=True)
    thread.start()
    thread.join(seconds)
    if not future.done():
        raise EnvironmentTimeout
    return future.result()
