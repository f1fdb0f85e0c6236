"""Process 1 of a machine: makes its root, starts what it is told to, keeps it within its memory, and takes all with it when it ends.

It sees the host's files, and nothing it starts does. It has every capability in the machine's user namespace; what it starts, through
bubblewrap, has fewer, so that nothing in the machine can trace it, and process 1 cannot be killed from inside.

Requests and replies are one JSON object a packet; descriptors travel along. ``{}`` only says that something is about to happen.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import select
import signal
import socket
import stat
import time
from collections.abc import Sequence
from typing import Any

from agent_peft.environments.os_interaction.jail import archive, kernel, processes, views

_OWN_PROCESSES = 6  # the keeper, its parent, bubblewrap beside each shell


def main(limits: dict[str, Any], control: int, alive: int, ids: dict[str, str], place: str, bwrap: str) -> None:
    """What the nursery forks: leaves its namespaces, forks process 1, and ends when that has ended. ``alive`` is closed with it.

    The kernel bounds the processes of a user namespace, whatever users they run as, by the limit of the process that made it; but it
    counts them with all others of that one's user in its namespace. Hence one namespace in between, for this machine alone.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    kernel.die_with_parent()
    _unshare(0, ids)
    bound = limits["processes"] + _OWN_PROCESSES
    resource.setrlimit(resource.RLIMIT_NPROC, (bound, bound))
    _unshare(kernel.NEWNS | kernel.NEWPID | kernel.NEWNET | kernel.NEWIPC | kernel.NEWUTS | kernel.NEWCGROUP, ids)
    pid = os.fork()
    if pid == 0:
        os.close(alive)
        kernel.die_with_parent()
        channel = socket.socket(fileno=control)
        keeper = Keeper(channel, limits, place, bwrap)
        channel.send(b"{}")
        keeper.serve()
        os._exit(0)
    os.close(control)
    os.waitpid(pid, 0)  # returns when every process of the machine is gone
    os._exit(0)


def _unshare(flags: int, ids: dict[str, str]) -> None:
    """Leave for a user namespace of our own, and others, in which a child that stays behind gives us all the ids we had."""
    left, mapped = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.read(left[0], 1)
            for name, text in ids.items():
                with open(f"/proc/{os.getppid()}/{name}", "w", encoding="utf-8") as file:
                    file.write(text)
            os.write(mapped[1], b"x")
        finally:
            os._exit(0)
    os.close(left[0])
    os.close(mapped[1])
    kernel.unshare(kernel.NEWUSER | flags)
    os.write(left[1], b"x")
    if not os.read(mapped[0], 1):
        raise OSError("a user namespace got no ids")
    os.close(left[1])
    os.close(mapped[0])
    os.waitpid(pid, 0)


class Keeper:
    """Answers one caller until it hangs up."""

    def __init__(self, channel: socket.socket, limits: dict[str, Any], place: str, bwrap: str) -> None:
        self._channel, self._limits = channel, limits
        self._views = views.Views(place, bwrap, limits)
        self._ends: dict[int, int] = {}  # a process we started -> where to write how it ended
        self._shells: set[int] = set()  # those whose child is the agent's shell
        self._watch = processes.Watch(limits["memory_mb"] << 20, limits["processes"], self._shells)
        kernel.loopback_up()
        socket.sethostname("sandbox")
        with open("/proc/sys/user/max_user_namespaces", "w", encoding="utf-8") as file:
            file.write("0")  # none inside ours: a new one would give back the capabilities that bubblewrap drops

    def serve(self) -> None:
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poll.register(wake_read, select.POLLIN)
        self._reap()
        while True:
            ready = {descriptor for descriptor, _ in poll.poll(self._watch.interval * 1000)}
            if wake_read in ready:
                os.read(wake_read, 4096)
                self._reap()
            if self._channel.fileno() in ready and not self._answer():
                return
            self._watch.look()

    def _answer(self) -> bool:
        message, descriptors, _, _ = socket.recv_fds(self._channel, 1 << 20, 8)
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        if not message:
            return False
        self._watch.wake()
        request = json.loads(message)
        if request:
            try:
                reply = getattr(self, f"_do_{request.pop('do')}")(descriptors, **request)
            except OSError as error:
                reply = {"error": str(error), "errno": error.errno}
            self._channel.send(json.dumps(reply).encode())
        for descriptor in descriptors:
            os.close(descriptor)
        return True

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._shells.discard(pid)
            if pid in self._ends:
                end = self._ends.pop(pid)
                with contextlib.suppress(BrokenPipeError):  # nobody wants to know
                    os.write(end, str(os.waitstatus_to_exitcode(status)).encode())
                os.close(end)

    def _do_spawn(self, descriptors: Sequence[int], view: str, argv: Sequence[str]) -> dict[str, Any]:
        """Start ``argv`` in a view; descriptors: its input, output, errors, where to write how it ended, and others to be kept open."""
        if view == "graded":
            self._kill_all()
        command = self._views.command(view, argv)
        pid = self._fork(lambda: self._execute(command, descriptors))
        self._ends[pid] = fcntl.fcntl(descriptors[3], fcntl.F_DUPFD_CLOEXEC)
        if view == "agent":
            self._shells.add(pid)
        return {}

    def _execute(self, command: Sequence[str], descriptors: Sequence[int]) -> None:
        megabyte = 1 << 20
        for kind, bound in (
            (resource.RLIMIT_FSIZE, self._limits["file_size_mb"] * megabyte),
            (resource.RLIMIT_DATA, self._limits["memory_mb"] * megabyte),
            (resource.RLIMIT_NPROC, self._limits["processes"] + 2),  # below ours, so that we can fork when the machine cannot
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_NOFILE, 1024),
            (resource.RLIMIT_MEMLOCK, megabyte),
        ):
            resource.setrlimit(kind, (min(bound, resource.getrlimit(kind)[1]) if resource.getrlimit(kind)[1] >= 0 else bound,) * 2)
        # Python ignores the first two, a job in the background the others; a shell could never again be interrupted
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        with open("/proc/self/oom_score_adj", "w", encoding="utf-8") as file:
            file.write("800")  # should the host run out of memory, let it be this
        places = dict(zip((0, 1, 2, *range(views.FIRST_EXTRA, 64)), [*descriptors[:3], *descriptors[4:]], strict=False))
        if self._views.filter is not None:
            places[views.FILTER], write = os.pipe()
            os.write(write, self._views.filter)
        moved = {place: fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 64) for place, descriptor in places.items()}
        for place, descriptor in moved.items():
            os.dup2(descriptor, place)
        os.execv(command[0], list(command))

    def _fork(self, work: Any) -> int:
        pid = os.fork()
        if pid == 0:
            status = 126
            try:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                work()
                status = 0
            except OSError as error:
                status = error.errno or 126
            finally:
                os._exit(status)
        return pid

    def _do_signal(self, descriptors: Sequence[int], since: int, number: int) -> dict[str, Any]:
        """Signal all processes that began at ``since`` (clock ticks after boot) or later, without the shell; says how many."""
        return {"count": processes.signal_all(number, since, self._shells)}

    def _do_signal_shell(self, descriptors: Sequence[int], number: int) -> dict[str, Any]:
        processes.signal_children(number, self._shells)
        return {}

    def _do_cpu(self, descriptors: Sequence[int]) -> dict[str, Any]:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return {"seconds": processes.cpu_seconds() + used.ru_utime + used.ru_stime}

    def _do_kill(self, descriptors: Sequence[int]) -> dict[str, Any]:
        self._kill_all()
        return {}

    def _kill_all(self) -> None:
        deadline = time.monotonic() + 5
        while processes.signal_all(signal.SIGKILL, 0, set()):
            self._reap()
            if time.monotonic() > deadline:
                raise OSError("processes of the machine do not die")
            time.sleep(0.001)
        self._reap()

    def _do_read(self, descriptors: Sequence[int], path: str, limit: int) -> dict[str, Any]:
        """Write the file into the memory that came along."""

        def work() -> None:
            os.chroot(self._views.root)
            source = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
            if not stat.S_ISREG(os.fstat(source).st_mode):
                raise FileNotFoundError(2, "not a regular file")
            while limit - os.lseek(descriptors[0], 0, os.SEEK_CUR) > 0:
                chunk = os.read(source, min(1 << 20, limit - os.lseek(descriptors[0], 0, os.SEEK_CUR)))
                if not chunk:
                    return
                os.write(descriptors[0], chunk)

        return self._inside(work)

    def _do_write(self, descriptors: Sequence[int], path: str, mode: int) -> dict[str, Any]:
        """Write what is in the memory that came along to a file."""

        def work() -> None:
            os.chroot(self._views.root)
            os.chdir("/")
            os.umask(0o022)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, mode)
            while chunk := os.read(descriptors[0], 1 << 20):
                os.write(target, chunk)
            os.fchmod(target, mode)

        return self._inside(work)

    def _inside(self, work: Any) -> dict[str, Any]:
        _, status = os.waitpid(self._fork(work), 0)
        code = os.waitstatus_to_exitcode(status)
        return {} if code == 0 else {"error": os.strerror(abs(code)), "errno": abs(code)}

    def _do_snapshot(self, descriptors: Sequence[int]) -> dict[str, Any]:
        with os.fdopen(os.dup(descriptors[0]), "wb") as file:
            archive.write(self._views.place, views.WRITTEN, file)
        return {}

    def _do_restore(self, descriptors: Sequence[int]) -> dict[str, Any]:
        self._kill_all()
        self._views.clear()
        with os.fdopen(os.dup(descriptors[0]), "rb") as file:
            archive.read(self._views.place, file)
        self._views.assemble()
        return {}
