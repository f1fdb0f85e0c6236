"""Keeps the parts of a cluster running: starts them, waits until they answer, and starts them again."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from agent_peft.child_processes import end_with_parent, start_of
from agent_peft.files import write_atomic
from agent_peft.printable import printable
from agent_peft.types import InfrastructureError

POLL = 0.2  # seconds
GRACE = 15.0  # seconds between SIGTERM and SIGKILL
LONGEST_WAIT = 60.0  # seconds before a part that keeps failing is started again
ANSWER = 5.0  # seconds for an answer
LAST_BYTES = 4096  # of a log, whose last line is shown
FINAL = (2, 3)  # exit codes of agent-peft for bad input and failed checks: another start does not mend them
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))

Report = Callable[[str], None]


@dataclass(frozen=True)
class Part:
    """One process of a cluster.

    Attributes:
        name: such as sampler-0, the name of its log, too.
        health: the address that answers when it is ready; None for the trainer.
    """

    name: str
    command: tuple[str, ...]
    threads: int | None = None
    health: str | None = None

    @property
    def variables(self) -> dict[str, str]:
        return {} if self.threads is None else {"OMP_NUM_THREADS": str(self.threads)}


def _identity(pid: int) -> str:
    """What no other process is, on any machine."""
    return f"{socket.gethostname()} {pid} {start_of(pid)}"


class Keeper:
    """One part: its process, its log, and how often it was started again.

    Args:
        logs: a folder for its log and the number of its process.
        shown: its output is this process's, and not the log.
    """

    def __init__(self, part: Part, logs: Path, secrets: Mapping[str, str], *, shown: bool = False) -> None:
        self.part, self.log = part, None if shown else logs / f"{part.name}.log"
        self._record = logs / f"{part.name}.pid"  # of its process, for the next supervisor
        self.starts, self.answered = 0, False
        self.process: subprocess.Popen[bytes] | None = None  # None: not started yet, or elsewhere
        self.due = 0.0  # when it may be started again
        self._secrets, self._since = secrets, time.monotonic()

    def start(self) -> None:
        self._await_former()
        with nullcontext() if self.log is None else open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                self.part.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self._secrets, **self.part.variables},
                preexec_fn=end_with_parent(),
                start_new_session=True,
            )
        write_atomic(self._record, _identity(self.process.pid))
        self.starts, self.answered, self._since = self.starts + 1, False, time.monotonic()

    def _await_former(self) -> None:
        """Wait for the process of a supervisor that was killed, which Linux has asked to end: it may hold the
        port, or the run's folder.
        """
        deadline = time.monotonic() + 2 * GRACE
        try:
            former = self._record.read_text()
            pid = int(former.split()[1])
        except (OSError, ValueError, IndexError):  # there was none
            return
        while start_of(pid) is not None and _identity(pid) == former:
            if time.monotonic() > deadline:
                raise InfrastructureError(
                    f"{self.part.name}: process {pid} of an earlier launch still runs; end it first"
                )
            time.sleep(POLL)

    @property
    def waited(self) -> float:
        """Seconds since its start."""
        return time.monotonic() - self._since

    @property
    def last_line(self) -> str:
        """What is known of its last words, for a message."""
        if self.log is None:
            return "see its output above"
        if not self.log.is_file():
            return "its log is on its own machine"
        with open(self.log, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_BYTES))
            lines = file.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "nothing")
        return f"the last line of {self.log}: {printable(last, 200)}"

    def end(self) -> None:
        """Ask the process, and all that it started, to end."""
        if self.process is not None and self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGTERM)

    def kill(self, deadline: float) -> None:
        """Wait until the deadline (``time.monotonic``), then kill what is left."""
        if self.process is None:
            return
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, deadline - time.monotonic()))
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def answers(address: str) -> bool:
    """Whether a server is there: it answers, or refuses a request without a token."""
    try:
        with _OPENER.open(address, timeout=ANSWER):
            return True
    except urllib.error.HTTPError as error:
        return error.code < 500
    except (OSError, ValueError):
        return False


class Supervisor:
    """Runs servers, and the trainer once all of them answer.

    Args:
        servers: one that ends is started again.
        learner: None keeps the servers until a signal.
        elsewhere: servers that another supervisor runs, and the trainer waits for.
        ready: seconds within which a server must answer.
        restarts: how often a part that ended is started again.
        report: receives each event in one line.
    """

    def __init__(
        self,
        servers: Sequence[Part],
        learner: Part | None,
        logs: Path,
        secrets: Mapping[str, str],
        *,
        elsewhere: Sequence[Part] = (),
        ready: float,
        restarts: int,
        report: Report,
    ) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self.keepers = [Keeper(part, logs, secrets) for part in servers]
        self.elsewhere = [Keeper(part, logs, secrets) for part in elsewhere]
        self.learner = None if learner is None else Keeper(learner, logs, secrets, shown=True)
        self.ready, self.restarts, self.report = ready, restarts, report
        self._ended = threading.Event()

    def stop(self) -> None:
        """End ``run``; from a signal handler or another thread."""
        self._ended.set()

    def run(self) -> int:
        """Returns the exit code of the trainer; 130 after ``stop``.

        Raises:
            InfrastructureError: a part did not answer in time, or failed too often.
        """
        try:
            for keeper in self.keepers:
                self._start(keeper)
            while not self._ended.wait(POLL):
                silent = [one for one in (*self.keepers, *self.elsewhere) if not self._keep(one)]
                if self.learner is None:
                    continue
                if self.learner.process is None:
                    if not silent:
                        self._start(self.learner)
                elif (code := self.learner.process.poll()) is not None:
                    if code in (0, *FINAL):
                        return code
                    self._again(self.learner, code)
            return 130
        finally:
            self._end()

    def _start(self, keeper: Keeper) -> None:
        try:
            keeper.start()
        except OSError as error:
            raise InfrastructureError(
                f"{keeper.part.name}: {keeper.part.command[0]} cannot be started ({error.strerror})"
            ) from error
        self.report(f"{keeper.part.name}: started" + (f"; output in {keeper.log}" if keeper.log else ""))

    def _keep(self, keeper: Keeper) -> bool:
        """Look after a server. Returns whether it answers."""
        code = None if keeper.process is None else keeper.process.poll()
        if code is not None:
            self._again(keeper, code)
            return False
        if not keeper.answered and answers(health := keeper.part.health or ""):
            keeper.answered = True
            self.report(f"{keeper.part.name}: answers after {keeper.waited:.0f} s")
        if not keeper.answered and keeper.waited > self.ready:
            raise InfrastructureError(
                f"{keeper.part.name}: {health} has not answered within {self.ready:g} s (ready); "
                f"{keeper.last_line}"
            )
        return keeper.answered

    def _again(self, keeper: Keeper, code: int) -> None:
        """Start a part that has ended once more, each time after twice as long."""
        now = time.monotonic()
        if not keeper.due:
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            line = f"{keeper.part.name}: ended with {how}; {keeper.last_line}"
            if keeper.starts == 1 and code in FINAL:  # a later one may be a port that is not free yet
                raise InfrastructureError(line)
            if keeper.starts > self.restarts:
                often = f"; it was started {keeper.starts} times (restarts)" if keeper.starts > 1 else ""
                raise InfrastructureError(line + often)
            keeper.kill(now)  # what it has started may live, and hold a port or a GPU
            pause = min(LONGEST_WAIT, 2.0 ** (keeper.starts - 1) / 2)
            keeper.due = now + pause
            self.report(f"{line}; started again in {pause:g} s")
        elif now >= keeper.due:
            keeper.due = 0.0
            self._start(keeper)

    def _end(self) -> None:
        keepers = [*self.keepers, *([] if self.learner is None else [self.learner])]
        for keeper in reversed(keepers):
            keeper.end()
        deadline = time.monotonic() + GRACE
        for keeper in reversed(keepers):
            keeper.kill(deadline)
