"""Filters of system calls (seccomp): calls that a machine does not get, and a question before each execve."""

from __future__ import annotations

import ctypes
import os
import platform
import socket
import struct

from agent_peft.sandbox.jail.syscalls import NUMBERS, check, libc, no_new_privileges

# The refused calls, with their numbers. No network namespace holds AF_VSOCK, by which a virtual machine
# reaches its host. Keys belong to the session that started us. Memory of a memfd and of System V belongs to
# no process and no folder, so that nothing here could count it; the same holds for messages and semaphores.
# The others (tracing, reading another process's memory or descriptors, mounting, namespaces, ...) give access
# to the kernel or to other processes.
_X86_64 = {
    "socket": 41, "shmget": 29, "shmat": 30, "shmctl": 31, "shmdt": 67, "semget": 64, "semop": 65,
    "semctl": 66, "semtimedop": 220, "msgget": 68, "msgsnd": 69, "msgrcv": 70, "msgctl": 71, "ptrace": 101,
    "syslog": 103, "personality": 135, "ustat": 136, "sysfs": 139, "pivot_root": 155, "_sysctl": 156,
    "adjtimex": 159, "acct": 163, "settimeofday": 164, "mount": 165, "umount2": 166, "swapon": 167,
    "swapoff": 168, "reboot": 169, "sethostname": 170, "setdomainname": 171, "iopl": 172, "ioperm": 173,
    "create_module": 174, "init_module": 175, "delete_module": 176, "get_kernel_syms": 177,
    "query_module": 178, "quotactl": 179, "nfsservctl": 180, "lookup_dcookie": 212, "remap_file_pages": 216,
    "clock_settime": 227, "mbind": 237, "set_mempolicy": 238, "get_mempolicy": 239, "mq_open": 240,
    "mq_unlink": 241, "kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250,
    "migrate_pages": 256, "unshare": 272, "move_pages": 279, "vhangup": 153, "perf_event_open": 298,
    "fanotify_init": 300, "fanotify_mark": 301, "name_to_handle_at": 303, "open_by_handle_at": 304,
    "clock_adjtime": 305, "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312,
    "finit_module": 313, "memfd_create": 319, "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323,
    "uselib": 134,
}  # fmt: skip
_AARCH64 = {
    "socket": 198, "shmget": 194, "shmat": 196, "shmctl": 195, "shmdt": 197, "semget": 190, "semop": 193,
    "semctl": 191, "semtimedop": 192, "msgget": 186, "msgsnd": 189, "msgrcv": 188, "msgctl": 187,
    "ptrace": 117, "syslog": 116, "personality": 92, "pivot_root": 41, "adjtimex": 171, "acct": 89,
    "settimeofday": 170, "mount": 40, "umount2": 39, "swapon": 224, "swapoff": 225, "reboot": 142,
    "sethostname": 161, "setdomainname": 162, "init_module": 105, "delete_module": 106, "quotactl": 60,
    "nfsservctl": 42, "lookup_dcookie": 18, "remap_file_pages": 234, "clock_settime": 112, "mbind": 235,
    "set_mempolicy": 237, "get_mempolicy": 236, "mq_open": 180, "mq_unlink": 181, "kexec_load": 104,
    "add_key": 217, "request_key": 218, "keyctl": 219, "migrate_pages": 238, "unshare": 97,
    "move_pages": 239, "vhangup": 58, "perf_event_open": 241, "fanotify_init": 262, "fanotify_mark": 263,
    "name_to_handle_at": 264, "open_by_handle_at": 265, "clock_adjtime": 266, "setns": 268,
    "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272, "finit_module": 273,
    "memfd_create": 279, "kexec_file_load": 294, "bpf": 280, "userfaultfd": 282,
}  # fmt: skip
_COMMON = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428,
    "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "pidfd_getfd": 438,
    "process_madvise": 440, "mount_setattr": 442, "quotactl_fd": 443, "landlock_create_ruleset": 444,
    "memfd_secret": 447, "process_mrelease": 448, "set_mempolicy_home_node": 450,
}  # fmt: skip
_NEWEST = 462  # newer system calls fail: nobody has reviewed them
_TABLES = {"x86_64": (0xC000003E, _X86_64), "aarch64": (0xC00000B7, _AARCH64)}
_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, 16)  # 16: netlink
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_PR_SET_SECCOMP, _USER_NOTIF = 22, 0x7FC00000
_EPERM, _ENOSYS, _ALLOW = 0x00050000 | 1, 0x00050000 | 38, 0x7FFF0000


class Program:
    """A filter in the kernel's format (struct sock_filter[]), with labels as jump targets."""

    def __init__(self) -> None:
        self._lines: list[tuple[int, int, str | None, str | None]] = []
        self._labels: dict[str, int] = {}

    def put(self, code: int, value: int, then: str | None = None, otherwise: str | None = None) -> None:
        self._lines.append((code, value, then, otherwise))

    def label(self, name: str) -> None:
        self._labels[name] = len(self._lines)

    def assemble(self) -> bytes:
        text = b""
        for i, (code, value, *targets) in enumerate(self._lines):
            offsets = [0 if target is None else self._labels[target] - i - 1 for target in targets]
            text += struct.pack("=HBBI", code, *offsets, value)
        return text


def seccomp_filter(machine: str | None = None) -> bytes | None:
    """Return the filter of all processes of a machine, or None if there is no table for this processor.

    Refused calls and other calling conventions (32 bit, x32) fail with EPERM. Calls newer than the tables
    fail with ENOSYS. ``socket`` allows four address families.
    """
    table = _TABLES.get(machine or platform.machine())
    if table is None:
        return None
    architecture, numbers = table
    program = Program()
    program.put(_LOAD, 4)
    program.put(_EQUAL, architecture, None, "refuse")
    program.put(_LOAD, 0)
    program.put(_AT_LEAST, 0x40000000, "refuse")
    program.put(_AT_LEAST, _NEWEST + 1, "unknown")
    for name, number in (numbers | _COMMON).items():
        if name != "socket":
            program.put(_EQUAL, number, "refuse")
    program.put(_EQUAL, numbers["socket"], None, "allow")
    program.put(_LOAD, 16)
    for family in _FAMILIES:
        program.put(_EQUAL, family, "allow")
    program.label("refuse")
    program.put(_RETURN, _EPERM)
    program.label("unknown")
    program.put(_RETURN, _ENOSYS)
    program.label("allow")
    program.put(_RETURN, _ALLOW)
    return program.assemble()


def install_filter(program: bytes) -> None:
    """Apply the filter to this process and to all programs that it executes. It cannot be removed."""
    content = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(content))
    check(
        int(libc.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(2), header, ctypes.c_ulong(0), ctypes.c_ulong(0))),
        "seccomp",
    )


def exec_numbers() -> tuple[int, int]:
    """Return the numbers of execve and execveat."""
    return NUMBERS["execve"], NUMBERS["execveat"]


def ask_before_exec() -> int:
    """Let the kernel ask before each execve of this process and of the programs that it executes. Return the
    descriptor from which the questions are read.
    """
    program = Program()
    program.put(_LOAD, 0)
    for number in exec_numbers():
        program.put(_EQUAL, number, "ask")
    program.put(_RETURN, _ALLOW)
    program.label("ask")
    program.put(_RETURN, _USER_NOTIF)
    text = program.assemble()
    content = ctypes.create_string_buffer(text, len(text))
    header = struct.pack("@HP", len(text) // 8, ctypes.addressof(content))
    return check(
        int(libc.syscall(NUMBERS["seccomp"], 1, ctypes.c_uint(8), header)), "seccomp with a listener"
    )


def check_ask_before_exec() -> None:
    """Check that ``ask_before_exec`` works here.

    Raises:
        OSError: this kernel does not support such questions.
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
