"""Trainings in the background: ``agent-peft train`` in another process. ``stop`` sends a signal to the
process that holds the lock of the run directory.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from agent_peft.configuration.load import dump_config
from agent_peft.configuration.run_config import TrainConfig
from agent_peft.files import MEGABYTE, open_regular, read_bytes, write_atomic
from agent_peft.runs.folder import check_place
from agent_peft.runs.history import state_of
from agent_peft.runs.layout import CONFIG, read_record
from agent_peft.types import AgentPeftError

# next to the run directory, which holds nothing but the run: NAME.training.yaml, NAME.output.txt
REQUEST = "training.yaml"  # the configuration that the process reads
OUTPUT = "output.txt"  # what it prints
START_SECONDS = 120.0  # in which a process must reach its run directory
STOP_SECONDS = 60.0
_POLL = 0.05  # seconds

_children: list[subprocess.Popen[bytes]] = []


def begin(config: TrainConfig) -> dict[str, Any]:
    """Train in its own process, which outlives this one. Return as soon as it has its run directory.
    If it ends before that, its message is the error.
    """
    folder = config.run_dir
    check_place(folder)
    request = _next_to(folder, REQUEST)
    dump_config(config, request)
    write_atomic(_next_to(folder, OUTPUT), "")  # nothing that was there is written to
    command = [sys.executable, "-m", "agent_peft", "train", str(request)]
    with open(open_regular(_next_to(folder, OUTPUT), os.O_WRONLY), "wb") as output:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    _children.append(child)

    def is_there() -> bool:
        process = read_record(folder).get("process") or {}
        trains = process.get("pid") == child.pid and (folder / CONFIG).is_file()
        return trains or child.poll() is not None

    if not _wait(is_there, START_SECONDS):
        return {"state": "starting", "pid": child.pid}
    if child.returncode:
        raise AgentPeftError(f"the training ended at once: {_last_line(folder)}")
    return {"state": state(folder), "pid": child.pid}


def state(folder: Path) -> str:
    """The state of a run."""
    for child in _children:
        child.poll()  # a child that has ended counts as a process until it is polled
    return state_of(read_record(folder))


def stop(folder: Path) -> str:
    """Stop the process that trains in a run directory, wait for its end, and return the run's state. The same
    training continues later from its newest checkpoint.
    """
    if (now := state(folder)) != "running":
        raise AgentPeftError(f"{folder}: is not running (it is {now}), so there is nothing to stop")
    process = read_record(folder).get("process") or {}
    pid = process.get("pid")
    if process.get("host") != socket.gethostname() or not isinstance(pid, int):
        raise AgentPeftError(f"{folder}: runs on {process.get('host')!s:.80}; stop it there")
    refusal = AgentPeftError(
        f"{folder}: its process {pid} is not one that was started in the background and holds the lock "
        "of this folder, so it is left alone"
    )
    if pid == os.getpid() or not hasattr(os, "pidfd_open"):
        raise refusal
    with suppress(ProcessLookupError):
        process_descriptor = os.pidfd_open(pid)  # first: the number may get to another process
        try:
            if not (state(folder) == "running" and _trains(pid) and _holds(pid, folder / ".lock")):
                raise refusal
            signal.pidfd_send_signal(process_descriptor, signal.SIGTERM)
        finally:
            os.close(process_descriptor)
    if not _wait(lambda: state(folder) != "running", STOP_SECONDS):
        raise AgentPeftError(f"{folder}: process {pid} has not ended in {STOP_SECONDS:g} seconds; ask again")
    return state(folder)


def _trains(pid: int) -> bool:
    """Whether the command of a process is ``agent-peft train``."""
    with suppress(OSError):
        words = [os.path.basename(word) for word in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")]
        return b"train" in words and bool({b"agent_peft", b"agent-peft"} & set(words))
    return False


def _holds(pid: int, lock: Path) -> bool:
    """Whether a process holds the lock of a run directory: the file that is there now, not a link to it and
    not under another name, and locked, not only open.
    """
    with suppress(OSError):
        descriptor = open_regular(lock, os.O_RDWR)
        try:
            ours = os.fstat(descriptor)
        finally:
            os.close(descriptor)
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                facts = Path(f"/proc/{pid}/fdinfo/{file.name}")
                if os.path.samestat(file.stat(), ours) and "FLOCK" in facts.read_text():
                    return True
    return False


def _next_to(folder: Path, name: str) -> Path:
    return folder.with_name(f"{folder.name}.{name}")


def _last_line(folder: Path) -> str:
    with suppress(AgentPeftError):
        text = read_bytes(_next_to(folder, OUTPUT), "its output", 64 * MEGABYTE, unlinked=1)
        if lines := text[-4000:].decode(errors="replace").strip().splitlines():
            return lines[-1].removeprefix("agent-peft: ")
    return f"it printed nothing (see {_next_to(folder, OUTPUT)})"


def _wait(is_done: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not is_done():
        if time.monotonic() > end:
            return False
        time.sleep(_POLL)
    return True
