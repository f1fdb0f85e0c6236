"""What runs in a machine, read from its own /proc: counted, signalled, and kept within its memory."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Set
from dataclasses import dataclass

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICK = os.sysconf("SC_CLK_TCK")
_STATE, _PARENT, _UTIME, _STIME, _CUTIME, _CSTIME, _START, _RSS = 0, 1, 11, 12, 13, 14, 19, 21  # columns of stat behind the name
_BOMB_SECONDS = 0.3  # so long may a machine be full of processes


@dataclass(frozen=True)
class Process:
    """A line of /proc/PID/stat: ticks of CPU time (its dead children's included), when it began (ticks after boot), bytes in memory."""

    pid: int
    parent: int
    ticks: int
    began: int
    resident: int


def living() -> Iterator[Process]:
    """All processes but process 1 and the dead."""
    for name in os.listdir("/proc"):
        if not name.isdigit() or name == "1":
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                columns = file.read().rpartition(b") ")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if columns[_STATE] not in (b"Z", b"X"):
            ticks = sum(int(columns[i]) for i in (_UTIME, _STIME, _CUTIME, _CSTIME))
            yield Process(int(name), int(columns[_PARENT]), ticks, int(columns[_START]), int(columns[_RSS]) * _PAGE)


def signal_all(number: int, since: int, keep: Set[int]) -> int:
    """Signal the living that began at ``since`` (ticks after boot) or later. Returns how many there were.

    Args:
        keep: processes that are left alone, and so are their children.
    """
    stopped = number == signal.SIGKILL and _signal(-1, signal.SIGSTOP)  # at once, so that nobody forks away
    count = 0
    for process in living():
        if process.began >= since and process.pid not in keep and process.parent not in keep:
            count += _signal(process.pid, number)
    if stopped:
        _signal(-1, signal.SIGCONT)
    return count


def signal_children(number: int, parents: Set[int]) -> None:
    for process in living():
        if process.parent in parents:
            _signal(process.pid, number)


def _signal(pid: int, number: int) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def cpu_seconds() -> float:
    return sum(process.ticks for process in living()) / _TICK


class Watch:
    """Kills the largest process while all together hold more memory than they may, and a fork bomb. Looks often while things move."""

    def __init__(self, memory: int, most: int, keep: Set[int]) -> None:
        """Args:
        memory: bytes.
        most: processes.
        keep: those that a fork bomb leaves, with their children.
        """
        self._memory, self._most, self._keep = memory, most, keep
        self._last = 0
        self._full_since: float | None = None
        self.interval = 0.05

    def wake(self) -> None:
        self.interval = 0.02

    def look(self) -> None:
        found = list(living())
        total = sum(process.resident for process in found)
        if total > self._memory:
            total = sum(_own(process) for process in found)  # what several share is counted once
        ticks = sum(process.ticks for process in found)
        if total > self._memory:
            _signal(max(found, key=_own).pid, signal.SIGKILL)
            self.interval = 0.005
        elif ticks != self._last or total > self._memory // 2:
            self.interval = 0.02
        else:
            self.interval = min(self.interval * 1.5, 0.25)
        self._last = ticks
        self._quell(len(found))

    def _quell(self, count: int) -> None:
        now = time.monotonic()
        if count < self._most * 0.9:
            self._full_since = None
        elif self._full_since is None:
            self._full_since = now
        elif now - self._full_since > _BOMB_SECONDS:
            signal_all(signal.SIGKILL, 0, self._keep)


def _own(process: Process) -> int:
    """Bytes in memory, its share of what it shares with others."""
    try:
        with open(f"/proc/{process.pid}/smaps_rollup", "rb") as file:
            for line in file:
                if line.startswith(b"Pss:"):
                    return int(line.split()[1]) << 10
    except (OSError, ValueError):
        pass
    return process.resident
