"""A sandbox on an OCI runtime of this computer: runc or crun. See docs/sandbox.md."""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress

from agent_peft.sandbox.base import CommandResult, MachineLost, Sandbox, SandboxLimits
from agent_peft.sandbox.exec_guard import ExecGuard
from agent_peft.sandbox.frozen import TREES, Frozen, in_memory
from agent_peft.sandbox.machine import Machine, inside
from agent_peft.sandbox.runtime import find_runtime
from agent_peft.sandbox.shell import SHELL, PersistentShell, Shell, run_alone
from agent_peft.sandbox.streams import PipeStreams

# Descriptor 6 holds the script. It is closed before the first line runs. So neither a program that the script
# starts nor a link in /proc can read the script; arguments and variables do not hold it either.
_SCRIPT = (
    "/bin/bash",
    "--noprofile",
    "--norc",
    "-c",
    'mapfile -d "" -t -u 6; exec 6<&-; eval "unset MAPFILE; ${MAPFILE[0]}"',
    "bash",
)
_UNPACK = "tar --extract --numeric-owner --preserve-permissions --same-owner --acls --xattrs"


class OciSandbox(Sandbox):
    """A container whose ``/`` and ``/usr`` are overlays in memory, which end with it."""

    def __init__(self, limits: SandboxLimits, runtime: str = "auto") -> None:
        """``runtime``: the path of a runtime, or "auto"."""
        self._runtime = find_runtime(runtime)
        self._limits = limits
        self._machine: Machine | None = None
        self._frozen: Frozen | None = None
        self._first_shell: PipeStreams | None = None  # started with the machine, not used yet
        self._shell = PersistentShell(self._start_shell)
        self._closed = self._inspecting = False

    def start(self) -> None:
        if self._closed or self._machine is not None:
            raise RuntimeError("a sandbox starts once")
        self._first_shell = PipeStreams()
        self._machine = self._runtime.agents_machine(self._limits, self._first_shell)
        self._frozen = Frozen(self._machine, self._runtime.image)

    def run(self, command: str, timeout: float) -> CommandResult:
        if self._inspecting:
            raise RuntimeError("the sandbox was inspected: its machine has ended")
        if not self._running.processes.alive():
            raise MachineLost("the machine has ended")
        return self._shell.run(command, timeout)

    def run_fresh(self, script: str, timeout: float) -> CommandResult:
        with ExitStack() as stack:
            text = in_memory(script.encode("utf-8", "surrogateescape"), stack)
            return self._running.run(_SCRIPT, "clean", timeout, [text])

    def inspect(self, script: str, timeout: float) -> CommandResult:
        if not self._inspecting:
            self._shell.close()
            self._running.end()
            self._inspecting = True
        began = time.clock_gettime(time.CLOCK_BOOTTIME)
        streams = PipeStreams()
        with ExitStack() as stack:
            stack.callback(streams.close)
            machine = self._open_inspection(script, streams, stack)
            return run_alone(streams, machine.first, self._limits, began, timeout)

    def close(self) -> None:
        self._closed = True
        for each in (self._shell, self._first_shell, self._frozen, self._machine):
            if each is not None:
                each.close()
        self._first_shell = self._frozen = self._machine = None

    @property
    def _running(self) -> Machine:
        if self._machine is None:
            raise RuntimeError("the sandbox is closed" if self._closed else "the sandbox was not started")
        return self._machine

    def _start_shell(self, state: bytes) -> Shell:
        if self._first_shell is not None:
            streams, self._first_shell = self._first_shell, None
            return Shell(streams, self._running.shell, self._limits, state)
        streams = PipeStreams()
        program = self._running.spawn(SHELL, "agent", streams)
        return Shell(streams, program, self._limits, state)

    def _open_inspection(self, script: str, streams: PipeStreams, stack: ExitStack) -> Machine:
        """Start a machine with the agent's files as ``script`` sees them, and the script as its process 1."""
        assert self._frozen is not None
        changed, gone = self._frozen.choose(script)
        folder = self._runtime.new_bundle()
        usr = folder / "usr"
        usr.mkdir()
        self._runtime.image.give(usr)
        in_usr = [
            path for path in changed if path.startswith(b"/usr/") and not path.startswith(b"/usr/local")
        ]
        if in_usr:
            self._frozen.unpack("usr", in_usr, usr)
        lines, contents = [], [in_memory(script.encode("utf-8", "surrogateescape"), stack)]
        if gone:
            contents.append(in_memory(b"\0".join(gone), stack))
            lines.append("xargs -0 rm -rf --")
        others = [path for path in changed if path not in set(in_usr)]
        for tree in TREES:
            content = in_memory(b"", stack)
            if self._frozen.pack(tree, others, content):
                contents.append(content)
                lines.append(f"{_UNPACK} --directory /{tree}")
        fill = "".join(f"{line} <&{7 + i} 2>/dev/null; exec {7 + i}<&-\n" for i, line in enumerate(lines))
        guard = ExecGuard(folder, self._runtime.case.ids)
        stack.callback(guard.close)
        first = inside(_SCRIPT, fill)
        machine = self._runtime.inspection(
            self._limits, folder, usr, guard, self._runtime.image.protected(script), first, streams, contents
        )
        stack.callback(machine.close)
        with suppress(MachineLost):  # it has ended already, and asks no more
            guard.watch(machine.processes, Frozen(machine, self._runtime.image))
        return machine
