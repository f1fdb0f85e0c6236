"""The ownership of a run directory: which run it holds, and which files may be replaced or removed.

A folder belongs to a run if its config.yaml is a configuration of ours. Links in it are not followed, and
files that no run wrote are never removed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from agent_peft.configuration import yaml12
from agent_peft.configuration.run_config import TrainConfig, resolved
from agent_peft.files import MEGABYTE, parse_json, read_text, write_atomic
from agent_peft.lookup import without_imports
from agent_peft.policies.precision import choose_precision
from agent_peft.runs.checkpoint import is_ours as is_checkpoint
from agent_peft.runs.lock import Lock
from agent_peft.types import AgentPeftError

CONFIG = "config.yaml"
STOPPED = "stopped.json"  # exists after an update that was not finite has ended the run
# in the order of their removal: as long as the configuration is there, the folder belongs to that run
FILES = ("metrics.jsonl", "timing.jsonl", STOPPED, CONFIG)
_GONE = ".gone-"  # the prefix of a folder that is being removed

_EVALUATION = re.compile(r".+\.json|\..+\.json\.aside")
_SCHEDULE = re.compile(r"\.?[^/]+\.rank_\d+\.json(\.aside)?")
_TRAJECTORIES = re.compile(r"step_\d{6,}\.jsonl|\.step_\d{6,}\.jsonl\.aside")

# for each folder of a run: whether a run wrote a path inside it
FOLDERS: dict[str, Callable[[Path], bool]] = {
    "checkpoints": is_checkpoint,
    "evaluations": lambda path: path.is_file() and _EVALUATION.fullmatch(path.name) is not None,
    "schedule": lambda path: path.is_file() and _SCHEDULE.fullmatch(path.name) is not None,
    "trajectories": lambda path: path.is_file() and _TRAJECTORIES.fullmatch(path.name) is not None,
}


def claim(config: TrainConfig, fresh: bool, lock: Lock) -> None:
    """Lock the run directory for this process, and write the configuration, which is the same for its life.

    Raises:
        AgentPeftError: the folder holds other files or another run, or cannot be written.
    """
    folder, text = config.run_dir, yaml12.dump(resolved(config))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except OSError as error:
        raise AgentPeftError(
            f"{folder}: cannot be a run directory ({error.strerror}); set another run_dir"
        ) from error
    _check_owner(folder)
    file = folder / CONFIG
    if fresh:
        clear(folder)
    elif file.exists() and (changed := _changed(read_text(file, "a YAML file", MEGABYTE), text)):
        if _has_results(folder):
            raise AgentPeftError(
                f"{folder}: holds a run of another configuration ({changed}); set another run_dir, or start "
                "over with --fresh"
            )
        clear(folder)  # a start that failed: it left at most an evaluation of that other configuration
    for name in (*FOLDERS, *FILES):
        if (folder / name).is_symlink():
            raise AgentPeftError(
                f"{folder / name}: is a link, which is not followed; move its target here, or set another "
                "run_dir"
            )
    write_atomic(file, text)
    if (stopped := folder / STOPPED).is_file():
        stage, step = _stopped_at(stopped, config)
        if config.stages[stage].nonfinite == "stop":
            raise AgentPeftError(
                f"{folder}: step {step} stopped this run with a loss or a gradient that is not finite, and "
                f"would again; add stages.{stage}.nonfinite=skip, or start over (--fresh) with a lower "
                "optimizer.learning_rate"
            )
        stopped.unlink()


def dtype_of_run(config: TrainConfig, fresh: bool) -> str:
    """Return the dtype that a run computes in, with ``auto`` decided. A run that has begun keeps its dtype,
    whatever a new measurement would say.
    """
    if config.policy.dtype != "auto":
        return config.policy.dtype
    begun = None if fresh or not _has_results(config.run_dir) else recorded_dtype(config.run_dir)
    return begun or choose_precision(config.policy).name


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


def check_place(path: Path, config: TrainConfig) -> None:
    """Check that training the configuration of a run directory would not start a second run elsewhere.

    Args:
        path: the file that ``config`` was read from, its ``run_dir`` included.

    Raises:
        AgentPeftError: the run directory was moved, or its ``run_dir`` is relative to another folder.
    """
    folder = path.parent
    if (
        path.name == CONFIG
        and (folder / "checkpoints").is_dir()
        and folder.resolve() != config.run_dir.resolve()
    ):
        raise AgentPeftError(
            f"{path}: belongs to a run in {folder}, and its run_dir is {config.run_dir} (seen from "
            f"{Path.cwd()}); to go on with that run, add run_dir={folder}; to start another one, add run_dir "
            "and a folder that does not exist yet"
        )


def check_paths(run: Path, config: TrainConfig) -> None:
    """Check that the relative paths of a run's policy can be found.

    Raises:
        AgentPeftError: a path exists as seen from where the run was started, and not from here.
    """
    parts, place = config.run_dir.parts, run.resolve()
    if config.run_dir.is_absolute() or place.parts[-len(parts) :] != parts:
        return
    root = Path(*place.parts[: -len(parts)])
    for key in ("model", "adapter"):
        value = getattr(config.policy, key, None)
        if value is not None and not Path(value).exists() and (root / value).exists():
            other = f", or add policy.model={root / value}" if key == "model" else ""
            raise AgentPeftError(
                f"{run}: policy.{key} {str(value)!r} is relative to {root}, where the run was started; run "
                f"the command there{other}"
            )


def _check_owner(folder: Path) -> None:
    """Check that a run of ours wrote everything at the places where a run writes or removes files.

    Raises:
        AgentPeftError: a file or folder there is of another origin.
    """
    advice = "so it is no run of ours; set another run_dir"
    names = [name for name in (*FOLDERS, *FILES) if os.path.lexists(folder / name)]
    if names and CONFIG not in names:
        raise AgentPeftError(f"{folder}: holds {names[0]} and no {CONFIG}, {advice}")
    if CONFIG in names and not _is_configuration(folder / CONFIG):
        raise AgentPeftError(
            f"{folder / CONFIG}: is no run's configuration, {advice}, or put back the {CONFIG} of the run"
        )
    for name in names:
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
    files = folder / "metrics.jsonl", folder / STOPPED
    if any(os.path.lexists(path) and path.lstat().st_size > 0 for path in files):
        return True
    return any((folder / "checkpoints").glob("*step_*"))


def _changed(before: str, after: str) -> str:
    """Return the keys that differ between two configurations, as text for a message; empty if none does.
    Keys that may change during a run do not count.
    """
    if before == after:
        return ""
    old, new = (yaml12.plain(yaml12.parse(text, CONFIG)) for text in (before, after))
    changed = sorted(_differences(_binding(old), _binding(new)))
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    return f"{', '.join(changed[:3])}{more} {'differs' if len(changed) == 1 else 'differ'}" if changed else ""


def _stopped_at(path: Path, config: TrainConfig) -> tuple[int, int]:
    """Return the stage and the step that a run was stopped at."""
    try:
        content = parse_json(read_text(path, "a JSON file", MEGABYTE))
        stage, step = int(content["stage"]), int(content["step"])
        if not 0 <= stage < len(config.stages):
            raise ValueError("there is no such stage")
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        raise AgentPeftError(
            f"{path}: is damaged ({error}); remove it, and the run goes on from its newest checkpoint"
        ) from error
    return stage, step


def _binding(content: Any) -> dict[str, Any]:
    """Return a configuration without the keys that may change during a run."""
    stages = [
        {key: value for key, value in stage.items() if key != "nonfinite"}
        for stage in content.get("stages") or []
    ]
    return {
        **{key: value for key, value in content.items() if key not in ("ranks", "run_dir")},
        "stages": stages,
    }


def _differences(old: Any, new: Any, key: str = "") -> Iterator[str]:
    """Yield the dotted keys whose values differ.

    >>> list(_differences({"seed": 0, "stages": [{"steps": 1}]}, {"seed": 0, "stages": [{"steps": 2}]}))
    ['stages.0.steps']
    """
    lists = isinstance(old, list) and isinstance(new, list)
    if lists and all(isinstance(item, dict) for item in (*old, *new)):
        old, new = ({str(place): item for place, item in enumerate(items)} for items in (old, new))
    if isinstance(old, dict) and isinstance(new, dict):
        for name in dict.fromkeys([*old, *new]):
            yield from _differences(old.get(name), new.get(name), f"{key}.{name}" if key else name)
    elif old != new:
        yield key


def clear(folder: Path) -> None:
    """Remove a run, its configuration last. If this is killed, the rest is still that run, at its start."""
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
