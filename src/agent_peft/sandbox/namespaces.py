"""The sandbox without a daemon: Linux namespaces, and overlays in memory. See docs/sandbox.md."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from agent_peft.sandbox.base import CommandResult, Sandbox, SandboxLimits
from agent_peft.sandbox.fork_server import Machine, check_host
from agent_peft.sandbox.shell import SHELL, Shell, run_alone
from agent_peft.sandbox.streams import PipeStreams

# Descriptor 9 holds the script. It is closed before the first line runs, so that nothing the script starts,
# and no file that is a link, leads back to it; nor do arguments or variables.
_SCRIPT = (
    "/bin/bash",
    "--noprofile",
    "--norc",
    "-c",
    'mapfile -d "" -t -u 9; exec 9<&-; eval "unset MAPFILE; ${MAPFILE[0]}"',
    "bash",
)


class NamespaceSandbox(Sandbox):
    """A machine whose ``/`` and ``/usr`` are overlays in memory that vanish with it."""

    def __init__(self, limits: SandboxLimits) -> None:
        """
        Raises:
            AgentPeftError: this computer cannot have such machines.
        """
        check_host()
        self._limits = limits
        self._process1: Machine | None = None
        self._shell: Shell | None = None
        self._closed = self._graded = False

    def start(self) -> None:
        if self._closed or self._process1 is not None:
            raise RuntimeError("a sandbox starts once")
        self._process1 = Machine(self._limits.model_dump())

    def run(self, command: str, timeout: float) -> CommandResult:
        if self._graded:
            raise RuntimeError(
                "the sandbox was graded: what runs now would not see what the episode wrote as it was"
            )
        machine = self._machine
        machine.wake()
        result = (
            self._shell.run(command, timeout) if self._shell is not None and self._shell.alive() else None
        )
        return (
            result
            if result is not None
            else self._new_shell().run(command, timeout) or CommandResult("", None)
        )

    def run_fresh(self, script: str, timeout: float, kill_others: bool = False) -> CommandResult:
        machine = self._machine
        machine.wake()
        began = time.clock_gettime(time.CLOCK_BOOTTIME)
        streams = PipeStreams()
        try:
            if kill_others:
                self._drop_shell()
                self._graded = True
            with (
                _memory(script.encode("utf-8", "surrogateescape")) as text,
                open(os.devnull, "rb") as nothing,
            ):
                _, output, _, end = streams.child
                machine.spawn(
                    "graded" if kill_others else "clean",
                    _SCRIPT,
                    [nothing.fileno(), output, output, end, text],
                    script,
                )
            streams.release()
            return run_alone(streams, machine, self._limits, began, timeout)
        finally:
            streams.close()

    def read_file(self, path: str, limit: int = 1 << 20) -> bytes:
        with _memory() as content:
            self._machine.ask_for_file("read", content, path=path, limit=limit)
            return os.pread(content, limit, 0)

    def write_file(self, path: str, content: bytes, mode: int = 0o644) -> None:
        with _memory(content) as descriptor:
            self._machine.ask_for_file("write", descriptor, path=path, mode=mode)

    def snapshot(self) -> bytes:
        with _memory() as content:
            self._machine.ask("snapshot", [content])
            with os.fdopen(os.dup(content), "rb") as file:
                file.seek(0)
                return file.read()

    def restore(self, snapshot: bytes) -> None:
        self._drop_shell()
        with _memory(snapshot) as content:
            self._machine.ask("restore", [content])
        self._graded = False

    def close(self) -> None:
        self._closed = True
        self._drop_shell()
        if self._process1 is not None:
            self._process1.close()
            self._process1 = None

    @property
    def _machine(self) -> Machine:
        if self._process1 is None:
            raise RuntimeError("the sandbox is closed" if self._closed else "the sandbox was not started")
        return self._process1

    def _new_shell(self) -> Shell:
        state = b"" if self._shell is None or not self._shell.killed else self._shell.state
        self._drop_shell()
        streams = PipeStreams()
        self._machine.spawn("agent", SHELL, streams.child)
        streams.release()
        self._shell = Shell(streams, self._machine, self._limits, state)
        return self._shell

    def _drop_shell(self) -> None:
        if self._shell is not None:
            self._shell.close()
            self._shell = None


@contextmanager
def _memory(content: bytes = b"") -> Iterator[int]:
    """A descriptor of a file in memory with this content, to be read from its beginning."""
    descriptor = os.memfd_create("content", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(content)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)
