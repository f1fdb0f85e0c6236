"""A sandbox without a daemon: Linux namespaces, and overlay file systems in memory. See docs/sandbox.md."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from agent_peft.sandbox.base import CommandResult, Sandbox, SandboxLimits
from agent_peft.sandbox.fork_server import Machine
from agent_peft.sandbox.host import check_host
from agent_peft.sandbox.shell import SHELL, PersistentShell, Shell, run_alone
from agent_peft.sandbox.streams import PipeStreams

# Descriptor 9 holds the script. It is closed before the first line runs. So neither a program that the script
# starts nor a link in /proc can read the script; arguments and variables do not hold it either.
_SCRIPT = (
    "/bin/bash",
    "--noprofile",
    "--norc",
    "-c",
    'mapfile -d "" -t -u 9; exec 9<&-; eval "unset MAPFILE; ${MAPFILE[0]}"',
    "bash",
)


class NamespaceSandbox(Sandbox):
    """A machine whose ``/`` and ``/usr`` are overlays in memory, which end with it."""

    def __init__(self, limits: SandboxLimits) -> None:
        """
        Raises:
            AgentPeftError: this computer does not support such machines; one line says why.
        """
        check_host()
        self._limits = limits
        self._init: Machine | None = None
        self._shell = PersistentShell(self._start_shell)
        self._closed = self._inspecting = False

    def start(self) -> None:
        if self._closed or self._init is not None:
            raise RuntimeError("a sandbox starts once")
        self._init = Machine(self._limits.model_dump())

    def run(self, command: str, timeout: float) -> CommandResult:
        if self._inspecting:
            raise RuntimeError("the sandbox is being inspected: call restore before run")
        self._machine.wake()
        return self._shell.run(command, timeout)

    def run_fresh(self, script: str, timeout: float, kill_others: bool = False) -> CommandResult:
        machine = self._machine
        machine.wake()
        began = time.clock_gettime(time.CLOCK_BOOTTIME)
        streams = PipeStreams()
        try:
            if kill_others:
                self._shell.close()
                self._inspecting = True
            with (
                _memory(script.encode("utf-8", "surrogateescape")) as text,
                open(os.devnull, "rb") as devnull,
            ):
                _, output, _, end = streams.child
                machine.spawn(
                    "inspection" if kill_others else "clean",
                    _SCRIPT,
                    [devnull.fileno(), output, output, end, text],
                    script,
                )
            streams.release()
            return run_alone(streams, machine, self._limits, began, timeout)
        finally:
            streams.close()

    def read_file(self, path: str, limit: int = 1 << 20) -> bytes:
        with _memory() as content:
            self._machine.transfer_file("read", content, path=path, limit=limit)
            return os.pread(content, limit, 0)

    def write_file(self, path: str, content: bytes, mode: int = 0o644) -> None:
        with _memory(content) as descriptor:
            self._machine.transfer_file("write", descriptor, path=path, mode=mode)

    def snapshot(self) -> bytes:
        with _memory() as content:
            self._machine.ask("snapshot", [content])
            with os.fdopen(os.dup(content), "rb") as file:
                file.seek(0)
                return file.read()

    def restore(self, snapshot: bytes) -> None:
        self._shell.close()
        with _memory(snapshot) as content:
            self._machine.ask("restore", [content])
        self._inspecting = False

    def close(self) -> None:
        self._closed = True
        self._shell.close()
        if self._init is not None:
            self._init.close()
            self._init = None

    @property
    def _machine(self) -> Machine:
        if self._init is None:
            raise RuntimeError("the sandbox is closed" if self._closed else "the sandbox was not started")
        return self._init

    def _start_shell(self, state: bytes) -> Shell:
        streams = PipeStreams()
        self._machine.spawn("agent", SHELL, streams.child)
        streams.release()
        return Shell(streams, self._machine, self._limits, state)


@contextmanager
def _memory(content: bytes = b"") -> Iterator[int]:
    """Open a file in memory with this content, positioned at its beginning. Yields its descriptor."""
    descriptor = os.memfd_create("content", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(content)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)
