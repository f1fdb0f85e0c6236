"""The requirements of machines on this computer, and the ids that it can give them."""

from __future__ import annotations

import contextlib
import os
import platform
import pwd
import resource
import shutil
import subprocess
import sys
from pathlib import Path

from agent_peft.sandbox.jail.seccomp import seccomp_filter
from agent_peft.types import AgentPeftError

ADVICE = "or set sandbox: docker (or podman)"
_IDS = 65536
_FIRST_OUTER_ID = (
    0x70000000  # ids of root's machines on the host: no account has them (systemd-nspawn: 0x80000)
)


def check_host() -> None:
    """Check that this computer can have machines.

    Raises:
        AgentPeftError: it cannot; one line says why and what to do.
    """
    if not sys.platform.startswith("linux"):
        raise AgentPeftError(
            f"sandbox: namespaces needs Linux, and this is {platform.system()}: "
            "install Docker and set sandbox: docker"
        )
    if seccomp_filter() is None:
        raise AgentPeftError(
            f"sandbox: namespaces has no filter of system calls for {platform.machine()} processors: "
            f"use an x86_64 or aarch64 machine, {ADVICE}"
        )
    if not os.path.exists("/usr/bin/setpriv"):
        raise AgentPeftError(
            "sandbox: namespaces needs setpriv: "
            f"apt-get install util-linux (the same name for dnf and pacman), {ADVICE}"
        )
    if not os.path.islink("/bin"):
        raise AgentPeftError(
            "sandbox: namespaces needs a system whose /bin is a link to usr/bin: "
            f"upgrade it (Debian: apt-get install usrmerge), {ADVICE}"
        )


def descriptor_limit() -> int:
    """Return the maximum number of descriptors of a machine's process. The kernel counts descriptors in
    flight by user, and the machines may be our user. With a fourth of our limit they never use up those that
    we need for our own messages.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1024 if soft < 0 else min(max(soft // 4, 64), 1024)


def map_ids(pid: int) -> bool:
    """Map 65,536 ids into a process's new user namespace, or only our own id if that is not allowed. Return
    whether the range was mapped.
    """
    if os.geteuid() == 0:
        for kind in ("uid", "gid"):
            Path(f"/proc/{pid}/{kind}_map").write_text(f"0 {_outer_ids(kind)} {_IDS}\n")
        return True
    ranges = [
        _sub_ids(path, user) for path, user in (("/etc/subuid", os.getuid()), ("/etc/subgid", os.getuid()))
    ]
    if all(ranges) and shutil.which("newuidmap") and shutil.which("newgidmap"):
        commands = [
            [f"new{kind}map", str(pid), "0", str(ours), "1", "1", str(first), str(min(count, _IDS - 1))]
            for kind, ours, (first, count) in zip(
                ("uid", "gid"), (os.getuid(), os.getgid()), [each or (0, 0) for each in ranges], strict=True
            )
        ]
        if all(
            subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True).returncode == 0
            for command in commands
        ):
            return True
    Path(f"/proc/{pid}/setgroups").write_text("deny")
    Path(f"/proc/{pid}/uid_map").write_text(f"0 {os.getuid()} 1\n")
    Path(f"/proc/{pid}/gid_map").write_text(f"0 {os.getgid()} 1\n")
    return False


def _outer_ids(kind: str) -> int:
    """Return the first of enough free ids in our user namespace: far from any account on a host, 0 in a
    container.
    """
    for line in Path(f"/proc/self/{kind}_map").read_text().splitlines():
        first, _, count = (int(word) for word in line.split())
        if first <= _FIRST_OUTER_ID and first + count >= _FIRST_OUTER_ID + _IDS:
            return _FIRST_OUTER_ID
    return 0


def _sub_ids(path: str, user: int) -> tuple[int, int] | None:
    """Return the first range of a user in a file such as /etc/subuid: its start and length."""
    names = {str(user)}
    with contextlib.suppress(KeyError):
        names.add(pwd.getpwuid(user).pw_name)
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    for fields in (line.split(":") for line in lines):
        if len(fields) == 3 and fields[0] in names and fields[1].isdigit() and fields[2].isdigit():
            return int(fields[1]), int(fields[2])
    return None


def explain_refusal() -> str:
    """Say what most likely forbids user namespaces here, and how to allow them."""

    def read(path: str) -> str:
        try:
            return Path(path).read_text().strip()
        except OSError:
            return ""

    if read("/proc/sys/kernel/unprivileged_userns_clone") == "0" and os.geteuid() != 0:
        return "allow user namespaces with sysctl kernel.unprivileged_userns_clone=1"
    if read("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == "1" and os.geteuid() != 0:
        return "allow user namespaces with sysctl kernel.apparmor_restrict_unprivileged_userns=0"
    if read("/proc/sys/user/max_user_namespaces") == "0":
        return "allow user namespaces with sysctl user.max_user_namespaces=10000"
    return (
        "it needs user namespaces and overlays (Linux 5.14 or newer; "
        "inside Docker, --security-opt seccomp=unconfined --security-opt systempaths=unconfined)"
    )
