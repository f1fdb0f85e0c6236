"""Replaying a task file: do its golds pass, and does doing nothing fail?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

from agent_peft.environments import db_bench, os_interaction
from agent_peft.environments.db_bench.episode import Rules as DBBenchRules
from agent_peft.environments.db_bench.inspection import inspect as inspect_db_bench
from agent_peft.environments.db_bench.tasks import read_entry
from agent_peft.environments.inspection import Inspection
from agent_peft.environments.os_interaction.episode import Rules as OSRules
from agent_peft.environments.os_interaction.episode import SandboxKind
from agent_peft.environments.os_interaction.inspection import inspect_all
from agent_peft.types import AgentPeftError

Inspected = Iterable[tuple[str, Inspection]]  # task ids, and what was found


def validate(environment_kind: str, tasks_file: Path | str, options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Replay every gold, and replies that do nothing, through real episodes.

    Args:
        options: what the replay is to run on, such as ``{"sandbox": "docker"}``; an option that is None was not given.

    Returns:
        ``{"tasks", "gold_correct", "nothing_correct", "rejected": [{"id", "cause"}]}``: three counts, and the tasks that cannot be used.

    Raises:
        AgentPeftError: the file or an argument is wrong.
    """
    if environment_kind not in VALIDATORS:
        raise AgentPeftError(f"no task file of {environment_kind!r} can be replayed; choose {' or '.join(VALIDATORS)}")
    inspect, known = VALIDATORS[environment_kind]
    found = list(inspect(Path(tasks_file), **chosen_options(environment_kind, options, known)))
    return {
        "tasks": len(found),
        "gold_correct": sum(inspection.gold_is_correct for _, inspection in found),
        "nothing_correct": sum(inspection.nothing_is_correct for _, inspection in found),
        "rejected": [{"id": name, "cause": inspection.cause} for name, inspection in found if inspection.cause is not None],
    }


def chosen_options(environment_kind: str, options: Mapping[str, Any] | None, known: tuple[str, ...]) -> dict[str, Any]:
    """The options that were given (are not None).

    Raises:
        AgentPeftError: one of them has no effect on this kind of environment.
    """
    chosen = {name: value for name, value in (options or {}).items() if value is not None}
    for name in chosen:
        if name not in known:
            raise AgentPeftError(f"{environment_kind} takes no {name.replace('_', ' ')}; leave it out")
    return chosen


def _db_bench(path: Path, database: str = "sqlite") -> Inspected:
    if database != "sqlite":
        raise AgentPeftError(f"there is no database {database!r}; choose sqlite")
    rules = DBBenchRules(database)
    return [(task.id, inspect_db_bench(read_entry(task.id, task.content), rules)) for task in db_bench.load_tasks(path)]


def _os_interaction(path: Path, sandbox: str = "namespaces", threads: int = 4, command_timeout: float = 60.0) -> Inspected:
    """Golds may take longer than an agent's commands, so that a slow one is told from a wrong one."""
    if sandbox not in get_args(SandboxKind):
        raise AgentPeftError(f"there is no sandbox {sandbox!r}; choose among {', '.join(get_args(SandboxKind))}")
    if threads < 1 or command_timeout <= 0:
        raise AgentPeftError("threads must be at least 1, and the command timeout above 0")
    tasks = os_interaction.load_tasks(path)
    rules = OSRules(sandbox, command_timeout=command_timeout)  # type: ignore[arg-type]  # it is one of them
    return zip((task.id for task in tasks), inspect_all(tasks, rules, threads), strict=True)


# for each kind: what replays a task file, and the options it takes
VALIDATORS: dict[str, tuple[Callable[..., Inspected], tuple[str, ...]]] = {
    "db_bench": (_db_bench, ("database",)),
    "os_interaction": (_os_interaction, ("sandbox", "threads", "command_timeout")),
}
