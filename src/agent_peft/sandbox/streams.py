"""A running process as its caller sees it: bytes in, three kinds of bytes out."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import termios
from collections.abc import Sequence
from enum import Enum
from typing import Protocol


class Source(Enum):
    OUTPUT = "output"  # what commands print
    CONTROL = "control"  # what only our own lines of the shell's script print
    END = "end"  # how the process ended: its exit code as digits, negative for a signal


class Streams(Protocol):
    """What a shell speaks through."""

    def write(self, content: bytes) -> None:
        """Queue input; it is sent while reading."""

    def read(self, timeout: float) -> Sequence[tuple[Source, bytes]]:
        """What has come, waiting at most ``timeout`` seconds for something."""

    def rest(self) -> Sequence[tuple[Source, bytes]]:
        """What was already printed, and not more, though somebody prints on."""

    def close(self) -> None: ...


class PipeStreams:
    """Streams over pipes; ``child`` are the ends to give to the process: input, output, control, end."""

    def __init__(self) -> None:
        stdin, output, control, end = (os.pipe2(os.O_CLOEXEC) for _ in range(4))
        self.child: tuple[int, ...] = (stdin[0], output[1], control[1], end[1])
        self._stdin = stdin[1]
        self._sources = {output[0]: Source.OUTPUT, control[0]: Source.CONTROL, end[0]: Source.END}
        self._pending = b""
        self._poll = select.poll()
        for descriptor in self._sources:
            self._poll.register(descriptor, select.POLLIN)
        for descriptor in (self._stdin, *self._sources):
            os.set_blocking(descriptor, False)

    def release(self) -> None:
        """Close the process's ends here, once it has them."""
        for descriptor in self.child:
            os.close(descriptor)
        self.child = ()

    def write(self, content: bytes) -> None:
        self._pending += content
        self._send()

    def read(self, timeout: float) -> Sequence[tuple[Source, bytes]]:
        found: list[tuple[Source, bytes]] = []
        for descriptor, _ in self._poll.poll(max(timeout, 0) * 1000):
            if descriptor == self._stdin:
                self._send()
                continue
            chunk = os.read(descriptor, 1 << 16)
            if chunk:
                found.append((self._sources[descriptor], chunk))
            else:
                self._poll.unregister(descriptor)
        return found

    def rest(self) -> Sequence[tuple[Source, bytes]]:
        found: list[tuple[Source, bytes]] = []
        for descriptor, source in self._sources.items():
            count = struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, b"\0" * 4))[0]
            if count:
                found.append((source, os.read(descriptor, count)))
        return found

    def close(self) -> None:
        if self.child:
            self.release()
        for descriptor in (self._stdin, *self._sources):
            os.close(descriptor)
        self._sources = {}

    def _send(self) -> None:
        try:
            while self._pending:
                self._pending = self._pending[os.write(self._stdin, self._pending[: 1 << 16]) :]
        except BlockingIOError:
            self._poll.register(self._stdin, select.POLLOUT)
            return
        except BrokenPipeError:
            self._pending = b""  # it has ended, which the other streams tell
        with contextlib.suppress(KeyError):
            self._poll.unregister(self._stdin)
