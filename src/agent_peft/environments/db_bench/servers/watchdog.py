"""The process above a throwaway database server. It installs and runs the server, and ends it when its own
input is closed, as it is when the process that started it ends, however that is. Then it removes the
server's folder.

Run as a script, with the standard library only. On Linux the kernel ends the server with this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

_PDEATHSIG = 1  # prctl's option
_MALLOC = {
    "MALLOC_ARENA_MAX": "2",
    "MALLOC_MMAP_THRESHOLD_": "131072",
}  # what is freed goes back to the kernel


def main() -> None:
    """Run what the first argument describes as JSON: the ``folder``, the account (``ids``), the commands
    ``install`` and ``serve``, and the largest file that the server may write (``file_bytes``).
    """
    order: dict[str, Any] = json.loads(sys.argv[1])
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    try:
        if _run(order["install"], order, None, ended) == 0:
            _run(order["serve"], order, order["file_bytes"], ended)
    finally:
        shutil.rmtree(order["folder"], ignore_errors=True)


def _run(command: Sequence[str], order: dict[str, Any], file_bytes: int | None, ended: int) -> int | None:
    """Run a command until it ends (its status) or we are not needed any more (None)."""
    with open(os.path.join(order["folder"], "log"), "ab") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=order["folder"],
            env={**os.environ, **_MALLOC},
            start_new_session=True,
            restore_signals=False,  # a file that reaches its limit is an error then, and not the end
            preexec_fn=_prepare(order["ids"], file_bytes, os.getpid()),
        )
    try:
        while process.poll() is None:
            readable, _, _ = select.select([0, ended], [], [])
            if 0 in readable and not os.read(0, 1):
                return None
            if ended in readable:
                os.read(ended, 4096)
        return process.returncode
    finally:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _prepare(ids: Sequence[int] | None, file_bytes: int | None, parent: int) -> Callable[[], None]:
    libc = ctypes.CDLL(None) if sys.platform.startswith("linux") else None

    def prepare() -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if file_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
        if ids is not None:
            os.setgroups([])
            os.setgid(ids[1])
            os.setuid(ids[0])
        if libc is not None:  # after setuid, which would undo it
            libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)

    return prepare


if __name__ == "__main__":
    main()
