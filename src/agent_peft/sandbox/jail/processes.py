"""What runs in a machine, read from its own /proc: counted, signalled, and kept within its memory and its
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
_STATE, _PARENT, _UTIME, _STIME, _CUTIME, _CSTIME, _START, _VIRTUAL, _RSS = (
    0,
    1,
    11,
    12,
    13,
    14,
    19,
    20,
    21,
)  # behind the name
_BOMB_SECONDS = 0.3  # so long may a machine be full of processes or sockets
_DEAD = (b"Z", b"X")
_SOCKET_BYTES = 425_984  # what one socket may hold in the kernel: twice net.core.wmem_max's default
_UNSEEN_TICKS = 0.5  # charged for a process that came and went between two looks


@dataclass(frozen=True)
class Process:
    """A line of /proc/PID/stat: ticks of its own and of the children it waited for, when it began (ticks
    after boot), bytes.

    ``task`` is a thread of it that lives: the first thread may have ended, and then it is a zombie that still
    computes.
    """

    pid: int
    task: int
    parent: int
    ticks: int
    childrens_ticks: int
    began: int
    virtual: int
    resident: int


def _columns(path: str) -> list[bytes] | None:
    try:
        with open(path, "rb") as file:
            return file.read().rpartition(b") ")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def living() -> Iterator[Process]:
    """All processes with a living thread, but process 1."""
    for name in os.listdir("/proc"):
        if not name.isdigit() or name == "1":
            continue
        columns, task = _columns(f"/proc/{name}/stat"), name
        if columns is None:
            continue
        memory = columns
        if columns[_STATE] in _DEAD:
            found = _living_task(name)
            if found is None:
                continue
            task, memory = found
        own, childrens = (
            int(columns[i]) + int(columns[j]) for i, j in ((_UTIME, _STIME), (_CUTIME, _CSTIME))
        )
        virtual, resident = int(memory[_VIRTUAL]), int(memory[_RSS]) * _PAGE
        yield Process(
            int(name),
            int(task),
            int(columns[_PARENT]),
            own,
            childrens,
            int(columns[_START]),
            virtual,
            resident,
        )


def _living_task(pid: str) -> tuple[str, list[bytes]] | None:
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return None
    for task in tasks:
        columns = _columns(f"/proc/{pid}/task/{task}/stat")
        if columns is not None and columns[_STATE] not in _DEAD:
            return task, columns
    return None


def kill_all() -> bool:
    """Kill everything but process 1, which we are. Returns whether there was anything.

    The kernel does it in one go, so that nobody can fork away from it, and whatever a process looks like in
    /proc.
    """
    return _signal(-1, signal.SIGKILL)


def signal_all(number: int, since: int, keep: Set[int]) -> int:
    """Signal the living that began at ``since`` (ticks after boot) or later, without those of ``keep``.
    Returns how many there were.
    """
    stopped = number == signal.SIGKILL and _signal(-1, signal.SIGSTOP)  # at once, so that nobody forks away
    count = 0
    for process in living():
        if process.began >= since and process.pid not in keep:
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


class Watch:
    """Kills the largest process while all together hold more memory than they may, a fork bomb, and what
    burns the processor in the background. Looks often while things move.
    """

    def __init__(self, memory: int, most: int, seconds: float, keep: Set[int]) -> None:
        """Args:
        memory: bytes.
        most: processes.
        seconds: of processor time that each command adds to what all may use together.
        keep: those that a fork bomb leaves.
        """
        self._memory, self._most, self._seconds, self._keep = memory, most, seconds, keep
        self._sockets = max(memory // _SOCKET_BYTES, 64)
        self._last = 0.0
        self._full_since: float | None = None
        self._ledger: dict[
            tuple[int, int], int
        ] = {}  # (pid, began) -> ticks, of all that were seen alive at the last look
        self._gone = 0.0  # ticks of those that were seen and are gone, and of those that never were
        self._reaped = 0.0  # seconds of those that process 1 waited for
        self._newest_pid = _newest_pid()
        self._allowed = seconds
        self.interval = 0.05

    def wake(self) -> None:
        """A command is about to run."""
        self.interval = 0.02
        self._allowed = self.cpu_seconds() + 2 * self._seconds

    def reaped(self, seconds: float) -> None:
        """Processor time, so far, of all that process 1 has waited for."""
        self._reaped = seconds

    def cpu_seconds(self) -> float:
        """Of all processes ever since: never too much but for what is charged for processes that no look
        has seen, and at most some hundredths of a second too little for each that nobody waited for.
        """
        found = list(living())
        self._account(found)
        waited = sum(process.ticks + process.childrens_ticks for process in found) / _TICK + self._reaped
        return max(waited, (self._gone + sum(self._ledger.values())) / _TICK)

    def look(self) -> None:
        found = list(living())
        self._account(found)
        total = self._measure(found)
        ticks = self._gone + sum(self._ledger.values())
        if total > self._memory and found:
            _signal(max(found, key=_held).pid, signal.SIGKILL)
            self.interval = 0.005
        elif ticks != self._last or total > self._memory // 2:
            self.interval = 0.02
        else:
            self.interval = min(self.interval * 1.5, 0.25)
        self._last = ticks
        self._quell(len(found) >= self._most * 0.9 or _sockets() > self._sockets)
        if (
            ticks / _TICK > self._allowed
        ):  # a command that uses up its own time is stopped by who waits for it
            signal_all(signal.SIGKILL, 0, self._keep)

    def _account(self, found: list[Process]) -> None:
        """Keep what each process has used, so that it still counts when nobody waits for it."""
        now = {(process.pid, process.began): process.ticks for process in found}
        self._gone += sum(ticks for key, ticks in self._ledger.items() if key not in now)
        newest = _newest_pid()
        unseen = (newest - self._newest_pid if newest >= self._newest_pid else newest) - len(
            now.keys() - self._ledger.keys()
        )
        self._gone += _UNSEEN_TICKS * max(unseen, 0)
        self._newest_pid, self._ledger = newest, now

    def _measure(self, found: list[Process]) -> int:
        """Bytes that the processes hold: memory, page tables, and memory that they share, whether it is
        mapped in or not.
        """
        total = sum(process.resident for process in found)
        if total > self._memory:
            total = sum(_own(process) for process in found)  # what several share is counted once
        virtual = sum(process.virtual for process in found)
        if virtual > self._memory:  # else there is no room to hide something in
            shared: dict[bytes, int] = {}
            for process in found:
                total += _page_tables(process)
                _shared(process, shared)
            total += sum(shared.values())
        return total

    def _quell(self, full: bool) -> None:
        now = time.monotonic()
        if not full:
            self._full_since = None
        elif self._full_since is None:
            self._full_since = now
        elif now - self._full_since > _BOMB_SECONDS:
            signal_all(signal.SIGKILL, 0, self._keep)


def _held(process: Process) -> int:
    shared: dict[bytes, int] = {}
    _shared(process, shared)
    return _own(process) + _page_tables(process) + sum(shared.values())


def _own(process: Process) -> int:
    """Bytes in memory, its share of what it shares with others."""
    try:
        with open(f"/proc/{process.task}/smaps_rollup", "rb") as file:
            for line in file:
                if line.startswith(b"Pss:"):
                    return int(line.split()[1]) << 10
    except (OSError, ValueError):
        pass
    return process.resident


def _page_tables(process: Process) -> int:
    try:
        with open(f"/proc/{process.task}/status", "rb") as file:
            for line in file:
                if line.startswith(b"VmPTE:"):
                    return int(line.split()[1]) << 10
    except (OSError, ValueError):
        pass
    return 0


def _shared(process: Process, sizes: dict[bytes, int]) -> None:
    """Add the sizes of memory without a file that processes share, by inode: it is held though no process
    has it mapped in.
    """
    try:
        with open(f"/proc/{process.task}/maps", "rb") as file:
            for line in file:
                if line.rstrip().endswith(b"/dev/zero (deleted)"):
                    columns = line.split(maxsplit=5)
                    low, high = (int(word, 16) for word in columns[0].split(b"-"))
                    end = int(columns[2], 16) + high - low  # a piece may be mapped of what is larger
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
