"""A machine's files, and how each of its processes sees them.

``/`` is an overlay over copies of our own, ``/usr`` one over the host's. What is written goes to one file system in memory, which has a
limited size.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from typing import Any

from agent_peft.environments.os_interaction.jail import kernel

WRITTEN = ("root_written", "usr_written")  # all that a snapshot holds
FIRST_EXTRA = 9  # descriptors that a process keeps besides its streams begin here
FILTER = 8  # where bubblewrap finds the forbidden system calls
_CAPABILITIES = (
    "AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "NET_BIND_SERVICE", "SETFCAP", "SETGID", "SETPCAP", "SETUID",
    "SYS_CHROOT",
)  # fmt: skip
_ENVIRONMENT = {"HOME": "/root", "USER": "root", "LOGNAME": "root", "SHELL": "/bin/bash", "LANG": "C.UTF-8", "TERM": "dumb", "PAGER": "cat"}
_PATHS = {
    "agent": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "clean": "/usr/sbin:/usr/bin:/sbin:/bin",  # not /usr/local, which is the agent's
    "graded": "/usr/sbin:/usr/bin:/sbin:/bin",
}
_LIBRARIES = ("lib", "lib32", "lib64", "libx32", "libexec", "share")  # of /usr: what programs load


class Views:
    """Mounted in the keeper's namespace, which nothing in the machine is in."""

    def __init__(self, place: str, bwrap: str, limits: dict[str, Any]) -> None:
        self._bwrap, self._host = bwrap, f"{place}/usr"
        self._base = f"{place}/base"
        self.place = f"{place}/box"
        self._view, self._local = f"{self.place}/view", f"{self.place}/local"
        self._touched = self._graded = False
        self.filter = kernel.seccomp_filter()
        kernel.mount("", "/", kernel.REC | kernel.PRIVATE)
        megabytes = limits["memory_mb"]
        kernel.mount("tmpfs", self.place, kernel.NOSUID | kernel.NODEV, f"mode=755,size={megabytes}m,nr_inodes={max(megabytes * 64, 4096)}")
        for name in (*WRITTEN, "root", "shm", "local", "view", "root_work", "usr_work", "view_written", "view_work"):
            os.mkdir(f"{self.place}/{name}")
        os.chmod(f"{self.place}/shm", 0o1777)
        os.chmod(f"{self.place}/{WRITTEN[0]}", 0o755)
        kernel.mount("proc", "/proc", kernel.NOSUID | kernel.NODEV | kernel.NOEXEC)  # bubblewrap looks its processes up there
        self.assemble()

    @property
    def root(self) -> str:
        """The machine's root as the keeper sees it."""
        return self._view if self._graded else f"{self.place}/root"

    def assemble(self) -> None:
        """Mount the machine's root."""
        self._overlay(self.root, [f"{self._base}/root"], "root_written", "root_work")
        self._overlay(f"{self.root}/usr", [f"{self._base}/usr", self._host], "usr_written", "usr_work")
        # By its own name, which cannot be made a link to anywhere, as the machine's /usr/local can.
        kernel.mount("", self._local, kernel.BIND, source=f"{self.root}/usr/local")

    def clear(self) -> None:
        """Unmount the root and forget what was written. Nothing runs any more."""
        self._leave()
        for name in (*WRITTEN, "root_work", "usr_work", "view_written", "view_work"):
            shutil.rmtree(f"{self.place}/{name}")
            os.mkdir(f"{self.place}/{name}")
        for name in os.listdir(f"{self.place}/shm"):
            path = f"{self.place}/shm/{name}"
            shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)
        self._touched = self._graded = False

    def command(self, view: str, argv: Sequence[str]) -> Sequence[str]:
        """The bubblewrap command that runs ``argv`` in a view.

        agent: the machine as it is. clean: the same with programs and libraries of the host, which once an agent was there can only be
        read. graded: when nothing else runs any more; files as they were left, below the host's own programs; new names in /usr stay.
        """
        root, extra = self.root, []
        if view == "graded" or self._graded:
            self._assemble_graded()
            root, extra = self.root, self._clean_libraries()
        elif view == "clean" and self._touched:
            extra = ["--ro-bind", self._host, "/usr", "--bind", self._local, "/usr/local", *self._guards()]
        self._touched |= view == "agent"
        command = [self._bwrap, "--bind", root, "/", *extra, "--dev", "/dev", "--bind", f"{self.place}/shm", "/dev/shm"]
        command += ["--remount-ro", "/dev", "--proc", "/proc", "--chdir", "/root", "--die-with-parent", "--new-session", "--clearenv"]
        for name, value in (_ENVIRONMENT | {"PATH": _PATHS[view]}).items():
            command += ["--setenv", name, value]
        if view != "agent":
            command += ["--setenv", "PYTHONNOUSERSITE", "1"]
        command += ["--cap-drop", "ALL"]
        for name in _CAPABILITIES:
            command += ["--cap-add", f"CAP_{name}"]
        if self.filter is not None:
            command += ["--seccomp", str(FILTER)]
        return [*command, "--", *argv]

    def _assemble_graded(self) -> None:
        if self._graded:
            return
        self._leave()
        written = [f"{self.place}/{name}" for name in WRITTEN]
        self._overlay(self._view, [f"{self._base}/guard", written[0], f"{self._base}/root"], "view_written", "view_work")
        kernel.mount("overlay", f"{self._view}/usr", 0, f"userxattr,lowerdir={self._host}:{written[1]}:{self._base}/usr")
        local = [f"{written[1]}/local"] if os.path.isdir(f"{written[1]}/local") and not os.path.islink(f"{written[1]}/local") else []
        layers = ":".join([f"{self._base}/guard_local", *local, f"{self._base}/usr/local"])
        kernel.mount("overlay", f"{self._view}/usr/local", 0, f"userxattr,lowerdir={layers}")
        self._graded = True

    def _clean_libraries(self) -> list[str]:
        return [
            word
            for name in _LIBRARIES
            if os.path.isdir(f"{self._host}/{name}")
            for word in ("--ro-bind", f"{self._host}/{name}", f"/usr/{name}")
        ]

    def _guards(self) -> list[str]:
        words: list[str] = []
        for name in os.listdir(f"{self._base}/guard/etc"):
            if os.path.exists(f"{self._base}/guard/etc/{name}") and os.path.lexists(f"{self.root}/etc/{name}") and name != "ld.so.preload":
                words += ["--ro-bind", f"{self._base}/guard/etc/{name}", f"/etc/{name}"]
        if os.path.lexists(f"{self.root}/etc/ld.so.preload"):
            words += ["--ro-bind", "/dev/null", "/etc/ld.so.preload"]
        return words

    def _overlay(self, target: str, lower: Sequence[str], upper: str, work: str) -> None:
        options = f"userxattr,lowerdir={':'.join(lower)},upperdir={self.place}/{upper},workdir={self.place}/{work}"
        kernel.mount("overlay", target, 0, options)

    def _leave(self) -> None:
        graded = (f"{self._view}/usr/local", f"{self._view}/usr", self._view)
        for target in graded if self._graded else (self._local, f"{self.root}/usr", self.root):
            kernel.unmount(target)
