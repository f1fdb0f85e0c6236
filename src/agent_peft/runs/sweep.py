"""Sweeps: one run for each combination of values, in processes of ``agent-peft train``."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any

from agent_peft.child_processes import end_with_parent
from agent_peft.configuration import yaml12
from agent_peft.configuration.load import read_config
from agent_peft.configuration.read import COMMAND_LINE
from agent_peft.runs.comparison import short_names
from agent_peft.runs.layout import CONFIG
from agent_peft.types import AgentPeftError

OUTPUT = "train.out"  # what a run prints when several run at once; a run directory may hold such files
_POLL = 0.1  # seconds
_LONGEST = 40  # characters of a value in the name of a folder


@dataclass(frozen=True)
class Cell:
    """One run of a sweep: its folder, and the overrides of its configuration."""

    folder: Path
    overrides: tuple[str, ...]


def plan(config: Path, arguments: Sequence[str], jobs: int = 1) -> list[Cell]:
    """Return the runs of a sweep, in folders below the configuration's ``run_dir``. Each configuration is
    checked.

    Args:
        arguments: overrides. The items of a list are the values to try (a value that is a list is written
            ``[[a, b]]``), and ``seeds=3`` is short for ``seed=[0, 1, 2]``.
        jobs: how many runs will share the cores.
    """
    axes: dict[str, Sequence[Any]] = {}
    fixed: list[str] = []
    for text in arguments:
        key, _, value = text.partition("=")
        values = yaml12.plain(yaml12.parse(value, COMMAND_LINE, (key,), lines=False))
        if key == "seeds":
            if type(values) is not int or values < 1:
                raise AgentPeftError(f"{text!r}: seeds is how many to try; write seeds=3")
            key, values = "seed", list(range(values))
        if not isinstance(values, list):
            fixed.append(text)
            continue
        if key == "run_dir":
            raise AgentPeftError(f"{text!r}: run_dir is one folder; the runs of the sweep are below it")
        if key in axes or not values or any(values.count(value) > 1 for value in values):
            raise AgentPeftError(f"{text!r}: list each value of {key} once, as {key}=[a,b]")
        axes[key] = values
    if not axes:
        raise AgentPeftError("nothing varies; add key=[a,b] or seeds=3, or use agent-peft train")
    settings = read_config(config, [*fixed, *(_override(key, values[0]) for key, values in axes.items())])[0]
    if (settings.run_dir / CONFIG).is_file():
        raise AgentPeftError(
            f"{settings.run_dir}: is a run; set run_dir to a folder for the runs of the sweep"
        )
    if jobs > 1 and settings.threads is None:
        fixed.append(f"threads={max(1, (os.cpu_count() or 1) // jobs)}")
    fixed = [text for text in fixed if text.partition("=")[0].strip() != "run_dir"]
    cells = []
    for values in product(*axes.values()):
        of_cell = dict(zip(axes, values, strict=True))
        folder = settings.run_dir / cell_name(of_cell)
        overrides = (*fixed, *(_override(key, value) for key, value in of_cell.items()))
        cells.append(Cell(folder, (*overrides, _override("run_dir", str(folder)))))
        read_config(config, cells[-1].overrides, warn=False)
    return cells


def _override(key: str, value: Any) -> str:
    return f"{key}={json.dumps(value)}"


def cell_name(values: Mapping[str, Any]) -> str:
    """Return the name of a run's folder. What a folder cannot hold of a value is replaced, with a digest.

    >>> cell_name({"optimizer.learning_rate": 0.001, "seed": 0})
    'learning_rate=0.001,seed=0'
    """
    parts = []
    for name, value in zip(short_names(list(values)), values.values(), strict=True):
        text = value if isinstance(value, str) else json.dumps(value)
        plain = re.sub(r"[^\w.+-]+", "_", text)[:_LONGEST]
        parts.append(
            f"{name}={plain}" + (f"-{sha256(text.encode()).hexdigest()[:6]}" if plain != text else "")
        )
    return ",".join(parts)


def train_cells(config: Path, cells: Sequence[Cell], jobs: int) -> Iterator[tuple[Cell, int | None]]:
    """Train each run with ``agent-peft train``, ``jobs`` at a time; a run that was stopped is resumed.

    Yields:
        Each run as it starts (None) and as it ends (its exit code). If the iteration ends early, so do the
        processes; on Linux, also if this process is killed.
    """
    waiting, running = list(cells), dict[Cell, subprocess.Popen[bytes]]()
    prepare = end_with_parent()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                cell = waiting.pop(0)
                yield cell, None
                command = [sys.executable, "-m", "agent_peft", "train", str(config), *cell.overrides]
                running[cell] = _start(command, cell.folder if jobs > 1 else None, prepare)
            for cell, process in list(running.items()):
                if process.poll() is not None:
                    del running[cell]
                    yield cell, process.returncode
            time.sleep(_POLL)
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()


def _start(
    command: Sequence[str], folder: Path | None, prepare: Callable[[], None] | None
) -> subprocess.Popen[bytes]:
    if folder is None:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=prepare)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / OUTPUT, "ab") as output:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, preexec_fn=prepare
        )
