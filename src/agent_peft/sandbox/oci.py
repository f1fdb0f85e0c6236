"""A sandbox on an OCI runtime of this computer: runc or crun. See docs/sandbox.md."""

from __future__ import annotations

import os
from contextlib import ExitStack

from agent_peft.sandbox.base import CommandResult, MachineLost, Sandbox, SandboxLimits
from agent_peft.sandbox.exec_guard import ExecGuard
from agent_peft.sandbox.frozen import Frozen, in_memory
from agent_peft.sandbox.machine import Machine
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
# Descriptors: paths that the agent deleted, and a tar for each of these folders
_TREES = {"": "/", "usr": "/usr", "dev/shm": "/dev/shm"}
_UNPACK = "tar --extract --numeric-owner --preserve-permissions --same-owner --acls --xattrs"


class OciSandbox(Sandbox):
    """A container whose ``/`` and ``/usr`` are overlays in memory, which end with it."""

    def __init__(self, limits: SandboxLimits, runtime: str = "auto") -> None:
        """
        Args:
            runtime: the path of a runtime, or "auto".

        Raises:
            AgentPeftError: this computer does not support such machines; one line says why.
        """
        self._runtime = find_runtime(runtime)
        self._limits = limits
        self._machine: Machine | None = None
        self._frozen: Frozen | None = None
        self._guard: ExecGuard | None = None
        self._inspection: Machine | None = None
        self._shell = PersistentShell(self._start_shell)
        self._closed = False

    def start(self) -> None:
        if self._closed or self._machine is not None:
            raise RuntimeError("a sandbox starts once")
        self._machine = self._runtime.agents_machine(self._limits)
        self._frozen = Frozen(self._machine, self._runtime.image)

    def run(self, command: str, timeout: float) -> CommandResult:
        if self._inspection is not None:
            raise RuntimeError("the sandbox was inspected: its machine has ended")
        if not self._running.processes.alive():
            raise MachineLost("the machine has ended")
        return self._shell.run(command, timeout)

    def run_fresh(self, script: str, timeout: float) -> CommandResult:
        return self._run_script(self._running, "clean", script, timeout)

    def inspect(self, script: str, timeout: float) -> CommandResult:
        if self._inspection is None:
            self._shell.close()
            self._running.end()
            self._inspection = self._open_inspection(script)
        return self._run_script(self._inspection, "inspection", script, timeout)

    def close(self) -> None:
        self._closed = True
        self._shell.close()
        for each in (self._inspection, self._guard, self._frozen, self._machine):
            if each is not None:
                each.close()
        self._inspection = self._guard = self._frozen = self._machine = None

    @property
    def _running(self) -> Machine:
        if self._machine is None:
            raise RuntimeError("the sandbox is closed" if self._closed else "the sandbox was not started")
        return self._machine

    def _start_shell(self, state: bytes) -> Shell:
        streams = PipeStreams()
        program = self._running.spawn(SHELL, "agent", streams)
        return Shell(streams, program, self._limits, state)

    def _run_script(
        self, machine: Machine, environment: str, script: str, timeout: float
    ) -> CommandResult:
        with in_memory(script.encode("utf-8", "surrogateescape")) as text:
            return machine.run(_SCRIPT, environment, timeout, [text])

    def _open_inspection(self, script: str) -> Machine:
        """Start a machine with the files that the agent left, as ``script`` sees them."""
        assert self._frozen is not None
        changed, gone = self._frozen.choose(script)
        folder = self._runtime.new_bundle()
        added = folder / "usr"
        added.mkdir()
        self._runtime.image.give(added)
        in_usr = [path for path in changed if path.startswith(b"/usr/") and not path.startswith(b"/usr/local")]
        if in_usr:
            self._frozen.unpack("usr", in_usr, added)
        self._guard = ExecGuard(folder, self._runtime.case.ids)
        machine = self._runtime.inspection(
            self._limits, folder, added, self._guard.socket, self._guard.mounts
        )
        self._guard.watch(machine.processes, Frozen(machine, self._runtime.image))
        self._fill(machine, [path for path in changed if path not in in_usr], gone)
        return machine

    def _fill(self, machine: Machine, changed: list[bytes], gone: list[bytes]) -> None:
        assert self._frozen is not None
        lines, contents = [], []
        with ExitStack() as stack:
            if gone:
                contents.append(stack.enter_context(in_memory(b"\0".join(gone))))
                lines.append(f"xargs -0 rm -rf -- <&{5 + len(contents)}")
            for tree, target in _TREES.items():
                content = stack.enter_context(in_memory())
                if self._frozen.pack(tree, changed, content):
                    os.lseek(content, 0, os.SEEK_SET)
                    contents.append(content)
                    lines.append(f"{_UNPACK} --directory {target} <&{5 + len(contents)}")
            if lines:
                bash = ("/bin/bash", "--noprofile", "--norc", "-c", "\n".join([*lines, "true"]))
                machine.run(bash, "clean", 60.0, contents)
