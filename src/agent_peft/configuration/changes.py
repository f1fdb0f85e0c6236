"""Which keys of a run may change when it continues.

A ``free`` key decides how the run computes, what it keeps and what it measures, but never what it learns. An
``asked`` key decides what is learned, and changes only where the user asks for it. A ``fixed`` key belongs to
what has been made already; another value of it is another run. A ``late`` key is one of a stage that is done,
where another value has no effect.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

Rule = Literal["free", "asked", "fixed", "late"]

# Every key has a row, as ``keys.all_keys`` writes it; ``section.*`` stands for all keys below a section.
RULES: Mapping[str, Rule] = {
    "run_dir": "free",
    "seed": "asked",
    "threads": "free",
    "policy.kind": "fixed",
    "policy.model": "asked",  # the same model may lie elsewhere
    "policy.architecture": "fixed",
    "policy.alphabet": "fixed",
    "policy.dtype": "fixed",
    "policy.device": "free",
    "policy.lora": "fixed",
    "policy.lora.rank": "fixed",
    "policy.lora.alpha": "fixed",
    "policy.lora.dropout": "asked",
    "policy.lora.target_modules": "fixed",
    "policy.adapter": "fixed",
    "policy.merge_adapter": "fixed",
    "policy.packing": "free",
    "policy.activation_checkpointing": "free",
    "environment.*": "asked",
    "engine.*": "free",
    "evaluation": "free",
    "evaluation.at": "free",
    "evaluation.every": "free",
    "evaluation.attempts": "free",
    "evaluation.num_tasks": "free",
    "evaluation.environment.*": "free",
    "evaluation.sampling.*": "free",
    "checkpoint.*": "free",
    "trajectories.*": "free",
    "trackers.*": "free",
    "ranks.*": "free",
    "name": "fixed",
    "steps": "asked",  # free where the last stage grows
    "epochs": "asked",  # a run has steps instead
    "until": "asked",
    "until.*": "asked",
    "tasks_per_step": "asked",
    "group_size": "asked",
    "microbatch_tokens": "free",
    "mask_cut_actions": "asked",
    "task_order": "asked",
    "task_order.*": "asked",
    "refill": "asked",
    "learn_from": "asked",
    "episodes_of": "asked",
    "episodes_of.*": "asked",
    "replay_in_prompt": "asked",
    "nonfinite": "free",
    "reference": "asked",
    "rewards.*": "asked",
    "optimizer.*": "asked",
    "sampling.*": "asked",
    "algorithm.kind": "fixed",
    "algorithm.*": "asked",
}


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


def rule_of(path: str) -> Rule | None:
    """The rule of a key path without ``stages.N``; None where there is no row for it.

    >>> rule_of("engine.rows"), rule_of("algorithm.kind"), rule_of("algorithm.gamma"), rule_of("nonsense")
    ('free', 'fixed', 'asked', None)
    """
    if path in RULES:
        return RULES[path]
    section = path.rpartition(".")[0]
    while section:
        if (rule := RULES.get(f"{section}.*")) is not None:
            return rule
        section = section.rpartition(".")[0]
    return None


def compare(old: Mapping[str, Any], new: Mapping[str, Any], done: int) -> list[Change]:
    """The keys that differ between two resolved configurations.

    Args:
        done: the steps that the run has made with ``old``.

    >>> one = {"seed": 0, "policy": {"kind": "pretrained"}, "stages": [{"steps": 2}]}
    >>> two = {"seed": 1, "policy": {"kind": "pretrained"}, "stages": [{"steps": 4}]}
    >>> [(str(change), change.rule) for change in compare(one, two, done=2)]
    [('seed 0 -> 1', 'asked'), ('stages.0.steps 2 -> 4', 'free')]
    """
    ends, later = (list(accumulate(stage["steps"] for stage in one["stages"])) for one in (old, new))
    changes = []
    for key, before, after in differences(old, new):
        section, *rest = key.split(".")
        if section == "stages":
            rule, cause = _rule_in_stage(int(rest[0]), ".".join(rest[1:]), after, ends, later, done)
        elif key == "seed" and new["policy"]["kind"] == "scratch":
            rule, cause = "fixed", "decides the weights of the model from scratch"
        elif section == "evaluation" and _ends_a_stage(new):
            rule, cause = "asked", ""
        else:
            rule, cause = rule_of(key) or "asked", "belongs to the weights that were trained"
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
    steps of the run after each stage, before and after the change.
    """
    if index >= len(ends):
        return "free", ""  # a stage that was added
    first = ends[index - 1] if index else 0
    if not path:
        return ("fixed", "has begun") if first < done else ("asked", "")
    rule = rule_of(path) or "asked"
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


def differences(old: Any, new: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield each dotted key whose values differ, with both values. Two paths of one file do not differ.

    >>> list(differences({"seed": 0, "stages": [{"steps": 1}]}, {"seed": 0, "stages": [{"steps": 2}]}))
    [('stages.0.steps', 1, 2)]
    """
    lists = isinstance(old, list) and isinstance(new, list)
    if lists and all(isinstance(item, dict) for item in (*old, *new)):
        old, new = ({str(place): item for place, item in enumerate(items)} for items in (old, new))
    if isinstance(old, dict) and isinstance(new, dict):
        for name in dict.fromkeys([*old, *new]):
            yield from differences(old.get(name), new.get(name), f"{key}.{name}" if key else name)
    elif old != new and not (isinstance(old, str) and isinstance(new, str) and _same_file(old, new)):
        yield key, old, new


def with_defaults(old: Any, defaults: Any, new: Any) -> Any:
    """``old`` with the keys that it lacks and ``new`` has, from ``defaults``: an older version wrote ``old``
    before there were such keys.

    >>> with_defaults({"a": 1}, {"a": 0, "b": 2, "c": 3}, {"a": 1, "b": 5})
    {'a': 1, 'b': 2}
    """
    if isinstance(old, dict) and isinstance(defaults, dict) and isinstance(new, dict):
        added = {name: defaults[name] for name in new if name not in old and name in defaults}
        return {
            name: with_defaults(value, defaults.get(name), new.get(name)) for name, value in old.items()
        } | added
    if isinstance(old, list) and isinstance(defaults, list) and isinstance(new, list):
        rest = [None] * len(old)
        parts = zip(old, [*defaults, *rest], [*new, *rest], strict=False)
        return [with_defaults(*part) for part in parts][: len(old)]
    return old


def _same_file(one: str, other: str) -> bool:
    try:
        return os.path.samefile(one, other)
    except (OSError, ValueError):
        return False


def _short(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
