"""Started once per process: prepares the clean system in a file system of its own, then forks an init for
each machine asked for.

It dies when its caller's end of the socket closes, and every machine with it.

It speaks lines of JSON: ``{"map": pid}`` asks to be given ids, ``{"ready": …}`` or ``{"error": …}`` follow;
each request ``{"memory_mb": …}`` carries the init's socket and the pipe whose end tells that all is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket

from agent_peft.sandbox.jail import base_image, init, mounts, syscalls

# A file system of our own must be mounted on a folder that every computer has and that nothing here needs.
_PLACE = "/sys"


def main(descriptor: int, privileged: str) -> None:
    caller = socket.socket(fileno=descriptor)
    syscalls.hide_arguments()
    try:
        _prepare(caller, bool(privileged))
    except OSError as error:
        caller.send(json.dumps({"error": str(error), "errno": error.errno}).encode())
        return
    caller.send(json.dumps({"ready": True}).encode())
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a machine ended
    ids = {name: _own_ids(name) for name in ("uid_map", "gid_map")}
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
    """Become root of a user namespace whose root folder holds nothing of the host but its ``/usr``, to be
    read only.
    """
    if (
        privileged
    ):  # before we are nobody: only here can the host's /usr be had without what else is mounted in it
        syscalls.unshare(syscalls.NEWNS)
        _place()
        syscalls.unshare(syscalls.NEWUSER | syscalls.NEWNS)
    else:
        syscalls.unshare(syscalls.NEWUSER | syscalls.NEWNS)
    caller.send(json.dumps({"map": os.getpid()}).encode())
    if not caller.recv(1):
        raise SystemExit(0)
    with contextlib.suppress(PermissionError):  # a user of one id has no say in it
        os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    syscalls.set_dumpable(True)  # we write our children's maps, which changing users forbids otherwise
    if not privileged:
        _place()
    syscalls.mount("tmpfs", f"{_PLACE}/base", syscalls.NOSUID | syscalls.NODEV, "mode=755,size=64m")
    base_image.build(f"{_PLACE}/base")
    syscalls.mount(
        "",
        f"{_PLACE}/base",
        syscalls.REMOUNT | syscalls.RDONLY | syscalls.NOSUID | syscalls.NODEV,
        "mode=755,size=64m",
    )
    syscalls.mount(
        "", _PLACE, syscalls.BIND | syscalls.REC, source=_PLACE
    )  # what an outer namespace mounted cannot be our root
    syscalls.change_root(_PLACE)
    nothing = os.open("/dev/null", os.O_RDWR)  # the host's own devices went with its root
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    os.close(nothing)
    _bound_inotify()
    syscalls.check_ask_before_exec()


def _place() -> None:
    syscalls.mount("", "/", syscalls.REC | syscalls.PRIVATE)
    syscalls.mount("tmpfs", _PLACE, syscalls.NOSUID | syscalls.NODEV, "mode=755,size=1m")
    for name in ("base", "usr", "box", "dev", "proc"):
        os.mkdir(f"{_PLACE}/{name}")
    syscalls.bind("/usr", f"{_PLACE}/usr", read_only=True)
    for name in mounts.DEVICES:
        os.close(os.open(f"{_PLACE}/dev/{name}", os.O_CREAT | os.O_WRONLY, 0o666))
        syscalls.bind(f"/dev/{name}", f"{_PLACE}/dev/{name}")
    syscalls.mount(
        "", f"{_PLACE}/proc", syscalls.BIND | syscalls.REC, source="/proc"
    )  # a new one may only be mounted where there is one


def _bound_inotify() -> None:
    """Let all machines together take half of the instances that the kernel gives our user, and leave him
    the rest.
    """
    with contextlib.suppress(OSError, ValueError):
        with open("/proc/sys/fs/inotify/max_user_instances", encoding="utf-8") as file:
            most = int(file.read())
        with open("/proc/sys/user/max_inotify_instances", "w", encoding="utf-8") as file:
            file.write(str(max(most // 2, 1)))


def _own_ids(name: str) -> str:
    """The map that gives a namespace inside ours all of our ids, under the same numbers."""
    with open(f"/proc/self/{name}", encoding="utf-8") as file:
        rows = [line.split() for line in file]
    return "".join(f"{first} {first} {count}\n" for first, _, count in rows)
