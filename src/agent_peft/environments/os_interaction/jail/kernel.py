"""The system calls that Python 3.11 does not have, and the filter of those that a machine does not get."""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import socket
import struct

NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, BIND, REC, PRIVATE, SLAVE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18, 1 << 19
DETACH = 2  # of umount2
_PDEATHSIG, _DUMPABLE = 1, 4

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    _check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def mount(kind: str, target: str, flags: int = 0, options: str = "", source: str = "none") -> None:
    arguments = [value.encode() or None for value in (source, target, kind)]
    _check(_libc.mount(*arguments, ctypes.c_ulong(flags), options.encode() or None), f"mount of {kind or source} on {target}")


def unmount(target: str) -> None:
    _check(_libc.umount2(target.encode(), DETACH), f"umount of {target}")


def die_with_parent() -> None:
    """Be killed when the parent's thread ends: only for children of single-threaded processes."""
    _check(_libc.prctl(_PDEATHSIG, ctypes.c_ulong(9), 0, 0, 0), "prctl")


def set_dumpable(dumpable: bool) -> None:
    _check(_libc.prctl(_DUMPABLE, ctypes.c_ulong(dumpable), 0, 0, 0), "prctl")


def hide_arguments() -> None:
    """Blank our command line, which names folders of the host, for those who will see us as process 1."""
    with open("/proc/self/stat", encoding="utf-8") as file:
        first, end = (int(word) for word in file.read().rpartition(") ")[2].split()[45:47])
    title = b"sandbox"[: end - first]
    ctypes.memmove(first, title.ljust(end - first, b"\0"), end - first)


def loopback_up() -> None:
    """Bring up ``lo`` in a network of our own, so that a machine can talk to itself."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as channel:
        request = struct.pack("16sH14x", b"lo", 0x1 | 0x40)  # IFF_UP | IFF_RUNNING
        fcntl.ioctl(channel, 0x8914, request)  # SIOCSIFFLAGS


# No network namespace holds AF_VSOCK (a virtual machine's way to its host); keys are the session's that started us; memory of a
# memfd belongs to no process and no folder, so nothing here could count it; the rest is there to attack a kernel with.
_X86_64 = {
    "socket": 41, "syslog": 103, "init_module": 175, "delete_module": 176, "add_key": 248, "request_key": 249, "keyctl": 250,
    "perf_event_open": 298, "name_to_handle_at": 303, "open_by_handle_at": 304, "finit_module": 313, "memfd_create": 319,
    "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323, "kexec_load": 246,
}  # fmt: skip
_AARCH64 = {
    "socket": 198, "syslog": 116, "init_module": 105, "delete_module": 106, "add_key": 217, "request_key": 218, "keyctl": 219,
    "perf_event_open": 241, "name_to_handle_at": 264, "open_by_handle_at": 265, "finit_module": 273, "memfd_create": 279,
    "kexec_file_load": 294, "bpf": 280, "userfaultfd": 282, "kexec_load": 104,
}  # fmt: skip
_BOTH = {"io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "memfd_secret": 447}
_TABLES = {"x86_64": (0xC000003E, _X86_64), "aarch64": (0xC00000B7, _AARCH64)}
_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, 16)  # 16: netlink


def seccomp_filter(machine: str | None = None) -> bytes | None:
    """The filter as the kernel reads it (struct sock_filter[]), None where we have no table for the processor.

    Forbidden calls and other calling conventions (32 bit, x32) fail with EPERM; ``socket`` knows four families.
    """
    found = _TABLES.get(machine or platform.machine())
    if found is None:
        return None
    architecture, numbers = found
    forbidden = [number for name, number in (numbers | _BOTH).items() if name != "socket"]
    load, equal, at_least, back = 0x20, 0x15, 0x35, 0x06
    refuse = 6 + len(forbidden) + len(_FAMILIES)  # where that instruction is, and the next one allows
    allow = refuse + 1
    program: list[bytes] = []

    def put(code: int, value: int, then: int | None = None, otherwise: int | None = None) -> None:
        offsets = [0 if target is None else target - len(program) - 1 for target in (then, otherwise)]
        program.append(struct.pack("=HBBI", code, *offsets, value))

    put(load, 4)
    put(equal, architecture, None, refuse)
    put(load, 0)
    put(at_least, 0x40000000, refuse)
    for number in forbidden:
        put(equal, number, refuse)
    put(equal, numbers["socket"], None, allow)
    put(load, 16)
    for family in _FAMILIES:
        put(equal, family, allow)
    put(back, 0x00050000 | 1)  # EPERM
    put(back, 0x7FFF0000)
    return b"".join(program)
