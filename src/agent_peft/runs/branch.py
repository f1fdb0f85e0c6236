"""A run that begins with the checkpoint of another one and counts on from there: ``train --from RUN[:step]``.

``origin.json`` in its directory names that checkpoint. The checkpoint itself is copied, so the other run may
be removed or continue.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from agent_peft.configuration.run_config import TrainConfig
from agent_peft.files import (
    MEGABYTE,
    check_tree,
    open_regular,
    parse_json,
    read_text,
    sync,
    write_json_atomic,
)
from agent_peft.policies.models.start import START
from agent_peft.runs.changes import Change, changed_contents, names, read_earlier
from agent_peft.runs.checkpoint import (
    checkpoint_step,
    checkpoints,
    read_position,
    remove,
    save_checkpoint,
    sync_tree,
)
from agent_peft.runs.digests import Contents, read_contents
from agent_peft.runs.layout import check_run_files
from agent_peft.runs.resume import measures_kl_to_its_start
from agent_peft.types import AgentPeftError

ORIGIN = "origin.json"
_SPECIFICATION = re.compile(r"(.+?)(?::(?:step_)?(\d+))?")


@dataclass(frozen=True)
class Origin:
    """The checkpoint that a run began with."""

    run: str  # the absolute path of the other run's directory
    checkpoint: str  # its name, such as step_000012
    steps: int  # that were done then
    start: str | None = None  # the checkpoint that the stage began with, if a KL is measured to it

    def __str__(self) -> str:
        return f"{self.run}:{self.checkpoint}"


def find_origin(text: str, config: TrainConfig, contents: Contents) -> tuple[Origin, list[Change], list[str]]:
    """Return the checkpoint that ``RUN``, ``RUN:12`` or ``RUN:step_000012`` stands for, the keys in which
    ``config`` will teach otherwise than that run did, and what is to be said.

    Raises:
        AgentPeftError: there is none, it is damaged, or ``config`` cannot continue from it.
    """
    run, name = split(text)
    check_run_files(run)
    earlier = read_earlier(run)
    if earlier is None:
        raise AgentPeftError(f"--from: {run} is no run directory (seen from {Path.cwd()})")
    have = {path.name: path for path in checkpoints(run / "checkpoints")}
    if name is not None and name not in have:
        raise AgentPeftError(f"--from: {run} has no {name}; there is: {', '.join(have) or 'none yet'}")
    if not have:
        raise AgentPeftError(f"--from: {run} has no checkpoint yet; train it first")
    name = name or list(have)[-1]
    position = read_position(have[name], len(earlier.config.stages))
    changes = earlier.changes(config, position.steps)
    if unfit := [c for c in changes if c.rule == "fixed" and not c.key.endswith(".name")]:
        raise AgentPeftError(
            f"--from: {run}:{name} does not fit this configuration ({names(unfit)}): {unfit[0].key} "
            f"{unfit[0].cause}; to begin at step 0 with its weights, leave --from out and set "
            f"policy.model={run}:{name}"
        )
    stage = config.stages[position.stage]
    first = sum(stage.steps for stage in config.stages[: position.stage])
    start = f"step_{first:06d}" if first and measures_kl_to_its_start(stage) else None
    late = [change for change in changes if change.rule == "late"]
    notes = [f"{names(late)} from {run}, but in a stage that is done, where it has no effect"] if late else []
    origin = Origin(str(run.resolve()), name, position.steps, start if start != name else None)
    changes += changed_contents(read_contents(run), contents, config, position.stage)
    return origin, [change for change in changes if change.rule == "asked"], notes


def is_origin(text: str, origin: Origin | None) -> bool:
    """Whether a run that began with ``origin`` is the one that ``--from TEXT`` asks for."""
    run, name = split(text)
    return origin is not None and str(run.resolve()) == origin.run and name in (None, origin.checkpoint)


def write_origin(folder: Path, origin: Origin) -> None:
    write_json_atomic(folder / ORIGIN, asdict(origin))


def read_origin(folder: Path) -> Origin | None:
    """Return the checkpoint that a run began with; None where it began at step 0.

    Raises:
        AgentPeftError: the file is damaged.
    """
    path = folder / ORIGIN
    if not path.is_file():
        return None
    try:
        content = parse_json(read_text(path, "a JSON file", MEGABYTE, unlinked=1))
        origin = Origin(**content)
        kinds = {"run": str, "checkpoint": str, "steps": int, "start": str | None}
        if not all(isinstance(content.get(key), kind) for key, kind in kinds.items()) or origin.steps < 1:
            raise ValueError("a value is of another type")
    except (TypeError, ValueError) as error:
        raise AgentPeftError(
            f"{path}: is damaged ({error}); put it back from a backup, or start over with --fresh --from"
        ) from error
    return origin


def copy_origin(folder: Path, origin: Origin) -> None:
    """Copy into a run directory that has no checkpoint what it begins with. The copies are never removed.

    Raises:
        AgentPeftError: the other run has lost it.
        InfrastructureError: it cannot be written.
    """
    run, root = Path(origin.run), folder / "checkpoints"
    for name in filter(None, (origin.start, origin.checkpoint)):  # the one that says how far the run is, last
        source = run / "checkpoints" / name
        if not source.is_dir():
            raise AgentPeftError(
                f"{folder}: begins with {origin}, and {source} is not there; put it back, or start over with "
                "--fresh"
            )
    if (run / START).is_dir() and not (folder / START).is_dir():
        aside = folder / f".aside-{START}"
        remove(aside)
        _copy_files(run / START, aside)
        sync_tree(aside)
        aside.rename(folder / START)
        sync(folder)
    for name in filter(None, (origin.start, origin.checkpoint)):
        source = run / "checkpoints" / name
        save_checkpoint(root, checkpoint_step(source), partial(_copy_files, source), keep_last=2, keep=True)


def _copy_files(source: Path, target: Path) -> None:
    """Copy a folder with this user's permissions, whatever those of the source are.

    Raises:
        AgentPeftError: a link, a pipe or a device is in it.
    """
    check_tree(source)
    target.mkdir(exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.is_dir():
            _copy_files(path, target / path.name)
        else:
            with open(open_regular(path), "rb") as old, open(target / path.name, "xb") as new:
                shutil.copyfileobj(old, new)


def split(text: str) -> tuple[Path, str | None]:
    """A run directory, and the name of a checkpoint in it.

    >>> split("runs/a:12")
    (PosixPath('runs/a'), 'step_000012')
    """
    match = _SPECIFICATION.fullmatch(text)
    if Path(text).is_dir() or match is None:
        return Path(text), None
    return Path(match[1]), None if match[2] is None else f"step_{int(match[2]):06d}"
