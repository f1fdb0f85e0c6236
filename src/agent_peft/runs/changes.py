"""The configuration that a run directory holds, and which changes of it the run takes when it continues."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from agent_peft.algorithms.base import restore_algorithm
from agent_peft.configuration import yaml12
from agent_peft.configuration.changes import Change, compare, with_defaults
from agent_peft.configuration.relocation import CONFIG, settle_paths
from agent_peft.configuration.run_config import TrainConfig, resolved
from agent_peft.environments.os_interaction.config import REPLACED
from agent_peft.files import MAX_JSONL_BYTES, MEGABYTE, parse_json, read_bytes, read_text
from agent_peft.lookup import without_imports
from agent_peft.policies.models.start import START
from agent_peft.rollout.replays import FILE as REPLAYS
from agent_peft.runs.checkpoint import STATE, Position
from agent_peft.runs.digests import DIGESTS, Contents, changed_contents, read_contents
from agent_peft.runs.resume import newest_position
from agent_peft.training.optimizer import learning_rate_factor
from agent_peft.training.stage import StageConfig
from agent_peft.training.state_file import load_state
from agent_peft.types import AgentPeftError


@dataclass(frozen=True)
class Earlier:
    """The configuration that a run directory holds: its values as they are written there, and checked without
    importing the user's code.
    """

    values: dict[str, Any]
    config: TrainConfig

    def changes(self, config: TrainConfig, done: int) -> list[Change]:
        """The keys that differ in ``config``, for a run that has made ``done`` steps. Keys that are newer
        than the run have their defaults there.
        """
        new = yaml12.plain(yaml12.parse(yaml12.dump(resolved(config)), CONFIG))
        return compare(with_defaults(self.values, resolved(self.config), new), new, done)


def read_earlier(folder: Path) -> Earlier | None:
    """Read the configuration of a run directory; None where there is none of ours."""
    file = folder / CONFIG
    try:
        tree = yaml12.parse(read_text(file, "a YAML file", MEGABYTE, unlinked=1), str(file))
        if not isinstance(tree, dict):
            return None
        stages = tree.get("stages")
        settle_paths(file, tree, stages if isinstance(stages, list) else ())
        with without_imports():
            values = yaml12.plain(tree)
            content = json.dumps(_with_new_names(values))
            return Earlier(values, TrainConfig.model_validate_json(content, strict=True))
    except (AgentPeftError, ValidationError, ValueError, RecursionError):
        return None


def _with_new_names(tree: Any) -> Any:
    """Replace the values that have other names today."""
    if isinstance(tree, list):
        return [_with_new_names(each) for each in tree]
    if not isinstance(tree, dict):
        return tree
    return {
        key: REPLACED.get(value, value)
        if key == "sandbox" and isinstance(value, str)
        else _with_new_names(value)
        for key, value in tree.items()
    }


def accept(
    folder: Path, earlier: Earlier, config: TrainConfig, asked: bool, contents: Contents | None = None
) -> tuple[list[Change], list[str]]:
    """Return the changes with which a run resumes, and lines to print about them.

    Args:
        asked: whether the user asked for changes of what is learned.
        contents: the digests of today's tasks and files; None compares none.

    Raises:
        AgentPeftError: one of them is refused.
    """
    position = newest_position(folder, earlier.config)
    changes = earlier.changes(config, position.steps)
    asked_keys = {_in_stage(change) for change in changes if change.rule == "asked"}
    # a key that was set for all stages also differs in those that are done
    late = [change for change in changes if change.rule == "late" and _in_stage(change) in asked_keys]
    changes = [change for change in changes if change not in late]
    deciding = [change for change in changes if change.rule != "free"]
    fault = f"{folder}: holds a run of another configuration ({names(deciding)}); set another run_dir, "
    for change in deciding:
        if change.rule != "asked":
            raise AgentPeftError(f"{fault}or start over with --fresh: {change.key} {change.cause}")
    if (folder / START / "config.json").is_file() and any(c.key == "policy.model" for c in deciding):
        raise AgentPeftError(
            f"{folder}: policy.model has no effect, since the run has its own copy of the model in "
            f"{folder / START}; leave the key as it was"
        )
    if deciding and not asked:
        raise AgentPeftError(
            f"{fault}start over with --fresh, or add --change to continue with the new values"
        )
    known = read_contents(folder)
    edited = changed_contents(known, contents or {}, config, position.stage)
    refuse_contents(folder, edited, asked)
    notes = [f"{names(late)} in a stage that is done, where it has no effect"] if late else []
    if contents and not known:
        notes.append(f"an earlier version kept no {DIGESTS}: the tasks of today count as those of the run")
    notes += _started_anew(folder, position, config) if deciding else []
    return changes + edited, notes + _beyond_until(folder, position, earlier.config, config)


def refuse_contents(folder: Path, edited: Sequence[Change], asked: bool) -> None:
    """
    Raises:
        AgentPeftError: what the run learns from has changed, and the user did not ask for that.
    """
    if not asked and (deciding := [change for change in edited if change.rule != "free"]):
        what = "; ".join(f"{change.key}: {change.new}, and before {change.old}" for change in deciding)
        raise AgentPeftError(
            f"{folder}: the content that this run learns from has changed ({what}); put it back, set another "
            "run_dir, start over with --fresh, or add --change to continue with the new content"
        )


def _started_anew(folder: Path, position: Position, config: TrainConfig) -> list[str]:
    """Lines about state that the stage needs now and the checkpoint lacks, and about state that is dropped.

    Raises:
        AgentPeftError: the algorithm does not take the state, as its keys are now.
    """
    if position.checkpoint is None or position.stage >= len(config.stages):
        return []
    stage, checkpoint = config.stages[position.stage], folder / "checkpoints" / position.checkpoint
    state = load_state(checkpoint / STATE, mapped=True)
    try:
        lines = restore_algorithm(stage.algorithm.build(), state["algorithm"])
    except Exception as error:  # of the user's code, too
        raise AgentPeftError(
            f"{folder}: stage {stage.name!r} cannot resume with these keys of its algorithm ({error}); leave "
            "them as they were, or start over with --fresh"
        ) from error
    if stage.replay_in_prompt and not (checkpoint / REPLAYS).is_file():
        lines.append("replay_in_prompt starts again: the checkpoint has no episodes")
    return lines


def _in_stage(change: Change) -> str:
    """The key without the number of its stage."""
    return re.sub(r"^stages\.\d+\.", "", change.key)


def names(changes: Sequence[Change]) -> str:
    """The keys of changes as text for a message, at most three of them."""
    keys = sorted(change.key for change in changes)
    more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
    return f"{', '.join(keys[:3])}{more} {'differs' if len(keys) == 1 else 'differ'}"


def _beyond_until(folder: Path, position: Position, old: TrainConfig, new: TrainConfig) -> list[str]:
    """What is to be said where a stage gets more steps that ``until`` has ended.

    Raises:
        AgentPeftError: the same ``until`` would still end it.
    """
    before, after = old.stages[position.stage], new.stages[position.stage]
    if position.checkpoint is None or before.until is None or after.steps <= before.steps:
        return []
    left_out = False
    with suppress(AgentPeftError, IndexError, KeyError, TypeError, ValueError):  # absent or damaged
        metrics = read_bytes(folder / "metrics.jsonl", "a JSONL file", MAX_JSONL_BYTES, unlinked=1)
        *_, last, _ = metrics.split(b"\n")
        left_out = parse_json(last)["step"] + 1 < position.steps
    recent = load_state(folder / "checkpoints" / position.checkpoint / STATE, mapped=True)["recent"]
    arrived = len(recent) == before.until.over and before.until.is_reached(sum(recent) / len(recent))
    if not left_out and not arrived:
        return []
    where = f"stages.{position.stage}"
    if after.until == before.until:
        raise AgentPeftError(
            f"{folder}: until has ended stage {before.name!r}, so {where}.steps={after.steps} would make no "
            f"more; add {where}.until=null --change, or a stage at the end"
        )
    return [
        f"stage {before.name!r} was ended by until, and continues with its step {before.steps}; the steps "
        "before it that were left out are not made"
    ]


def note_on_schedule(stage: StageConfig, steps: int, done: int) -> str | None:
    """A message where a stage of ``steps`` steps was prolonged after ``done`` of them, and the learning rates
    of these would have been others in a run that was so long from the start.

    >>> stage = {"algorithm": {"kind": "sft"}, "steps": 20, "optimizer": {"schedule": "linear"}}
    >>> note_on_schedule(StageConfig.model_validate(stage), steps=10, done=1) is None
    True
    >>> print(note_on_schedule(StageConfig.model_validate(stage), steps=10, done=5))
    stage 'sft': with schedule linear, its 5 steps so far had the rates of 10 steps, and the others get \
those of 20; a run of 20 steps from the start would have learned something else
    """
    per_step = stage.updates // stage.steps

    def rates(steps: int) -> list[float]:
        numbers = range(done * per_step)
        return [learning_rate_factor(stage.optimizer, steps * per_step, number) for number in numbers]

    if rates(stage.steps) == rates(steps):
        return None
    return (
        f"stage {stage.name!r}: with schedule {stage.optimizer.schedule}, its {done} steps so far had "
        f"the rates of {steps} steps, and the others get those of {stage.steps}; a run of {stage.steps} "
        "steps from the start would have learned something else"
    )
