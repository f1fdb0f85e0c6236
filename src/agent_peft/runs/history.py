"""What happened to a run: ``run.json`` (versions, machine, command, history, state) and ``log.txt`` (every
warning, and the error that ended it).

Both differ between runs of one configuration, and nothing that is learned depends on them. A failure to write
them is a warning and never ends the run.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from agent_peft.child_processes import start_of
from agent_peft.files import open_regular, write_json_atomic
from agent_peft.printable import printable
from agent_peft.runs.layout import RECORD, read_record
from agent_peft.version import __version__

logger = logging.getLogger(__name__)

LOG = "log.txt"
LINE = 2000  # characters of a message in the log
_PACKAGES = ("torch", "transformers", "peft")
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class History:
    """Writes both files while it is entered. On exit it writes how the run has ended."""

    def __init__(self, folder: Path, origin: Mapping[str, Any] | None = None) -> None:
        self.folder = folder
        self._log = _LogFile(folder / LOG)
        self._added: list[logging.Handler] = []
        self._handlers: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {}
        events = read_record(folder).get("history")
        self.record: dict[str, Any] = {
            "state": "running",
            "process": _process(),
            "command": shlex.join(sys.argv),
            "folder": str(Path.cwd()),
            "from": origin,
            "commit": _commit(),
            "versions": _versions(),
            "hardware": _hardware(),
            "history": events if isinstance(events, list) else [],
        }

    def __enter__(self) -> Self:
        # Python shows warnings by itself only while there is no handler
        shown = None if logger.hasHandlers() else logging.lastResort
        self._added = [self._log, *([] if shown is None else [shown])]
        for log in self._added:
            logging.getLogger().addHandler(log)
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) is signal.SIG_DFL:
                    self._handlers[number] = signal.signal(number, self._on_signal)
        self._write()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if isinstance(error, KeyboardInterrupt):
            self._end("interrupted", "SIGINT")
        elif error is not None:
            name = "" if type(error).__module__.startswith("agent_peft.") else f"{type(error).__name__}: "
            self._end("failed", f"{name}{error}")
        else:
            self._end("done")
        for log in self._added:
            logging.getLogger().removeHandler(log)
        self._log.close()

    def add(self, event: str, step: int, detail: str = "", **more: Any) -> None:
        """Add an event (``started``, ``resumed``, ``changed``) after ``step`` steps to the history.
        ``detail`` is for the log, and ``more`` for ``run.json``.
        """
        # infinite numbers become texts, which JSON can hold
        more = json.loads(json.dumps(more, default=str), parse_constant=str)
        self.record["history"].append({"time": _now(), "event": event, "step": step, **more})
        self._write()
        self._log.write(logging.INFO, f"{event} at step {step}" + (f": {detail}" if detail else ""))

    def _end(self, state: str, cause: str | None = None) -> None:
        self.record |= {"state": state, "process": None, "ended": _now()}
        if cause is not None:
            cause = self.record["cause"] = printable(" ".join(cause.split()), LINE)
        self._write()
        level = logging.INFO if cause is None else logging.ERROR
        self._log.write(level, state + (f": {cause}" if cause else ""))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Write who ended the run, then let the signal end it as it would have."""
        self._end("interrupted", signal.Signals(number).name)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _write(self) -> None:
        try:
            write_json_atomic(self.folder / RECORD, self.record)
        except (OSError, ValueError) as error:
            logger.warning("%s: cannot be written (%s); the run continues", self.folder / RECORD, error)


def first_record() -> dict[str, Any]:
    """What ``run.json`` holds until a ``History`` writes it: the folder belongs to a run."""
    return {"state": "running", "process": _process(), "versions": _versions()}


def is_record(record: Mapping[str, Any]) -> bool:
    """Whether a run wrote this content of ``run.json``."""
    versions = record.get("versions")
    return isinstance(versions, dict) and "agent-peft" in versions


def state_of(record: Mapping[str, Any]) -> str:
    """The state of a run by its ``run.json``: ``running``, ``done``, ``failed``, ``interrupted``, ``killed``
    where its process has ended without a word, or ``unknown``.

    >>> state_of({"state": "failed"}), state_of({})
    ('failed', 'unknown')
    """
    state, process = record.get("state"), record.get("process")
    if state not in ("running", "done", "failed", "interrupted"):
        return "unknown"
    if state == "running" and isinstance(process, dict) and process.get("host") == socket.gethostname():
        pid = process.get("pid")
        start = start_of(pid) if isinstance(pid, int) else None
        if start is None or start != process.get("birth"):
            return "killed"
    return str(state)


class _LogFile(logging.Handler):
    """Appends a line for each warning. It is open for one line at a time, and never raises."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.WARNING)
        self._path, self._failed = path, False

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(Exception):  # a message of somebody else's code may not fit its arguments
            self.write(record.levelno, record.getMessage())

    def write(self, level: int, message: str) -> None:
        line = f"{_now()} {logging.getLevelName(level)} {printable(message.strip(), LINE)}\n"
        try:
            descriptor = open_regular(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            if not self._failed:
                self._failed = True  # first: the warning comes here, too
                logger.warning("%s: cannot be written (%s); the run continues", self._path, error)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _process() -> dict[str, Any]:
    return {"pid": os.getpid(), "host": socket.gethostname(), "birth": start_of(os.getpid())}


def _commit() -> str | None:
    """The commit that is checked out in the current folder; None outside of a repository."""
    with suppress(OSError, subprocess.SubprocessError):
        command = ["git", "rev-parse", "--verify", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    return None


def _versions() -> dict[str, str]:
    versions = {"agent-peft": __version__}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions | {"python": platform.python_version()}


def _hardware() -> dict[str, Any]:
    import torch

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return {
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "memory_bytes": memory,
        "threads": torch.get_num_threads(),
        "gpus": gpus if torch.cuda.is_available() else [],
    }
