"""The fork server's program. It prepares the base image in its own file system, then forks an init for each
requested machine.

It ends when the caller's end of the socket closes, and all machines end with it.

Messages are JSON objects. ``{"map": pid}`` asks the caller to map ids; ``{"ready": true}`` or
``{"error": ...}`` follows. Each request holds the limits of a machine. It carries the init's socket and a
pipe whose end is closed when all processes of the machine have ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket

from agent_peft.sandbox.jail import base_image, init, mounts, seccomp, syscalls

_ROOT = "/sys"  # the mount point of our root: every computer has this folder, and nothing here needs it


def main(descriptor: int, privileged: str) -> None:
    caller = socket.socket(fileno=descriptor)
    syscalls.hide_arguments()
    try:
        _prepare(caller, bool(privileged))
    except OSError as error:
        caller.send(json.dumps({"error": str(error), "errno": error.errno}).encode())
        return
    caller.send(json.dumps({"ready": True}).encode())
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody reads the exit code of a machine
    ids = {name: _identity_map(name) for name in ("uid_map", "gid_map")}
    while True:
        message, descriptors, _, _ = socket.recv_fds(caller, 65536, 2)
        if not message:
            return
        for each in descriptors:
            os.set_inheritable(each, False)
        if os.fork() == 0:
            try:
                caller.close()
                init.main(json.loads(message), descriptors[0], descriptors[1], ids)
            except OSError as error:
                os.write(descriptors[0], json.dumps({"error": str(error)}).encode())
            finally:
                os._exit(1)
        for each in descriptors:
            os.close(each)


def _prepare(caller: socket.socket, privileged: bool) -> None:
    """Become root of a user namespace. Its root folder holds only the host's ``/usr``, which is read-only."""
    if privileged:  # only now can the host's /usr be mounted without the file systems mounted in it
        syscalls.unshare(syscalls.NEWNS)
        _make_root()
        syscalls.unshare(syscalls.NEWUSER | syscalls.NEWNS)
    else:
        syscalls.unshare(syscalls.NEWUSER | syscalls.NEWNS)
    caller.send(json.dumps({"map": os.getpid()}).encode())
    if not caller.recv(1):
        raise SystemExit(0)
    with contextlib.suppress(PermissionError):  # not allowed with a single id
        os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    syscalls.set_dumpable(True)  # allows us to write our children's id maps after changing the user
    if not privileged:
        _make_root()
    syscalls.mount("tmpfs", f"{_ROOT}/base", syscalls.NOSUID | syscalls.NODEV, "mode=755,size=64m")
    base_image.build(f"{_ROOT}/base")
    syscalls.mount(
        "",
        f"{_ROOT}/base",
        syscalls.REMOUNT | syscalls.RDONLY | syscalls.NOSUID | syscalls.NODEV,
        "mode=755,size=64m",
    )
    syscalls.mount("", _ROOT, syscalls.BIND | syscalls.REC, source=_ROOT)  # an outer mount cannot be a root
    syscalls.change_root(_ROOT)
    mounts.detach_streams()  # the host's devices are gone with its root
    _limit_inotify()
    seccomp.check_ask_before_exec()


def _make_root() -> None:
    syscalls.mount("", "/", syscalls.REC | syscalls.PRIVATE)
    syscalls.mount("tmpfs", _ROOT, syscalls.NOSUID | syscalls.NODEV, "mode=755,size=1m")
    for name in ("base", "usr", "box", "dev", "proc"):
        os.mkdir(f"{_ROOT}/{name}")
    syscalls.bind("/usr", f"{_ROOT}/usr", read_only=True)
    mounts.bind_devices(f"{_ROOT}/dev")
    # The kernel allows a new /proc only where one is visible
    syscalls.mount("", f"{_ROOT}/proc", syscalls.BIND | syscalls.REC, source="/proc")


def _limit_inotify() -> None:
    """Limit all machines together to half of our user's inotify instances."""
    with contextlib.suppress(OSError, ValueError):
        with open("/proc/sys/fs/inotify/max_user_instances", encoding="utf-8") as file:
            maximum = int(file.read())
        with open("/proc/sys/user/max_inotify_instances", "w", encoding="utf-8") as file:
            file.write(str(max(maximum // 2, 1)))


def _identity_map(name: str) -> str:
    """Return the id map that gives an inner namespace all of our ids, under the same numbers."""
    with open(f"/proc/self/{name}", encoding="utf-8") as file:
        rows = [line.split() for line in file]
    return "".join(f"{first} {first} {count}\n" for first, _, count in rows)
