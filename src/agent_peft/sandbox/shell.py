"""Running commands: one persistent bash per episode, and scripts in processes of their own.

The shell is an interactive bash without a terminal, because that one comes back to its next line after an
interrupt. It reads our lines from its input, one command a line, each followed by a line that prints a mark
and ``$?`` to the control stream, which commands do not have. The mark holds a number nobody has seen before.
After it comes what a new shell would need if this one had to be killed.
"""

from __future__ import annotations

import re
import secrets
import shlex
import signal
import time
from collections.abc import Iterable
from typing import Protocol

from agent_peft.sandbox.base import CommandResult, SandboxLimits
from agent_peft.sandbox.streams import Source, Streams

SHELL = ("/bin/bash", "--noprofile", "--norc", "--noediting", "-i")
RESTARTED = (
    "[the shell had to be killed; a new one has its working directory, exported variables and functions]\n"
)
_NO_TERMINAL = re.compile(r"^bash: \[[0-9]+: [0-9]+ \([0-9]+\)\] tcsetattr: .*\n", re.MULTILINE)
_OUTPUT, _CONTROL = 250, 251  # high numbers, which commands that redirect do not use
_LOOK = 0.25  # seconds between looks at the CPU time
_STATE_LIMIT = 1 << 18  # bytes of variables and functions that we remember
_FREELY = (
    8 << 20
)  # bytes read as fast as they come; the rest more slowly, so that endless output costs little


class Processes(Protocol):
    """The processes of a machine."""

    def signal(self, number: int, since: float) -> int:
        """Signal those begun at ``since`` (seconds after boot) or later, without the shell; how many there
        were.
        """

    def signal_shell(self, number: int) -> None: ...

    def cpu_seconds(self) -> float:
        """Of all, the dead included, ever since."""


class Bounded:
    """Output of any length in little memory: its beginning and its end.

    >>> kept = Bounded(8)
    >>> for piece in (b"abcdef", b"ghijkl", b"mnop"):
    ...     kept.add(piece)
    >>> kept.text()
    ('abcd\\n[8 characters cut out]\\nmnop', True)
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._room = 4 * limit  # bytes: a character has four at most
        self._head, self._tail = bytearray(), bytearray()
        self.size = 0
        self.received = 0  # bytes that came beside it, too

    def add(self, content: bytes) -> None:
        self.size += len(content)
        room = self._room - len(self._head)
        self._head += content[:room] if room > 0 else b""
        if len(content) > room:
            self._tail += content[max(room, 0) :]
            if len(self._tail) > 2 * self._room:
                del self._tail[: -self._room]

    def text(self) -> tuple[str, bool]:
        """The characters kept, and whether that is not all."""
        lost = self.size - len(self._head) - len(self._tail)
        if lost == 0:
            text = (self._head + self._tail).decode("utf-8", "replace")
            if len(text) <= self._limit:
                return text, False
            head = tail = text
        else:
            head, tail = self._head.decode("utf-8", "replace"), self._tail.decode("utf-8", "replace")
        half = self._limit // 2
        cut = (len(head) if lost == 0 else len(head) + len(tail) + lost) - 2 * half
        return f"{head[:half]}\n[{cut} characters cut out]\n{tail[-half:]}", True


class Shell:
    """A bash that keeps its state from command to command. Once ``ended``, the next command needs a new
    one.
    """

    def __init__(
        self, streams: Streams, processes: Processes, limits: SandboxLimits, state: bytes = b""
    ) -> None:
        """Take over a bash that was just started as ``SHELL``.

        Args:
            state: that of the shell whose place this one takes.
        """
        self._streams, self._processes, self._limits = streams, processes, limits
        self.state = state
        self.ended = self.killed = False  # killed by us: what it knew is worth keeping
        self._control = b""
        self._status = 0
        self._secret = self._last_secret = secrets.token_hex(8)
        prelude = f"exec {_OUTPUT}>&1 {_CONTROL}>&2 >/dev/null 2>&1; PS1= PS2=; set +o history +H\n"
        streams.write(prelude.encode() + state)

    def run(self, command: str, timeout: float) -> CommandResult | None:
        """Run it to its end, or stop it at ``timeout`` seconds or at the limit of CPU time, with everything
        it started.

        Returns: None if the shell had died before the command began.
        """
        began = time.clock_gettime(time.CLOCK_BOOTTIME)
        output = Bounded(self._limits.output_chars)
        self._send(command)
        code = _wait(
            self._streams, self._processes, self._limits, time.monotonic() + timeout, output, self._take
        )
        if code is not None:
            if self.ended and f"{self._secret} begin\n".encode() not in self._control:
                return None
            text, cut = self._text(output)
            return CommandResult(text, code if code >= 0 else None, truncated=cut)
        self._stop(began, output)
        text, cut = self._text(output)
        return CommandResult(text + RESTARTED if self.killed else text, None, timed_out=True, truncated=cut)

    def alive(self) -> bool:
        """Whether it can take a command."""
        if not self.ended:
            for source, content in self._streams.read(0):
                self._note(source, content)
        return not self.ended

    def close(self) -> None:
        self._streams.close()

    def _send(self, command: str) -> None:
        self._last_secret, self._secret = self._secret, secrets.token_hex(8)
        again = (
            f"( builtin exit {self._status} )\n" if self._status else ""
        )  # so that $? is what the last command left
        quoted = shlex.quote(command.replace("\0", ""))
        redirections = f"</dev/null >&{_OUTPUT} 2>&1 {_OUTPUT}>&- {_CONTROL}>&-"
        state = "builtin declare -f; builtin declare -px; builtin alias -p; builtin printf 'builtin cd %q\\n' \"$PWD\""
        lines = (
            f"builtin printf '{self._secret} begin\\n' >&{_CONTROL}\n"
            f"{again}builtin eval {quoted} {redirections}\n"
            f"{self._mark()}"
            f"{{ {state}; builtin printf '{self._secret} end\\n'; }} >&{_CONTROL}\n"
        )
        self._streams.write(lines.encode("utf-8", "surrogateescape"))

    def _text(self, output: Bounded) -> tuple[str, bool]:
        """What was printed, without what an interactive bash says of itself."""
        text, cut = output.text()
        text = _NO_TERMINAL.sub("", text)
        return text.removesuffix("exit\n") if self.ended and not self.killed else text, cut

    def _mark(self) -> str:
        return f"builtin printf '{self._secret} %s\\n' \"$?\" >&{_CONTROL}\n"

    def _take(self, source: Source, content: bytes) -> int | None:
        """The exit code, once the command has ended; -1 where a signal killed the shell."""
        self._note(source, content)
        if source is Source.END:
            code = int(content or b"-1")  # of our own process, not of the agent's
            return -1 if code < 0 or 128 < code <= 128 + 64 else code
        mark = re.search(rb"%s ([0-9]+)\n" % self._secret.encode(), self._control)
        if mark is None:
            return None
        self._remember()
        self._control = self._control[self._control.index(mark[0]) + len(mark[0]) :]
        self._status = min(int(mark[1][-3:]), 255)  # a trap of the agent's may print what it likes there
        return self._status

    def _note(self, source: Source, content: bytes) -> None:
        self.ended = self.ended or source is Source.END
        if source is not Source.CONTROL:
            return
        self._control += content
        if (
            len(self._control) > _STATE_LIMIT
        ):  # more than we remember: the piece kept is none that a shell would be given
            self._control = b"\0" + self._control[-1024:]

    def _remember(self) -> None:
        """Keep what the last command left of the shell, if it is whole."""
        text, found, rest = self._control.partition(f"{self._last_secret} end\n".encode())
        if found:
            self.state = b"" if b"\0" in text else text
            self._control = rest

    def _stop(self, began: float, output: Bounded) -> None:
        """Interrupt the shell and kill what it started; where it does not come back, kill it as well."""
        self._remember()
        self._last_secret, self._secret = self._secret, secrets.token_hex(8)
        self._streams.write(self._mark().encode())
        for attempt in range(15):
            self._processes.signal_shell(signal.SIGINT)
            self._processes.signal(signal.SIGKILL if attempt else signal.SIGINT, began)
            deadline = time.monotonic() + 0.02 * (attempt + 1)
            if _wait(self._streams, self._processes, self._limits, deadline, output, self._take) is not None:
                break
        else:
            self.ended = self.killed = True
            self._processes.signal_shell(signal.SIGKILL)
        self._processes.signal(signal.SIGKILL, began)


def run_alone(
    streams: Streams, processes: Processes, limits: SandboxLimits, began: float, timeout: float
) -> CommandResult:
    """Wait for a process of its own, started at ``began`` (seconds after boot), which has no control
    stream.
    """
    output = Bounded(limits.output_chars)

    def take(source: Source, content: bytes) -> int | None:
        if source is Source.CONTROL:
            output.add(content)
        return int(content or b"-1") if source is Source.END else None

    code = _wait(streams, processes, limits, time.monotonic() + timeout, output, take)
    if code is None:
        processes.signal(signal.SIGKILL, began)
    text, cut = output.text()
    return CommandResult(text, code if code is None or code >= 0 else 128 - code, code is None, cut)


class _Take(Protocol):
    def __call__(self, source: Source, content: bytes) -> int | None: ...


def _wait(
    streams: Streams,
    processes: Processes,
    limits: SandboxLimits,
    deadline: float,
    output: Bounded,
    take: _Take,
) -> int | None:
    """Gather output until ``take`` knows how the command ended; None at the deadline, or when it has used
    up its CPU time.
    """
    look, most = time.monotonic() + _LOOK, None
    while (now := time.monotonic()) < deadline:
        if now >= look:
            look, used = now + _LOOK, processes.cpu_seconds()
            most = used + limits.cpu_seconds if most is None else most
            if used > most:
                return None
        code = _gather(streams.read(min(deadline, look) - now), output, take)
        if code is not None:
            _gather(
                streams.rest(), output, take
            )  # what was printed before the end, and not more, though a daemon print on
            return code
        if output.received > _FREELY:
            time.sleep(0.002)
    return None


def _gather(pieces: Iterable[tuple[Source, bytes]], output: Bounded, take: _Take) -> int | None:
    code: int | None = None
    for source, content in pieces:
        output.received += len(content)
        if source is Source.OUTPUT:
            output.add(content)
        elif (found := take(source, content)) is not None:
            code = found
    return code
