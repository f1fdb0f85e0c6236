"""Digests of tasks: what one asks, and what a list of them holds, in whatever file or generator they are."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from agent_peft.environments.base import Environment, Mistake
from agent_peft.types import Task

MAX_READ = 10_000  # tasks of a sequence that makes or fetches each task when it is read
SPREAD = 64  # evenly spaced tasks that stand for a longer sequence
_IDS = re.compile(r"(.*[_\W])?(id|idx|index|key|uid|uuid|qid)", re.IGNORECASE)  # columns that may hold ids
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
# keys that choose tasks, or say how they are shown; the others say which world a seed or a number is of
_CHOOSING = {"tasks", "split", "limit", "num_tasks", "seed", "digits", "environment", "max_turns", "answer"}
_CHOOSING |= {"symbols", "examples", "system_prompt", "prompt", "timeout", "patience", "token"}

Digests = Mapping[str, Any]  # of a list of tasks, as ``digests_of`` returns them


def digest(content: Any) -> str:
    """16 hex digits that name a value. Mappings of equal items are equal in any order.

    >>> digest({"a": 1, "b": (2, 3)}) == digest({"b": [2, 3], "a": 1}) != digest({"a": 1, "b": [3, 2]})
    True
    """
    try:
        text = _encode(content)
    except (TypeError, ValueError, RecursionError):  # keys of two types, or a value that holds itself
        text = _text(content)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _text(value: Any) -> str:
    """The text of a value that JSON cannot hold, the same in each process."""
    if isinstance(value, set | frozenset):
        return repr(sorted(map(_text, value)))
    return _ADDRESS.sub("", repr(value))


_encode = json.JSONEncoder(sort_keys=True, default=_text, separators=(",", ":")).encode


def task_digest(task: Task) -> str:
    """The digest of what a task asks: of its content without a column that repeats its id, or of its id where
    it has no content. Numbers are texts, as in a CSV file.

    >>> task_digest(Task("a:1", content={"id": "a:1", "q": 2})) == task_digest(Task("b", content={"q": "2"}))
    True
    """
    content = {
        key: str(value) if type(value) in (int, float) else value
        for key, value in task.content.items()
        if not (str(value) == task.id and _IDS.fullmatch(str(key)))
    }
    return digest(content or task.id)


def tasks_to_digest(tasks: Sequence[Task]) -> Sequence[Task]:
    """The tasks of a list. Of a sequence with very many tasks that are made or fetched one by one, such as
    those of a server, ``SPREAD`` of them.
    """
    return tasks if isinstance(tasks, list | tuple) or len(tasks) <= MAX_READ else _spread(tasks)


def _spread(tasks: Sequence[Task]) -> list[Task]:
    number = min(SPREAD, len(tasks))
    return [tasks[place * (len(tasks) - 1) // max(number - 1, 1)] for place in range(number)]


def shown_before(environment: Environment) -> list[str]:
    """What is shown before each task: a prompt with examples (``gsm8k``), or examples (``remote``)."""
    parts = (getattr(environment, name, None) for name in ("prompt", "examples"))
    return [repr(part) for part in parts if isinstance(part, str | tuple)]


def environment_digests(environment: Environment, number: int | None = None) -> dict[str, Any]:
    """``digests_of`` the first ``number`` tasks, with a digest of what is shown before each."""
    return {**digests_of(environment.tasks[:number]), "shown": digest(shown_before(environment))}


def digests_of(tasks: Sequence[Task]) -> dict[str, Any]:
    """The number of tasks, and digests of their ids and contents in any order, and of all in their order."""
    read = tasks_to_digest(tasks)
    ids, contents = [task.id for task in read], [digest(dict(task.content)) for task in read]
    whole = [[*pair, list(task.skills)] for *pair, task in zip(ids, contents, read, strict=True)]
    parts = {"ids": sorted(ids), "contents": sorted(contents), "order": whole}
    return {"number": len(tasks), **{name: digest(part) for name, part in parts.items()}}


def describe_change(old: Digests, new: Digests) -> str | None:
    """What ``new`` tasks are, seen from ``old`` ones; None where they are the same.

    >>> one, two = (digests_of([Task(name, content={"q": name}) for name in names]) for names in ("ab", "ba"))
    >>> describe_change(one, two), describe_change(one, one)
    ('the same tasks in another order', None)
    """
    same = {name for name in new if old.get(name) == new[name]}
    if "order" in same:
        return None if same == set(new) else "the same tasks with other examples before them"
    if "number" not in same:
        return f"{new['number']} tasks"
    if {"ids", "contents"} <= same:
        return "the same tasks in another order"
    if "contents" in same:
        return "the same tasks under other ids"
    return "tasks of other contents" if "ids" in same else "other tasks"


def demonstrations_digest(environment: Environment) -> str:
    """The digest of the demonstrations and rejections of at most ``SPREAD`` evenly spaced tasks."""
    return digest([_replies(environment, task) for task in _spread(environment.tasks)])


def _replies(environment: Environment, task: Task) -> Any:
    try:
        both = environment.demonstration(task), environment.rejection(task)
        return [
            replies
            if isinstance(replies, str)
            else [[isinstance(one, Mistake), one] for one in replies or ()]
            for replies in both
        ]
    except Exception as error:  # a stage that uses this demonstration reports it
        return type(error).__name__


def shared_ids(training: Environment, heldout: Environment, number: int | None = None) -> list[str]:
    """The ids of those first ``number`` tasks of ``heldout`` that ask what tasks of training ask."""
    known = {_question(training, task) for task in tasks_to_digest(training.tasks)}
    return [task.id for task in tasks_to_digest(heldout.tasks[:number]) if _question(heldout, task) in known]


def _question(environment: Environment, task: Task) -> str:
    """A task's digest. Contents without a text, such as a seed, are told apart by the environment's keys."""
    if any(not isinstance(value, int | float | None) for value in task.content.values()):
        return task_digest(task)
    keys = getattr(environment, "config", None)
    return digest(
        [keys.model_dump(exclude=_CHOOSING) if isinstance(keys, BaseModel) else "", task_digest(task)]
    )
