"""Reading task files: LifelongAgentBench's entries, and AgentBench's (`agentbench.read_problem`).

An entry of LifelongAgentBench is ``{"instruction", "skill_list"?, "initialization_command_item": {"command_name": "bash", "script"},
"evaluation_info": {"evaluation_command_item": {"script"}, "ground_truth_command_item"?: {"script"}}}``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agent_peft.environments.os_interaction import agentbench
from agent_peft.environments.os_interaction.agentbench import bring_files
from agent_peft.environments.os_interaction.entries import object_of, text_of, wrong
from agent_peft.environments.os_interaction.problems import SKILLS, Exits, Problem, Script
from agent_peft.types import AgentPeftError, Task


def load_tasks(path: Path) -> tuple[Task, ...]:
    """The tasks of a file: a JSON object of entries (its keys become the ids), a JSON list, or JSON lines.

    Scripts that an AgentBench entry names as files are read from beside the task file, so that a task holds all it needs.

    Raises:
        AgentPeftError: the file cannot be read, or an entry is not as it should be (the entry and the key are named).
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise AgentPeftError(f"{path}: cannot be read ({error.strerror}); give the path of an OS interaction task file") from error
    except UnicodeDecodeError as error:
        raise AgentPeftError(f"{path}: is not UTF-8 text; give a JSON file of OS interaction entries") from error
    tasks: dict[str, Task] = {}
    for name, entry in _entries(path, text):
        if name in tasks:
            raise AgentPeftError(f"{path}: two entries are called {name!r}; every entry needs an id of its own")
        try:
            tasks[name] = task_of(name, bring_files(entry, path.parent))
        except AgentPeftError as error:
            raise AgentPeftError(f"{path}: {error}") from error
    if not tasks:
        raise AgentPeftError(f"{path}: holds no entry; give a JSON file of OS interaction entries")
    return tuple(tasks.values())


def task_of(name: str, entry: Any) -> Task:
    """An entry as a task; its skills are those it names (AgentBench calls them labels), the primary one first.

    Raises:
        AgentPeftError: the entry is not as it should be.
    """
    if not isinstance(entry, Mapping):
        raise AgentPeftError(f"entry {name!r}: must be a JSON object, not {type(entry).__name__}")
    key = "labels" if agentbench.is_entry(entry) else "skill_list"
    skills = entry.get(key) or []
    if not isinstance(skills, list | tuple) or not all(isinstance(skill, str) for skill in skills):
        raise wrong(name, key, "a list of skill names")
    if agentbench.is_entry(entry):
        agentbench.check_shape(name, entry)
    else:
        read_problem(name, entry)
    return Task(id=name, skills=by_rarity(skills), content=entry)


def by_rarity(skills: Iterable[str]) -> tuple[str, ...]:
    """Each skill once, the primary one (the rarest in LifelongAgentBench) first.

    >>> by_rarity(["chmod", "mkdir", "sed"])
    ('sed', 'mkdir', 'chmod')
    """
    ranks = {skill: rank for rank, skill in enumerate(SKILLS)}
    return tuple(sorted(dict.fromkeys(skills), key=lambda skill: ranks.get(skill, len(SKILLS))))


def read_problem(name: str, entry: Mapping[str, Any]) -> Problem:
    """What an entry says.

    Raises:
        Unusable: it asks for what cannot be had here.
        AgentPeftError: with the entry's name, the key that is wrong, and what belongs there.
    """
    if agentbench.is_entry(entry):
        return agentbench.read_problem(name, entry)
    instruction = text_of(name, entry, "instruction")
    initialization = _script(name, entry, "initialization_command_item", may_be_empty=True)
    info = object_of(name, entry, "evaluation_info")
    evaluation = _script(name, info, "evaluation_info.evaluation_command_item")
    truth = "evaluation_info.ground_truth_command_item"
    gold = _script(name, info, truth) if info.get("ground_truth_command_item") is not None else None
    return Problem(
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
    if not isinstance(script, str) or not (may_be_empty or script.strip()) or "\0" in script:
        raise wrong(name, f"{key}.script", "a bash script")
    return script


def _entries(path: Path, text: str) -> Iterable[tuple[str, Any]]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        if path.suffix == ".jsonl" or (text.lstrip().startswith("{") and "Extra data" in str(error)):
            content = [_line(path, number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
        else:
            raise AgentPeftError(f"{path}: is not JSON ({error})") from error
    if isinstance(content, Mapping) and ("evaluation_info" in content or agentbench.is_entry(content)):
        content = [content]  # one entry alone
    if isinstance(content, Mapping):
        return content.items()
    if isinstance(content, Sequence) and not isinstance(content, str):
        return [(str(entry.get("sample_index", i)) if isinstance(entry, Mapping) else str(i), entry) for i, entry in enumerate(content)]
    raise AgentPeftError(f"{path}: must hold a JSON object or list of entries, not {type(content).__name__}")


def _line(path: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise AgentPeftError(f"{path}: line {number} is not JSON ({error})") from error
