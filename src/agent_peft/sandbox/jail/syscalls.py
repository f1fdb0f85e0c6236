"""The system calls that Python 3.11 does not have, and the filters of those that a machine does not get."""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import socket
import struct
from collections.abc import Collection

NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = (
    0x20000,
    0x2000000,
    0x4000000,
    0x8000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, BIND, REC, PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
DETACH = 2  # of umount2
_PDEATHSIG, _DUMPABLE, _SECCOMP, _CAPBSET_DROP, _NO_NEW_PRIVS, _AMBIENT = 1, 4, 22, 24, 38, 47
_AT_EMPTY_PATH, _AT_FDCWD, _OPEN_TREE_CLONE, _MOVE_EMPTY_FROM = 0x1000, -100, 1, 4

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _prctl(option: int, value: int, more: int = 0) -> int:
    return int(
        _libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(more), ctypes.c_ulong(0), ctypes.c_ulong(0))
    )


def unshare(flags: int) -> None:
    _check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def setns(descriptor: int, kind: int) -> None:
    _check(_libc.setns(ctypes.c_int(descriptor), ctypes.c_int(kind)), "setns")


def mount(kind: str, target: str, flags: int = 0, options: str = "", source: str = "none") -> None:
    arguments = [os.fsencode(value) or None for value in (source, target, kind)]
    _check(
        _libc.mount(*arguments, ctypes.c_ulong(flags), options.encode() or None),
        f"mount of {kind or source} on {target}",
    )


def bind(source: str, target: str, read_only: bool = False) -> None:
    """Let ``target`` be what ``source`` is; read only, it can still be executed."""
    mount("", target, BIND, source=source)
    if read_only:
        mount("", target, REMOUNT | BIND | RDONLY | _locked_flags(target))


def _locked_flags(path: str) -> int:
    """The flags that a mount of the host's has, which a user namespace may not clear."""
    flags, found = os.statvfs(path).f_flag, 0
    for name, flag in (
        (os.ST_NOSUID, NOSUID),
        (os.ST_NODEV, NODEV),
        (os.ST_NOEXEC, NOEXEC),
        (os.ST_NOATIME, 1024),
    ):
        found |= flag if flags & name else 0
    return found | (1 << 21 if flags & os.ST_RELATIME else 0)


def detached_copy(path: str) -> int:
    """A descriptor of a mount of ``path`` that is in no namespace yet: ``attach`` puts it into another
    one.
    """
    return _check(
        _libc.syscall(
            _OPEN_TREE,
            ctypes.c_int(_AT_FDCWD),
            os.fsencode(path),
            ctypes.c_uint(_OPEN_TREE_CLONE | os.O_CLOEXEC),
        ),
        "open_tree",
    )


def attach(descriptor: int, target: str) -> None:
    result = _libc.syscall(
        _MOVE_MOUNT,
        ctypes.c_int(descriptor),
        b"",
        ctypes.c_int(_AT_FDCWD),
        os.fsencode(target),
        ctypes.c_uint(_MOVE_EMPTY_FROM),
    )
    _check(result, f"move_mount on {target}")


def unmount(target: str) -> None:
    _check(_libc.umount2(os.fsencode(target), DETACH), f"umount of {target}")


def change_root(folder: str) -> None:
    """Let ``folder``, a mount point, be the root of our mount namespace, and nothing else be in it."""
    os.chdir(folder)
    _check(_libc.syscall(_numbers()["pivot_root"], b".", b"."), "pivot_root")
    unmount(".")  # the old root lies on the new one
    os.chdir("/")


def die_with_parent() -> None:
    """Be killed when the parent's thread ends: only for children of single-threaded processes."""
    _check(_prctl(_PDEATHSIG, 9), "prctl")


def set_dumpable(dumpable: bool) -> None:
    _check(_prctl(_DUMPABLE, dumpable), "prctl")


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


CAPABILITIES = {
    "CHOWN": 0, "DAC_OVERRIDE": 1, "FOWNER": 3, "FSETID": 4, "KILL": 5, "SETGID": 6, "SETUID": 7, "SETPCAP": 8, "NET_BIND_SERVICE": 10,
    "SYS_CHROOT": 18, "AUDIT_WRITE": 29, "SETFCAP": 31,
}  # fmt: skip


def mask_of(names: Collection[str]) -> int:
    return sum(1 << CAPABILITIES[name] for name in names)


def keep_capabilities(names: Collection[str]) -> None:
    """Give up all capabilities but these, for us and for whatever we execute, for ever."""
    mask = mask_of(names)
    _prctl(_AMBIENT, 4)  # clear all
    for number in range(64):
        if not mask >> number & 1 and _prctl(_CAPBSET_DROP, number) < 0:
            break  # the kernel knows no more
    header = struct.pack("=Ii", 0x20080522, 0)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    _check(
        _libc.syscall(_numbers()["capset"], header, struct.pack("=6I", low, low, 0, high, high, 0)), "capset"
    )


# No network namespace holds AF_VSOCK (a virtual machine's way to its host); keys are the session's that
# started us; memory of a memfd and of System V belongs to no process and no folder, so nothing here could
# count it; messages and semaphores likewise. Tracing, reading another's memory or descriptors, mounting,
# namespaces and the rest are there to reach a kernel or another process with.
_X86_64 = {
    "socket": 41, "shmget": 29, "shmat": 30, "shmctl": 31, "shmdt": 67, "semget": 64, "semop": 65, "semctl": 66, "semtimedop": 220,
    "msgget": 68, "msgsnd": 69, "msgrcv": 70, "msgctl": 71, "ptrace": 101, "syslog": 103, "personality": 135, "ustat": 136, "sysfs": 139,
    "pivot_root": 155, "_sysctl": 156, "adjtimex": 159, "acct": 163, "settimeofday": 164, "mount": 165, "umount2": 166, "swapon": 167,
    "swapoff": 168, "reboot": 169, "sethostname": 170, "setdomainname": 171, "iopl": 172, "ioperm": 173, "create_module": 174,
    "init_module": 175, "delete_module": 176, "get_kernel_syms": 177, "query_module": 178, "quotactl": 179, "nfsservctl": 180,
    "lookup_dcookie": 212, "remap_file_pages": 216, "clock_settime": 227, "mbind": 237, "set_mempolicy": 238, "get_mempolicy": 239,
    "mq_open": 240, "mq_unlink": 241, "kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250, "migrate_pages": 256,
    "unshare": 272, "move_pages": 279, "vhangup": 153, "perf_event_open": 298, "fanotify_init": 300, "fanotify_mark": 301,
    "name_to_handle_at": 303, "open_by_handle_at": 304, "clock_adjtime": 305, "setns": 308, "process_vm_readv": 310,
    "process_vm_writev": 311, "kcmp": 312, "finit_module": 313, "memfd_create": 319, "kexec_file_load": 320, "bpf": 321,
    "userfaultfd": 323, "uselib": 134,
}  # fmt: skip
_AARCH64 = {
    "socket": 198, "shmget": 194, "shmat": 196, "shmctl": 195, "shmdt": 197, "semget": 190, "semop": 193, "semctl": 191,
    "semtimedop": 192, "msgget": 186, "msgsnd": 189, "msgrcv": 188, "msgctl": 187, "ptrace": 117, "syslog": 116, "personality": 92,
    "pivot_root": 41, "adjtimex": 171, "acct": 89, "settimeofday": 170, "mount": 40, "umount2": 39, "swapon": 224, "swapoff": 225,
    "reboot": 142, "sethostname": 161, "setdomainname": 162, "init_module": 105, "delete_module": 106, "quotactl": 60,
    "nfsservctl": 42, "lookup_dcookie": 18, "remap_file_pages": 234, "clock_settime": 112, "mbind": 235, "set_mempolicy": 237,
    "get_mempolicy": 236, "mq_open": 180, "mq_unlink": 181, "kexec_load": 104, "add_key": 217, "request_key": 218, "keyctl": 219,
    "migrate_pages": 238, "unshare": 97, "move_pages": 239, "vhangup": 58, "perf_event_open": 241, "fanotify_init": 262,
    "fanotify_mark": 263, "name_to_handle_at": 264, "open_by_handle_at": 265, "clock_adjtime": 266, "setns": 268,
    "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272, "finit_module": 273, "memfd_create": 279, "kexec_file_load": 294,
    "bpf": 280, "userfaultfd": 282,
}  # fmt: skip
_BOTH = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429, "fsopen": 430,
    "fsconfig": 431, "fsmount": 432, "fspick": 433, "pidfd_getfd": 438, "process_madvise": 440, "mount_setattr": 442,
    "quotactl_fd": 443, "landlock_create_ruleset": 444, "memfd_secret": 447, "process_mrelease": 448, "set_mempolicy_home_node": 450,
}  # fmt: skip
_NEWEST = 462  # a system call that is newer than this is not there: nobody has looked at what it can do
_OPEN_TREE, _MOVE_MOUNT = 428, 429
_TABLES = {"x86_64": (0xC000003E, _X86_64), "aarch64": (0xC00000B7, _AARCH64)}
_OWN = {
    "x86_64": {"pivot_root": 155, "capset": 126, "execve": 59, "execveat": 322, "seccomp": 317},
    "aarch64": {"pivot_root": 41, "capset": 91, "execve": 221, "execveat": 281, "seccomp": 277},
}
_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, 16)  # 16: netlink
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_OPENAT2, _RESOLVE_IN_ROOT = 437, 0x10
_USER_NOTIF = 0x7FC00000
_EPERM, _ENOSYS, _ALLOW = 0x00050000 | 1, 0x00050000 | 38, 0x7FFF0000


def _numbers() -> dict[str, int]:
    return _OWN[platform.machine()]


class Program:
    """A filter of system calls as the kernel reads it (struct sock_filter[]), with names for the places
    that are jumped to.
    """

    def __init__(self) -> None:
        self._lines: list[tuple[int, int, str | None, str | None]] = []
        self._places: dict[str, int] = {}

    def put(self, code: int, value: int, then: str | None = None, otherwise: str | None = None) -> None:
        self._lines.append((code, value, then, otherwise))

    def place(self, name: str) -> None:
        self._places[name] = len(self._lines)

    def assemble(self) -> bytes:
        text = b""
        for i, (code, value, *targets) in enumerate(self._lines):
            offsets = [0 if target is None else self._places[target] - i - 1 for target in targets]
            text += struct.pack("=HBBI", code, *offsets, value)
        return text


def seccomp_filter(machine: str | None = None) -> bytes | None:
    """The filter of all processes of a machine; None where we have no table for the processor.

    Forbidden calls and other calling conventions (32 bit, x32) fail with EPERM, those that are newer than we
    know with ENOSYS; ``socket`` knows four families.
    """
    found = _TABLES.get(machine or platform.machine())
    if found is None:
        return None
    architecture, numbers = found
    program = Program()
    program.put(_LOAD, 4)
    program.put(_EQUAL, architecture, None, "refuse")
    program.put(_LOAD, 0)
    program.put(_AT_LEAST, 0x40000000, "refuse")
    program.put(_AT_LEAST, _NEWEST + 1, "unknown")
    for name, number in (numbers | _BOTH).items():
        if name != "socket":
            program.put(_EQUAL, number, "refuse")
    program.put(_EQUAL, numbers["socket"], None, "allow")
    program.put(_LOAD, 16)
    for family in _FAMILIES:
        program.put(_EQUAL, family, "allow")
    program.place("refuse")
    program.put(_RETURN, _EPERM)
    program.place("unknown")
    program.put(_RETURN, _ENOSYS)
    program.place("allow")
    program.put(_RETURN, _ALLOW)
    return program.assemble()


def no_new_privileges() -> None:
    _check(_prctl(_NO_NEW_PRIVS, 1), "prctl")


def install_filter(program: bytes) -> None:
    """Put the filter on us and on whatever we execute, for ever."""
    content = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(content))
    _check(
        int(_libc.prctl(_SECCOMP, ctypes.c_ulong(2), header, ctypes.c_ulong(0), ctypes.c_ulong(0))), "seccomp"
    )


def exec_numbers() -> tuple[int, int]:
    """The numbers of execve and execveat."""
    return _numbers()["execve"], _numbers()["execveat"]


def ask_before_exec() -> int:
    """Have the kernel ask before each execve of ours and of what we execute; the descriptor returned is
    where it asks.
    """
    program = Program()
    program.put(_LOAD, 0)
    for number in exec_numbers():
        program.put(_EQUAL, number, "ask")
    program.put(_RETURN, _ALLOW)
    program.place("ask")
    program.put(_RETURN, _USER_NOTIF)
    text = program.assemble()
    content = ctypes.create_string_buffer(text, len(text))
    header = struct.pack("@HP", len(text) // 8, ctypes.addressof(content))
    return _check(
        int(_libc.syscall(_numbers()["seccomp"], 1, ctypes.c_uint(8), header)), "seccomp with a listener"
    )


def check_ask_before_exec() -> None:
    """
    Raises:
        OSError: this kernel does not let a process ask before another executes something.
    """
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            no_new_privileges()
            ask_before_exec()
            status = 0
        except OSError as error:
            status = error.errno or 1
        finally:
            os._exit(status)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code != 0:
        raise OSError(abs(code), f"seccomp with a listener: {os.strerror(abs(code))}")


def open_in(root: int, path: str, flags: int) -> int:
    """Open as a process would whose root is the folder behind the descriptor ``root``."""
    how = struct.pack("=QQQ", flags | os.O_CLOEXEC, 0, _RESOLVE_IN_ROOT)
    return _check(
        int(_libc.syscall(_OPENAT2, ctypes.c_int(root), os.fsencode(path), how, ctypes.c_size_t(len(how)))),
        "openat2",
    )
