"""Processes that end with the one that started them, and whether one is still the same."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

_PDEATHSIG = 1  # prctl's option


def end_with_parent() -> Callable[[], None] | None:
    """What a child does first (``preexec_fn``): on Linux, ask for SIGTERM when this process ends, however it
    does.
    """
    if not sys.platform.startswith("linux"):
        return None
    libc, parent = ctypes.CDLL(None), os.getpid()

    def prepare() -> None:
        libc.prctl(_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


def start_of(pid: int) -> str | None:
    """When a process began, in the kernel's ticks: a later one of the same number differs. None if it has
    ended; ``"0"`` for one that runs where there is no /proc.
    """
    try:
        if os.path.exists("/proc/self"):
            # the program's name, in parentheses, may hold anything
            fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
            return None if fields[0] in ("Z", "X") else fields[19]
        os.kill(pid, 0)
    except PermissionError:  # another user's
        pass
    except OSError:
        return None
    return "0"
