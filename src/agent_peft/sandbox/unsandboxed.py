"""No sandbox: the machine itself. For machines that are thrown away anyway, and asked for by name only."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from agent_peft.sandbox.base import CommandResult, Sandbox, SandboxLimits
from agent_peft.sandbox.shell import SHELL, Shell, run_alone
from agent_peft.sandbox.streams import PipeStreams

logger = logging.getLogger(__name__)


class NoSandbox(Sandbox):
    """Commands run as we ourselves, in a temporary folder, with limits on files and CPU time of each process,
    and no others.

    A snapshot holds that folder only. ``run_fresh`` has the same programs as anybody else.
    """

    def __init__(self, limits: SandboxLimits) -> None:
        logger.warning(
            "sandbox: none runs the agent's commands on this machine as this user, and grades with programs it could have changed"
        )
        self._limits = limits
        self._folder: Path | None = None
        self._group = _Session()
        self._shell: Shell | None = None

    def start(self) -> None:
        if self._folder is not None:
            raise RuntimeError("a sandbox starts once")
        self._folder = Path(tempfile.mkdtemp(prefix="agent-peft-"))

    def run(self, command: str, timeout: float) -> CommandResult:
        result = (
            self._shell.run(command, timeout) if self._shell is not None and self._shell.alive() else None
        )
        return (
            result
            if result is not None
            else self._new_shell().run(command, timeout) or CommandResult("", None)
        )

    def run_fresh(self, script: str, timeout: float, kill_others: bool = False) -> CommandResult:
        if kill_others:
            self._drop_shell()
        streams = PipeStreams()
        alone = _Session()
        try:
            alone.spawn(
                ["/bin/bash", "--noprofile", "--norc", "-c", script],
                streams,
                self._place,
                self._limits,
                alone=True,
            )
            result = run_alone(streams, alone, self._limits, 0, timeout)
            if result.timed_out:
                alone.signal_shell(signal.SIGKILL)
            return result
        finally:
            streams.close()

    def read_file(self, path: str, limit: int = 1 << 20) -> bytes:
        if not (self._place / path).is_file():
            raise FileNotFoundError(2, f"{path} is not a regular file")
        with open(self._place / path, "rb") as file:
            return file.read(limit)

    def write_file(self, path: str, content: bytes, mode: int = 0o644) -> None:
        target = self._place / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        target.chmod(mode)

    def snapshot(self) -> bytes:
        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode="w") as archive:
            archive.add(self._place, arcname=".")
        return content.getvalue()

    def restore(self, snapshot: bytes) -> None:
        self._drop_shell()
        shutil.rmtree(self._place)
        with tarfile.open(fileobj=io.BytesIO(snapshot)) as archive:
            archive.extraction_filter = getattr(
                tarfile, "tar_filter", None
            )  # older than 3.11.4: it has none, and trusts what is ours
            archive.extractall(self._place)

    def close(self) -> None:
        self._drop_shell()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    @property
    def _place(self) -> Path:
        if self._folder is None:
            raise RuntimeError("the sandbox is not running")
        return self._folder

    def _new_shell(self) -> Shell:
        state = self._shell.state if self._shell is not None and self._shell.killed else b""
        self._drop_shell()
        streams = PipeStreams()
        self._group.spawn(SHELL, streams, self._place, self._limits)
        self._shell = Shell(streams, self._group, self._limits, state)
        return self._shell

    def _drop_shell(self) -> None:
        self._group.signal_shell(signal.SIGKILL)
        self._group.signal(signal.SIGKILL, 0)
        if self._shell is not None:
            self._shell.close()
            self._shell = None


# A job in the background ignores interrupts, and a shell that inherits that can never again be interrupted.
_HEARING = ("env", "--default-signal=INT,QUIT,HUP,TERM") if sys.platform == "linux" else ()


class _Session:
    """A process on this machine and all of its session: what leaves the session, as a daemon does, is not
    found again.
    """

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
        stdin, output, control, end = streams.child
        self._leader = subprocess.Popen(
            [*_HEARING, *argv],
            stdin=subprocess.DEVNULL if alone else stdin,
            stdout=output,
            stderr=output if alone else control,
            cwd=folder,
            env={
                "HOME": str(folder),
                "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
                "LANG": "C.UTF-8",
                "TERM": "dumb",
            },
            start_new_session=True,
        )
        if sys.platform == "linux":
            for kind, bound in (
                (resource.RLIMIT_FSIZE, limits.file_size_mb << 20),
                (resource.RLIMIT_CPU, int(limits.cpu_seconds) + 1),
            ):
                resource.prlimit(self._leader.pid, kind, (bound, bound))
        threading.Thread(target=_tell_end, args=(self._leader, os.dup(end)), daemon=True).start()
        streams.release()

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
        return 0.0  # each process has a limit of its own

    def _members(self) -> Sequence[int]:
        """The living of the session, without its leader."""
        if self._leader is None or sys.platform != "linux":
            return []
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                columns = Path(f"/proc/{name}/stat").read_text(errors="replace").rpartition(") ")[2].split()
                if (
                    int(columns[3]) == self._leader.pid
                    and columns[0] != "Z"
                    and int(name) != self._leader.pid
                ):
                    found.append(int(name))
        return found


def _tell_end(process: subprocess.Popen[bytes], end: int) -> None:
    code = process.wait()
    with contextlib.suppress(BrokenPipeError):
        os.write(end, str(code).encode())
    os.close(end)
