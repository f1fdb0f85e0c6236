"""The processes of a machine, read from its own /proc: counting, signals, and the limits of memory and
processor time.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Set
from dataclasses import dataclass

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICK = os.sysconf("SC_CLK_TCK")
# Columns of /proc/PID/stat after the name
_STATE, _UTIME, _STIME, _CUTIME, _CSTIME, _START, _VIRTUAL, _RSS = 0, 11, 12, 13, 14, 19, 20, 21
_BOMB_SECONDS = 0.3  # a machine may be full of processes or sockets for this time
_DEAD = (b"Z", b"X")
_SOCKET_BYTES = 425_984  # kernel memory of one socket: twice net.core.wmem_max's default
_UNSEEN_TICKS = 0.5  # charged for a process that lived and ended between two checks


@dataclass(frozen=True)
class Process:
    """A line of /proc/PID/stat."""

    pid: int
    thread: int  # id of a live thread: the first one may have ended, and the process looks like a zombie
    ticks: int  # clock ticks of processor time
    childrens_ticks: int  # of the children that it waited for
    began: int  # clock ticks after boot
    virtual: int  # bytes
    resident: int  # bytes


def _columns(path: str) -> list[bytes] | None:
    try:
        with open(path, "rb") as file:
            return file.read().rpartition(b") ")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def live_processes() -> Iterator[Process]:
    """List all processes with a live thread, except process 1."""
    for name in os.listdir("/proc"):
        if not name.isdigit() or name == "1":
            continue
        columns, thread = _columns(f"/proc/{name}/stat"), name
        if columns is None:
            continue
        memory = columns
        if columns[_STATE] in _DEAD:
            live = _live_thread(name)
            if live is None:
                continue
            thread, memory = live
        yield Process(
            int(name),
            int(thread),
            int(columns[_UTIME]) + int(columns[_STIME]),
            int(columns[_CUTIME]) + int(columns[_CSTIME]),
            int(columns[_START]),
            int(memory[_VIRTUAL]),
            int(memory[_RSS]) * _PAGE,
        )


def _live_thread(pid: str) -> tuple[str, list[bytes]] | None:
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return None
    for thread in threads:
        columns = _columns(f"/proc/{pid}/task/{thread}/stat")
        if columns is not None and columns[_STATE] not in _DEAD:
            return thread, columns
    return None


def kill_all() -> bool:
    """Kill all processes except process 1, which calls this. Return whether there was one.

    The kernel does it in one step, so that no process can escape by forking or by its appearance in /proc.
    """
    return _signal(-1, signal.SIGKILL)


def signal_all(number: int, since: int, spared: Set[int]) -> int:
    """Signal the live processes that started at ``since`` (ticks after boot) or later, except ``spared``.
    Return their number.
    """
    stopped = number == signal.SIGKILL and _signal(
        -1, signal.SIGSTOP
    )  # first stop all at once: none can escape by forking
    count = 0
    for process in live_processes():
        if process.began >= since and process.pid not in spared:
            count += _signal(process.pid, number)
    if stopped:
        _signal(-1, signal.SIGCONT)
    return count


def signal_each(number: int, pids: Set[int]) -> None:
    for pid in pids:
        _signal(pid, number)


def _signal(pid: int, number: int) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


class Monitor:
    """Enforces limits of all processes together. It kills the largest process while the memory exceeds its
    limit, and all processes after a fork bomb or too much processor time in the background. It checks often
    while processes are active.
    """

    def __init__(self, memory: int, max_processes: int, seconds: float, spared: Set[int]) -> None:
        """
        Args:
            memory: limit in bytes.
            seconds: each command adds this much to the allowed processor time of all processes.
            spared: ids of processes that are killed only for their memory.
        """
        self._memory, self._max_processes = memory, max_processes
        self._seconds, self._spared = seconds, spared
        self._sockets = max(memory // _SOCKET_BYTES, 64)
        self._last_ticks = 0.0
        self._full_since: float | None = None
        self._ticks: dict[tuple[int, int], int] = {}  # by (pid, began), as of the last check
        self._ended_ticks = 0.0  # of processes that ended since, and of those that no check has seen
        self._reaped = 0.0  # seconds of the processes that process 1 waited for
        self._newest_pid = _newest_pid()
        self._allowed = seconds
        self.interval = 0.05

    def wake(self) -> None:
        """Prepare for a new command."""
        self.interval = 0.02
        self._allowed = self.cpu_seconds() + 2 * self._seconds

    def set_reaped(self, seconds: float) -> None:
        """Set the total processor time of all processes that process 1 has waited for."""
        self._reaped = seconds

    def cpu_seconds(self) -> float:
        """Return the processor time of all processes so far. It is too large only by the charge for processes
        that no check has seen. It is too small by at most some hundredths of a second for each process that
        nobody waited for.
        """
        live = list(live_processes())
        self._account(live)
        waited = sum(process.ticks + process.childrens_ticks for process in live) / _TICK + self._reaped
        return max(waited, (self._ended_ticks + sum(self._ticks.values())) / _TICK)

    def check(self) -> None:
        live = list(live_processes())
        self._account(live)
        total = self._measure(live)
        ticks = self._ended_ticks + sum(self._ticks.values())
        if total > self._memory and live:
            _signal(max(live, key=_memory_of).pid, signal.SIGKILL)
            self.interval = 0.005
        elif ticks != self._last_ticks or total > self._memory // 2:
            self.interval = 0.02
        else:
            self.interval = min(self.interval * 1.5, 0.25)
        self._last_ticks = ticks
        self._stop_fork_bomb(len(live) >= self._max_processes * 0.9 or _sockets() > self._sockets)
        if ticks / _TICK > self._allowed:  # our caller stops a command that uses up its own time
            signal_all(signal.SIGKILL, 0, self._spared)

    def _account(self, live: list[Process]) -> None:
        """Record the time of each process, so that it still counts when nobody waits for the process."""
        now = {(process.pid, process.began): process.ticks for process in live}
        self._ended_ticks += sum(ticks for key, ticks in self._ticks.items() if key not in now)
        newest = _newest_pid()
        unseen = (newest - self._newest_pid if newest >= self._newest_pid else newest) - len(
            now.keys() - self._ticks.keys()
        )
        self._ended_ticks += _UNSEEN_TICKS * max(unseen, 0)
        self._newest_pid, self._ticks = newest, now

    def _measure(self, live: list[Process]) -> int:
        """Return the bytes that processes hold: memory, page tables, and shared memory, mapped or not."""
        total = sum(process.resident for process in live)
        if total > self._memory:
            total = sum(_proportional_size(process) for process in live)  # shared memory is counted once
        virtual = sum(process.virtual for process in live)
        if virtual > self._memory:  # otherwise they cannot hold more than they show
            shared: dict[bytes, int] = {}
            for process in live:
                total += _page_tables(process)
                _add_shared(process, shared)
            total += sum(shared.values())
        return total

    def _stop_fork_bomb(self, full: bool) -> None:
        now = time.monotonic()
        if not full:
            self._full_since = None
        elif self._full_since is None:
            self._full_since = now
        elif now - self._full_since > _BOMB_SECONDS:
            signal_all(signal.SIGKILL, 0, self._spared)


def _memory_of(process: Process) -> int:
    shared: dict[bytes, int] = {}
    _add_shared(process, shared)
    return _proportional_size(process) + _page_tables(process) + sum(shared.values())


def _proportional_size(process: Process) -> int:
    """Return the bytes in memory. Shared memory counts in proportion."""
    try:
        with open(f"/proc/{process.thread}/smaps_rollup", "rb") as file:
            for line in file:
                if line.startswith(b"Pss:"):
                    return int(line.split()[1]) << 10
    except (OSError, ValueError):
        pass
    return process.resident


def _page_tables(process: Process) -> int:
    try:
        with open(f"/proc/{process.thread}/status", "rb") as file:
            for line in file:
                if line.startswith(b"VmPTE:"):
                    return int(line.split()[1]) << 10
    except (OSError, ValueError):
        pass
    return 0


def _add_shared(process: Process, sizes: dict[bytes, int]) -> None:
    """Add the sizes of shared anonymous memory, by inode. The kernel holds it even while it is not mapped."""
    try:
        with open(f"/proc/{process.thread}/maps", "rb") as file:
            for line in file:
                if line.rstrip().endswith(b"/dev/zero (deleted)"):
                    columns = line.split(maxsplit=5)
                    low, high = (int(word, 16) for word in columns[0].split(b"-"))
                    end = int(columns[2], 16) + high - low  # only a part of it may be mapped
                    sizes[columns[4]] = max(sizes.get(columns[4], 0), end)
    except (OSError, ValueError):
        pass


def _newest_pid() -> int:
    with open("/proc/loadavg", "rb") as file:
        return int(file.read().split()[4])


def _sockets() -> int:
    try:
        with open("/proc/net/sockstat", "rb") as file:
            return int(file.readline().split()[2])
    except (OSError, ValueError, IndexError):
        return 0
