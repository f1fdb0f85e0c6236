"""What a run begins with, copied into its directory: it depends on no other run afterwards.

``train --from RUN[:step]`` begins with the checkpoint of another run and counts on from there;
``origin.json`` names that checkpoint. A policy that starts from an adapter or from another run has its copy
in ``RUN/start``.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from agent_peft.config import first_error
from agent_peft.configuration.run_config import TrainConfig
from agent_peft.files import MEGABYTE, check_tree, open_regular, read_text, sync, write_json_atomic
from agent_peft.policies.config import PolicyConfig, PretrainedConfig
from agent_peft.policies.loading import save_start
from agent_peft.policies.models.start import START, from_start, split_run, start_of
from agent_peft.runs.changes import Change, changed_contents, names, read_earlier
from agent_peft.runs.checkpoint import (
    checkpoint_step,
    checkpoints,
    latest_checkpoint,
    read_position,
    remove,
    save_checkpoint,
    sync_tree,
)
from agent_peft.runs.digests import Contents, read_contents
from agent_peft.runs.layout import check_run_files
from agent_peft.types import AgentPeftError

ORIGIN = "origin.json"


@dataclass(frozen=True)
class Origin:
    """The checkpoint that a run began with."""

    run: str  # the absolute path of the other run's directory
    checkpoint: str  # its name, such as step_000012
    steps: Annotated[int, Field(ge=1)]  # that were done then
    start: str | None = None  # the checkpoint that the stage began with, if a KL is measured to it

    def __str__(self) -> str:
        return f"{self.run}:{self.checkpoint}"


def find_origin(text: str, config: TrainConfig, contents: Contents) -> tuple[Origin, list[Change], list[str]]:
    """Return the checkpoint that ``RUN``, ``RUN:12`` or ``RUN:step_000012`` names, the changed keys that
    decide what is learned from there on, and lines to print.
    """
    run, name = _named_by(text)
    check_run_files(run)
    earlier = read_earlier(run)
    if earlier is None:
        raise AgentPeftError(f"--from: {run} is not a run directory (seen from {Path.cwd()})")
    existing = {path.name: path for path in checkpoints(run / "checkpoints")}
    if name is not None and name not in existing:
        raise AgentPeftError(f"--from: {run} has no {name}; there is: {', '.join(existing) or 'none yet'}")
    if not existing:
        raise AgentPeftError(f"--from: {run} has no checkpoint yet; train it first")
    name = name or list(existing)[-1]
    position = read_position(existing[name], len(earlier.config.stages))
    changes = earlier.changes(config, position.steps)
    if unfit := [c for c in changes if c.rule == "fixed" and not c.key.endswith(".name")]:
        raise AgentPeftError(
            f"--from: {run}:{name} does not fit this configuration ({names(unfit)}): {unfit[0].key} "
            f"{unfit[0].cause}; to begin at step 0 with its weights, leave --from out and set "
            f"policy.model={run}:{name}"
        )
    stage = config.stages[position.stage]
    first = sum(stage.steps for stage in config.stages[: position.stage])
    start = f"step_{first:06d}" if first and stage.copies_reference else None
    late = [change for change in changes if change.rule == "late"]
    notes = [f"{names(late)} from {run}, but in a stage that is done, where it has no effect"] if late else []
    origin = Origin(str(run.resolve()), name, position.steps, start if start != name else None)
    changes += changed_contents(read_contents(run), contents, config, position.stage)
    return origin, [change for change in changes if change.rule == "asked"], notes


def is_origin(text: str, origin: Origin | None) -> bool:
    """Whether a run that began with ``origin`` is the one that ``--from TEXT`` asks for."""
    run, name = _named_by(text)
    return origin is not None and str(run.resolve()) == origin.run and name in (None, origin.checkpoint)


def _named_by(text: str) -> tuple[Path, str | None]:
    """The run directory in ``RUN:12``, and the name of the checkpoint."""
    run, step = split_run(text)
    return run, None if step is None else f"step_{step:06d}"


def write_origin(folder: Path, origin: Origin) -> None:
    write_json_atomic(folder / ORIGIN, asdict(origin))


def read_origin(folder: Path) -> Origin | None:
    """Return the checkpoint that a run began with; None where it began at step 0."""
    path = folder / ORIGIN
    if not path.is_file():
        return None
    try:
        return TypeAdapter(Origin).validate_json(
            read_text(path, "a JSON file", MEGABYTE, unlinked=1), strict=True
        )
    except ValidationError as error:
        raise AgentPeftError(
            f"{path}: is damaged ({first_error(error)}); put it back from a backup, or start over with "
            "--fresh --from"
        ) from error


def copy_origin(folder: Path, origin: Origin) -> None:
    """Copy into a run directory what it begins with, unless it has a checkpoint of then or later. The copies
    are never removed. Raises `InfrastructureError`: it cannot be written.
    """
    run, root = Path(origin.run), folder / "checkpoints"
    newest = latest_checkpoint(root)
    if newest is not None and checkpoint_step(newest) >= origin.steps:
        return
    for name in filter(None, (origin.start, origin.checkpoint)):  # the newest one last
        source = run / "checkpoints" / name
        if not source.is_dir():
            raise AgentPeftError(
                f"{folder}: begins with {origin}, and {source} is not there; put it back, or start over with "
                "--fresh"
            )
    if (run / START).is_dir() and not (folder / START).is_dir():
        _write_folder(folder / START, partial(_copy_files, run / START))
    for name in filter(None, (origin.start, origin.checkpoint)):
        source = run / "checkpoints" / name
        save_checkpoint(root, checkpoint_step(source), partial(_copy_files, source), keep_last=2, keep=True)


def _copy_files(source: Path, target: Path) -> None:
    """Copy a folder with this user's permissions, whatever those of the source are."""
    check_tree(source)
    target.mkdir(exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.is_dir():
            _copy_files(path, target / path.name)
        else:
            with open(open_regular(path), "rb") as old, open(target / path.name, "xb") as new:
                shutil.copyfileobj(old, new)


def keep_start(config: TrainConfig) -> None:
    """Write ``RUN/start`` if the policy starts from an adapter or from a checkpoint of a run, and the folder
    is not there yet. It is whole or absent.
    """
    folder, policy = config.run_dir / START, config.policy
    if folder.is_dir() or not isinstance(policy, PretrainedConfig):
        return
    start = start_of(policy)
    if start.adapter is not None or start.of_run:
        _write_folder(folder, partial(save_start, policy))


def started(config: TrainConfig) -> PolicyConfig:
    """Return the configuration of the run's policy, with ``RUN/start`` where there is one."""
    policy = config.policy
    return from_start(policy, config.run_dir) if isinstance(policy, PretrainedConfig) else policy


def _write_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Write a folder of a run, whole or not at all."""
    aside = folder.with_name(f".aside-{folder.name}")
    remove(aside)
    write(aside)
    sync_tree(aside)
    aside.rename(folder)
    sync(folder.parent)
