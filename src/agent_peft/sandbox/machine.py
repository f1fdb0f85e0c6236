"""One container of an OCI runtime, and the programs that are started in it."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agent_peft.sandbox import bundle
from agent_peft.sandbox.base import CommandResult, MachineLost, SandboxLimits
from agent_peft.sandbox.processes import WATCH, Processes
from agent_peft.sandbox.shell import run_alone
from agent_peft.sandbox.streams import PipeStreams
from agent_peft.types import InfrastructureError

logger = logging.getLogger(__name__)

_SECONDS = 60.0  # for the runtime to start or end a machine
_TICK = os.sysconf("SC_CLK_TCK")
_CGROUPS = Path("/sys/fs/cgroup")
# The runtime copies what goes through its own three streams. Those of the program are therefore 3, 4 and 5 on
# the way, so that the program has the pipes themselves.
_OUTSIDE = 'exec "$@" 3<&0 4>&1 5>&2 </dev/null >/dev/null 2>&1'
_INSIDE = 'cd 2>/dev/null; exec "$@" <&3 >&4 2>&5 3<&- 4>&- 5>&-'
_WITHOUT_FILES = ("/bin/bash", "--noprofile", "--norc", "-c")


class Machine:
    """A running container."""

    def __init__(
        self,
        command: Sequence[str],
        bundle_folder: Path,
        config: Mapping[str, Any],
        limits: SandboxLimits,
        later: Callable[[Callable[[], None]], None],
    ) -> None:
        """
        Args:
            command: the runtime and its options.
            bundle_folder: an empty folder, which the machine removes when it is closed.
            config: the content of config.json.
            later: does something in another thread.

        Raises:
            InfrastructureError: the runtime did not start it.
        """
        self.name = f"agent-peft-{secrets.token_hex(8)}"
        self._command, self._limits, self._later = command, limits, later
        self._bundle = bundle_folder
        self._descriptors = next(
            each["hard"] for each in config["process"]["rlimits"] if each["type"] == "RLIMIT_NOFILE"
        )
        self._count = 0
        self._cgroup: Mapping[str, Path] | None = None
        (self._bundle / "config.json").write_text(json.dumps(config), "utf-8")
        theirs, self._lifeline = os.pipe2(os.O_CLOEXEC)
        self._processes: Processes | None = None
        try:
            with open(theirs, "rb"):
                self._start(theirs)
            self._cgroup = _cgroup_of(self.processes.first) if "resources" in config["linux"] else None
            if self._cgroup is None:
                WATCH.add(self.processes, limits)
        except BaseException:
            self.close()
            raise

    @property
    def processes(self) -> Processes:
        if self._processes is None:
            raise MachineLost("the machine was not started")
        return self._processes

    @property
    def cgroup(self) -> Mapping[str, Path] | None:
        """The folders of its control group by controller, "" for version 2. None where it has none."""
        return self._cgroup

    def spawn(
        self,
        argv: Sequence[str],
        environment: str,
        streams: PipeStreams,
        descriptors: Sequence[int] = (),
        with_input: bool = True,
    ) -> Program:
        """Start a program of the host's /usr in the machine, with pipes for its streams.

        Args:
            environment: a key of ``bundle.ENVIRONMENTS``.
            descriptors: further ones for it, which become 6 and so on.
            with_input: False for a script: it reads nothing, and its errors are output.

        Raises:
            MachineLost: the machine has ended.
        """
        if not self.processes.alive():
            raise MachineLost("the machine has ended")
        self._count += 1
        path = self._bundle / f"process{self._count}"
        inside = (*_WITHOUT_FILES, _INSIDE, "bash", *argv)
        described = bundle.process(inside, environment, self._limits, self._descriptors)
        path.write_text(json.dumps(described), "utf-8")
        high = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, 64) for each in descriptors]  # 6 is none of them
        more = "".join(f"exec {6 + i}<&{each}; " for i, each in enumerate(high))
        pid_file = path.with_suffix(".pid")
        options = [
            "--preserve-fds",
            str(3 + len(descriptors)),
            "--pid-file",
            str(pid_file),
            "--process",
            str(path),
        ]
        try:
            streams.spawn(
            [*_WITHOUT_FILES, f"{more}{_OUTSIDE}", "bash", *self._command, "exec", *options, self.name],
            with_input=with_input,
            pass_fds=high,
            cwd="/",
        )
        finally:
            for each in high:
                os.close(each)
        return Program(self, pid_file)

    def run(
        self, argv: Sequence[str], environment: str, seconds: float, descriptors: Sequence[int] = ()
    ) -> CommandResult:
        """Run a program to its end. Its exit code is the runtime's.

        Raises:
            MachineLost: the machine has ended.
        """
        began = time.clock_gettime(time.CLOCK_BOOTTIME)
        streams = PipeStreams()
        try:
            program = self.spawn(argv, environment, streams, descriptors, with_input=False)
            result = run_alone(streams, program, self._limits, began, seconds)
            if not result.timed_out and program.pid is None:
                raise MachineLost(f"the runtime started no program in the machine: {result.output[-200:]}")
            return result
        finally:
            streams.close()

    def cpu_seconds(self) -> float:
        """Return the processor time of all processes so far."""
        if self._cgroup is None:
            return WATCH.ticks(self.processes) / _TICK
        try:
            if "cpuacct" in self._cgroup:
                return int((self._cgroup["cpuacct"] / "cpuacct.usage").read_text()) / 1e9
            text = (self._cgroup[""] / "cpu.stat").read_text()
        except OSError as error:
            raise MachineLost(f"the machine has ended: {error}") from error
        return next(
            (int(line.split()[1]) / 1e6 for line in text.splitlines() if line.startswith("usage_usec")), 0.0
        )

    def end(self) -> None:
        """Kill all processes.

        Raises:
            MachineLost: some of them cannot be killed.
        """
        if not self.processes.end(_SECONDS):
            raise MachineLost("processes of a machine cannot be killed")

    def close(self) -> None:
        """End the machine. What the runtime keeps of it is removed later."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        if self._processes is not None:
            WATCH.remove(self._processes)
            if not self._processes.end(_SECONDS):
                logger.warning("a machine was closed and did not end within %g seconds", _SECONDS)
            self._processes.close()
            self._processes = None
            command, folder = [*self._command, "delete", "--force", self.name], self._bundle
            self._later(lambda: _remove(command, folder))  # it takes the runtime a tenth of a second

    def _start(self, stdin: int) -> None:
        pid_file = self._bundle / "pid"
        command = [*self._command, "run", "--detach", "--bundle", str(self._bundle)]
        with open(self._bundle / "errors", "w+b") as errors:
            try:
                ended = subprocess.run(
                    [*command, "--pid-file", str(pid_file), self.name],
                    stdin=stdin,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    cwd="/",
                    timeout=_SECONDS,
                )
                pid = int(pid_file.read_text()) if ended.returncode == 0 else 0
                if pid:
                    self._processes = Processes(pid)
                    return
            except (OSError, ValueError, subprocess.TimeoutExpired) as error:
                raise InfrastructureError(f"a machine did not start: {error}") from error
            errors.seek(0)
            lines = errors.read().decode("utf-8", "replace").strip().splitlines() or ["no reason was given"]
            raise InfrastructureError(f"a machine did not start: {lines[-1]}")


class Program:
    """A program that was started in a machine, and the processes that it started there."""

    def __init__(self, machine: Machine, pid_file: Path) -> None:
        self._machine, self._pid_file = machine, pid_file

    @property
    def pid(self) -> int | None:
        """Its id, as our own /proc shows it. None while the runtime has not started it."""
        try:
            return int(self._pid_file.read_text())
        except (OSError, ValueError):
            return None

    def signal(self, number: int, since: float) -> int:
        pid = self.pid
        spared = [pid] if pid is not None else []
        return self._machine.processes.signal(number, int(since * _TICK), spared)

    def signal_shell(self, number: int) -> None:
        pid = self.pid
        if pid is not None:
            self._machine.processes.signal_one(pid, number)

    def cpu_seconds(self) -> float:
        return self._machine.cpu_seconds()


def _remove(command: Sequence[str], folder: Path) -> None:
    try:
        subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, cwd="/", timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        logger.warning("what the runtime keeps of a machine was not removed: %s", error)
    shutil.rmtree(folder, ignore_errors=True)


def _cgroup_of(pid: int) -> Mapping[str, Path]:
    """Return the folders of a process's control groups by controller."""
    folders = {}
    with open(f"/proc/{pid}/cgroup", encoding="utf-8") as file:
        for line in file:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            for name in controllers.split(","):
                folder = _CGROUPS / name / path.lstrip("/")
                if folder.is_dir():
                    folders[name] = folder
    return folders
