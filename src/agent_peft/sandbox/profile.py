"""The filter of system calls: the container world's profile, less what attacks have used
(docs/internals/attacks.md).

seccomp.json is the profile of Podman, Buildah and CRI-O (containers/common, Apache-2.0), unchanged.
"""

from __future__ import annotations

import errno
import json
import platform
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

_REFUSED = frozenset((
    "add_key", "request_key", "keyctl", "mount", "umount", "umount2", "mount_setattr", "move_mount",
    "open_tree", "fsopen", "fsconfig", "fsmount", "fspick", "pivot_root", "unshare", "setns", "clone3",
    "ptrace", "process_vm_readv", "process_vm_writev", "pidfd_getfd", "process_mrelease", "kcmp",
    "memfd_create", "memfd_secret", "remap_file_pages", "vmsplice", "userfaultfd", "shmget", "shmat",
    "shmctl", "shmdt", "semget", "semop", "semctl", "semtimedop", "semtimedop_time64", "msgget", "msgsnd",
    "msgrcv", "msgctl", "ipc", "mq_open", "mq_unlink", "mq_timedsend", "mq_timedreceive",
    "mq_timedsend_time64", "mq_timedreceive_time64", "mq_notify", "mq_getsetattr", "io_setup",
    "io_destroy", "io_submit", "io_cancel", "io_getevents", "mbind", "set_mempolicy", "get_mempolicy",
    "landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self", "name_to_handle_at",
    "fanotify_mark", "inotify_init", "inotify_init1", "inotify_add_watch", "inotify_rm_watch", "reboot",
    "syslog", "adjtimex", "clock_adjtime", "clock_adjtime64", "socketcall", "modify_ldt",
    # Allowed below with certain arguments
    "clone", "socket", "socketpair", "prlimit64",
))  # fmt: skip
_CAPABILITIES = ("CAP_SYS_CHROOT", "CAP_AUDIT_WRITE")  # those of a machine that the profile asks for
_NEW_NAMESPACES = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
_UNIX, _INET, _INET6, _NETLINK = 1, 2, 10, 16
# TCP, UDP and ICMP; other protocols make the kernel load modules of the host
_PROTOCOLS = {_INET: (0, 1, 6, 17), _INET6: (0, 6, 17, 58), _NETLINK: (0,)}
_PROCESSORS = {
    "x86_64": ("amd64", ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"]),
    "aarch64": ("arm64", ["SCMP_ARCH_AARCH64", "SCMP_ARCH_ARM"]),
}


def processor_is_known(machine: str | None = None) -> bool:
    return (machine or platform.machine()) in _PROCESSORS


def seccomp(listener: str | None = None, machine: str | None = None) -> dict[str, Any]:
    """Return the value of ``linux.seccomp`` in a bundle's config.json. ``listener``: the path of a socket;
    the kernel then asks its reader before each execve. ``machine``: a processor as ``platform.machine()``
    names it, None for this one.
    """
    processor, architectures = _PROCESSORS[machine or platform.machine()]
    content = _profile()
    asked = ("execve", "execveat") if listener is not None else ()
    rules = [_allow(names) for names in _allowed(content, processor, asked)]
    rules += [
        rule
        for rule in content["syscalls"]
        if rule["action"] == "SCMP_ACT_ALLOW" and rule["names"] == ["personality"]
    ]
    rules.append(_allow(["clone"], (0, "SCMP_CMP_MASKED_EQ", _NEW_NAMESPACES, 0)))
    rules.append(_allow(["prlimit64"], (0, "SCMP_CMP_EQ", 0, 0)))  # its own limits only
    rules += [_allow([name], (0, "SCMP_CMP_EQ", _UNIX, 0)) for name in ("socket", "socketpair")]
    rules += [
        _allow(["socket"], (0, "SCMP_CMP_EQ", family, 0), (2, "SCMP_CMP_EQ", protocol, 0))
        for family, protocols in _PROTOCOLS.items()
        for protocol in protocols
    ]
    # What programs that write to the audit log expect where there is none
    audit = [
        {"index": 0, "op": "SCMP_CMP_EQ", "value": _NETLINK},
        {"index": 2, "op": "SCMP_CMP_EQ", "value": 9},
    ]
    rules.append({"names": ["socket"], "action": "SCMP_ACT_ERRNO", "errnoRet": errno.EINVAL, "args": audit})
    notified = {}
    if listener is not None:
        rules.append({"names": list(asked), "action": "SCMP_ACT_NOTIFY"})
        notified = {"listenerPath": listener}
    refused = {"defaultAction": "SCMP_ACT_ERRNO", "defaultErrnoRet": content["defaultErrnoRet"]}
    return {**refused, "architectures": architectures, "syscalls": rules, **notified}


@cache
def _profile() -> Any:
    return json.loads(files("agent_peft.sandbox").joinpath("seccomp.json").read_text("utf-8"))


def _allowed(content: Any, processor: str, asked: Sequence[str]) -> list[list[str]]:
    """List the calls that the profile allows whatever their arguments, in its own groups."""
    groups = []
    for rule in content["syscalls"]:
        includes = rule.get("includes") or {}
        here = set(includes.get("caps", _CAPABILITIES)) <= set(_CAPABILITIES)
        here = here and processor in includes.get("arches", [processor])
        if rule["action"] == "SCMP_ACT_ALLOW" and here and not rule.get("args") and not rule.get("excludes"):
            names = [name for name in rule["names"] if name not in _REFUSED and name not in asked]
            groups += [names] if names else []
    return groups


def _allow(names: Sequence[str], *arguments: tuple[int, str, int, int]) -> dict[str, Any]:
    """``arguments``: conditions that must all hold: index, comparison, value, second value."""
    conditions = [
        {"index": index, "op": comparison, "value": value, "valueTwo": second}
        for index, comparison, value, second in arguments
    ]
    return {"names": list(names), "action": "SCMP_ACT_ALLOW", **({"args": conditions} if conditions else {})}
