"""One container of an OCI runtime, and the programs that are started in it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
_OUTSIDE = 'exec "$@" 3<&0 4>&1 5>&2 </dev/null >/dev/null 2>"$0"'
_INSIDE = 'cd 2>/dev/null; exec "$@" <&3 >&4 2>&5 3<&- 4>&- 5>&-'
WITHOUT_FILES = ("/bin/bash", "--noprofile", "--norc", "-c")


def inside(argv: Sequence[str], before: str = "") -> list[str]:
    """Return the arguments of a program with our streams. ``before``: lines of bash to run first."""
    return [*WITHOUT_FILES, before + _INSIDE, "bash", *argv]


class Machine:
    """A running container."""

    def __init__(
        self,
        command: Sequence[str],
        bundle_folder: Path,
        config: Mapping[str, Any],
        limits: SandboxLimits,
        later: Callable[[Callable[[], None]], None],
        streams: PipeStreams,
        descriptors: Sequence[int] | None = None,
    ) -> None:
        """Start the container.

        Args:
            command: the runtime and its options.
            bundle_folder: a folder, which the machine removes when it is closed.
            config: the content of config.json.
            later: does something in another thread.
            streams: of the first shell, or of process 1, whose exit code is the runtime's.
            descriptors: further ones for process 1, which become 6 and so on. None: process 1 starts a shell,
                and then waits for the end of its input, which is the end of our process at the latest.

        Raises:
            InfrastructureError: the runtime did not start it.
        """
        self.name = f"agent-peft-{secrets.token_hex(8)}"
        self._command, self.limits, self._later = command, limits, later
        self._bundle = bundle_folder
        self._descriptors = next(
            each["hard"] for each in config["process"]["rlimits"] if each["type"] == "RLIMIT_NOFILE"
        )
        self._count, self._closed, self._seconds = 0, False, 0.0
        # the folders of its control group by controller, "" for version 2; None where it has none
        self.cgroup: Mapping[str, Path] | None = None
        self._lifeline: int | None = None
        self._processes: Processes | None = None
        self._waits_for_shell: int | None = None
        (self._bundle / "config.json").write_text(json.dumps(config), "utf-8")
        # A user may have 200 keyrings, and the kernel keeps one for minutes after its container has ended
        run = ["run", "--no-new-keyring", "--bundle", str(self._bundle)]
        try:
            if descriptors is None:
                self._start(run, streams)
            else:
                self._spawn(run, self._bundle / "first", streams, descriptors, with_input=False)
            self._processes = self._wait(may_have_ended=descriptors is not None)
            if descriptors is None:
                self._find_shell(self.processes.first, streams)
            if "resources" in config["linux"]:
                self.cgroup = _cgroup_of(config["linux"]["cgroupsPath"], self._processes)
            elif self._processes is not None:
                WATCH.add(self._processes, limits)
        except BaseException:
            self.close()
            raise

    @property
    def processes(self) -> Processes:
        """Raises `MachineLost`: the machine has ended."""
        if self._processes is None:
            raise MachineLost("the machine has ended")
        return self._processes

    @property
    def first(self) -> Program:
        """Process 1."""
        return Program(self, self._bundle / "first")

    @property
    def shell(self) -> Program:
        """The shell that process 1 started."""
        return Program(self, self._bundle / "shell", self._waits_for_shell)

    def spawn(
        self,
        argv: Sequence[str],
        environment: str,
        streams: PipeStreams,
        descriptors: Sequence[int] = (),
        with_input: bool = True,
    ) -> Program:
        """Start a program in the machine, with pipes for its streams.

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
        described = bundle.process(inside(argv), environment, self.limits, self._descriptors)
        path.write_text(json.dumps(described), "utf-8")
        self._spawn(["exec", "--process", str(path)], path, streams, descriptors, with_input)
        return Program(self, path)

    def run(
        self, argv: Sequence[str], environment: str, seconds: float, descriptors: Sequence[int] = ()
    ) -> CommandResult:
        """Run a program to its end, and return the runtime's exit code. Raises `MachineLost`."""
        began = time.clock_gettime(time.CLOCK_BOOTTIME)
        streams = PipeStreams()
        try:
            program = self.spawn(argv, environment, streams, descriptors, with_input=False)
            result = run_alone(streams, program, self.limits, began, seconds)
            if not result.timed_out and program.pid is None:
                raise MachineLost(f"the runtime started no program in the machine: {program.error}")
            return result
        finally:
            streams.close()

    def cpu_seconds(self) -> float:
        """Return the processor time of all processes so far; of the last call if the machine has ended."""
        with contextlib.suppress(OSError, MachineLost, KeyError):
            if self.cgroup is None:
                self._seconds = WATCH.ticks(self.processes) / _TICK
            elif "cpuacct" in self.cgroup:
                self._seconds = int((self.cgroup["cpuacct"] / "cpuacct.usage").read_text()) / 1e9
            else:
                text = (self.cgroup[""] / "cpu.stat").read_text()
                self._seconds = int(text.partition("usage_usec ")[2].split()[0]) / 1e6
        return self._seconds

    def end(self) -> None:
        """Kill all processes. Raises `MachineLost`: some of them cannot be killed."""
        if not self.processes.end(_SECONDS):
            raise MachineLost("processes of a machine cannot be killed")

    def close(self) -> None:
        """End the machine. What the runtime keeps of it is removed later."""
        if self._closed:
            return
        self._closed = True
        if self._lifeline is not None:
            os.close(self._lifeline)
        if self._processes is not None:
            WATCH.remove(self._processes)
            if not self._processes.end(_SECONDS):
                logger.warning("a machine was closed and did not end within %g seconds", _SECONDS)
            self._processes.close()
            self._processes = None
        kept = [Path(self._command[self._command.index("--root") + 1]) / self.name, self._bundle]
        command, groups = [*self._command, "delete", "--force", self.name], self.cgroup or {}
        self._later(lambda: _remove(command, kept, list(groups.values())))

    def _start(self, run: Sequence[str], streams: PipeStreams) -> None:
        """Start process 1 with the shell's streams as 3 to 6. Only we hold the other end of its input."""
        theirs, self._lifeline = os.pipe2(os.O_CLOEXEC)
        path = self._bundle / "first"
        options = ["--detach", "--preserve-fds", "4", "--pid-file", str(path.with_suffix(".pid")), self.name]
        with (
            open(theirs, "rb") as stdin,
            open(path.with_suffix(".errors"), "wb") as errors,
            _moved(streams.child, 3) as (move, high),
        ):
            try:
                subprocess.run(
                    [*WITHOUT_FILES, f'{move}exec "$@"', "bash", *self._command, *run, *options],
                    stdin=stdin,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    pass_fds=high,
                    cwd="/",
                    timeout=_SECONDS,
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                raise InfrastructureError(f"a machine did not start: {error}") from error
        streams.release()

    def _find_shell(self, first: int, streams: PipeStreams) -> None:
        """Record the id of the shell, a child of the only child of process 1. No program of the agent runs
        yet. A shell that has ended already needs no id.
        """
        deadline = time.monotonic() + _SECONDS
        while (pid := _only_child(parent := _only_child(first))) is None:
            if streams.ended() or not self.processes.alive():
                return
            if time.monotonic() > deadline:
                raise InfrastructureError(f"the shell of a machine did not start within {_SECONDS:g} seconds")
            time.sleep(0.001)
        self._waits_for_shell = parent
        (self._bundle / "shell.pid").write_text(str(pid))

    def _spawn(
        self,
        action: Sequence[str],
        path: Path,
        streams: PipeStreams,
        descriptors: Sequence[int],
        with_input: bool,
    ) -> None:
        """Let the runtime start a program. ``path``: of the files for its id and the runtime's errors."""
        options = ["--preserve-fds", str(3 + len(descriptors)), "--pid-file", str(path.with_suffix(".pid"))]
        with _moved(descriptors, 6) as (move, high):
            shell = [*WITHOUT_FILES, f"{move}{_OUTSIDE}", str(path.with_suffix(".errors"))]
            streams.spawn(
                [*shell, *self._command, *action, *options, self.name],
                with_input=with_input,
                pass_fds=high,
                cwd="/",
            )

    def _wait(self, may_have_ended: bool) -> Processes | None:
        """Wait until the runtime has started process 1. Return None if that has already ended."""
        deadline, first = time.monotonic() + _SECONDS, self.first
        while (pid := first.pid) is None:
            if first.error or time.monotonic() > deadline:
                raise InfrastructureError(f"a machine did not start: {first.error or 'no answer'}")
            time.sleep(0.002)
        try:
            return Processes(pid)
        except OSError as error:
            if may_have_ended:
                return None
            raise InfrastructureError(f"a machine has ended at its start: {error}") from error


class Program:
    """A program that was started in a machine, and the processes that it started there."""

    def __init__(self, machine: Machine, described: Path, parent: int | None = None) -> None:
        """``parent``: started in the same clock tick as the first command, perhaps, and not by it."""
        self._machine, self._parent = machine, parent
        self._pid_file, self._errors = described.with_suffix(".pid"), described.with_suffix(".errors")

    @property
    def pid(self) -> int | None:
        """Its id, as our own /proc shows it. None while the runtime has not started it."""
        try:
            return int(self._pid_file.read_text())
        except (OSError, ValueError):
            return None

    @property
    def error(self) -> str:
        """The last line that the runtime printed."""
        with contextlib.suppress(OSError):
            return (self._errors.read_text("utf-8", "replace").strip().splitlines() or [""])[-1]
        return ""

    def signal(self, number: int, since: float) -> int:
        spared = [pid for pid in (self.pid, self._parent) if pid is not None]
        return self._machine.processes.signal(number, int(since * _TICK), spared)

    def signal_shell(self, number: int) -> None:
        processes, pid = self._machine.processes, self.pid
        if pid is not None:
            processes.signal_one(pid, number)

    def cpu_seconds(self) -> float:
        return self._machine.cpu_seconds()


@contextlib.contextmanager
def _moved(descriptors: Sequence[int], first: int) -> Iterator[tuple[str, Sequence[int]]]:
    """Yield bash that makes inherited descriptors ``first`` and following, and those to inherit."""
    high = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, 64) for each in descriptors]  # none is also a target
    try:
        yield "".join(f"exec {first + i}<&{each} {each}<&-; " for i, each in enumerate(high)), high
    finally:
        for each in high:
            os.close(each)


def _only_child(pid: int | None) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text())
    except (OSError, ValueError):
        return None


def _remove(command: Sequence[str], kept: Sequence[Path], groups: Sequence[Path]) -> None:
    """Remove what the runtime keeps of a machine that has ended. The runtime itself needs a tenth of a second
    for that, so it is only called where something resists.
    """
    try:
        for group in groups:
            group.rmdir()
    except OSError:
        try:
            subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, cwd="/", timeout=_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            logger.warning("what the runtime keeps of a machine was not removed: %s", error)
    for folder in kept:
        shutil.rmtree(folder, ignore_errors=True)


def _cgroup_of(path: str, processes: Processes | None) -> Mapping[str, Path]:
    """Return the folders of a control group by controller. ``path``: the bundle's ``cgroupsPath``."""
    if ":" in path:  # systemd chose the place of its scope
        if processes is None:
            return {}
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{processes.first}/cgroup").read_text()
            return {"": _CGROUPS / text.rpartition("0::/")[2].strip()}
        return {}
    name = Path(path).name
    folders = {each.parent.name: each for each in _CGROUPS.glob(f"*/{name}")}
    if (_CGROUPS / name).is_dir():
        folders[""] = _CGROUPS / name
    return folders
