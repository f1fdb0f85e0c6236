"""The process above a private database server. It installs and runs the server, ends it when its own input is
closed, which is when the process that started it ends, and then removes the server's folder.

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
from typing import Any

_PDEATHSIG = 1  # prctl's option
_MALLOC = {"MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": "131072"}  # freed memory returns to the kernel


def watch(folder: str, commands: list[list[str]], account: dict[str, Any], file_bytes: int) -> None:
    """Run the commands as the account (arguments of Popen), with a limit of the files that they write."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    try:
        for command in commands:
            if _run(command, cwd=folder, **account) != 0:
                break
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(command: list[str], **options: Any) -> int | None:
    """Run a command until it ends (its status) or our input is closed (None)."""
    libc, parent = ctypes.CDLL(None) if sys.platform.startswith("linux") else None, os.getpid()

    def end_with_parent() -> None:
        if libc is not None:
            libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)

    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **_MALLOC},
        start_new_session=True,
        restore_signals=False,  # a file that reaches its limit is an error then, and not a signal
        preexec_fn=end_with_parent,  # runs after the change of account, which would undo it
        **options,
    )
    try:
        while process.poll() is None:
            if select.select([0], [], [], 0.05)[0]:  # nothing is ever written to it
                return None
        return process.returncode
    finally:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


if __name__ == "__main__":
    watch(**json.loads(sys.argv[1]))
