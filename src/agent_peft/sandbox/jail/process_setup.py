"""The last steps of a process before it executes its program: limits, signals, descriptors, privileges."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
from collections.abc import Sequence
from typing import Any

from agent_peft.sandbox.jail import seccomp, syscalls

_FIRST_EXTRA = 9  # descriptors besides the three streams are numbered from here


def set_limits(limits: dict[str, Any]) -> None:
    megabyte = 1 << 20
    for kind, bound in (
        (resource.RLIMIT_FSIZE, limits["file_size_mb"] * megabyte),
        (resource.RLIMIT_DATA, limits["memory_mb"] * megabyte),
        (resource.RLIMIT_NPROC, limits["processes"] + 2),  # below ours: we can fork when the machine cannot
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, limits.get("descriptors", 1024)),
        (resource.RLIMIT_MEMLOCK, megabyte),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_SIGPENDING, 1024),
    ):
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (min(bound, hard) if hard >= 0 else bound,) * 2)
    with open("/proc/self/oom_score_adj", "w", encoding="utf-8") as file:
        file.write("800")  # if the host runs out of memory, the kernel should choose this process


def reset_signals() -> None:
    """Restore default handlers. Python ignores SIGPIPE and SIGXFSZ, and background jobs ignore the others; a
    shell that inherits this can never be interrupted.
    """
    for number in (
        signal.SIGPIPE,
        signal.SIGXFSZ,
        signal.SIGINT,
        signal.SIGQUIT,
        signal.SIGHUP,
        signal.SIGTERM,
    ):
        signal.signal(number, signal.SIG_DFL)


def place_descriptors(descriptors: Sequence[int]) -> None:
    """Move descriptors to the numbers 0, 1, 2 and the extra ones to 9, 10, ..."""
    targets = dict(zip((0, 1, 2, *range(_FIRST_EXTRA, 64)), descriptors, strict=False))
    copies = {
        target: fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 64) for target, descriptor in targets.items()
    }
    for target, copy in copies.items():
        os.dup2(copy, target)


def drop_privileges(seccomp_filter: bytes) -> None:
    """Keep only the rights of the machine's processes."""
    syscalls.keep_capabilities(syscalls.CAPABILITIES)
    syscalls.no_new_privileges()
    seccomp.install_filter(seccomp_filter)
