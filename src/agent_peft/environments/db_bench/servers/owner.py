"""Names that say which process made a thing, so that another process can remove what a dead one has left."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import socket
import subprocess
from pathlib import Path

_NAME = re.compile(r"(?P<prefix>[\w-]+)_(?P<host>[0-9a-f]{6})_(?P<pid>[0-9a-f]+)_(?P<start>[0-9a-z]+)(_.*)?")


def owned_name(prefix: str) -> str:
    """A name of this process: the host (with its process namespace), the process id, and when it started."""
    pid = os.getpid()
    return f"{prefix}_{_host()}_{pid:x}_{_start_of(pid)}"


def is_orphan(name: str, prefix: str) -> bool:
    """Whether a process of this host made the name, and has ended.

    >>> is_orphan(owned_name("x") + "_1", "x"), is_orphan("x_orders", "x")
    (False, False)
    """
    match = _NAME.fullmatch(name)
    if match is None or match["prefix"] != prefix or match["host"] != _host():
        return False
    return _start_of(int(match["pid"], 16)) != match["start"]


@functools.cache
def _host() -> str:
    """Six digits that differ from host to host, and between containers, whose process ids mean others."""
    namespace = os.stat("/proc/self/ns/pid").st_ino if os.path.exists("/proc/self/ns/pid") else 0
    return hashlib.sha256(f"{socket.gethostname()} {namespace}".encode()).hexdigest()[:6]


def _start_of(pid: int) -> str | None:
    """When a process started, in letters and digits; None if there is none."""
    if os.path.isdir("/proc/self"):
        try:
            # the name before it, in parentheses, may hold anything
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            return None
        return None if fields[0] in (b"Z", b"X") else f"{int(fields[19]):x}"
    run = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True)
    text = "".join(run.stdout.split())
    return hashlib.sha256(text.encode()).hexdigest()[:9] if text else None
