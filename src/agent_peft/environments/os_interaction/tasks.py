"""Reading task files: LifelongAgentBench's entries, and AgentBench's (`agentbench.read_problem`).

An entry of LifelongAgentBench is ``{"instruction", "skill_list"?, "initialization_command_item":
{"command_name": "bash", "script"}, "evaluation_info": {"evaluation_command_item": {"script"},
"ground_truth_command_item"?: {"script"}}}``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from agent_peft.environments.os_interaction import agentbench
from agent_peft.environments.os_interaction.agentbench import bring_files
from agent_peft.environments.os_interaction.problems import (
    SKILLS,
    Exits,
    Script,
    ShellProblem,
    Unusable,
    is_typable,
)
from agent_peft.environments.task_files.reading import object_of, read_tasks, text_of, wrong
from agent_peft.types import AgentPeftError, Task


def load_tasks(path: Path) -> tuple[Task, ...]:
    """The tasks of a file: a JSON object of entries (its keys become the ids), a JSON list, or JSON lines.

    Scripts that an AgentBench entry names as files are read from the task file's folder, so that a task holds
    all it needs.
    """
    return read_tasks(
        path,
        "OS interaction",
        lambda content: "evaluation_info" in content or agentbench.is_entry(content),
        lambda name, entry: task_of(name, _whole(name, entry, path.parent)),
    )


def _whole(name: str, entry: Any, folder: Path) -> Any:
    try:
        return bring_files(entry, folder)
    except RecursionError as error:
        raise AgentPeftError(f"entry {name!r}: is nested too deeply") from error


def task_of(name: str, entry: Any) -> Task:
    """An entry as a task; its skills are those it names (AgentBench calls them labels), the primary first."""
    if not isinstance(entry, Mapping):
        raise AgentPeftError(f"entry {name!r}: must be a JSON object, not {type(entry).__name__}")
    key = "labels" if agentbench.is_entry(entry) else "skill_list"
    skills = entry.get(key) or []
    if not isinstance(skills, list | tuple) or not all(isinstance(skill, str) for skill in skills):
        raise wrong(name, key, "a list of skill names")
    with suppress(Unusable):  # an entry that is only unusable here passes
        read_problem(name, entry)
    return Task(id=name, skills=by_rarity(skills), content=entry)


def by_rarity(skills: Iterable[str]) -> tuple[str, ...]:
    """Each skill once, the primary one (the rarest in LifelongAgentBench) first.

    >>> by_rarity(["chmod", "mkdir", "sed"])
    ('sed', 'mkdir', 'chmod')
    """
    ranks = {skill: rank for rank, skill in enumerate(SKILLS)}
    return tuple(sorted(dict.fromkeys(skills), key=lambda skill: ranks.get(skill, len(SKILLS))))


def read_problem(name: str, entry: Mapping[str, Any]) -> ShellProblem:
    """Check an entry, and return its content. Raises `Unusable` if it needs something that is not here."""
    if agentbench.is_entry(entry):
        return agentbench.read_problem(name, entry)
    instruction = text_of(name, entry, "instruction")
    if not is_typable(instruction):
        raise wrong(name, "instruction", "a text without null characters and surrogates")
    initialization = _script(name, entry, "initialization_command_item", may_be_empty=True)
    info = object_of(name, entry, "evaluation_info")
    evaluation = _script(name, info, "evaluation_info.evaluation_command_item")
    truth = "evaluation_info.ground_truth_command_item"
    gold = _script(name, info, truth) if info.get("ground_truth_command_item") is not None else None
    return ShellProblem(
        instruction,
        Exits(Script(evaluation)),
        initialization=(Script(initialization),) if initialization.strip() else (),
        gold=gold,
    )


def _script(name: str, holder: Mapping[str, Any], key: str, may_be_empty: bool = False) -> str:
    item = object_of(name, holder, key)
    if item.get("command_name", "bash") != "bash":
        raise wrong(name, f"{key}.command_name", "bash")
    script = item.get("script")
    if not isinstance(script, str) or not (may_be_empty or script.strip()) or not is_typable(script):
        raise wrong(name, f"{key}.script", "a bash script")
    return script
