"""A run directory: which run it holds, its lock, and how it begins, resumes or starts over.

A folder with a ``run.json`` belongs to a run, with all that lies at the places of a run's files (``FOLDERS``,
``FILES``). Links there are not followed, and everything else in the folder stays.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from agent_peft.configuration import yaml12
from agent_peft.configuration.paths import absolute
from agent_peft.configuration.run_config import TrainConfig
from agent_peft.files import MEGABYTE, locked, parse_json, read_text, write_atomic, write_json_atomic
from agent_peft.hardware import choose_device
from agent_peft.policies.forward.products import PRODUCTS, choose_library
from agent_peft.policies.models.start import split_run
from agent_peft.policies.precision import choose_precision
from agent_peft.runs.branch import Origin, copy_origin, find_origin, is_origin, read_origin, write_origin
from agent_peft.runs.changes import Change, accept, read_earlier
from agent_peft.runs.checkpoint import remove
from agent_peft.runs.digests import DIGESTS, Contents
from agent_peft.runs.history import first_record, is_record
from agent_peft.runs.layout import CONFIG, FILES, FOLDERS, RECORD, check_run_files, read_record
from agent_peft.types import AgentPeftError

STOPPED = "stopped.json"  # exists after an update that was not finite has ended the run
# keys of the policy whose ``auto`` a measurement decides, and what it may become
MEASURED = {"dtype": ("float32", "bfloat16"), "matmul": tuple(PRODUCTS)}
_APPENDED = ("metrics.jsonl", "timing.jsonl", "log.txt")
_BEFORE = re.compile(r"\..*|.*\.(out|err)|lost\+found")  # what a scheduler or a disk puts into a new folder


class Lock:
    """Lets one process at a time write a run directory, until ``stack`` is closed. If the file ``.lock`` is
    removed meanwhile, ``renew`` notices.
    """

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._path, self._stack = folder / ".lock", stack
        self._inode: tuple[int, int] | None = None  # of the file that is locked

    def acquire(self) -> None:
        """Lock the folder. Raises `OSError`: the file cannot be made."""
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


@dataclass(frozen=True)
class RunDir:
    """An opened run directory."""

    begun: bool  # the run has made steps there before
    changes: tuple[Change, ...] = ()  # keys with other values than before, or than in the run of ``origin``
    messages: tuple[str, ...] = ()  # to print
    origin: Origin | None = None  # the checkpoint of another run that the run began with


def open_run_dir(
    config: TrainConfig,
    lock: Lock,
    contents: Contents,
    *,
    fresh: bool = False,
    change: bool = False,
    begin: str | None = None,
) -> RunDir:
    """Lock the run directory for this process, and write the configuration of a run that begins. That of a
    run that resumes stays until ``write_config`` replaces it.

    Args:
        fresh: remove an earlier run.
        change: the user asks for changes of what is learned.
        begin: the checkpoint of another run to begin with: ``RUN`` or ``RUN:step_000012``.
    """
    folder = config.run_dir
    check_place(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except OSError as error:
        raise AgentPeftError(
            f"{folder}: cannot be a run directory ({error.strerror}); set another run_dir"
        ) from error
    if fresh:
        clear(folder)
    check_run_files(folder)
    for name in _APPENDED:
        if (path := folder / name).exists() and path.stat().st_nlink > 1:
            raise AgentPeftError(
                f"{path}: has other names (hard links), whose content would change, too; copy it"
            )
    earlier, begun = read_earlier(folder), _has_results(folder)
    origin = read_origin(folder)
    changes: list[Change] = []
    messages: list[str] = []
    if begun and earlier is None:
        raise AgentPeftError(
            f"{folder / CONFIG}: is not a run's configuration; put back that of the run, or start over with "
            "--fresh"
        )
    if begin is not None and not begun:
        origin, changes, messages = find_origin(begin, config, contents)
        clear(folder)
    elif begin is not None and not is_origin(begin, origin):
        raise AgentPeftError(
            f"{folder}: holds a run already; set another run_dir for the one that begins from {begin}, or "
            "add --fresh"
        )
    elif earlier is not None and begun:
        changes, messages = accept(folder, earlier, config, change, contents)
    elif earlier is None or any(c.rule != "free" for c in earlier.changes(config, done=0)):
        clear(folder)  # a start that failed: it left at most an evaluation of that other configuration
        origin = None
    _check_stopped(folder, config, changes)
    if not is_record(read_record(folder)):
        write_json_atomic(folder / RECORD, first_record())  # before all else: see check_place
    if not begun:
        write_atomic(folder / CONFIG, yaml12.dump(absolute(config)))
    if origin is not None:
        write_origin(folder, origin)
        copy_origin(folder, origin)
    return RunDir(begun, tuple(changes), tuple(messages), origin)


def write_config(config: TrainConfig, contents: Contents) -> None:
    """Write the configuration and the digests with which the run has begun or resumed."""
    write_atomic(config.run_dir / CONFIG, yaml12.dump(absolute(config)))
    write_json_atomic(config.run_dir / DIGESTS, contents)
    (config.run_dir / STOPPED).unlink(missing_ok=True)


def check_place(folder: Path) -> None:
    """Check that a folder is absent, empty or a run directory. Nothing is written.

    A run writes ``run.json`` first and never removes it. So a run that was killed at any moment is
    recognized, and a folder with a configuration alone is the user's. Where ``run.json`` is damaged, a
    configuration with results is a run.
    """
    if not folder.is_dir() or is_record(read_record(folder)):
        return
    names = [name for name in sorted(os.listdir(folder)) if not _BEFORE.fullmatch(name)]
    if names and not (_has_results(folder) and read_earlier(folder) is not None):
        raise AgentPeftError(
            f"{folder}: holds {names[0]} and no {RECORD} of a run, so it is not a run directory; set another "
            "run_dir"
        )


def _check_stopped(folder: Path, config: TrainConfig, changes: Sequence[Change]) -> None:
    """Check that a run that an update has stopped would not stop there again."""
    if not (path := folder / STOPPED).is_file():
        return
    try:
        content = parse_json(read_text(path, "a JSON file", MEGABYTE))
        number, step = int(content["stage"]), int(content["step"])
        if not 0 <= number < len(config.stages):
            raise ValueError("there is no such stage")
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        raise AgentPeftError(
            f"{path}: is damaged ({error}); remove it, and the run continues from its newest checkpoint"
        ) from error
    if config.stages[number].nonfinite == "stop" and all(change.rule == "free" for change in changes):
        raise AgentPeftError(
            f"{folder}: step {step} stopped this run with a loss or a gradient that is not finite, and would "
            f"again; add stages.{number}.nonfinite=skip, or start over (--fresh) or continue (--change) with "
            "a lower optimizer.learning_rate"
        )


def measured_of_run(config: TrainConfig, fresh: bool, begin: str | None = None) -> dict[str, str]:
    """Return the values of ``MEASURED`` that a run computes with, with ``auto`` decided. A run that has
    begun, here or as the run that it begins from, keeps its values, whatever a new measurement would be.
    """
    values = {key: str(getattr(config.policy, key)) for key in MEASURED}
    if not fresh and _has_results(config.run_dir):
        begun = recorded_measured(config.run_dir)
    else:
        begun = {} if begin is None else recorded_measured(split_run(begin)[0])
    values |= {key: value for key, value in begun.items() if values[key] == "auto"}
    if values["dtype"] == "auto":
        values["dtype"] = choose_precision(config.policy, fetch=True).name
    if values["matmul"] == "auto":
        device, dtype = choose_device(config.policy.device), getattr(torch, values["dtype"])
        values["matmul"] = choose_library("auto", device, dtype).name
    return values


def recorded_measured(run: Path) -> dict[str, str]:
    """Return the readable values of ``MEASURED`` in the configuration of a run directory."""
    file = run / CONFIG
    if not file.is_file():
        return {}
    with suppress(AgentPeftError, LookupError, TypeError):
        content: Any = yaml12.plain(yaml12.parse(read_text(file, "a YAML file", MEGABYTE), str(file)))
        policy = content["policy"]
        return {key: policy[key] for key, values in MEASURED.items() if policy.get(key) in values}
    return {}


def with_policy(config: TrainConfig, **keys: str) -> TrainConfig:
    return config.model_copy(update={"policy": config.policy.model_copy(update=keys)})


def _has_results(folder: Path) -> bool:
    files = folder / "metrics.jsonl", folder / STOPPED
    if any(os.path.lexists(path) and path.lstat().st_size > 0 for path in files):
        return True
    return any((folder / "checkpoints").glob("step_*"))


def clear(folder: Path) -> None:
    """Remove a run, its configuration last. If this is killed, the rest is still that run, at its start.
    ``run.json`` stays, by which the folder is known.
    """
    with suppress(FileNotFoundError):
        if not stat.S_ISREG((folder / RECORD).lstat().st_mode):
            (folder / RECORD).unlink()
    write_json_atomic(folder / RECORD, first_record())
    for name in FOLDERS:
        gone = folder / f".gone-{name}"
        remove(gone)
        if (folder / name).is_dir() and not (folder / name).is_symlink():
            (folder / name).rename(gone)
            remove(gone)
    for name in (*FOLDERS, *FILES):
        remove(folder / name)
