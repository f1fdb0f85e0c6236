"""A machine as an OCI bundle: the content of its config.json.

``/`` and ``/usr`` are overlays, over our own copies and over the host's ``/usr``. Their changes lie in two
file systems in memory. Each overlay is mounted over the folder that holds its own upper layer: no path of the
machine leads there. Paths below are the host's; the runtime resolves them before it changes the root.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agent_peft.sandbox.base import SandboxLimits
from agent_peft.sandbox.inspection import SETTINGS
from agent_peft.sandbox.shell import SHELL

CAPABILITIES = (
    "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_SETGID", "CAP_SETUID",
    "CAP_SETPCAP", "CAP_NET_BIND_SERVICE", "CAP_SYS_CHROOT", "CAP_AUDIT_WRITE", "CAP_SETFCAP",
)  # fmt: skip
# Process 1 may not do more by it. The kernel lets nobody trace a process, or open its descriptors, who lacks
# one of its capabilities: so no process of the agent can hold its input open.
CAPABILITY_OF_PROCESS_1 = "CAP_WAKE_ALARM"
# It starts the first shell, whose streams are 3 to 5, and writes its exit code to 6. Then it reads until our
# end of the pipe is closed, and waits for orphans. Nothing inside can end it: it ignores all signals that
# have an effect on a process 1. $0 is the shell's processor time in seconds.
_PROCESS_1 = f"""
exec >/dev/null 2>&1; unset SHLVL; set -m
( ulimit -t "$0"; cd
  /usr/bin/setsid /usr/bin/setpriv --bounding-set -wake_alarm \\
    {" ".join(SHELL)} <&3 >&4 2>&5 3<&- 4>&- 5>&- 6>&-
  printf %s "$?" >&6 ) </dev/null &
set +m; exec 3<&- 4>&- 5>&- 6>&-
trap '' HUP INT QUIT TERM USR1 USR2 ALRM PIPE
while read -r; do :; done
"""
_FLAGS = ("nosuid", "nodev")
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
ENVIRONMENTS: Mapping[str, Mapping[str, str]] = {
    "agent": {**_ENVIRONMENT, "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
    "clean": _ENVIRONMENT | _CLEAN,
    "inspection": _ENVIRONMENT | _CLEAN | SETTINGS,
}
_READ_ONLY = ("sys", "sysrq-trigger", "irq", "bus", "fs")  # of /proc
_MASKED = (
    "kcore", "keys", "kmsg", "timer_list", "kallsyms", "config.gz", "interrupts", "diskstats",
    "sched_debug", "slabinfo", "pagetypeinfo", "sys/kernel/random/boot_id",
)  # fmt: skip


def config(
    folder: Path,
    layers: Sequence[str],
    usr_layers: Sequence[str],
    limits: SandboxLimits,
    ids: Mapping[str, Sequence[tuple[int, int, int]]],
    seccomp: Mapping[str, Any],
    descriptors: int,
    cgroup: str | None,
    inspection: Sequence[tuple[str, str]] | None = None,
    script: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the content of a bundle's config.json.

    Args:
        folder: the folder on which the root is mounted. It holds ``up`` and ``work``, and the lowest layer
            of ``/`` holds ``usr/up`` and ``usr/work``.
        layers: the lower layers of ``/``, the uppermost first.
        usr_layers: those of ``/usr``.
        ids: by "uid" and "gid", the ranges of ids: inside, outside, count.
        descriptors: the maximum number of descriptors of a process.
        cgroup: path of the machine's control group; None for no limits by the kernel.
        inspection: None, or the machine is one for inspection: its /usr is read-only, and so are these
            sources, mounted at these targets.
        script: the arguments of its process 1.
    """
    megabytes = limits.memory_mb * (1 if inspection is None else 2)  # the agent may have filled its own
    mounts = [
        *_overlay("/", folder, "", layers, megabytes * 3 // 8),
        *_overlay("/usr", folder, "usr/", usr_layers, megabytes // 16, read_only=inspection is not None),
        _mount("/proc", "proc", "nosuid", "nodev", "noexec", *(() if inspection is None else ("hidepid=2",))),
        _mount("/dev", "tmpfs", "nosuid", "mode=755", "size=64k", "ro"),
        _mount(
            "/dev/pts", "devpts", "nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "max=64"
        ),
        _memory("/dev/shm", max(megabytes // 16, 1), "mode=1777"),
        *(
            {"destination": target, "type": "bind", "source": source, "options": ["bind", "ro", *_FLAGS]}
            for source, target in inspection or ()
        ),
    ]
    if inspection is not None:
        mounts.insert(3, _memory("/usr/local", max(megabytes // 8, 1), "mode=755", "tmpcopyup"))
    maps = {
        f"{kind}Mappings": [
            {"containerID": inside, "hostID": outside, "size": count} for inside, outside, count in ranges
        ]
        for kind, ranges in ids.items()
    }
    linux: dict[str, Any] = {
        "namespaces": [
            {"type": kind} for kind in ("pid", "mount", "ipc", "uts", "network", "cgroup", "user")
        ],
        **maps,
        "maskedPaths": [f"/proc/{name}" for name in _MASKED],
        "readonlyPaths": [f"/proc/{name}" for name in (*_READ_ONLY, *(("1",) if inspection is None else ()))],
        "seccomp": seccomp,
    }
    if cgroup is not None:
        memory = megabytes << 20
        linux["cgroupsPath"] = cgroup
        linux["resources"] = {
            "memory": {"limit": memory, "swap": memory},
            "pids": {"limit": limits.processes},
        }
    return {
        "ociVersion": "1.0.2",
        "root": {"path": str(folder)},
        "hostname": "sandbox",
        "mounts": mounts,
        "process": _process_1(limits, descriptors)
        if inspection is None
        else process(script, "inspection", limits, descriptors),
        "linux": linux,
    }


def _process_1(limits: SandboxLimits, descriptors: int) -> dict[str, Any]:
    argv = ("/bin/bash", "--noprofile", "--norc", "-c", _PROCESS_1, str(_cpu_seconds(limits)))
    described = process(argv, "agent", limits, descriptors, (*CAPABILITIES, CAPABILITY_OF_PROCESS_1))
    described["rlimits"] = [each for each in described["rlimits"] if each["type"] != "RLIMIT_CPU"]
    return described


def _cpu_seconds(limits: SandboxLimits) -> int:
    return int(limits.cpu_seconds) + 1


def process(
    argv: Sequence[str],
    environment: str,
    limits: SandboxLimits,
    descriptors: int,
    capabilities: Sequence[str] = CAPABILITIES,
) -> dict[str, Any]:
    """Return a process in OCI's form. ``environment``: a key of ``ENVIRONMENTS``."""
    file_size = limits.file_size_mb << 20
    rlimits = {
        "CORE": 1,  # with 0, the kernel still starts the host's handler if that is a program
        "FSIZE": file_size,
        "NOFILE": descriptors,
        "MSGQUEUE": 0,
        "SIGPENDING": 1024,
        "MEMLOCK": 64 << 10,
        "CPU": _cpu_seconds(limits),
    }
    return {
        "terminal": False,
        "user": {"uid": 0, "gid": 0},
        "args": list(argv),
        "env": [f"{name}={value}" for name, value in ENVIRONMENTS[environment].items()],
        "cwd": "/",  # the agent may have removed its home
        "capabilities": {name: list(capabilities) for name in ("bounding", "effective", "permitted")},
        "noNewPrivileges": True,
        "oomScoreAdj": 800,
        "rlimits": [
            {"type": f"RLIMIT_{name}", "soft": value, "hard": value} for name, value in rlimits.items()
        ],
    }


def _overlay(
    target: str, folder: Path, name: str, layers: Sequence[str], megabytes: int, read_only: bool = False
) -> list[dict[str, Any]]:
    """An overlay over a file system in memory that holds its upper layer."""
    lower = f"lowerdir={':'.join(layers)}"
    if read_only:
        return [_mount(target, "overlay", *_FLAGS, "ro", "userxattr", lower)]
    upper = [f"upperdir={folder}/{name}up", f"workdir={folder}/{name}work"]
    return [
        _memory(target, max(megabytes, 1), "mode=755", "tmpcopyup"),
        _mount(target, "overlay", *_FLAGS, "userxattr", "xino=on", lower, *upper),
    ]


def _memory(target: str, megabytes: int, *options: str) -> dict[str, Any]:
    bound = (f"size={megabytes}m", f"nr_inodes={max(megabytes * 64, 2048)}")
    return _mount(target, "tmpfs", *_FLAGS, *bound, *options)


def _mount(target: str, kind: str, *options: str) -> dict[str, Any]:
    return {"destination": target, "type": kind, "source": kind, "options": list(options)}
