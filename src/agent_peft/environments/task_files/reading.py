"""Task files of JSON entries: reading a file, and reading the values of an entry with clear errors."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agent_peft.files import MEGABYTE, parse_json, read_text
from agent_peft.types import AgentPeftError, Task

MAX_FILE_BYTES = 64 * MEGABYTE  # of a task file; as Python's objects it takes up to twenty times as much
MAX_ID_CHARS = 200  # characters


def read_tasks(
    path: Path, what: str, is_entry: Callable[[Mapping[str, Any]], bool], task_of: Callable[[str, Any], Task]
) -> tuple[Task, ...]:
    """The tasks of a file: a JSON object of entries (its keys become the ids), a JSON list, or JSON lines.

    Args:
        what: the environment's name, for messages.
        is_entry: tells an entry from an object of entries.
        task_of: makes a task of an id and an entry.
    """
    text = read_text(path, f"a JSON file of {what} entries", MAX_FILE_BYTES)
    tasks: dict[str, Task] = {}
    for name, entry in _entries(path, text, is_entry):
        if len(name) > MAX_ID_CHARS:
            raise AgentPeftError(
                f"{path}: the id {name[:40]!r}... has {len(name)} characters; {MAX_ID_CHARS} is the most"
            )
        if name in tasks:
            raise AgentPeftError(f"{path}: two entries are called {name!r}; every entry needs its own id")
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
            lines = enumerate(text.split("\n"), 1)  # splitlines would cut at U+2028 inside a text, too
            content = [_line(path, number, line) for number, line in lines if line.strip()]
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


def parse_literal(text: str) -> Any:
    """Parse JSON or a Python literal; raise ValueError if it is neither.

    >>> parse_literal('{"a": null}'), parse_literal("[(1, 'a')]")
    ({'a': None}, [(1, 'a')])
    """
    try:
        return parse_json(text)
    except ValueError:
        try:
            return ast.literal_eval(text.strip())  # literals only: it runs nothing
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
            raise ValueError("neither JSON nor a literal") from error


def wrong(name: str, key: str, expected: str) -> AgentPeftError:
    """The error for a wrong value, in one line."""
    return AgentPeftError(f"entry {name!r}: {key} must be {expected}")


def object_of(name: str, holder: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The object under the last part of ``key``, a dotted path from the entry."""
    value = holder.get(key.rsplit(".", 1)[-1])
    if not isinstance(value, Mapping):
        raise wrong(name, key, "an object")
    return value


def text_of(name: str, holder: Mapping[str, Any], key: str) -> str:
    """The text, not blank, under the last part of ``key``."""
    value = holder.get(key.rsplit(".", 1)[-1])
    if not isinstance(value, str) or not value.strip():
        raise wrong(name, key, "a text")
    return value


def list_of(name: str, holder: Mapping[str, Any], key: str) -> Sequence[Any]:
    """The list under the last part of ``key``."""
    value = holder.get(key.rsplit(".", 1)[-1])
    if not isinstance(value, list | tuple):
        raise wrong(name, key, "a list")
    return value
