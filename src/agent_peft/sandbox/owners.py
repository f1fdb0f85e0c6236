"""The private folders in which our processes keep their machines' bundles and the runtime's state.

Each process has a folder with a lock file. When a process has ended without removing its folder (kill -9),
the next one of the same user ends what is left of its machines, and removes the folder.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import secrets
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agent_peft.types import AgentPeftError

_LOCK, RUNTIME = "lock", "runtime"
_MAX_PATH = 60
STATE = "state"  # the runtime's own folder, in which each container is a folder


class OwnerFolder:
    """The folder of this process. It is removed when the process ends."""

    def __init__(self) -> None:
        above = _private_folder()
        self.path = above / secrets.token_hex(8)
        with _locked(above / _LOCK, fcntl.LOCK_EX):
            _remove_abandoned(above)
            self.path.mkdir()
            self.path.chmod(0o711)  # a machine's root is another user, and looks for its layers below
            (self.path / STATE).mkdir(mode=0o700)
            self._lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.lockf(self._lock, fcntl.LOCK_EX)  # a child of this process does not have it
        self.process = os.getpid()
        atexit.register(self.remove)

    def name_runtime(self, command: list[str]) -> None:
        """Record how to call the runtime, for those who find the folder abandoned."""
        (self.path / RUNTIME).write_text("\0".join(command), "utf-8", "surrogateescape")

    def remove(self) -> None:
        if os.getpid() == self.process:
            _remove(self.path)


def _remove_abandoned(above: Path) -> None:
    """Remove the folders of processes that have ended, and end their machines."""
    for path in above.iterdir():
        if path.is_dir():
            try:
                with _locked(path / _LOCK, fcntl.LOCK_EX | fcntl.LOCK_NB):
                    _remove(path)
            except BlockingIOError:  # its owner lives
                continue


@contextmanager
def _locked(path: Path, how: int) -> Iterator[None]:
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.lockf(descriptor, how)
        yield
    finally:
        os.close(descriptor)


def _private_folder() -> Path:
    """Return the folder of all processes of this user: not readable by others, nor made by them."""
    path = Path(tempfile.gettempdir()).resolve() / f"agent-peft-machines-{os.getuid()}"
    if len(str(path)) > _MAX_PATH or set(str(path)) & set(":,\\"):  # of sockets, and of an overlay's layers
        raise AgentPeftError(
            f"sandbox: {path} is too long, or has a colon or comma; set TMPDIR to another folder"
        )
    path.mkdir(mode=0o711, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise AgentPeftError(f"sandbox: {path} belongs to another user; set TMPDIR to a folder of your own")
    path.chmod(0o711)
    return path


def closed_folder(path: Path) -> Path | None:
    """Return the topmost folder above path that other users may not search, such as a private TMPDIR.

    The users of a machine cannot reach its files there.
    """
    return next((p for p in reversed(path.parents) if not p.stat().st_mode & stat.S_IXOTH), None)


def _remove(path: Path) -> None:
    try:
        runtime = (path / RUNTIME).read_text("utf-8", "surrogateescape").split("\0")
        names = [entry.name for entry in (path / STATE).iterdir()]
    except OSError:
        names = []
    for name in names:
        subprocess.run(
            [*runtime, "delete", "--force", name], stdin=subprocess.DEVNULL, capture_output=True, timeout=60
        )
    shutil.rmtree(path, ignore_errors=True)
