"""Standard output and error, whose reader may end first: a closed pipe, or a terminal that is gone."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

STREAMS = ("stdout", "stderr")
_lasting = 0  # how many ``lasting_output`` are open


class Output:
    """A text stream. Inside ``lasting_output`` it drops what cannot be written, and all that follows."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except (OSError, ValueError) as error:  # ValueError: the stream is closed
            self._drop(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._drop(error)

    def _drop(self, error: Exception) -> None:
        if not _lasting:
            raise error
        if not isinstance(error, BlockingIOError):
            discard(self._stream)


def discard(stream: Any) -> None:
    """Send the rest of a stream to nowhere, so that flushing it at the end of the process cannot fail."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


@contextmanager
def lasting_output() -> Iterator[None]:
    """Inside, no failure to print ends the work: a run outlives the terminal that it was started in, and
    ``| head``.
    """
    global _lasting
    before = {name: getattr(sys, name) for name in STREAMS}
    for name, stream in before.items():
        if stream is not None and not isinstance(stream, Output):
            setattr(sys, name, Output(stream))
    _lasting += 1
    try:
        yield
    finally:
        for name in STREAMS:
            if isinstance(getattr(sys, name), Output):
                getattr(sys, name).flush()
            setattr(sys, name, before[name])
        _lasting -= 1


def open_output() -> None:
    """Wrap both streams. One that is closed is opened to nowhere: no other file may get its number."""
    for number, name in enumerate(STREAMS, 1):
        try:
            os.fstat(number)
        except OSError:
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_RDWR), number)
            setattr(sys, name, os.fdopen(number, "w", closefd=False))
        setattr(sys, name, Output(getattr(sys, name)))
    flush_output()  # a warning of Python's own may have failed already


def flush_output() -> None:
    """Write what is left in both streams, or drop it."""
    for name in STREAMS:
        stream = getattr(sys, name)
        try:
            stream.flush()
        except (OSError, ValueError):
            discard(stream)
