"""A run directory as a place: whose it is, one process at a time, and what may be removed from it.

A folder is a run's if its config.yaml is a configuration of ours. Nothing in it is a link, and nothing is
removed that no run wrote.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from pydantic import ValidationError

from agent_peft.configuration import yaml12
from agent_peft.configuration.run_config import TrainConfig, resolved
from agent_peft.files import MEGABYTE, parse_json, read_text, write_atomic
from agent_peft.lookup import without_imports
from agent_peft.policies.precision import choose_precision
from agent_peft.runs.checkpoint import is_ours as is_checkpoint
from agent_peft.types import AgentPeftError

CONFIG = "config.yaml"
STOPPED = "stopped.json"  # there once an update that is not finite has ended the run
FILES = (
    "metrics.jsonl",
    "timing.jsonl",
    STOPPED,
    CONFIG,
)  # the configuration last: while it is there, the folder is that run's
_GONE = ".gone-"  # what begins so is half removed

_EVALUATION = re.compile(r".+\.json|\..+\.json\.aside")
_SCHEDULE = re.compile(r"\.?[^/]+\.rank_\d+\.json(\.aside)?")
_TRAJECTORIES = re.compile(r"step_\d{6,}\.jsonl|\.step_\d{6,}\.jsonl\.aside")

# for each folder of a run: whether something in it was written by a run
FOLDERS: dict[str, Callable[[Path], bool]] = {
    "checkpoints": is_checkpoint,
    "evaluations": lambda path: path.is_file() and _EVALUATION.fullmatch(path.name) is not None,
    "schedule": lambda path: path.is_file() and _SCHEDULE.fullmatch(path.name) is not None,
    "trajectories": lambda path: path.is_file() and _TRAJECTORIES.fullmatch(path.name) is not None,
}


class Lock:
    """One process at a time, as long as the file ``.lock`` is left alone. Where it was removed, that is
    found out, and mended or told.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / ".lock"
        self._file: tuple[int, int] | None = None  # the one that is locked

    def acquire(self, stack: ExitStack) -> None:
        """Until ``stack`` is closed.

        Raises:
            AgentPeftError: another process has it.
            OSError: the file cannot be made.
        """
        try:
            stack.enter_context(FileLock(self._path).acquire(timeout=0))
        except Timeout as error:
            raise AgentPeftError(
                f"{self._path.parent}: another process is training there; wait for it, or set another run_dir"
            ) from error
        self._file = self._here()

    def renew(self, stack: ExitStack) -> None:
        """Asked before a step is written: without its file, the lock keeps nobody out.

        Raises:
            AgentPeftError: another process has locked a new file.
        """
        if self._here() == self._file:
            return
        try:
            self.acquire(stack)
        except AgentPeftError as error:
            raise AgentPeftError(
                f"{self._path}: was removed while this process trained, and another one trains there now; this one stops, and nothing is "
                "written twice"
            ) from error

    def _here(self) -> tuple[int, int] | None:
        try:
            found = self._path.lstat()
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino


def claim(config: TrainConfig, fresh: bool, lock: Lock, stack: ExitStack) -> None:
    """Make the run directory ours: one process at a time, and one configuration for its whole life.

    Raises:
        AgentPeftError: it is somebody else's, another run's, or cannot be written.
    """
    folder, text = config.run_dir, yaml12.dump(resolved(config))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(stack)
    except OSError as error:
        raise AgentPeftError(
            f"{folder}: cannot be a run directory ({error.strerror}); set another run_dir"
        ) from error
    _check_whose(folder)
    written = folder / CONFIG
    if fresh:
        clear(folder)
    elif written.exists() and (changed := _changed(read_text(written, "a YAML file", MEGABYTE), text)):
        if _has_results(folder):
            raise AgentPeftError(
                f"{folder}: holds a run of another configuration ({changed}); set another run_dir, or start over with --fresh"
            )
        clear(folder)  # a start that failed: at most an evaluation of that other configuration
    for name in (*FOLDERS, *FILES):
        if (folder / name).is_symlink():
            raise AgentPeftError(
                f"{folder / name}: is a link, which is not followed; move what it leads to here, or set another run_dir"
            )
    write_atomic(written, text)
    if (stopped := folder / STOPPED).is_file():
        stage, step = _stopped_at(stopped, config)
        if config.stages[stage].nonfinite == "stop":
            raise AgentPeftError(
                f"{folder}: step {step} stopped this run with a loss or a gradient that is not finite, and would again; "
                f"add stages.{stage}.nonfinite=skip, or start over (--fresh) with a lower optimizer.learning_rate"
            )
        stopped.unlink()


def dtype_of_run(config: TrainConfig, fresh: bool) -> str:
    """What the run computes in, ``auto`` decided: a run that has begun keeps what it began in, whatever
    another measurement would say.
    """
    if config.policy.dtype != "auto":
        return config.policy.dtype
    written = config.run_dir / CONFIG
    with suppress(AgentPeftError, LookupError, TypeError):  # it is no run of ours, which ``claim`` tells
        if not fresh and written.is_file() and _has_results(config.run_dir):
            began: Any = yaml12.plain(yaml12.parse(read_text(written, "a YAML file", MEGABYTE), str(written)))
            if began["policy"]["dtype"] in ("float32", "bfloat16"):
                return str(began["policy"]["dtype"])
    return choose_precision(config.policy).name


def settle_dtype(config: TrainConfig, dtype: str) -> TrainConfig:
    """The same configuration with ``policy.dtype``."""
    return config.model_copy(update={"policy": config.policy.model_copy(update={"dtype": dtype})})


def check_place(path: Path, config: TrainConfig) -> None:
    """
    Args:
        path: the file that ``config`` was read from, its run_dir included.

    Raises:
        AgentPeftError: it is the file of a run directory that was moved, or is seen from another folder, and
            would start a run elsewhere.
    """
    folder = path.parent
    if (
        path.name == CONFIG
        and (folder / "checkpoints").is_dir()
        and folder.resolve() != config.run_dir.resolve()
    ):
        raise AgentPeftError(
            f"{path}: belongs to a run in {folder}, and its run_dir is {config.run_dir} (seen from {Path.cwd()}); "
            f"to go on with that run, add run_dir={folder}; to start another one, add run_dir and a folder that is not there yet"
        )


def check_paths(run: Path, config: TrainConfig) -> None:
    """
    Raises:
        AgentPeftError: a path of the run's policy is relative, is not here, and is there as seen from where
            the run was started.
    """
    parts, place = config.run_dir.parts, run.resolve()
    if config.run_dir.is_absolute() or place.parts[-len(parts) :] != parts:
        return
    root = Path(*place.parts[: -len(parts)])
    for key in ("model", "adapter"):
        value = getattr(config.policy, key, None)
        if value is not None and not Path(value).exists() and (root / value).exists():
            raise AgentPeftError(
                f"{run}: policy.{key} {str(value)!r} is relative to {root}, where the run was started; run the command there"
                + (f", or add policy.model={root / value}" if key == "model" else "")
            )


def _check_whose(folder: Path) -> None:
    """
    Raises:
        AgentPeftError: something is here that no run of ours wrote, at a place where a run writes or removes.
    """
    advice = "so it is no run of ours; set another run_dir"
    here = [name for name in (*FOLDERS, *FILES) if os.path.lexists(folder / name)]
    if here and CONFIG not in here:
        raise AgentPeftError(f"{folder}: holds {here[0]} and no {CONFIG}, {advice}")
    if CONFIG in here and not _is_configuration(folder / CONFIG):
        raise AgentPeftError(
            f"{folder / CONFIG}: is no run's configuration, {advice}, or put back the {CONFIG} of the run"
        )
    for name in here:
        path = folder / name
        if path.is_symlink():
            continue
        if path.is_dir() != (name in FOLDERS):
            raise AgentPeftError(f"{path}: is {'a' if path.is_dir() else 'no'} folder, {advice}")
        for inside in sorted(path.iterdir()) if name in FOLDERS else ():
            if not FOLDERS[name](inside):
                raise AgentPeftError(
                    f"{inside}: was not written by a run; move it elsewhere, or set another run_dir"
                )


def _is_configuration(path: Path) -> bool:
    try:
        content = yaml12.plain(yaml12.parse(read_text(path, "a YAML file", MEGABYTE), path.name))
        with without_imports():
            TrainConfig.model_validate_json(json.dumps(content), strict=True)
    except (AgentPeftError, ValidationError, ValueError, RecursionError):
        return False
    return True


def _has_results(folder: Path) -> bool:
    written = any(
        os.path.lexists(path) and path.lstat().st_size > 0
        for path in (folder / "metrics.jsonl", folder / STOPPED)
    )
    return written or any((folder / "checkpoints").glob("*step_*"))


def _changed(written: str, text: str) -> str:
    """Which keys differ between two configurations, of those that may not change while a run lives; empty
    where none does.
    """
    if written == text:
        return ""
    old, new = (yaml12.plain(yaml12.parse(found, CONFIG)) for found in (written, text))
    changed = sorted(_differences(_binding(old), _binding(new)))
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    return f"{', '.join(changed[:3])}{more} {'differs' if len(changed) == 1 else 'differ'}" if changed else ""


def _stopped_at(path: Path, config: TrainConfig) -> tuple[int, int]:
    """The stage and the step that a run was stopped at."""
    try:
        was = parse_json(read_text(path, "a JSON file", MEGABYTE))
        stage, step = int(was["stage"]), int(was["step"])
        if not 0 <= stage < len(config.stages):
            raise ValueError("there is no such stage")
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        raise AgentPeftError(
            f"{path}: is damaged ({error}); remove it, and the run goes on from its newest checkpoint"
        ) from error
    return stage, step


def _binding(content: Any) -> dict[str, Any]:
    """A configuration without what may change while it runs: it decides nothing that was already done."""
    stages = [
        {key: value for key, value in stage.items() if key != "nonfinite"}
        for stage in content.get("stages") or []
    ]
    return {
        **{key: value for key, value in content.items() if key not in ("ranks", "run_dir")},
        "stages": stages,
    }


def _differences(old: Any, new: Any, key: str = "") -> Iterator[str]:
    """Dotted keys whose values differ.

    >>> list(_differences({"seed": 0, "stages": [{"steps": 1}]}, {"seed": 0, "stages": [{"steps": 2}]}))
    ['stages.0.steps']
    """
    if (
        isinstance(old, list)
        and isinstance(new, list)
        and all(isinstance(item, dict) for item in (*old, *new))
    ):
        old, new = ({str(place): item for place, item in enumerate(items)} for items in (old, new))
    if isinstance(old, dict) and isinstance(new, dict):
        for name in dict.fromkeys([*old, *new]):
            yield from _differences(old.get(name), new.get(name), f"{key}.{name}" if key else name)
    elif old != new:
        yield key


def clear(folder: Path) -> None:
    """Remove a run, its configuration last: whenever this is killed, what is left is still that run, whole
    or at its start.
    """
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
