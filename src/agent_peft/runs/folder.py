"""The ownership of a run directory: which run it holds, and which files may be replaced or removed.

A folder belongs to a run if its config.yaml is a configuration of ours. Links in it are not followed, and
files that no run wrote are never removed.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_peft.configuration import yaml12
from agent_peft.configuration.paths import absolute
from agent_peft.configuration.run_config import TrainConfig
from agent_peft.files import MEGABYTE, parse_json, read_text, write_atomic, write_json_atomic
from agent_peft.policies.models.start import START
from agent_peft.policies.precision import choose_precision
from agent_peft.runs.branch import (
    Origin,
    copy_origin,
    find_origin,
    is_origin,
    read_origin,
    split,
    write_origin,
)
from agent_peft.runs.changes import Change, Earlier, accept, read_earlier
from agent_peft.runs.checkpoint import checkpoints
from agent_peft.runs.checkpoint import is_ours as is_checkpoint
from agent_peft.runs.digests import DIGESTS, Contents
from agent_peft.runs.history import first_record, is_record
from agent_peft.runs.layout import (
    CONFIG,
    FILES,
    RECORD,
    TRACKERS,
    check_run_files,
    read_record,
)
from agent_peft.runs.lock import Lock
from agent_peft.types import AgentPeftError

STOPPED = "stopped.json"  # exists after an update that was not finite has ended the run
_APPENDED = ("metrics.jsonl", "timing.jsonl", "log.txt")
# what may be in a folder before its run: a scheduler's output, and the files of older versions of the tool
_BEFORE = re.compile(r"\..*|.*\.(out|err)|lost\+found|training\.yaml|output\.txt")
_GONE = ".gone-"  # the prefix of a folder that is being removed

_EVALUATION = re.compile(r".+\.(jsonl?|safetensors)(\.aside)?")
_SCHEDULE = re.compile(r"\.?[^/]+\.rank_\d+\.json(\.aside)?")
_START = re.compile(r".+\.(json|safetensors|jinja|txt|model|tiktoken)|additional_chat_templates")
_TRAJECTORIES = re.compile(r"\.?step_\d{6,}\.(jsonl|safetensors)(\.aside)?")

_STATE = re.compile(r"\.?[\w-]+\.json(\.aside)?")  # of a tracker; its own files are in a folder

# for each folder of a run: whether a run wrote a path inside it
FOLDERS: dict[str, Callable[[Path], bool]] = {
    "checkpoints": is_checkpoint,
    "evaluations": lambda path: path.is_file() and _EVALUATION.fullmatch(path.name) is not None,
    "schedule": lambda path: path.is_file() and _SCHEDULE.fullmatch(path.name) is not None,
    START: lambda path: _START.fullmatch(path.name) is not None,
    TRACKERS: lambda path: path.is_dir() or _STATE.fullmatch(path.name) is not None,
    "trajectories": lambda path: path.is_file() and _TRAJECTORIES.fullmatch(path.name) is not None,
}


@dataclass(frozen=True)
class Claim:
    """What a process finds in its run directory.

    Attributes:
        begun: whether the run has made steps there before.
        changes: the keys with other values than before, or than in the run that it begins from.
        notes: lines to tell.
        origin: the checkpoint of another run that the run began with.
    """

    begun: bool
    changes: tuple[Change, ...] = ()
    notes: tuple[str, ...] = ()
    origin: Origin | None = None

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Claim:
        """Return the claim whose ``dataclasses.asdict`` is ``content``."""
        origin = content["origin"]
        changes = tuple(Change(**change) for change in content["changes"])
        return cls(content["begun"], changes, tuple(content["notes"]), origin and Origin(**origin))


def claim(
    config: TrainConfig,
    lock: Lock,
    contents: Contents,
    *,
    fresh: bool = False,
    change: bool = False,
    begin: str | None = None,
) -> Claim:
    """Lock the run directory for this process, and write the configuration of a run that begins. That of a
    run that resumes stays until ``settle`` replaces it.

    Args:
        fresh: remove an earlier run.
        change: the user asks for changes of what is learned.
        begin: the checkpoint of another run to begin with: ``RUN`` or ``RUN:step_000012``.

    Raises:
        AgentPeftError: the folder holds other files or another run, or cannot be written.
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
    earlier = _check_owner(folder, fresh)
    if fresh:
        clear(folder)
        earlier = None
    check_run_files(folder)
    for name in _APPENDED:
        if (path := folder / name).exists() and path.stat().st_nlink > 1:
            raise AgentPeftError(
                f"{path}: has other names (hard links), whose content would change, too; copy it"
            )
    begun = earlier is not None and _has_results(folder)
    origin = None if earlier is None else read_origin(folder)
    changes: list[Change] = []
    notes: list[str] = []
    if begin is not None and not begun:
        origin, changes, notes = find_origin(begin, config, contents)
        clear(folder)
    elif begin is not None and not is_origin(begin, origin):
        raise AgentPeftError(
            f"{folder}: holds a run already; set another run_dir for the one that begins from {begin}, or "
            "add --fresh"
        )
    elif earlier is not None and begun:
        changes, notes = accept(folder, earlier, config, change, contents)
    elif earlier is not None and any(c.rule != "free" for c in earlier.changes(config, done=0)):
        clear(folder)  # a start that failed: it left at most an evaluation of that other configuration
        origin = None
    _check_stopped(folder, config, changes)
    if not is_record(read_record(folder)):
        write_json_atomic(folder / RECORD, first_record())  # before all else: see check_place
    if not begun:
        write_atomic(folder / CONFIG, yaml12.dump(absolute(config)))
    if origin is not None:
        write_origin(folder, origin)
        if not checkpoints(folder / "checkpoints"):
            copy_origin(folder, origin)
    return Claim(begun, tuple(changes), tuple(notes), origin)


def settle(config: TrainConfig, contents: Contents) -> None:
    """Write the configuration and the digests with which the run has resumed."""
    write_atomic(config.run_dir / CONFIG, yaml12.dump(absolute(config)))
    write_json_atomic(config.run_dir / DIGESTS, contents)
    (config.run_dir / STOPPED).unlink(missing_ok=True)


def _is_visible_link(path: Path) -> bool:
    return not path.name.startswith(".") and path.is_symlink()


def check_place(folder: Path) -> None:
    """Check that a folder is absent, empty or a run directory. Nothing is written.

    A run writes ``run.json`` first and never removes it. So a run that was killed at any moment is
    recognized, and a folder with a configuration alone is the user's.

    Raises:
        AgentPeftError: it holds other files.
    """
    if not folder.is_dir() or is_record(read_record(folder)):
        return
    inside = sorted(os.listdir(folder))
    names = [name for name in inside if not _BEFORE.fullmatch(name) or _is_visible_link(folder / name)]
    begun = "metrics.jsonl" in names or "checkpoints" in names  # by a version that wrote no run.json
    if names and not (begun and read_earlier(folder) is not None):
        raise AgentPeftError(
            f"{folder}: holds {names[0]} and no {RECORD} of a run, so it is no run directory; set another "
            "run_dir"
        )


def _check_stopped(folder: Path, config: TrainConfig, changes: Sequence[Change]) -> None:
    """Check that a run that an update has stopped would not stop there again.

    Raises:
        AgentPeftError: it would, since nothing that is learned has changed.
    """
    if not (stopped := folder / STOPPED).is_file():
        return
    stage, step = _stopped_at(stopped, config)
    if config.stages[stage].nonfinite == "stop" and all(change.rule == "free" for change in changes):
        raise AgentPeftError(
            f"{folder}: step {step} stopped this run with a loss or a gradient that is not finite, and would "
            f"again; add stages.{stage}.nonfinite=skip, or start over (--fresh) or continue (--change) with "
            "a lower optimizer.learning_rate"
        )


def dtype_of_run(config: TrainConfig, fresh: bool, begin: str | None = None) -> str:
    """Return the dtype that a run computes in, with ``auto`` decided. A run that has begun, here or as the
    run that it begins from, keeps its dtype, whatever a new measurement would say.
    """
    if config.policy.dtype != "auto":
        return config.policy.dtype
    if not fresh and _has_results(config.run_dir):
        begun = recorded_dtype(config.run_dir)
    else:
        begun = None if begin is None else recorded_dtype(split(begin)[0])
    return begun or choose_precision(config.policy, fetch=True).name


def recorded_dtype(run: Path) -> str | None:
    """Return the dtype in the configuration of a run directory; None where there is none of ours."""
    file = run / CONFIG
    if not file.is_file():
        return None
    with suppress(AgentPeftError, LookupError, TypeError):  # it is no run of ours, which ``claim`` reports
        content: Any = yaml12.plain(yaml12.parse(read_text(file, "a YAML file", MEGABYTE), str(file)))
        if content["policy"]["dtype"] in ("float32", "bfloat16"):
            return str(content["policy"]["dtype"])
    return None


def settle_dtype(config: TrainConfig, dtype: str) -> TrainConfig:
    """Return the configuration with another ``policy.dtype``."""
    return config.model_copy(update={"policy": config.policy.model_copy(update={"dtype": dtype})})


def _check_owner(folder: Path, fresh: bool) -> Earlier | None:
    """Check that a run wrote everything at the places where a run writes or removes files. Return the
    configuration there, if there is one.

    Raises:
        AgentPeftError: a file or folder there is of another origin.
    """
    names = [name for name in (*FOLDERS, *FILES) if os.path.lexists(folder / name)]
    earlier = read_earlier(folder) if CONFIG in names else None
    if names and earlier is None and not fresh:
        check_run_files(folder)
        raise AgentPeftError(
            f"{folder / CONFIG}: is no run's configuration; put back that of the run, or set another run_dir"
        )
    for name in names:
        path = folder / name
        if path.is_symlink():
            continue
        if path.is_dir() != (name in FOLDERS):
            raise AgentPeftError(f"{path}: is {'a' if path.is_dir() else 'no'} folder; remove it")
        for inside in sorted(path.iterdir()) if name in FOLDERS else ():
            if not FOLDERS[name](inside):
                raise AgentPeftError(
                    f"{inside}: was not written by a run; move it elsewhere, or set another run_dir"
                )
    return earlier


def _has_results(folder: Path) -> bool:
    files = folder / "metrics.jsonl", folder / STOPPED
    if any(os.path.lexists(path) and path.lstat().st_size > 0 for path in files):
        return True
    return any((folder / "checkpoints").glob("*step_*"))


def _stopped_at(path: Path, config: TrainConfig) -> tuple[int, int]:
    """Return the stage and the step that a run was stopped at."""
    try:
        content = parse_json(read_text(path, "a JSON file", MEGABYTE))
        stage, step = int(content["stage"]), int(content["step"])
        if not 0 <= stage < len(config.stages):
            raise ValueError("there is no such stage")
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        raise AgentPeftError(
            f"{path}: is damaged ({error}); remove it, and the run continues from its newest checkpoint"
        ) from error
    return stage, step


def clear(folder: Path) -> None:
    """Remove a run, its configuration last. If this is killed, the rest is still that run, at its start.
    What remains is ``run.json``, which says whose the folder is.
    """
    with suppress(FileNotFoundError):
        if not stat.S_ISREG((folder / RECORD).lstat().st_mode):
            (folder / RECORD).unlink()
    write_json_atomic(folder / RECORD, first_record())
    for name in FOLDERS:
        gone = folder / f"{_GONE}{name}"
        if gone.is_symlink() or gone.is_file():
            gone.unlink()
        shutil.rmtree(gone, ignore_errors=True)
        if (folder / name).is_symlink():
            (folder / name).unlink()
        elif (folder / name).is_dir():
            (folder / name).rename(gone)
            shutil.rmtree(gone)
    for name in FILES:
        (folder / name).unlink(missing_ok=True)
