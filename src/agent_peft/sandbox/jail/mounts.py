"""A machine's files, and the mount namespaces in which its processes see them.

``/`` is an overlay over our own copies, ``/usr`` is an overlay over the host's ``/usr``. All changes go to
one file system in memory of a limited size. A machine has up to three mount namespaces: "agent", "clean" and
"inspection". The root of each is the machine's, so that its processes cannot reach anything outside.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agent_peft.sandbox.jail import exec_guard, inspection, links, syscalls

CHANGES = ("root_upper", "usr_upper")  # the upper layers of the overlays: the content of a snapshot
_BOX = "/box"
_NEW_ROOT = "/new_root"  # a namespace's root is assembled here
_FLAGS = syscalls.NOSUID | syscalls.NODEV
_ENVIRONMENT = {
    "HOME": "/root",
    "USER": "root",
    "LOGNAME": "root",
    "SHELL": "/bin/bash",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "PAGER": "cat",
}
_CLEAN = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PYTHONNOUSERSITE": "1"}  # /usr/local is the agent's
_ENVIRONMENTS: Mapping[str, Mapping[str, str]] = {
    "agent": {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
    "clean": _CLEAN,
    "inspection": _CLEAN | inspection.SETTINGS,
}
_READ_ONLY = ("sys", "sysrq-trigger", "irq", "bus", "fs", "1")  # of /proc
_MASKED = ("kcore", "keys", "kmsg", "timer_list", "kallsyms")


class Mounts:
    """The files of one machine. Process 1 makes it; its own root becomes the file system in memory."""

    def __init__(self, limits: Mapping[str, Any], new_user_namespace: Callable[[], int]) -> None:
        megabytes = limits["memory_mb"]
        syscalls.mount("", "/", syscalls.REC | syscalls.PRIVATE)
        syscalls.mount(
            "tmpfs",
            _BOX,
            _FLAGS,
            f"mode=755,size={megabytes}m,nr_inodes={max(megabytes * 64, 4096)}",
        )
        for name in (
            *CHANGES,
            "shm",
            "root_work",
            "usr_work",
            "base",
            "usr",
            "dev",
            "proc",
            "new_root",
            "inspection",
        ):
            os.mkdir(f"{_BOX}/{name}")
        os.chmod(f"{_BOX}/shm", 0o1777)
        os.chmod(f"{_BOX}/{CHANGES[0]}", 0o755)
        for name in ("base", "usr"):
            syscalls.mount("", f"{_BOX}/{name}", syscalls.BIND, source=f"/{name}")
        bind_devices(f"{_BOX}/dev")
        syscalls.mount("proc", f"{_BOX}/proc", _FLAGS | syscalls.NOEXEC)
        syscalls.change_root(_BOX)
        detach_streams()
        self._user = new_user_namespace()
        self._megabytes = megabytes
        with open("/proc/self/uid_map", encoding="utf-8") as file:
            self._single_id = [line.split()[2] for line in file] == ["1"]
        self._namespaces: dict[str, int] = {}
        self._agent_ran = False
        self._open("agent", self._build_agent)

    def prepare(self, namespace: str, script: str) -> str:
        """Make a mount namespace ready. Return its name, or that of another one that serves as well.

        agent: the machine as it is.
        clean: the same with the host's programs and libraries, which are read-only once the agent has run.
        inspection: the agent's files as ``script`` needs to see them, in the host's own system. No process of
            the agent may run any more.
        """
        if namespace == "inspection" or "inspection" in self._namespaces:
            if "inspection" not in self._namespaces:
                self._close("agent", "clean")
                syscalls.mount(
                    "tmpfs",
                    inspection.FOLDER,
                    _FLAGS,
                    f"mode=755,size={self._megabytes}m",
                )
                inspection.make_layers(script)
                self._make_launcher()
                self._open("inspection", self._build_inspection)
            return "inspection"
        if namespace == "agent":
            self._agent_ran = True
        elif self._agent_ran:
            if "clean" not in self._namespaces:
                self._open_clean()
            return "clean"
        return "agent"

    def enter(self, namespace: str) -> None:
        """Enter a mount namespace, and the user namespace below that of process 1. There is no way back."""
        syscalls.setns(self._namespaces[namespace], syscalls.NEWNS)
        syscalls.setns(self._user, syscalls.NEWUSER)
        try:
            os.chdir("/root")
        except OSError:  # the agent removed or locked it
            os.chdir("/")

    def _make_launcher(self) -> None:
        guard = f"{inspection.FOLDER}/guard"
        for folder in (f"{inspection.FOLDER}/launching", f"{guard}{exec_guard.FOLDER}"):
            os.mkdir(folder)
        with open(f"{guard}{exec_guard.LAUNCHER}", "w", encoding="utf-8") as file:
            file.write(exec_guard.launcher(self._single_id))
        os.chmod(f"{guard}{exec_guard.LAUNCHER}", 0o755)

    @staticmethod
    def environment(namespace: str) -> Mapping[str, str]:
        return {**_ENVIRONMENT, **_ENVIRONMENTS[namespace]}

    @property
    def current(self) -> str:
        """The name of the namespace that shows the machine's current files."""
        return "inspection" if "inspection" in self._namespaces else "agent"

    @staticmethod
    def new_links() -> list[bytes]:
        """List the links that were made since the inspection began."""
        return links.links_in((f"{inspection.FOLDER}/root", ""), ("/shm", "/dev/shm"))

    def remove_new_links(self) -> None:
        """Call this in a separate process: it stays in the inspection's namespace."""
        paths = self.new_links()
        syscalls.setns(self._namespaces["inspection"], syscalls.NEWNS)
        links.remove_escaping(paths)

    def clear(self) -> None:
        """Delete all changes. No process of the agent may run any more."""
        if "inspection" in self._namespaces:
            syscalls.unmount(inspection.FOLDER)
        self._close(*tuple(self._namespaces))
        for name in (*CHANGES, "root_work", "usr_work"):
            shutil.rmtree(f"/{name}")
            os.mkdir(f"/{name}")
        os.chmod(f"/{CHANGES[0]}", 0o755)
        for name in os.listdir("/shm"):
            path = f"/shm/{name}"
            shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)
        self._agent_ran = False

    def assemble(self) -> None:
        """Show the machine the changes that were restored meanwhile."""
        self._open("agent", self._build_agent)

    def _open(self, name: str, build: Callable[[], None]) -> None:
        """Make a mount namespace. ``build`` runs in it and sets its root."""
        ready, go = os.pipe2(os.O_CLOEXEC), os.pipe2(os.O_CLOEXEC)
        pid = os.fork()
        if pid == 0:
            message = b""
            try:
                syscalls.set_dumpable(True)  # process 1 opens our namespace
                syscalls.unshare(syscalls.NEWNS)
                build()
            except OSError as error:
                message = f"{error.errno or 5} {error}".encode()
            except Exception as error:  # caused by the agent's files: reported like any other failure
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
                raise OSError(int(number), f"the mount namespace {name}: {text.decode(errors='replace')}")
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
        _overlay(_NEW_ROOT, ["/base/root"], "root")
        _overlay(f"{_NEW_ROOT}/usr", ["/base/usr", "/usr"], "usr")
        _dev(f"{_NEW_ROOT}/dev")
        _proc(f"{_NEW_ROOT}/proc")
        syscalls.change_root(_NEW_ROOT)

    def _open_clean(self) -> None:
        """Make the clean namespace: the agent's, except for the files that decide which program a name means,
        or which code is loaded into it.
        """
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

    def _build_inspection(self) -> None:
        paths = links.links_in(("/root_upper", ""), ("/usr_upper", "/usr"), ("/shm", "/dev/shm"))
        inspection.mount_layers(_NEW_ROOT)
        _dev(f"{_NEW_ROOT}/dev")
        _proc(f"{_NEW_ROOT}/proc", inspecting=True)
        syscalls.bind(f"{inspection.FOLDER}/launching", f"{_NEW_ROOT}{exec_guard.FOLDER}", read_only=True)
        syscalls.change_root(_NEW_ROOT)
        links.remove_escaping(paths)
        inspection.close_usr()


def bind_devices(folder: str) -> None:
    for name in ("null", "zero", "full", "random", "urandom", "tty"):
        os.close(os.open(f"{folder}/{name}", os.O_CREAT | os.O_WRONLY, 0o666))
        syscalls.bind(f"/dev/{name}", f"{folder}/{name}")


def detach_streams() -> None:
    """Connect the standard streams to the /dev/null of the current root."""
    devnull = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(devnull, descriptor)
    os.close(devnull)


def _overlay(target: str, lower: Sequence[str], name: str) -> None:
    syscalls.mount(
        "overlay",
        target,
        0,
        f"userxattr,lowerdir={':'.join(lower)},upperdir=/{name}_upper,workdir=/{name}_work",
    )


def _dev(target: str) -> None:
    _real_folder(target)
    syscalls.mount("tmpfs", target, syscalls.NOSUID, "mode=755,size=64k")
    bind_devices(target)
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


def _proc(target: str, inspecting: bool = False) -> None:
    """Mount the machine's /proc. During an inspection no process can write to another one's memory there, or
    see the processes of another user.
    """
    _real_folder(target)
    flags = _FLAGS | syscalls.NOEXEC
    syscalls.mount("proc", target, flags, "hidepid=2" if inspecting else "")
    for name in _READ_ONLY:
        with contextlib.suppress(FileNotFoundError):
            syscalls.bind(f"{target}/{name}", f"{target}/{name}", read_only=True)
    for name in _MASKED:
        with contextlib.suppress(FileNotFoundError):
            syscalls.bind("/dev/null", f"{target}/{name}")
    if inspecting:
        syscalls.mount("", target, syscalls.REMOUNT | syscalls.BIND | syscalls.RDONLY | flags)


def _real_folder(path: str) -> None:
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        raise OSError(20, f"{path} is not a folder any more")
