"""A machine's files, and the mount namespaces in which its processes see them.

``/`` is an overlay over copies of our own, ``/usr`` one over the host's. What is written goes to one file
system in memory, which has a limited size. Each view is a mount namespace whose root is the machine's:
whoever is in it finds no way to what lies outside.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agent_peft.sandbox.jail import exec_guard, grading, syscalls

WRITTEN = ("root_written", "usr_written")  # all that a snapshot holds
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_BOX = "/box"
_VIEW = "/view"  # where a namespace's root is put together before it becomes the root
_ENVIRONMENT = {
    "HOME": "/root",
    "USER": "root",
    "LOGNAME": "root",
    "SHELL": "/bin/bash",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "PAGER": "cat",
}
_CLEAN = {
    "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
    "PYTHONNOUSERSITE": "1",
}  # not /usr/local, which is the agent's
_ENVIRONMENTS: Mapping[str, Mapping[str, str]] = {
    "agent": {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
    "clean": _CLEAN,
    "graded": _CLEAN | grading.SETTINGS,
}
_READ_ONLY = ("sys", "sysrq-trigger", "irq", "bus", "fs", "1")  # of /proc
_MASKED = ("kcore", "keys", "kmsg", "timer_list", "kallsyms")


class Mounts:
    """The files of one machine, from process 1, whose own root becomes the file system in memory."""

    def __init__(self, limits: Mapping[str, Any], new_user_namespace: Callable[[], int]) -> None:
        megabytes = limits["memory_mb"]
        syscalls.mount("", "/", syscalls.REC | syscalls.PRIVATE)
        syscalls.mount(
            "tmpfs",
            _BOX,
            syscalls.NOSUID | syscalls.NODEV,
            f"mode=755,size={megabytes}m,nr_inodes={max(megabytes * 64, 4096)}",
        )
        for name in (
            *WRITTEN,
            "shm",
            "root_work",
            "usr_work",
            "base",
            "usr",
            "dev",
            "proc",
            "view",
            "grading",
        ):
            os.mkdir(f"{_BOX}/{name}")
        os.chmod(f"{_BOX}/shm", 0o1777)
        os.chmod(f"{_BOX}/{WRITTEN[0]}", 0o755)
        for name in ("base", "usr"):
            syscalls.mount("", f"{_BOX}/{name}", syscalls.BIND, source=f"/{name}")
        for name in DEVICES:
            os.close(os.open(f"{_BOX}/dev/{name}", os.O_CREAT | os.O_WRONLY, 0o666))
            syscalls.bind(f"/dev/{name}", f"{_BOX}/dev/{name}")
        syscalls.mount("proc", f"{_BOX}/proc", syscalls.NOSUID | syscalls.NODEV | syscalls.NOEXEC)
        syscalls.change_root(_BOX)
        nothing = os.open("/dev/null", os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nothing, descriptor)
        os.close(nothing)
        self._user = new_user_namespace()
        self._megabytes = megabytes
        with open("/proc/self/uid_map", encoding="utf-8") as file:
            self._single_id = [line.split()[2] for line in file] == ["1"]
        self._namespaces: dict[str, int] = {}
        self._touched = False
        self._open("agent", self._build_agent)

    def prepare(self, view: str, script: str) -> str:
        """Have the namespace of a view ready; says which one it is.

        agent: the machine as it is. clean: the same with programs and libraries of the host, which once an
        agent was there can only be read. graded: when nothing else runs any more; the agent's files as
        ``script`` needs to see them, in the host's own system.
        """
        if view == "graded" or "graded" in self._namespaces:
            if "graded" not in self._namespaces:
                self._close("agent", "clean")
                syscalls.mount(
                    "tmpfs",
                    grading.PLACE,
                    syscalls.NOSUID | syscalls.NODEV,
                    f"mode=755,size={self._megabytes}m",
                )
                grading.make_layers(script)
                self._make_launcher()
                self._open("graded", self._build_graded)
            return "graded"
        if view == "agent":
            self._touched = True
        elif self._touched:
            if "clean" not in self._namespaces:
                self._open_clean()
            return "clean"
        return "agent"

    def enter(self, namespace: str) -> None:
        """Go where the machine's processes live, for good: its files, and a user namespace below that of
        process 1.
        """
        syscalls.setns(self._namespaces[namespace], syscalls.NEWNS)
        syscalls.setns(self._user, syscalls.NEWUSER)
        try:
            os.chdir("/root")
        except OSError:  # the agent has removed or locked it
            os.chdir("/")

    def _make_launcher(self) -> None:
        guard = f"{grading.PLACE}/guard"
        for folder in (f"{grading.PLACE}/launching", f"{guard}{exec_guard.PLACE}"):
            os.mkdir(folder)
        with open(f"{guard}{exec_guard.LAUNCHER}", "w", encoding="utf-8") as file:
            file.write(exec_guard.launcher(self._single_id))
        os.chmod(f"{guard}{exec_guard.LAUNCHER}", 0o755)

    @staticmethod
    def environment(view: str) -> Mapping[str, str]:
        return {**_ENVIRONMENT, **_ENVIRONMENTS[view]}

    @property
    def current(self) -> str:
        """The namespace in which the machine's files are as they are now."""
        return "graded" if "graded" in self._namespaces else "agent"

    def remove_new_links(self) -> None:
        """To be called in a process of its own, which stays there."""
        paths = grading.new_links()
        syscalls.setns(self._namespaces["graded"], syscalls.NEWNS)
        grading.remove_ways_out(paths)

    def clear(self) -> None:
        """Forget what was written. Nothing runs any more."""
        if "graded" in self._namespaces:
            syscalls.unmount(grading.PLACE)
        self._close(*tuple(self._namespaces))
        for name in (*WRITTEN, "root_work", "usr_work"):
            shutil.rmtree(f"/{name}")
            os.mkdir(f"/{name}")
        os.chmod(f"/{WRITTEN[0]}", 0o755)
        for name in os.listdir("/shm"):
            path = f"/shm/{name}"
            shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)
        self._touched = False

    def assemble(self) -> None:
        """Let the machine see what was written in the meantime."""
        self._open("agent", self._build_agent)

    def _open(self, name: str, build: Callable[[], None]) -> None:
        """Make a mount namespace; ``build`` runs in it and leaves its root where it shall be."""
        ready, go = os.pipe2(os.O_CLOEXEC), os.pipe2(os.O_CLOEXEC)
        pid = os.fork()
        if pid == 0:
            message = b""
            try:
                syscalls.set_dumpable(True)  # process 1 looks at our namespace
                syscalls.unshare(syscalls.NEWNS)
                build()
            except OSError as error:
                message = f"{error.errno or 5} {error}".encode()
            except Exception as error:  # whatever the agent left there: it is told like any other failure
                message = f"5 {error!r}".encode()
            finally:
                os.write(ready[1], message or b"0")
                os.read(go[0], 1)
                os._exit(0)
        os.close(ready[1])
        try:
            answer = os.read(ready[0], 4096)
            if answer != b"0":
                number, _, text = (answer or b"5 it was killed").partition(b" ")
                raise OSError(int(number), f"the {name} view: {text.decode(errors='replace')}")
            self._namespaces[name] = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.write(go[1], b"x")
            for descriptor in (ready[0], *go):
                os.close(descriptor)
            os.waitpid(pid, 0)

    def _close(self, *names: str) -> None:
        for name in names:
            if name in self._namespaces:
                os.close(self._namespaces.pop(name))

    def _build_agent(self) -> None:
        _overlay(_VIEW, ["/base/root"], "root")
        _overlay(f"{_VIEW}/usr", ["/base/usr", "/usr"], "usr")
        _dev(f"{_VIEW}/dev")
        _proc(f"{_VIEW}/proc")
        syscalls.change_root(_VIEW)

    def _open_clean(self) -> None:
        """The live machine, but for what decides which program a name means, or what is loaded into it."""
        sources = {"/usr": "/usr"} | {
            f"/etc/{name}": f"/base/guard/etc/{name}" for name in os.listdir("/base/guard/etc")
        }
        sources["/etc/ld.so.preload"] = "/dev/null"
        copies = {target: syscalls.detached_copy(source) for target, source in sources.items()}

        def build() -> None:
            syscalls.setns(self._namespaces["agent"], syscalls.NEWNS)
            syscalls.unshare(syscalls.NEWNS)
            local = syscalls.detached_copy("/usr/local")
            for target, descriptor in copies.items():
                if os.path.lexists(target):
                    syscalls.attach(descriptor, target)
            syscalls.attach(local, "/usr/local")

        try:
            self._open("clean", build)
        finally:
            for descriptor in copies.values():
                os.close(descriptor)

    def _build_graded(self) -> None:
        links = grading.links(("/root_written", ""), ("/usr_written", "/usr"), ("/shm", "/dev/shm"))
        grading.mount_layers(_VIEW)
        _dev(f"{_VIEW}/dev")
        _proc(f"{_VIEW}/proc", graded=True)
        syscalls.bind(f"{grading.PLACE}/launching", f"{_VIEW}{exec_guard.PLACE}", read_only=True)
        syscalls.change_root(_VIEW)
        grading.remove_ways_out(links)
        grading.close_usr()


def _overlay(target: str, lower: Sequence[str], name: str) -> None:
    syscalls.mount(
        "overlay",
        target,
        0,
        f"userxattr,lowerdir={':'.join(lower)},upperdir=/{name}_written,workdir=/{name}_work",
    )


def _dev(target: str) -> None:
    _real_folder(target)
    syscalls.mount("tmpfs", target, syscalls.NOSUID, "mode=755,size=64k")
    for name in DEVICES:
        os.close(os.open(f"{target}/{name}", os.O_CREAT | os.O_WRONLY, 0o666))
        syscalls.bind(f"/dev/{name}", f"{target}/{name}")
    for name in ("pts", "shm"):
        os.mkdir(f"{target}/{name}")
    syscalls.mount(
        "devpts", f"{target}/pts", syscalls.NOSUID | syscalls.NOEXEC, "newinstance,ptmxmode=0666,mode=620"
    )
    syscalls.bind("/shm", f"{target}/shm")
    for name, path in (
        ("ptmx", "pts/ptmx"),
        ("fd", "/proc/self/fd"),
        ("stdin", "fd/0"),
        ("stdout", "fd/1"),
        ("stderr", "fd/2"),
    ):
        os.symlink(path, f"{target}/{name}")
    syscalls.mount("", target, syscalls.REMOUNT | syscalls.BIND | syscalls.RDONLY | syscalls.NOSUID)


def _proc(target: str, graded: bool = False) -> None:
    """A view of the machine's processes. When grading nobody can write into another's memory there, or see
    another user's processes.
    """
    _real_folder(target)
    flags = syscalls.NOSUID | syscalls.NODEV | syscalls.NOEXEC
    syscalls.mount("proc", target, flags, "hidepid=2" if graded else "")
    for name in _READ_ONLY:
        with contextlib.suppress(FileNotFoundError):
            syscalls.bind(f"{target}/{name}", f"{target}/{name}", read_only=True)
    for name in _MASKED:
        with contextlib.suppress(FileNotFoundError):
            syscalls.bind("/dev/null", f"{target}/{name}")
    if graded:
        syscalls.mount("", target, syscalls.REMOUNT | syscalls.BIND | syscalls.RDONLY | flags)


def _real_folder(path: str) -> None:
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        raise OSError(20, f"{path} is not a folder any more")
