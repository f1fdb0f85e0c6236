"""The system calls that Python 3.11 does not offer."""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import socket
import struct

NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = (
    0x20000,
    0x2000000,
    0x4000000,
    0x8000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
NAMESPACES = NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWPID | NEWNET  # all except those of users
RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, BIND, REC, PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
DETACH = 2  # of umount2
_PDEATHSIG, _DUMPABLE, _CAPBSET_DROP, _NO_NEW_PRIVS, _AMBIENT = 1, 4, 24, 38, 47
_AT_FDCWD, _OPEN_TREE_CLONE, _MOVE_EMPTY_FROM = -100, 1, 4
_OPEN_TREE, _MOVE_MOUNT, _OPENAT2, _RESOLVE_IN_ROOT = 428, 429, 437, 0x10
NUMBERS = {
    "x86_64": {"pivot_root": 155, "capset": 126, "execve": 59, "execveat": 322, "seccomp": 317},
    "aarch64": {"pivot_root": 41, "capset": 91, "execve": 221, "execveat": 281, "seccomp": 277},
}.get(platform.machine(), {})  # of the calls whose number depends on the processor

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def prctl(option: int, value: int, more: int = 0) -> int:
    return int(
        libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(more), ctypes.c_ulong(0), ctypes.c_ulong(0))
    )


def unshare(flags: int) -> None:
    check(libc.unshare(ctypes.c_int(flags)), "unshare")


def setns(descriptor: int, kind: int) -> None:
    check(libc.setns(ctypes.c_int(descriptor), ctypes.c_int(kind)), "setns")


def mount(kind: str, target: str, flags: int = 0, options: str = "", source: str = "none") -> None:
    arguments = [os.fsencode(value) or None for value in (source, target, kind)]
    check(
        libc.mount(*arguments, ctypes.c_ulong(flags), options.encode() or None),
        f"mount of {kind or source} on {target}",
    )


def bind(source: str, target: str, read_only: bool = False) -> None:
    """Mount ``source`` on ``target`` as well. Files of a read-only mount can still be executed."""
    mount("", target, BIND, source=source)
    if read_only:
        mount("", target, REMOUNT | BIND | RDONLY | _locked_flags(target))


def _locked_flags(path: str) -> int:
    """Return the flags of a host's mount that a user namespace may not clear."""
    flags, locked = os.statvfs(path).f_flag, 0
    for name, flag in (
        (os.ST_NOSUID, NOSUID),
        (os.ST_NODEV, NODEV),
        (os.ST_NOEXEC, NOEXEC),
        (os.ST_NOATIME, 1024),
    ):
        locked |= flag if flags & name else 0
    return locked | (1 << 21 if flags & os.ST_RELATIME else 0)


def detached_copy(path: str) -> int:
    """Return a descriptor of a new mount of ``path`` that is in no namespace. ``attach`` puts it into one."""
    return check(
        libc.syscall(
            _OPEN_TREE,
            ctypes.c_int(_AT_FDCWD),
            os.fsencode(path),
            ctypes.c_uint(_OPEN_TREE_CLONE | os.O_CLOEXEC),
        ),
        "open_tree",
    )


def attach(descriptor: int, target: str) -> None:
    result = libc.syscall(
        _MOVE_MOUNT,
        ctypes.c_int(descriptor),
        b"",
        ctypes.c_int(_AT_FDCWD),
        os.fsencode(target),
        ctypes.c_uint(_MOVE_EMPTY_FROM),
    )
    check(result, f"move_mount on {target}")


def unmount(target: str) -> None:
    check(libc.umount2(os.fsencode(target), DETACH), f"umount of {target}")


def change_root(folder: str) -> None:
    """Make the mount point ``folder`` the root of our mount namespace, and remove all other mounts."""
    os.chdir(folder)
    check(libc.syscall(NUMBERS["pivot_root"], b".", b"."), "pivot_root")
    unmount(".")  # the old root lies on the new one
    os.chdir("/")


def die_with_parent() -> None:
    """Let the kernel kill us when the parent's thread ends. The parent must have one thread only."""
    check(prctl(_PDEATHSIG, 9), "prctl")


def set_dumpable(dumpable: bool) -> None:
    check(prctl(_DUMPABLE, dumpable), "prctl")


def hide_arguments() -> None:
    """Overwrite our command line, which names folders of the host. Machines see us as process 1."""
    with open("/proc/self/stat", encoding="utf-8") as file:
        first, end = (int(word) for word in file.read().rpartition(") ")[2].split()[45:47])
    title = b"sandbox"[: end - first]
    ctypes.memmove(first, title.ljust(end - first, b"\0"), end - first)


def loopback_up() -> None:
    """Bring up ``lo`` in our own network namespace, so that a machine can connect to itself."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as channel:
        request = struct.pack("16sH14x", b"lo", 0x1 | 0x40)  # IFF_UP | IFF_RUNNING
        fcntl.ioctl(channel, 0x8914, request)  # SIOCSIFFLAGS


# CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID, SETPCAP, NET_BIND_SERVICE, SYS_CHROOT,
# AUDIT_WRITE and SETFCAP, as a mask of their numbers
CAPABILITIES = sum(1 << number for number in (0, 1, 3, 4, 5, 6, 7, 8, 10, 18, 29, 31))


def no_new_privileges() -> None:
    check(prctl(_NO_NEW_PRIVS, 1), "prctl")


def keep_capabilities(mask: int) -> None:
    """Give up all other capabilities, for this process and for all programs that it executes."""
    prctl(_AMBIENT, 4)  # clear all
    for number in range(64):
        if not mask >> number & 1 and prctl(_CAPBSET_DROP, number) < 0:
            break  # the kernel has no further capability
    header = struct.pack("=Ii", 0x20080522, 0)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    check(libc.syscall(NUMBERS["capset"], header, struct.pack("=6I", low, low, 0, high, high, 0)), "capset")


def open_in(root: int, path: str, flags: int) -> int:
    """Open a path as a process does whose root is the folder of the descriptor ``root``."""
    how = struct.pack("=QQQ", flags | os.O_CLOEXEC, 0, _RESOLVE_IN_ROOT)
    return check(
        int(libc.syscall(_OPENAT2, ctypes.c_int(root), os.fsencode(path), how, ctypes.c_size_t(len(how)))),
        "openat2",
    )
