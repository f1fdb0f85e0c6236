"""Running commands: one persistent bash, and scripts in new processes.

The shell is an interactive bash without a terminal, because only an interactive bash continues with its next
line after an interrupt. It reads our lines from its input. Each line runs one command, and a line after it
prints a mark and ``$?`` to the control stream, to which commands have no descriptor. The mark holds a random
number. After the mark comes the state that a new shell needs if this one has to be killed.
"""

from __future__ import annotations

import re
import secrets
import shlex
import signal
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from agent_peft.sandbox.base import CommandResult, SandboxLimits
from agent_peft.sandbox.streams import PipeStreams, StreamKind

SHELL = ("/bin/bash", "--noprofile", "--norc", "--noediting", "-i")
RESTART_NOTICE = (
    "[the shell had to be killed; a new one has its working directory, exported variables and functions]\n"
)
_NO_TERMINAL = re.compile(r"^bash: \[[0-9]+: [0-9]+ \([0-9]+\)\] tcsetattr: .*\n", re.MULTILINE)
_OUTPUT, _CONTROL = 250, 251  # high numbers, which commands that redirect do not use
_CPU_CHECK_SECONDS = 0.25
_MAX_STATE = 1 << 18  # bytes of variables and functions to carry over to a new shell
_MAX_FAST_BYTES = 8 << 20  # further output is read more slowly, so that endless output costs little


class ShellProcesses(Protocol):
    """The processes of a machine."""

    def signal(self, number: int, since: float) -> int:
        """Signal the processes started ``since`` seconds after boot, except the shell; return how many."""

    def signal_shell(self, number: int) -> None: ...

    def cpu_seconds(self) -> float:
        """Return the processor time of all processes so far, including those that ended."""


class BoundedOutput:
    """The beginning and the end of an output of any length, in bounded memory.

    >>> output = BoundedOutput(8)
    >>> for chunk in (b"abcdef", b"ghijkl", b"mnop"):
    ...     output.add(chunk)
    >>> output.text()
    ('abcd\\n[8 characters cut out]\\nmnop', True)
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._room = 4 * limit  # bytes: a character has at most four
        self._head, self._tail = bytearray(), bytearray()
        self.size = 0
        self.received = 0  # bytes of all streams

    def add(self, content: bytes) -> None:
        self.size += len(content)
        room = self._room - len(self._head)
        self._head += content[:room] if room > 0 else b""
        if len(content) > room:
            self._tail += content[max(room, 0) :]
            if len(self._tail) > 2 * self._room:
                del self._tail[: -self._room]

    def text(self) -> tuple[str, bool]:
        """Return the remaining text, and whether something was cut out."""
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
    """A bash that keeps its state. When it has ``ended``, the next command needs a new one."""

    def __init__(
        self, streams: PipeStreams, processes: ShellProcesses, limits: SandboxLimits, state: bytes = b""
    ) -> None:
        """Take over a bash just started as ``SHELL``. ``state``: that of the shell that it replaces."""
        self._streams, self._processes, self._limits = streams, processes, limits
        self.state = state
        self.ended = self.killed = False  # killed at its time limit: a new shell gets its state
        self._control = b""
        self._status = 0
        self._secret = self._last_secret = secrets.token_hex(8)
        prelude = f"exec {_OUTPUT}>&1 {_CONTROL}>&2 >/dev/null 2>&1; PS1= PS2=; set +o history +H\n"
        streams.write(prelude.encode() + state)

    def run(self, command: str, timeout: float) -> CommandResult | None:
        """Run a command to its end. Stop it, with everything it started, after ``timeout`` seconds or at the
        limit of processor time.

        Returns:
            None if the shell had died before the command began.
        """
        began = time.clock_gettime(time.CLOCK_BOOTTIME)
        output = BoundedOutput(self._limits.output_chars)
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
        return CommandResult(
            text + RESTART_NOTICE if self.killed else text, None, timed_out=True, truncated=cut
        )

    def alive(self) -> bool:
        """Whether the shell can take a command."""
        if not self.ended:
            for kind, content in self._streams.read(0):
                self._note(kind, content)
        return not self.ended

    def close(self) -> None:
        self._streams.close()

    def _send(self, command: str) -> None:
        self._last_secret, self._secret = self._secret, secrets.token_hex(8)
        status = f"( builtin exit {self._status} )\n" if self._status else ""  # $? of the last command
        quoted = shlex.quote(command.replace("\0", ""))
        redirections = f"</dev/null >&{_OUTPUT} 2>&1 {_OUTPUT}>&- {_CONTROL}>&-"
        state = (
            "builtin declare -f; builtin declare -px; builtin alias -p; "
            "builtin printf 'builtin cd %q\\n' \"$PWD\""
        )
        lines = (
            f"builtin printf '{self._secret} begin\\n' >&{_CONTROL}\n"
            f"{status}builtin eval {quoted} {redirections}\n"
            f"{self._mark()}"
            f"{{ {state}; builtin printf '{self._secret} end\\n'; }} >&{_CONTROL}\n"
        )
        self._streams.write(lines.encode("utf-8", "surrogateescape"))

    def _text(self, output: BoundedOutput) -> tuple[str, bool]:
        """Return the output without the messages that an interactive bash prints about itself."""
        text, cut = output.text()
        text = _NO_TERMINAL.sub("", text)
        return text.removesuffix("exit\n") if self.ended and not self.killed else text, cut

    def _mark(self) -> str:
        return f"builtin printf '{self._secret} %s\\n' \"$?\" >&{_CONTROL}\n"

    def _take(self, kind: StreamKind, content: bytes) -> int | None:
        """Return the exit code once the command has ended: -1 if a signal killed the shell."""
        self._note(kind, content)
        if kind is StreamKind.END:
            code = int(content or b"-1")  # from our own process, not from the agent's
            return -1 if code < 0 or 128 < code <= 128 + 64 else code
        mark = re.search(rb"%s ([0-9]+)\n" % self._secret.encode(), self._control)
        if mark is None:
            return None
        self._remember()
        self._control = self._control[self._control.index(mark[0]) + len(mark[0]) :]
        self._status = min(int(mark[1][-3:]), 255)  # a trap of the agent may print anything there
        return self._status

    def _note(self, kind: StreamKind, content: bytes) -> None:
        self.ended = self.ended or kind is StreamKind.END
        if kind is not StreamKind.CONTROL:
            return
        self._control += content
        if len(self._control) > _MAX_STATE:  # the null character marks a state that no shell may be given
            self._control = b"\0" + self._control[-1024:]

    def _remember(self) -> None:
        """Keep the state of the shell after the last command, if it arrived completely."""
        text, end, rest = self._control.partition(f"{self._last_secret} end\n".encode())
        if end:
            self.state = b"" if b"\0" in text else text
            self._control = rest

    def _stop(self, began: float, output: BoundedOutput) -> None:
        """Interrupt the shell and kill what it started. If the shell does not return, kill it as well. Its
        limit of processor time may also kill it meanwhile.
        """
        self._remember()
        self._last_secret, self._secret = self._secret, secrets.token_hex(8)
        self._streams.write(self._mark().encode())
        for attempt in range(15):
            self._processes.signal_shell(signal.SIGINT)
            self._processes.signal(signal.SIGKILL if attempt else signal.SIGINT, began)
            deadline = time.monotonic() + 0.02 * (attempt + 1)
            code = _wait(self._streams, self._processes, self._limits, deadline, output, self._take)
            if code is not None:
                self.killed = code < 0
                break
        else:
            self.ended = self.killed = True
            self._processes.signal_shell(signal.SIGKILL)
        self._processes.signal(signal.SIGKILL, began)


class PersistentShell:
    """The one shell of a machine. A new one replaces it when it has ended."""

    def __init__(self, start: Callable[[bytes], Shell]) -> None:
        """``start``: starts a shell from the state of an earlier one, or from nothing."""
        self._start = start
        self._shell: Shell | None = None

    def run(self, command: str, timeout: float) -> CommandResult:
        """Run a command as ``Sandbox.run`` describes it."""
        shell = self._shell
        result = shell.run(command, timeout) if shell is not None and shell.alive() else None
        if result is not None:
            return result
        state = shell.state if shell is not None and shell.killed else b""
        for carried in (state, b""):  # a shell that ends at once, whatever ended it, ran nothing: once more
            self.close()
            self._shell = self._start(carried)
            if (result := self._shell.run(command, timeout)) is not None:
                return result
        return CommandResult("", None)

    def close(self) -> None:
        if self._shell is not None:
            self._shell.close()
            self._shell = None


def run_alone(
    streams: PipeStreams, processes: ShellProcesses, limits: SandboxLimits, began: float, timeout: float
) -> CommandResult:
    """Wait for a process without a control stream, which started at ``began`` (seconds after boot)."""
    output = BoundedOutput(limits.output_chars)

    def take(kind: StreamKind, content: bytes) -> int | None:
        if kind is StreamKind.CONTROL:
            output.add(content)
        return int(content or b"-1") if kind is StreamKind.END else None

    code = _wait(streams, processes, limits, time.monotonic() + timeout, output, take)
    if code is None:
        processes.signal_shell(signal.SIGKILL)
        processes.signal(signal.SIGKILL, began)
    text, cut = output.text()
    return CommandResult(text, code if code is None or code >= 0 else 128 - code, code is None, cut)


_Take = Callable[[StreamKind, bytes], int | None]


def _wait(
    streams: PipeStreams,
    processes: ShellProcesses,
    limits: SandboxLimits,
    deadline: float,
    output: BoundedOutput,
    take: _Take,
) -> int | None:
    """Collect output until ``take`` returns an exit code; None at the deadline or limit of CPU time."""
    next_check, max_seconds = time.monotonic() + _CPU_CHECK_SECONDS, None
    while (now := time.monotonic()) < deadline:
        if now >= next_check:
            next_check, used = now + _CPU_CHECK_SECONDS, processes.cpu_seconds()
            max_seconds = used + limits.cpu_seconds if max_seconds is None else max_seconds
            if used > max_seconds:
                return None
        code = _gather(streams.read(min(deadline, next_check) - now), output, take)
        if code is not None:
            _gather(streams.rest(), output, take)  # printed before the end; a daemon may keep printing
            return code
        if output.received > _MAX_FAST_BYTES:
            time.sleep(0.002)
    return None


def _gather(chunks: Iterable[tuple[StreamKind, bytes]], output: BoundedOutput, take: _Take) -> int | None:
    code: int | None = None
    for kind, content in chunks:
        output.received += len(content)
        if kind is StreamKind.OUTPUT:
            output.add(content)
        elif (exit_code := take(kind, content)) is not None:
            code = exit_code
    return code
