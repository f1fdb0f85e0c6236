"""The lock of a run directory."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from agent_peft.files import locked
from agent_peft.types import AgentPeftError


class Lock:
    """Lets one process at a time write a run directory, until ``stack`` is closed. If the file ``.lock`` is
    removed meanwhile, ``renew`` notices.
    """

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._path, self._stack = folder / ".lock", stack
        self._inode: tuple[int, int] | None = None  # of the file that is locked

    def acquire(self) -> None:
        """Lock the folder.

        Raises:
            OSError: the file cannot be made.
        """
        try:
            self._stack.enter_context(locked(self._path))
        except BlockingIOError as error:
            raise AgentPeftError(
                f"{self._path.parent}: another process is training there; wait for it, or set another run_dir"
            ) from error
        self._inode = self._present_inode()

    def renew(self) -> None:
        """Lock again if the file is gone, since a lock without its file keeps no other process out."""
        if self._present_inode() == self._inode:
            return
        try:
            self.acquire()
        except AgentPeftError as error:
            raise AgentPeftError(
                f"{self._path}: was removed while this process trained, and another process trains there; "
                "this one stops, and nothing is written twice"
            ) from error

    def _present_inode(self) -> tuple[int, int] | None:
        try:
            status = self._path.lstat()
        except FileNotFoundError:
            return None
        return status.st_dev, status.st_ino
