"""Replaying tasks, of a file or of a class of a user's own: do their golds pass, and does doing nothing
fail?
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, get_args

from agent_peft.environments import Environment, db_bench, load_environment, os_interaction
from agent_peft.environments.contract import (
    LOOKED_AT,
    described,
    opened,
    opening_of,
    place_of,
    result_of,
    shown,
)
from agent_peft.environments.db_bench.episode import Rules as DBBenchRules
from agent_peft.environments.db_bench.inspection import inspect as inspect_db_bench
from agent_peft.environments.db_bench.tasks import read_entry
from agent_peft.environments.os_interaction.episode import Rules as OSRules
from agent_peft.environments.os_interaction.episode import SandboxKind
from agent_peft.environments.os_interaction.inspection import inspect_all
from agent_peft.environments.task_files.replay import Inspection
from agent_peft.types import AgentPeftError, InfrastructureError, Outcome, StepResult, Task

Inspected = Iterable[tuple[str, Inspection]]  # task ids, and what was found
NOTHINGS = ("",) * 100  # that an episode which does not end hears


def validate(
    environment_kind: str, tasks_file: Path | str | None, options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Replay every gold, and replies that do nothing, through real episodes.

    Args:
        environment_kind: one of those that have task files, or ``package.module:Class``.
        tasks_file: a class of one's own gets it under the key ``tasks``, if it is given.
        options: what the replay is to run on, such as ``{"sandbox": "docker"}``; an option that is None was
            not given.

    Returns:
        ``{"tasks", "gold_correct", "nothing_correct", "rejected": [{"id", "cause"}]}``: three counts, and the
        tasks that cannot be used.

    Raises:
        AgentPeftError: the file or an argument is wrong.
    """
    if ":" in environment_kind:
        chosen_options(environment_kind, options, ())
        found = _own(environment_kind, {} if tasks_file is None else {"tasks": str(tasks_file)})
    else:
        if environment_kind not in VALIDATORS:
            kinds = f"{', '.join(VALIDATORS)}, or your own as package.module:Class"
            raise AgentPeftError(f"no task file of {environment_kind!r} can be replayed; choose {kinds}")
        if tasks_file is None:
            raise AgentPeftError(f"{environment_kind} has no tasks of its own to replay; give a task file")
        inspect, known = VALIDATORS[environment_kind]
        found = list(inspect(Path(tasks_file), **chosen_options(environment_kind, options, known)))
    return {
        "tasks": len(found),
        "gold_correct": sum(inspection.gold_is_correct for _, inspection in found),
        "nothing_correct": sum(inspection.nothing_is_correct for _, inspection in found),
        "rejected": [
            {"id": name, "cause": inspection.cause}
            for name, inspection in found
            if inspection.cause is not None
        ],
    }


def chosen_options(
    environment_kind: str, options: Mapping[str, Any] | None, known: tuple[str, ...]
) -> dict[str, Any]:
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
    return [
        (task.id, inspect_db_bench(read_entry(task.id, task.content), rules))
        for task in db_bench.load_tasks(path)
    ]


def _os_interaction(
    path: Path, sandbox: str = "namespaces", threads: int = 4, command_timeout: float = 60.0
) -> Inspected:
    """Golds may take longer than an agent's commands, so that a slow one is told from a wrong one."""
    if sandbox not in get_args(SandboxKind):
        raise AgentPeftError(
            f"there is no sandbox {sandbox!r}; choose among {', '.join(get_args(SandboxKind))}"
        )
    if threads < 1 or command_timeout <= 0:
        raise AgentPeftError("threads must be at least 1, and the command timeout above 0")
    tasks = os_interaction.load_tasks(path)
    rules = OSRules(sandbox, command_timeout=command_timeout)  # type: ignore[arg-type]  # it is one of them
    return zip((task.id for task in tasks), inspect_all(tasks, rules, threads), strict=True)


def _own(kind: str, settings: Mapping[str, Any]) -> list[tuple[str, Inspection]]:
    """Of a class of a user's own: its demonstrations, and empty replies."""
    environment = load_environment({"kind": kind, **settings})
    try:
        return [(task.id, _inspect(environment, task)) for task in islice(environment.tasks, LOOKED_AT)]
    finally:
        environment.close()


def _inspect(environment: Environment, task: Task) -> Inspection:
    try:
        fault = _fault_of_demonstration(environment, task)
        nothing = _replay(environment, task, NOTHINGS).outcome is Outcome.CORRECT
    except (AgentPeftError, InfrastructureError) as error:
        return Inspection(False, False, str(error))
    except Exception as error:
        return Inspection(False, False, f"{described(error)}, at {place_of(error, type(environment))}")
    return Inspection(fault is None, nothing, fault or ("doing nothing passes" if nothing else None))


def _fault_of_demonstration(environment: Environment, task: Task) -> str | None:
    actions = environment.demonstration(task)
    if actions is None:
        return "it has no demonstration that could be replayed"
    if isinstance(actions, str) or not actions or not all(isinstance(action, str) for action in actions):
        return f"its demonstration is {shown(actions)}; give a list of texts, one for each turn"
    last = _replay(environment, task, actions)
    if not last.done:
        return "its demonstration does not end the episode"
    return None if last.outcome is Outcome.CORRECT else f"its demonstration is graded {last.outcome}"


def _replay(environment: Environment, task: Task, actions: Sequence[str]) -> StepResult:
    """The last result of one action or more."""
    episode = opened(environment, task, seed=0)
    try:
        opening_of(episode)
        for action in actions:
            result = result_of(episode, action)
            if result.done:
                break
        return result
    finally:
        episode.close()


# for each kind: what replays a task file, and the options it takes
VALIDATORS: dict[str, tuple[Callable[..., Inspected], tuple[str, ...]]] = {
    "db_bench": (_db_bench, ("database",)),
    "os_interaction": (_os_interaction, ("sandbox", "threads", "command_timeout")),
}
