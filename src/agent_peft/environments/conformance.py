"""Conformance of an environment: the rules that every environment must keep, tried in real episodes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from agent_peft.environments.base import Environment, Mistake
from agent_peft.environments.contract import (
    check_ids,
    error_text,
    open_episode,
    opening_of,
    place_in,
    place_of,
    quote,
)
from agent_peft.environments.task_files.replay import GoldReplay, inspect, replay
from agent_peft.types import AgentPeftError, Outcome, Task

MAX_TASKS = 4  # that are tried; validation replays the demonstrations of all tasks
# a policy may write anything: nothing, what no file holds, half of a character, very long texts
JUNK = ("", "\0", "\ud800", "```", "{}", "9" * 5000, "x" * 100_000)
NUM_THREADS = 4


def violations_of(load: Callable[[], Environment]) -> list[str]:
    """Try the rules on the first tasks of an environment. Return one line for each broken rule: the task, the
    place, the fault, and what to do. ``load`` is called twice: both environments must have the same tasks.
    """
    environment, again = load(), load()
    try:
        tasks = list(islice(environment.tasks, MAX_TASKS))
        lines = list(_faults(environment, "tasks", _tasks(environment, again)))
        for task in tasks:
            for rule in TASK_RULES:
                lines += _faults(environment, f"task {quote(task.id)}", rule(environment, task))
        lines += _faults(environment, "threads", _threads(environment, tasks))
        lines += _faults(environment, "close", _closing_twice(environment))
        return lines
    finally:
        again.close()


def _faults(environment: Environment, subject: str, faults: Iterator[str]) -> Iterator[str]:
    """The faults that a rule finds; an exception that ends it is the last one."""
    try:
        for fault in faults:
            yield f"{subject}: {fault}"
    except Exception as error:
        where = "" if isinstance(error, AgentPeftError) else f", at {place_of(error, type(environment))}"
        yield f"{subject}: {error if not where else error_text(error) + where}"


def _tasks(environment: Environment, again: Environment) -> Iterator[str]:
    check_ids(environment)
    for other in (environment, again):
        if list(islice(environment.tasks, 1000)) != list(islice(other.tasks, 1000)):
            yield (
                f"{place_in(environment, 'tasks')} changes from one load to the next; make the tasks from "
                "the configuration alone, and draw from a seed that it holds"
            )
            return


def _content(environment: Environment, task: Task) -> Iterator[str]:
    try:
        same = json.loads(json.dumps(task.content)) == task.content
    except (TypeError, ValueError, RecursionError):
        same = False
    if not same:
        yield (
            "its content is not JSON, so a server cannot send it; use dicts with text keys, lists, texts, "
            "numbers, booleans and None"
        )


def _opening(environment: Environment, task: Task) -> Iterator[str]:
    episode = open_episode(environment, task, seed=0)
    try:
        last = opening_of(episode)[-1]
    finally:
        episode.close()
    if last.role != "user" or not last.content.strip():
        place = place_in(episode, "start")
        yield f"{place} ends with {quote(last)}; end the opening with a text of the role user"


def _demonstration(environment: Environment, task: Task) -> Iterator[str]:
    inspection = inspect(environment, task)
    actions = environment.demonstration(task)
    if actions is None:
        if inspection.nothing_is_correct:
            yield "doing nothing passes; grade empty actions as incorrect"
        return
    if inspection.cause is not None:
        yield inspection.cause
        return
    results = _play(environment, task, actions).results
    if len(results) < len(actions):
        yield f"its demonstration ends after {len(results)} of {len(actions)} actions; leave the others out"
    if not all(
        result.valid or isinstance(action, Mistake) for action, result in zip(actions, results, strict=False)
    ):
        yield "an action of its demonstration is invalid; only a Mistake may be"


def _junk(environment: Environment, task: Task) -> Iterator[str]:
    for action in JUNK:
        try:
            result = _play(environment, task, [action]).results[-1]
        except Exception as error:
            where = place_of(error, type(environment))
            yield (
                f"the action {quote(action)} raises {error_text(error)}, at {where}; answer every text with "
                "a StepResult, such as StepResult('Write a number.', valid=False)"
            )
            return
        if result.outcome is Outcome.CORRECT:
            yield f"the action {quote(action)} is correct; grade it as incorrect"


def _repetition(environment: Environment, task: Task) -> Iterator[str]:
    actions = environment.demonstration(task) or ["1", "2"]
    if _play(environment, task, actions) != _play(environment, task, actions):
        yield (
            "two episodes with the same seed and the same actions differ; draw from the seed that episode() "
            "is given, and keep all state in the episode"
        )


def _closing(environment: Environment, task: Task) -> Iterator[str]:
    for starts in (False, True):
        episode = open_episode(environment, task, seed=0)
        if starts:
            opening_of(episode)
        episode.close()
        episode.close()
    yield from ()


def _closing_twice(environment: Environment) -> Iterator[str]:
    environment.close()
    environment.close()
    yield from ()


def _threads(environment: Environment, tasks: Sequence[Task]) -> Iterator[str]:
    played = [(task, environment.demonstration(task) or ["1", "2"]) for task in tasks] * 2
    alone = [_play(environment, *each) for each in played]
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        together = list(pool.map(lambda each: _play(environment, *each), played))
    for (task, _), one, other in zip(played, alone, together, strict=True):
        if one != other:
            yield f"task {quote(task.id)} ends otherwise among other episodes; keep all state in the episode"
            return


def _play(environment: Environment, task: Task, actions: Sequence[str]) -> GoldReplay:
    return replay(open_episode(environment, task, seed=0), actions)


TASK_RULES = (_content, _opening, _demonstration, _junk, _repetition, _closing)
