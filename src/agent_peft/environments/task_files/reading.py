"""Task files of JSON entries: reading them, and taking what belongs there out of an entry, or saying what
does.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agent_peft.files import MEGABYTE, parse_json, read_text
from agent_peft.types import AgentPeftError, Task

LIMIT = 64 * MEGABYTE  # of a task file; as Python's objects it takes up to twenty times as much
LONGEST_ID = 200  # characters


def read_tasks(
    path: Path, what: str, is_entry: Callable[[Mapping[str, Any]], bool], task_of: Callable[[str, Any], Task]
) -> tuple[Task, ...]:
    """The tasks of a file: a JSON object of entries (its keys become the ids), a JSON list, or JSON lines.

    Args:
        what: whose entries they are, for the messages.
        is_entry: whether an object is one entry, and not an object of entries.
        task_of: (id, entry) -> task.

    Raises:
        AgentPeftError: the file cannot be read, or an entry is not as it should be (the entry and the key are
            named).
    """
    text = read_text(path, f"a JSON file of {what} entries", LIMIT)
    tasks: dict[str, Task] = {}
    for name, entry in _entries(path, text, is_entry):
        if len(name) > LONGEST_ID:
            raise AgentPeftError(
                f"{path}: the id {name[:40]!r}... has {len(name)} characters; {LONGEST_ID} is the most"
            )
        if name in tasks:
            raise AgentPeftError(
                f"{path}: two entries are called {name!r}; every entry needs an id of its own"
            )
        try:
            tasks[name] = task_of(name, entry)
        except AgentPeftError as error:
            raise AgentPeftError(f"{path}: {error}") from error
    if not tasks:
        raise AgentPeftError(f"{path}: holds no entry; give a JSON file of {what} entries")
    return tuple(tasks.values())


def _entries(
    path: Path, text: str, is_entry: Callable[[Mapping[str, Any]], bool]
) -> Sequence[tuple[str, Any]]:
    if not text.strip():
        return []
    try:
        content = parse_json(text)
    except ValueError as error:
        if path.suffix == ".jsonl" or (text.lstrip().startswith("{") and "Extra data" in str(error)):
            content = [
                _line(path, number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()
            ]
        else:
            raise AgentPeftError(f"{path}: is not JSON ({error})") from error
    if isinstance(content, Mapping) and is_entry(content):
        content = [content]  # JSON lines with one line
    if isinstance(content, Mapping):
        return list(content.items())
    if isinstance(content, list):
        return [
            (str(entry.get("sample_index", i)) if isinstance(entry, Mapping) else str(i), entry)
            for i, entry in enumerate(content)
        ]
    raise AgentPeftError(f"{path}: must hold a JSON object or list of entries, not {type(content).__name__}")


def _line(path: Path, number: int, line: str) -> Any:
    try:
        return parse_json(line)
    except ValueError as error:
        raise AgentPeftError(f"{path}: line {number} is not JSON ({error})") from error


def wrong(name: str, key: str, wanted: str) -> AgentPeftError:
    """The one line that tells what to do."""
    return AgentPeftError(f"entry {name!r}: {key} must be {wanted}")


def object_of(name: str, holder: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The object under the last part of ``key``, a dotted path from the entry."""
    found = holder.get(key.rsplit(".", 1)[-1])
    if not isinstance(found, Mapping):
        raise wrong(name, key, "an object")
    return found


def text_of(name: str, holder: Mapping[str, Any], key: str) -> str:
    """The text, not blank, under the last part of ``key``."""
    found = holder.get(key.rsplit(".", 1)[-1])
    if not isinstance(found, str) or not found.strip():
        raise wrong(name, key, "a text")
    return found


def list_of(name: str, holder: Mapping[str, Any], key: str) -> Sequence[Any]:
    """The list under the last part of ``key``."""
    found = holder.get(key.rsplit(".", 1)[-1])
    if not isinstance(found, list | tuple):
        raise wrong(name, key, "a list")
    return found


def check_skills(skills: Sequence[str] | None, among: Sequence[str]) -> None:
    """
    Raises:
        ValueError: one of the skills is not there; with the nearest that is.
    """
    for skill in skills or ():
        if skill not in among:
            nearest = difflib.get_close_matches(skill, among, 1, cutoff=0.0)[0]
            raise ValueError(f"{skill!r} is no skill here; did you mean {nearest!r}?")
