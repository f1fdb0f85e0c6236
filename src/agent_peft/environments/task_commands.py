"""Generating, validating and downloading tasks, for every environment that offers it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from agent_peft.environments import ENVIRONMENTS, load_environment, named_class
from agent_peft.environments.conformance import violations_of
from agent_peft.environments.contract import MAX_CHECKED_TASKS, configured
from agent_peft.environments.task_files.replay import inspect
from agent_peft.types import AgentPeftError


def generate_tasks(kind: str, /, **keys: Any) -> Mapping[str, Mapping[str, Any]]:
    """The entries of a task file, by id. ``keys`` are those of the class's ``task_files.generate_config``."""
    generate, config_class = _operation(kind, "generate"), named_class(kind).task_files.generate_config
    entries: Mapping[str, Mapping[str, Any]] = generate(**dict(configured(config_class, keys, "generate")))
    return entries


def validate_tasks(kind: str, /, **keys: Any) -> dict[str, Any]:
    """Replay every task's demonstration, which must be correct, and replies that do nothing, which must not,
    through real episodes. A class of the user's own is checked by ``conformance``, too. ``keys`` are those of
    the environment's configuration, such as ``tasks="tasks.json"``.

    Returns:
        ``{"tasks", "gold_correct", "nothing_correct", "rejected": [{"id", "cause"}], "warnings": [{"id",
        "cause"}], "violations": [line]}``: three counts, the tasks that cannot be used, those whose
        evaluation has a weakness, and the breaches of the contract.
    """
    environment, violations = named_class(kind), []
    if environment.task_files.inspect is not None:
        config = configured(environment.config_class, {"kind": kind, **keys})
        inspected = list(environment.task_files.inspect(config))
    else:
        loaded = load_environment(kind, **keys)
        try:
            tasks = islice(loaded.tasks, MAX_CHECKED_TASKS)
            inspected = [(task.id, inspect(loaded, task)) for task in tasks]
        finally:
            loaded.close()
        violations = violations_of(lambda: load_environment(kind, **keys))
    return {
        "tasks": len(inspected),
        "gold_correct": sum(inspection.gold_is_correct for _, inspection in inspected),
        "nothing_correct": sum(inspection.nothing_is_correct for _, inspection in inspected),
        **{
            key: [
                {"id": name, "cause": cause}
                for name, inspection in inspected
                if (cause := getattr(inspection, attribute)) is not None
            ]
            for key, attribute in (("rejected", "cause"), ("warnings", "warning"))
        },
        "violations": violations,
    }


def download_tasks(kind: str, folder: Path | str) -> Sequence[Path]:
    """Download the published tasks of an environment into ``folder``. Return the files."""
    files: Sequence[Path] = _operation(kind, "download")(Path(folder))
    return files


def _operation(kind: str, name: str) -> Any:
    operation = getattr(named_class(kind).task_files, name)
    if operation is None:
        able = [other for other, row in ENVIRONMENTS.items() if getattr(row.task_files, name)]
        raise AgentPeftError(f"{kind} has no tasks to {name}; choose {' or '.join(able)}")
    return operation
