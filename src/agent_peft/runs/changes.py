"""The configuration that a run directory holds, and which changes of it the run takes when it continues."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from agent_peft.algorithms.base import restore_algorithm
from agent_peft.config import Resume
from agent_peft.configuration import CONFIG, yaml12
from agent_peft.configuration.keys import resume_class
from agent_peft.configuration.paths import absolute, relocated
from agent_peft.configuration.run_config import TrainConfig, resolved
from agent_peft.environments.digests import describe_change
from agent_peft.files import MAX_JSONL_BYTES, MEGABYTE, parse_json, read_bytes, read_text
from agent_peft.lookup import without_imports
from agent_peft.policies.models.start import START
from agent_peft.rollout.replays import FILE as REPLAYS
from agent_peft.runs.checkpoint import STATE, Position
from agent_peft.runs.digests import DIGESTS, EVALUATION, Contents, read_contents
from agent_peft.runs.resume import newest_position
from agent_peft.training.optimizer import learning_rate_factor
from agent_peft.training.stage import StageConfig
from agent_peft.training.state_file import load_state
from agent_peft.types import AgentPeftError

Rule = Resume | Literal["late"]  # late: a key of a stage that is done, where another value has no effect


@dataclass(frozen=True)
class Change:
    """A key with another value than before. ``rule`` holds for a run that is as far as this one.

    >>> print(Change("engine.rows", 32, 16, "free"))
    engine.rows 32 -> 16
    """

    key: str
    old: Any
    new: Any
    rule: Rule
    cause: str = ""  # why a fixed or late key cannot change

    def __str__(self) -> str:
        return f"{self.key} {_short(self.old)} -> {_short(self.new)}"


@dataclass(frozen=True)
class Earlier:
    """The configuration of a run directory as it is written, checked without importing the user's code."""

    values: dict[str, Any]
    config: TrainConfig

    def changes(self, config: TrainConfig, done: int) -> list[Change]:
        """The keys that differ in ``config``, for a run that has made ``done`` steps. A key that is newer
        than the run has its default there.
        """
        return changed_keys(self.values, absolute(config), done, resolved(self.config))


def read_earlier(folder: Path) -> Earlier | None:
    """Read the configuration of a run directory; None where there is none of ours."""
    file = folder / CONFIG
    try:
        tree = yaml12.parse(read_text(file, "a YAML file", MEGABYTE, unlinked=1), str(file))
        if not isinstance(tree, dict):
            return None
        with without_imports():
            values = yaml12.plain(relocated(tree, folder))
            return Earlier(values, TrainConfig.model_validate_json(json.dumps(values), strict=True))
    except (AgentPeftError, ValidationError, ValueError, RecursionError):
        return None


def accept(
    folder: Path, earlier: Earlier, config: TrainConfig, asked: bool, contents: Contents | None = None
) -> tuple[list[Change], list[str]]:
    """Return the changes with which a run resumes, and lines to print about them. ``asked``: whether the user
    asked for changes of what is learned. ``contents``: the digests of today's tasks and files; None compares
    none.
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
    """Refuse other contents that the run learns from, unless the user asked for changes."""
    if not asked and (deciding := [change for change in edited if change.rule != "free"]):
        what = "; ".join(f"{change.key}: {change.new}, and before {change.old}" for change in deciding)
        raise AgentPeftError(
            f"{folder}: the content that this run learns from has changed ({what}); put it back, set another "
            "run_dir, start over with --fresh, or add --change to continue with the new content"
        )


def _started_anew(folder: Path, position: Position, config: TrainConfig) -> list[str]:
    """Lines about state that the stage needs and the checkpoint lacks, and about state that is dropped."""
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
    """Lines about a stage that ``until`` ended and that gets more steps. The same ``until`` is refused."""
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


def changed_keys(
    old: Mapping[str, Any], new: Mapping[str, Any], done: int, defaults: Mapping[str, Any] | None = None
) -> list[Change]:
    """The keys that differ between two resolved configurations. ``done``: the steps that the run has made
    with ``old``. ``defaults``: values of keys that ``old`` lacks.

    >>> one = {"seed": 0, "policy": {"kind": "pretrained"}, "stages": [{"steps": 2}]}
    >>> two = {"seed": 1, "policy": {"kind": "pretrained"}, "stages": [{"steps": 4}]}
    >>> [(str(change), change.rule) for change in changed_keys(one, two, done=2)]
    [('seed 0 -> 1', 'asked'), ('stages.0.steps 2 -> 4', 'free')]
    """
    ends, later = (list(accumulate(stage["steps"] for stage in one["stages"])) for one in (old, new))
    changes = []
    for key, before, after in differing_keys(old, new, defaults):
        section, *rest = key.split(".")
        if section == "stages":
            rule, cause = _rule_in_stage(int(rest[0]), ".".join(rest[1:]), after, ends, later, done)
        elif key == "seed" and new["policy"]["kind"] == "scratch":
            rule, cause = "fixed", "decides the weights of the model from scratch"
        elif section == "evaluation" and _ends_a_stage(new):
            rule, cause = "asked", ""
        else:
            rule, cause = resume_class(key), "belongs to the weights that were trained"
        changes.append(Change(key, before, after, rule, cause if rule in ("fixed", "late") else ""))
    return changes


def _ends_a_stage(content: Mapping[str, Any]) -> bool:
    """Whether evaluations decide when a stage ends, and so what is learned."""
    untils = (stage.get("until") or {} for stage in content["stages"])
    return any(until.get("metric", "").startswith("evaluation.") for until in untils)


def _rule_in_stage(
    index: int, path: str, after: Any, ends: Sequence[int], later: Sequence[int], done: int
) -> tuple[Rule, str]:
    """The rule of a key in stage ``index``, and the cause if it cannot change. ``ends`` and ``later`` are the
    run's steps at the end of each stage, before and after the change.
    """
    if index >= len(ends):
        return "free", ""  # a stage that was added
    first = ends[index - 1] if index else 0
    if not path:
        return ("fixed", "has begun") if first < done else ("asked", "")
    rule: Rule = resume_class(path)
    if path == "steps":
        if first + after < done:
            return "fixed", f"cannot be less than the {done - first} steps that are made"
        if ends[index] <= done and index < len(ends) - 1:
            return "fixed", "belongs to a stage that is done"
        return ("free" if index == len(ends) - 1 and later[index] > ends[index] else "asked"), ""
    if rule == "free":
        return "free", ""
    if rule == "fixed" and first < done:
        return "fixed", "belongs to a stage that has begun"
    if max(ends[index], later[index]) <= done:
        return "late", "belongs to a stage that is done, where it has no effect"
    return "asked", ""


def differing_keys(old: Any, new: Any, defaults: Any = None, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield each dotted key whose values differ, with both values. Two paths of one file do not differ.

    >>> list(differing_keys({"seed": 0, "stages": [{"steps": 1}]}, {"seed": 0, "stages": [{"steps": 2}]}))
    [('stages.0.steps', 1, 2)]
    """
    lists = isinstance(old, list) and isinstance(new, list)
    if lists and all(isinstance(item, dict) for item in (*old, *new)):
        old, new, defaults = (
            {str(place): item for place, item in enumerate(items or ())} for items in (old, new, defaults)
        )
    if isinstance(old, dict) and isinstance(new, dict):
        absent = defaults if isinstance(defaults, dict) else {}
        for name in dict.fromkeys([*old, *new]):
            before, default = old.get(name, absent.get(name)), absent.get(name)
            yield from differing_keys(before, new.get(name), default, f"{key}.{name}" if key else name)
    elif old != new and not (isinstance(old, str) and isinstance(new, str) and _same_file(old, new)):
        yield key, old, new


def changed_contents(old: Contents, new: Contents, config: TrainConfig, stage: int) -> list[Change]:
    """The contents that differ, for a run that is in the stage of index ``stage``. What one of both does not
    name, or what no later step uses, does not count.
    """
    changes = []
    for name in new.keys() & old.keys():
        before, now = old[name], new[name]
        if isinstance(now, dict):
            text = describe_change(before, now) if isinstance(before, dict) else "other tasks"
            was = f"{before['number']} tasks" if isinstance(before, dict) and "number" in before else "others"
        else:
            text, was = (None if before == now else f"{now}"), f"{before}"
        if text is not None and (rule := _rule(name, config, stage)) is not None:
            changes.append(Change(name, was, text, rule))
    return sorted(changes, key=lambda change: change.key)


def _rule(name: str, config: TrainConfig, stage: int) -> Rule | None:
    if name == EVALUATION:
        decides = any(one.until is not None and one.until.of_evaluations for one in config.stages)
        return "asked" if decides else "free"
    if name == "demonstrations":
        return "asked" if any(one.needs_demonstrations for one in config.stages[stage:]) else None
    if name.startswith("stages.") and int(name.split(".")[1]) < stage:
        return None
    return "asked"


def _same_file(one: str, other: str) -> bool:
    """Whether two paths are of one file. A run directory holds ``one`` as an absolute path."""
    try:
        if os.path.isabs(one) and os.path.abspath(os.path.expanduser(other)) == one:
            return True  # also where it is gone
        return os.path.samefile(one, other)
    except (OSError, ValueError):
        return False


def _short(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
