"""Process 1 of a machine (its init): it makes the machine's files, starts processes and enforces the memory
limit. When it ends, all its processes end.

Its root holds the machine's files and, of the host, only ``/usr``. The processes that it starts live in mount
namespaces that hold less, and in a user namespace below its own. No process of the machine can trace it, read
its memory, follow its descriptors or kill it.

A request and its reply are one packet each, with one JSON object; descriptors travel along. The request
``{}`` announces that a command is about to run.
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

from agent_peft.sandbox.jail import (
    archive,
    exec_guard,
    inspection,
    mounts,
    process_setup,
    processes,
    seccomp,
    syscalls,
    user_namespaces,
)

_INTERNAL_PROCESSES = 6  # process 1, its parent, and the short-lived children of both
_KILL_SECONDS = 5.0
_MAX_INOTIFY_WATCHES = 4096
_MAX_INOTIFY_INSTANCES = 16


def main(limits: dict[str, Any], control: int, alive: int, ids: dict[str, str]) -> None:
    """Run as a child of the fork server: leave its namespaces, fork process 1, and end after process 1. The
    end closes ``alive``.

    The kernel limits the processes of a user namespace, of all its users together, to the limit of the
    process that made the namespace. But it counts them together with all other processes of that user in the
    outer namespace. Hence each machine gets one more user namespace in between.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    syscalls.die_with_parent()
    user_namespaces.unshare_with_ids(0, ids)
    bound = limits["processes"] + _INTERNAL_PROCESSES
    resource.setrlimit(resource.RLIMIT_NPROC, (bound, bound))
    user_namespaces.unshare_with_ids(syscalls.NAMESPACES, ids)
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
    os.waitpid(pid, 0)  # returns when every process of the machine has ended
    os._exit(0)


class Init:
    """Answers the requests of one caller until the caller closes the connection."""

    def __init__(self, channel: socket.socket, limits: dict[str, Any], ids: dict[str, str]) -> None:
        self._channel, self._limits = channel, limits
        filter_ = seccomp.seccomp_filter()
        if filter_ is None:
            raise OSError("there is no filter of system calls for this processor")
        self._filter = filter_
        self._mounts = mounts.Mounts(limits, lambda: user_namespaces.child_namespace(ids))
        self._ends: dict[int, int] = {}  # process id -> descriptor to which its exit code is written
        self._shells: set[int] = set()
        self._guards: dict[int, exec_guard.ExecGuard] = {}
        self._monitor = processes.Monitor(
            limits["memory_mb"] << 20, limits["processes"], limits["cpu_seconds"], self._shells
        )
        syscalls.loopback_up()
        socket.sethostname("sandbox")
        _setting(
            "user/max_user_namespaces", 0
        )  # a new one would give back the capabilities that were dropped
        _setting("user/max_inotify_watches", _MAX_INOTIFY_WATCHES)
        _setting("user/max_inotify_instances", _MAX_INOTIFY_INSTANCES)
        _setting("net/ipv4/ip_unprivileged_port_start", 0)  # the network belongs to our user namespace
        syscalls.set_dumpable(False)  # then other processes cannot open our files in /proc

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
            ready = dict(poll.poll(self._monitor.interval * 1000))
            guards = ready.keys() & self._guards.keys()
            for descriptor in guards:
                if not ready[descriptor] & select.POLLIN or not self._guards[descriptor].answer():
                    self._stop_guard(descriptor)  # all processes that could ask have ended
            if ready and ready.keys() == guards:
                continue
            if wake_read in ready:
                os.read(wake_read, 4096)
                self._reap()
            if self._channel.fileno() in ready and not self._answer():
                return
            self._monitor.check()

    def _answer(self) -> bool:
        message, descriptors, _, _ = socket.recv_fds(self._channel, 1 << 20, 8)
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        if not message:
            return False
        self._monitor.wake()
        request = json.loads(message)
        if request:
            try:
                reply = getattr(self, f"_do_{request.pop('do')}")(descriptors, **request)
            except OSError as error:
                reply = {"error": str(error), "errno": error.errno}
            except Exception as error:  # an error of ours must not end the machine
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
                with contextlib.suppress(BrokenPipeError):  # nobody reads it
                    os.write(end, str(os.waitstatus_to_exitcode(status)).encode())
                os.close(end)

    def _do_spawn(
        self, descriptors: Sequence[int], namespace: str, argv: Sequence[str], script: str = ""
    ) -> dict[str, Any]:
        """Start a process in a mount namespace.

        Args:
            descriptors: its input, output, errors, the descriptor for its exit code, and others to keep open.
            script: the script of an inspection.
        """
        if namespace == "inspection" and not self._kill_all():
            return {"unkillable": True}
        actual = self._mounts.prepare(namespace, script)
        environment = dict(self._mounts.environment(namespace))
        if namespace == "inspection":
            pid = self._spawn_guarded(
                lambda channel: self._execute(actual, environment, argv, descriptors, channel)
            )
        else:
            pid = self._fork(lambda: self._execute(actual, environment, argv, descriptors))
        self._ends[pid] = fcntl.fcntl(descriptors[3], fcntl.F_DUPFD_CLOEXEC)
        if namespace == "agent":
            self._shells.add(pid)
        return {}

    def _spawn_guarded(self, work: Callable[[socket.socket], None]) -> int:
        """Fork, and answer the kernel's questions about the programs that the child executes."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            pid = self._fork(lambda: work(theirs))
            theirs.close()
            _, listeners, _, _ = socket.recv_fds(ours, 1, 1)
        for listener in listeners:
            os.set_inheritable(listener, False)
            self._guards[listener] = exec_guard.ExecGuard(
                listener, f"{inspection.FOLDER}/launching", self._remove_new_links
            )
            self._poll.register(listener, select.POLLIN)
        return pid

    def _remove_new_links(self) -> None:
        if self._mounts.new_links():
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
        process_setup.set_limits(self._limits)
        process_setup.reset_signals()
        process_setup.place_descriptors([*descriptors[:3], *descriptors[4:]])
        self._mounts.enter(namespace)
        process_setup.drop_privileges(self._filter)
        if guard is not None:
            socket.send_fds(guard, [b"x"], [seccomp.ask_before_exec()])
        os.execve(argv[0], list(argv), environment)

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
        """Signal all processes that started at ``since`` (clock ticks after boot) or later, except the shell.
        The reply holds their number.
        """
        return {"count": processes.signal_all(number, since, self._shells)}

    def _do_signal_shell(self, descriptors: Sequence[int], number: int) -> dict[str, Any]:
        processes.signal_each(number, self._shells)
        return {}

    def _do_cpu(self, descriptors: Sequence[int]) -> dict[str, Any]:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        self._monitor.set_reaped(used.ru_utime + used.ru_stime)
        return {"seconds": self._monitor.cpu_seconds()}

    def _kill_all(self) -> bool:
        """Kill until no process is left, not even a zombie. Return whether that succeeded."""
        deadline = time.monotonic() + _KILL_SECONDS
        while processes.kill_all():
            self._reap()
            if time.monotonic() > deadline:
                return False
            time.sleep(0.0005)
        self._reap()
        return True

    def _do_read(self, descriptors: Sequence[int], path: str, limit: int) -> dict[str, Any]:
        """Copy a file to the descriptor that came with the request."""

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
        """Copy the descriptor that came with the request to a file."""

        def work() -> None:
            os.umask(0o022)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, mode)
            while chunk := os.read(descriptors[0], 1 << 20):
                os.write(target, chunk)
            os.fchmod(target, mode)

        return self._inside(work)

    def _inside(self, work: Callable[[], None]) -> dict[str, Any]:
        """Work with the rights of the machine's processes, so that no link of the agent leads out of it."""
        namespace = self._mounts.current

        def work_there() -> None:
            self._mounts.enter(namespace)
            os.chdir("/")
            process_setup.drop_privileges(self._filter)
            work()

        _, status = os.waitpid(self._fork(work_there), 0)
        code = os.waitstatus_to_exitcode(status)
        return {} if code == 0 else {"error": os.strerror(abs(code)), "errno": abs(code)}

    def _do_snapshot(self, descriptors: Sequence[int]) -> dict[str, Any]:
        with os.fdopen(os.dup(descriptors[0]), "wb") as file:
            archive.write("", mounts.CHANGES, file)
        return {}

    def _do_restore(self, descriptors: Sequence[int]) -> dict[str, Any]:
        if not self._kill_all():
            return {"unkillable": True}
        self._mounts.clear()
        with os.fdopen(os.dup(descriptors[0]), "rb") as file:
            archive.read("", file)
        self._mounts.assemble()
        return {}


def _setting(name: str, value: int) -> None:
    with open(f"/proc/sys/{name}", "w", encoding="utf-8") as file:
        file.write(str(value))
