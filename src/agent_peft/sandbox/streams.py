"""The input of a running process and its three kinds of output."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Sequence
from enum import Enum
from typing import Any


class StreamKind(Enum):
    OUTPUT = "output"  # printed by commands
    CONTROL = "control"  # printed by our own lines in the shell's input
    END = "end"  # the exit code of the process as digits, negative for a signal; empty if it is unknown


class PipeStreams:
    """Streams over pipes. ``child`` holds the process's ends: input, output, control, end."""

    def __init__(self, arrival: float = 0.0) -> None:
        """``arrival``: seconds until what was printed has arrived, where another program is between."""
        self._arrival = arrival
        stdin, output, control, end = (os.pipe2(os.O_CLOEXEC) for _ in range(4))
        self.child: tuple[int, ...] = (stdin[0], output[1], control[1], end[1])
        self._stdin = stdin[1]
        self._kinds = {output[0]: StreamKind.OUTPUT, control[0]: StreamKind.CONTROL, end[0]: StreamKind.END}
        self._pending = b""
        self._poll = select.poll()
        for descriptor in self._kinds:
            self._poll.register(descriptor, select.POLLIN)
        for descriptor in (self._stdin, *self._kinds):
            os.set_blocking(descriptor, False)

    def spawn(self, argv: Sequence[str], with_input: bool = True, **options: Any) -> subprocess.Popen[bytes]:
        """Start a program with ``child`` as its streams. Its exit code becomes the ``END``. ``with_input``:
        False for a script: it reads nothing, and its errors are output. ``options``: further ones of
        ``Popen``.
        """
        stdin, output, control, end = self.child
        process = subprocess.Popen(
            argv,
            stdin=stdin if with_input else subprocess.DEVNULL,
            stdout=output,
            stderr=control if with_input else output,
            **options,
        )
        threading.Thread(target=_report_exit, args=(process, os.dup(end)), daemon=True).start()
        self.release()
        return process

    def release(self) -> None:
        """Close our copies of the process's ends, once the process has them."""
        for descriptor in self.child:
            os.close(descriptor)
        self.child = ()

    def write(self, content: bytes) -> None:
        """Queue input. It is sent during ``read``."""
        self._pending += content
        self._send()

    def read(self, timeout: float) -> Sequence[tuple[StreamKind, bytes]]:
        """Return the output that has arrived. Wait at most ``timeout`` seconds for some."""
        chunks: list[tuple[StreamKind, bytes]] = []
        for descriptor, _ in self._poll.poll(max(timeout, 0) * 1000):
            if descriptor == self._stdin:
                self._send()
                continue
            chunk, kind = os.read(descriptor, 1 << 16), self._kinds[descriptor]
            if chunk or kind is StreamKind.END:  # an END without a code: nobody is left who could report it
                chunks.append((kind, chunk))
            if not chunk:
                self._poll.unregister(descriptor)
        return chunks

    def rest(self) -> Sequence[tuple[StreamKind, bytes]]:
        """Return the output that was already printed, without waiting for a process that keeps printing."""
        chunks: list[tuple[StreamKind, bytes]] = []
        time.sleep(self._arrival)
        for descriptor, kind in self._kinds.items():
            count = struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, b"\0" * 4))[0]
            if count:
                chunks.append((kind, os.read(descriptor, count)))
        return chunks

    def ended(self) -> bool:
        """Whether the ``END`` waits to be read."""
        end = next(descriptor for descriptor, kind in self._kinds.items() if kind is StreamKind.END)
        poll = select.poll()
        poll.register(end, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        if self.child:
            self.release()
        for descriptor in (self._stdin, *self._kinds):
            os.close(descriptor)
        self._kinds = {}

    def _send(self) -> None:
        try:
            while self._pending:
                self._pending = self._pending[os.write(self._stdin, self._pending[: 1 << 16]) :]
        except BlockingIOError:
            self._poll.register(self._stdin, select.POLLOUT)
            return
        except BrokenPipeError:
            self._pending = b""  # the process ended; the other streams report that
        with contextlib.suppress(KeyError):
            self._poll.unregister(self._stdin)


def _report_exit(process: subprocess.Popen[bytes], end: int) -> None:
    code = process.wait()
    with contextlib.suppress(BrokenPipeError):
        os.write(end, str(code).encode())
    os.close(end)
