"""No isolation: commands run on this computer. For disposable machines; it has to be asked for by name."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from agent_peft.sandbox.base import CommandResult, Sandbox, SandboxLimits
from agent_peft.sandbox.shell import SHELL, PersistentShell, Shell, run_alone
from agent_peft.sandbox.streams import PipeStreams

logger = logging.getLogger(__name__)


class NoSandbox(Sandbox):
    """Commands run as the current user in a temporary folder. Only the file size and the processor time of
    each process are limited.

    ``inspect`` uses the same programs, in the same folder, as every other command.
    """

    def __init__(self, limits: SandboxLimits) -> None:
        logger.warning(
            "sandbox: none runs the agent's commands on this machine as this user, "
            "and inspects the result with programs that the agent could have changed"
        )
        self._limits = limits
        self._folder: Path | None = None
        self._group = _Session()
        self._shell = PersistentShell(self._start_shell)

    def start(self) -> None:
        if self._folder is not None:
            raise RuntimeError("a sandbox starts once")
        self._folder = Path(tempfile.mkdtemp(prefix="agent-peft-"))

    def run(self, command: str, timeout: float) -> CommandResult:
        return self._shell.run(command, timeout)

    def run_fresh(self, script: str, timeout: float) -> CommandResult:
        streams = PipeStreams()
        alone = _Session()
        try:
            alone.spawn(
                ["/bin/bash", "--noprofile", "--norc", "-c", script],
                streams,
                self._working_folder,
                self._limits,
                alone=True,
            )
            return run_alone(streams, alone, self._limits, 0, timeout)
        finally:
            streams.close()

    def inspect(self, script: str, timeout: float) -> CommandResult:
        self._drop_shell()
        return self.run_fresh(script, timeout)

    def close(self) -> None:
        self._drop_shell()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    @property
    def _working_folder(self) -> Path:
        if self._folder is None:
            raise RuntimeError("the sandbox is not running")
        return self._folder

    def _start_shell(self, state: bytes) -> Shell:
        self._kill_shell()
        streams = PipeStreams()
        self._group.spawn(SHELL, streams, self._working_folder, self._limits)
        return Shell(streams, self._group, self._limits, state)

    def _drop_shell(self) -> None:
        self._kill_shell()
        self._shell.close()

    def _kill_shell(self) -> None:
        self._group.signal_shell(signal.SIGKILL)
        self._group.signal(signal.SIGKILL, 0)


# A background job ignores interrupts. A shell that inherits this could never be interrupted.
_DEFAULT_SIGNALS = ("env", "--default-signal=INT,QUIT,HUP,TERM") if sys.platform == "linux" else ()


class _Session:
    """A process of this computer and its session. A daemon that leaves the session is no longer tracked."""

    def __init__(self) -> None:
        self._leader: subprocess.Popen[bytes] | None = None

    def spawn(
        self,
        argv: Sequence[str],
        streams: PipeStreams,
        folder: Path,
        limits: SandboxLimits,
        alone: bool = False,
    ) -> None:
        environment = {"HOME": str(folder), "LANG": "C.UTF-8", "TERM": "dumb"}
        bounds = {"fsize": limits.file_size_mb << 20, "cpu": int(limits.cpu_seconds) + 1}
        before = ["prlimit", *(f"--{name}={value}:{value}" for name, value in bounds.items())]
        self._leader = streams.spawn(
            [*(before if sys.platform == "linux" else ()), *_DEFAULT_SIGNALS, *argv],
            with_input=not alone,
            cwd=folder,
            env={**environment, "PATH": os.environ.get("PATH", "/usr/bin:/bin")},
            start_new_session=True,
        )

    def signal(self, number: int, since: float) -> int:
        members = self._members()
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return len(members)

    def signal_shell(self, number: int) -> None:
        if self._leader is not None and self._leader.poll() is None:
            self._leader.send_signal(number)

    def cpu_seconds(self) -> float:
        return 0.0  # each process has its own limit

    def _members(self) -> Sequence[int]:
        """The live processes of the session, without its leader."""
        if self._leader is None or sys.platform != "linux":
            return []
        members = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                columns = Path(f"/proc/{name}/stat").read_text(errors="replace").rpartition(") ")[2].split()
                if (
                    int(columns[3]) == self._leader.pid
                    and columns[0] != "Z"
                    and int(name) != self._leader.pid
                ):
                    members.append(int(name))
        return members
