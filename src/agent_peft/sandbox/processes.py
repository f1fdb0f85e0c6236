"""The processes of a machine, seen from outside: all processes of its pid namespace.

Where a machine has no control group, a thread adds up their memory, and ends a machine above its limits.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from agent_peft.sandbox.base import SandboxLimits

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICK = os.sysconf("SC_CLK_TCK")
# Columns of /proc/PID/stat after the name
_STATE, _UTIME, _STIME, _CUTIME, _CSTIME, _START, _RSS = 0, 11, 12, 13, 14, 19, 21
_DEAD = (b"Z", b"X")
_ROUNDS = 50  # of signals, against processes that fork meanwhile
_SECONDS_BETWEEN_CHECKS = 0.05
_SOCKET_BYTES = 425_984  # kernel memory of one socket: twice net.core.wmem_max's default
_MAX_LOCKS = 10_000  # record locks of all machines together


@dataclass(frozen=True)
class Process:
    """A line of /proc/PID/stat."""

    pid: int  # as our own /proc shows it
    thread: int  # id of a live thread: the first one may have ended, and the process looks like a zombie
    ticks: int  # clock ticks of processor time
    childrens_ticks: int  # of the children that it waited for
    began: int  # clock ticks after boot
    resident: int  # bytes


class Processes:
    """The processes of one machine."""

    def __init__(self, first: int) -> None:
        """``first``: process 1 of the machine in our own /proc. Raises `OSError`: it has ended."""
        self.first = first
        self._handle = os.pidfd_open(first)
        try:
            self._namespace = os.stat(f"/proc/{first}/ns/pid").st_ino
            if not self.alive() or self._namespace == os.stat("/proc/self/ns/pid").st_ino:
                raise ProcessLookupError(3, "process 1 of the machine has ended")
        except OSError:
            self.close()
            raise

    def alive(self) -> bool:
        return not self._ended(0)

    def end(self, seconds: float) -> bool:
        """Kill process 1, upon which the kernel kills all others. Return whether all of them have ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)
        return self._ended(seconds)

    def close(self) -> None:
        os.close(self._handle)

    def live(self) -> list[Process]:
        """List the processes with a live thread, except process 1."""
        found = []
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) != self.first and self._is_ours(name):
                process = _process(name)
                found += [process] if process is not None else []
        return found

    def signal(self, number: int, since: int = 0, spared: Sequence[int] = ()) -> int:
        """Signal the processes that started at ``since`` (ticks after boot) or later, except ``spared``.
        Return their number. SIGKILL is repeated until none is left, and ends the machine if that fails.
        """
        count = 0
        for _ in range(_ROUNDS if number == signal.SIGKILL else 1):
            chosen = [each.pid for each in self.live() if each.began >= since and each.pid not in spared]
            if not chosen:
                return count
            count = max(count, len(chosen))
            for pid in chosen:
                self.signal_one(pid, number)
        if number == signal.SIGKILL:
            self.end(0)
        return count

    def signal_one(self, pid: int, number: int) -> None:
        """Signal a process if it belongs to the machine: its number may be another process's by now."""
        try:
            handle = os.pidfd_open(pid)
        except OSError:
            return
        try:
            if self._is_ours(str(pid)):
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(handle, number)
        finally:
            os.close(handle)

    def ticks(self) -> int:
        """Return the processor time of the live processes and of those that somebody waited for."""
        first = _process(str(self.first))
        return sum(
            process.ticks + process.childrens_ticks
            for process in [*self.live(), *([first] if first is not None else [])]
        )

    def _is_ours(self, pid: str) -> bool:
        try:
            return os.stat(f"/proc/{pid}/ns/pid").st_ino == self._namespace
        except OSError:  # it has ended, or is another user's
            return False

    def _ended(self, seconds: float) -> bool:
        poll = select.poll()
        poll.register(self._handle, select.POLLIN)
        return bool(poll.poll(seconds * 1000))


def _process(pid: str) -> Process | None:
    columns, thread = _columns(f"/proc/{pid}/stat"), pid
    if columns is None:
        return None
    memory = columns
    if columns[_STATE] in _DEAD:
        live = _live_thread(pid)
        if live is None:
            return None
        thread, memory = live
    return Process(
        int(pid),
        int(thread),
        int(columns[_UTIME]) + int(columns[_STIME]),
        int(columns[_CUTIME]) + int(columns[_CSTIME]),
        int(columns[_START]),
        int(memory[_RSS]) * _PAGE,
    )


def _columns(path: str) -> list[bytes] | None:
    try:
        with open(path, "rb") as file:
            return file.read().rpartition(b") ")[2].split() or None
    except OSError:
        return None


def _live_thread(pid: str) -> tuple[str, list[bytes]] | None:
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return None
    for thread in threads:
        columns = _columns(f"/proc/{pid}/task/{thread}/stat")
        if columns is not None and columns[_STATE] not in _DEAD:
            return thread, columns
    return None


# -- limits without a control group --------------------------------------------------------------------------


@dataclass
class _Watched:
    processes: Processes
    limits: SandboxLimits
    ticks: dict[tuple[int, int], int] = field(default_factory=dict)  # by (pid, began), as of the last check
    ended_ticks: int = 0  # of processes that ended since


class Watch:
    """A thread that ends each machine whose processes exceed the limits of all of them together."""

    def __init__(self) -> None:
        self._watched: dict[int, _Watched] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, processes: Processes, limits: SandboxLimits) -> None:
        with self._changed:
            self._watched[processes.first] = _Watched(processes, limits)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="sandbox-watch", daemon=True)
                self._thread.start()
            self._changed.notify()

    def remove(self, processes: Processes) -> None:
        """Stop watching. Afterwards the thread uses no descriptor of the machine."""
        with self._changed:
            self._watched.pop(processes.first, None)

    def ticks(self, processes: Processes) -> int:
        """Return the processor time of all processes so far, including those that nobody waited for."""
        with self._changed:
            watched = self._watched.get(processes.first)
            if watched is None:
                return 0
            _account(watched, processes.live())
            return max(processes.ticks(), watched.ended_ticks + sum(watched.ticks.values()))

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._watched:
                    self._changed.wait()
                for watched in self._watched.values():
                    live = watched.processes.live()
                    _account(watched, live)
                    if _exceeds(watched.limits, watched.processes, live):
                        watched.processes.end(0)
            time.sleep(_SECONDS_BETWEEN_CHECKS)


WATCH = Watch()


def _account(watched: _Watched, live: Sequence[Process]) -> None:
    now = {(process.pid, process.began): process.ticks for process in live}
    watched.ended_ticks += sum(ticks for key, ticks in watched.ticks.items() if key not in now)
    watched.ticks = now


def _exceeds(limits: SandboxLimits, processes: Processes, live: Sequence[Process]) -> bool:
    memory = limits.memory_mb << 20
    if len(live) > limits.processes or _sockets(processes.first) > max(memory // _SOCKET_BYTES, 64):
        return True
    if len(live) > 0 and _locks() > _MAX_LOCKS:
        return True
    total = sum(process.resident for process in live)
    if total > memory:  # shared memory was counted more than once: now in proportion
        total = sum(_kilobytes(process, "smaps_rollup", b"Pss:") or process.resident for process in live)
    shared: dict[bytes, int] = {}
    for process in live:
        total += _kilobytes(process, "status", b"VmPTE:")
        _add_shared(process, shared)
    return total + sum(shared.values()) > memory


def _kilobytes(process: Process, file_name: str, name: bytes) -> int:
    """Return the bytes of a line in a file of /proc that counts kilobytes."""
    try:
        with open(f"/proc/{process.thread}/{file_name}", "rb") as file:
            return next((int(line.split()[1]) << 10 for line in file if line.startswith(name)), 0)
    except (OSError, ValueError):
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


def _sockets(first: int) -> int:
    try:
        with open(f"/proc/{first}/net/sockstat", "rb") as file:
            return int(file.readline().split()[2])
    except (OSError, ValueError, IndexError):
        return 0


def _locks() -> int:
    try:
        with open("/proc/locks", "rb") as file:
            return sum(1 for _ in file)
    except OSError:
        return 0
