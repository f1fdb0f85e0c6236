"""Process 1 of a machine: makes its files, starts what it is told to, keeps it within its memory, and takes
all with it when it ends.

Its root holds the machine's files and nothing else of the host but ``/usr``. What it starts lives in mount
namespaces that hold less, and in a user namespace below its own: nothing in the machine can trace it, read
its memory or follow its descriptors, and process 1 cannot be killed from inside.

Requests and replies are one JSON object a packet; descriptors travel along. ``{}`` only says that something
is about to happen.
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
from collections.abc import Callable, Sequence
from typing import Any

from agent_peft.sandbox.jail import archive, exec_guard, grading, mounts, processes, syscalls, user_namespaces

FIRST_EXTRA = 9  # descriptors that a process keeps besides its streams begin here
_OWN_PROCESSES = 6  # process 1, its parent, and those that either forks for a moment
_KILL_SECONDS = 5.0
_MOST_WATCHES = 4096  # of inotify, in a machine
_MOST_INSTANCES = 16


def main(limits: dict[str, Any], control: int, alive: int, ids: dict[str, str]) -> None:
    """What the fork server forks: leaves its namespaces, forks process 1, and ends when that has ended.
    ``alive`` is closed with it.

    The kernel bounds the processes of a user namespace, whatever users they run as, by the limit of the
    process that made it; but it counts them with all others of that one's user in its namespace. Hence one
    namespace in between, for this machine alone.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    syscalls.die_with_parent()
    user_namespaces.leave_for(0, ids)
    bound = limits["processes"] + _OWN_PROCESSES
    resource.setrlimit(resource.RLIMIT_NPROC, (bound, bound))
    user_namespaces.leave_for(
        syscalls.NEWNS
        | syscalls.NEWPID
        | syscalls.NEWNET
        | syscalls.NEWIPC
        | syscalls.NEWUTS
        | syscalls.NEWCGROUP,
        ids,
    )
    pid = os.fork()
    if pid == 0:
        os.close(alive)
        syscalls.die_with_parent()
        channel = socket.socket(fileno=control)
        init = Init(channel, limits, ids)
        channel.send(b"{}")
        init.serve()
        os._exit(0)
    os.close(control)
    os.waitpid(pid, 0)  # returns when every process of the machine is gone
    os._exit(0)


class Init:
    """Answers one caller until it hangs up."""

    def __init__(self, channel: socket.socket, limits: dict[str, Any], ids: dict[str, str]) -> None:
        self._channel, self._limits = channel, limits
        filter_ = syscalls.seccomp_filter()
        if filter_ is None:
            raise OSError("no filter of system calls is known for this computer's processor")
        self._filter = filter_
        self._mounts = mounts.Mounts(limits, lambda: user_namespaces.below(ids))
        self._ends: dict[int, int] = {}  # a process we started -> where to write how it ended
        self._shells: set[int] = set()
        self._guards: dict[int, exec_guard.ExecGuard] = {}
        self._watch = processes.Watch(
            limits["memory_mb"] << 20, limits["processes"], limits["cpu_seconds"], self._shells
        )
        syscalls.loopback_up()
        socket.sethostname("sandbox")
        _setting(
            "user/max_user_namespaces", 0
        )  # none inside ours: a new one would give back the capabilities that were dropped
        _setting("user/max_inotify_watches", _MOST_WATCHES)
        _setting("user/max_inotify_instances", _MOST_INSTANCES)
        _setting(
            "net/ipv4/ip_unprivileged_port_start", 0
        )  # the network belongs to our user namespace, not to the agent's
        syscalls.set_dumpable(False)  # our files in /proc are nobody's, then

    def serve(self) -> None:
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poll.register(wake_read, select.POLLIN)
        self._reap()
        self._poll = poll
        while True:
            ready = dict(poll.poll(self._watch.interval * 1000))
            guards = ready.keys() & self._guards.keys()
            for descriptor in guards:
                if (
                    not ready[descriptor] & select.POLLIN or not self._guards[descriptor].answer()
                ):  # all who could ask are gone
                    self._stop_guard(descriptor)
            if ready and ready.keys() == guards:
                continue
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
            except Exception as error:  # a fault of ours must not take the machine with it
                reply = {"error": repr(error), "errno": 5}
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

    def _do_spawn(
        self, descriptors: Sequence[int], view: str, argv: Sequence[str], script: str = ""
    ) -> dict[str, Any]:
        """Start ``argv`` in a view; descriptors: its input, output, errors, where to write how it ended, and
        others to be kept open.

        ``script`` is what a graded view is for.
        """
        if view == "graded" and not self._kill_all():
            return {"undead": True}
        namespace = self._mounts.prepare(view, script)
        environment = dict(self._mounts.environment(view))
        if view == "graded":
            pid = self._spawn_guarded(
                lambda tell: self._execute(namespace, environment, argv, descriptors, tell)
            )
        else:
            pid = self._fork(lambda: self._execute(namespace, environment, argv, descriptors))
        self._ends[pid] = fcntl.fcntl(descriptors[3], fcntl.F_DUPFD_CLOEXEC)
        if view == "agent":
            self._shells.add(pid)
        return {}

    def _spawn_guarded(self, work: Callable[[socket.socket], None]) -> int:
        """Fork, and answer the kernel's questions about what the child executes."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            pid = self._fork(lambda: work(theirs))
            theirs.close()
            _, listeners, _, _ = socket.recv_fds(ours, 1, 1)
        for listener in listeners:
            os.set_inheritable(listener, False)
            self._guards[listener] = exec_guard.ExecGuard(
                listener, f"{grading.PLACE}/launching", self._remove_new_links
            )
            self._poll.register(listener, select.POLLIN)
        return pid

    def _remove_new_links(self) -> None:
        if grading.new_links():
            os.waitpid(self._fork(self._mounts.remove_new_links), 0)

    def _stop_guard(self, listener: int) -> None:
        self._poll.unregister(listener)
        os.close(listener)
        del self._guards[listener]

    def _execute(
        self,
        namespace: str,
        environment: dict[str, str],
        argv: Sequence[str],
        descriptors: Sequence[int],
        guard: socket.socket | None = None,
    ) -> None:
        os.setsid()
        megabyte = 1 << 20
        for kind, bound in (
            (resource.RLIMIT_FSIZE, self._limits["file_size_mb"] * megabyte),
            (resource.RLIMIT_DATA, self._limits["memory_mb"] * megabyte),
            (
                resource.RLIMIT_NPROC,
                self._limits["processes"] + 2,
            ),  # below ours, so that we can fork when the machine cannot
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_NOFILE, self._limits.get("descriptors", 1024)),
            (resource.RLIMIT_MEMLOCK, megabyte),
            (resource.RLIMIT_MSGQUEUE, 0),
            (resource.RLIMIT_SIGPENDING, 1024),
        ):
            resource.setrlimit(
                kind,
                (min(bound, resource.getrlimit(kind)[1]) if resource.getrlimit(kind)[1] >= 0 else bound,) * 2,
            )
        # Python ignores the first two, a job in the background the others; a shell could never again be
        # interrupted
        for number in (
            signal.SIGPIPE,
            signal.SIGXFSZ,
            signal.SIGINT,
            signal.SIGQUIT,
            signal.SIGHUP,
            signal.SIGTERM,
        ):
            signal.signal(number, signal.SIG_DFL)
        with open("/proc/self/oom_score_adj", "w", encoding="utf-8") as file:
            file.write("800")  # should the host run out of memory, let it be this
        places = dict(
            zip((0, 1, 2, *range(FIRST_EXTRA, 64)), [*descriptors[:3], *descriptors[4:]], strict=False)
        )
        moved = {
            place: fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 64) for place, descriptor in places.items()
        }
        for place, descriptor in moved.items():
            os.dup2(descriptor, place)
        self._mounts.enter(namespace)
        self._become_a_process_of_the_machine()
        if guard is not None:
            socket.send_fds(guard, [b"x"], [syscalls.ask_before_exec()])
        os.execve(argv[0], list(argv), environment)

    def _become_a_process_of_the_machine(self) -> None:
        syscalls.keep_capabilities(syscalls.CAPABILITIES)
        syscalls.no_new_privileges()
        syscalls.install_filter(self._filter)

    def _fork(self, work: Callable[[], None]) -> int:
        pid = os.fork()
        if pid == 0:
            status = 126
            try:
                syscalls.set_dumpable(True)
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
        """Signal all processes that began at ``since`` (clock ticks after boot) or later, without the
        shell; says how many.
        """
        return {"count": processes.signal_all(number, since, self._shells)}

    def _do_signal_shell(self, descriptors: Sequence[int], number: int) -> dict[str, Any]:
        processes.signal_each(number, self._shells)
        return {}

    def _do_cpu(self, descriptors: Sequence[int]) -> dict[str, Any]:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        self._watch.reaped(used.ru_utime + used.ru_stime)
        return {"seconds": self._watch.cpu_seconds()}

    def _kill_all(self) -> bool:
        """Kill until nothing is left, not even a zombie. Returns whether that came about."""
        deadline = time.monotonic() + _KILL_SECONDS
        while processes.kill_all():
            self._reap()
            if time.monotonic() > deadline:
                return False
            time.sleep(0.0005)
        self._reap()
        return True

    def _do_read(self, descriptors: Sequence[int], path: str, limit: int) -> dict[str, Any]:
        """Write the file into the memory that came along."""

        def work() -> None:
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
            os.umask(0o022)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, mode)
            while chunk := os.read(descriptors[0], 1 << 20):
                os.write(target, chunk)
            os.fchmod(target, mode)

        return self._inside(work)

    def _inside(self, work: Callable[[], None]) -> dict[str, Any]:
        """Work as a process of the machine would: what the agent made of its folders leads nowhere else."""
        namespace = self._mounts.current

        def work_there() -> None:
            self._mounts.enter(namespace)
            os.chdir("/")
            self._become_a_process_of_the_machine()
            work()

        _, status = os.waitpid(self._fork(work_there), 0)
        code = os.waitstatus_to_exitcode(status)
        return {} if code == 0 else {"error": os.strerror(abs(code)), "errno": abs(code)}

    def _do_snapshot(self, descriptors: Sequence[int]) -> dict[str, Any]:
        with os.fdopen(os.dup(descriptors[0]), "wb") as file:
            archive.write("", mounts.WRITTEN, file)
        return {}

    def _do_restore(self, descriptors: Sequence[int]) -> dict[str, Any]:
        if not self._kill_all():
            return {"undead": True}
        self._mounts.clear()
        with os.fdopen(os.dup(descriptors[0]), "rb") as file:
            archive.read("", file)
        self._mounts.assemble()
        return {}


def _setting(name: str, value: int) -> None:
    with open(f"/proc/sys/{name}", "w", encoding="utf-8") as file:
        file.write(str(value))
