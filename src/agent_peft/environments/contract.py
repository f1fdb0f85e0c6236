"""The contract of an environment: what it must be and return. A breach is one line that names the place, the
fault, and what belongs there.
"""

from __future__ import annotations

import inspect
import sys
import traceback
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import ValidationError

from agent_peft.config import Config, first_error
from agent_peft.environments.base import Environment, EnvironmentConfig, Episode
from agent_peft.printable import printable
from agent_peft.types import (
    AgentPeftError,
    InfrastructureError,
    Message,
    Outcome,
    Role,
    StepResult,
    StopReason,
    Task,
)

AnyConfig = TypeVar("AnyConfig", bound=Config)

ROLES: tuple[str, ...] = get_args(Role)
MAX_CHECKED_TASKS = 10_000  # a sequence that makes its tasks on access may have very many
MAX_SHOWN = 60  # characters of a value in a message
CALL = "a class is called with one argument, its configuration: def __init__(self, config)"
TASKS = "give a list of agent_peft.types.Task(id, skills, content)"
MESSAGES = (
    'give a list of agent_peft.types.Message(role, content), such as [Message("user", "What is 1 + 1?")]'
)
RESULT = (
    "give an agent_peft.types.StepResult: StepResult(observation), or at the end "
    "StepResult('', True, outcome, stop_reason)"
)
OUTCOMES = "Outcome.CORRECT, Outcome.INCORRECT or Outcome.UNKNOWN; a graded result is the score, from 0 to 1"


class ContractError(AgentPeftError):
    """An environment is, or has returned, what none may. ``place`` is the code at fault."""

    def __init__(self, place: str, fault: str) -> None:
        super().__init__(f"{place} {fault}")
        self.place = place


def configured(
    config_class: type[AnyConfig], settings: Mapping[str, Any], place: str = "environment"
) -> AnyConfig:
    """Return the configuration that a mapping describes.

    Raises:
        AgentPeftError: it does not fit; with the first wrong key, and the nearest one for an unknown key.
    """
    try:
        return config_class.model_validate(dict(settings))
    except ValidationError as error:
        raise AgentPeftError(first_error(error, place, config_class)) from error


def build(environment_class: type[Environment], config: EnvironmentConfig) -> Environment:
    """Call an environment's class with its configuration.

    Raises:
        AgentPeftError: the class fails.
    """
    try:
        return environment_class(config)
    except (AgentPeftError, InfrastructureError):
        raise
    except Exception as error:
        where = place_of(error, environment_class)
        raise AgentPeftError(
            f"{environment_class.__name__} cannot be made: {describe(error)}, at {where}; {CALL}"
        ) from error


def refuse_class(environment: object) -> None:
    """Refuse an environment's class where an environment belongs.

    Raises:
        AgentPeftError: it is a class.
    """
    if isinstance(environment, type):
        name = environment.__name__
        raise AgentPeftError(f"environment: {name} is a class; give agent_peft.load_environment({name})")


def check_tasks(environment: Environment, kind: str) -> None:
    """Check that there are tasks, that they are of class ``Task``, and that each has a different id: tasks of
    one id would count as one.

    Raises:
        AgentPeftError: one of these does not hold.
    """
    place = f"environment {kind}: {place_in(environment, 'tasks')}"
    try:
        tasks: Any = environment.tasks
        if isinstance(tasks, str | Mapping) or not (
            hasattr(tasks, "__len__") and hasattr(tasks, "__getitem__")
        ):
            raise ContractError(place, f"is {quote(tasks)}; {TASKS}")
        count = len(tasks)
        checked: Iterable[Any] = (
            tasks if isinstance(tasks, list | tuple) or count <= MAX_CHECKED_TASKS else ()
        )
        ids = Counter(_checked_id(place, task) for task in checked)
    except (AgentPeftError, InfrastructureError):
        raise
    except Exception as error:
        where = place_of(error, type(environment))
        raise AgentPeftError(f"{place}: {describe(error)}, at {where}; {TASKS}") from error
    if count == 0:
        raise ContractError(place, f"has no tasks; {TASKS}")
    name, times = ids.most_common(1)[0] if ids else ("", 1)
    if times > 1:
        fault = f"has {times} tasks whose id is {quote(name)}, which would count as one"
        raise ContractError(place, f"{fault}; give each task its own id")


def open_episode(environment: Environment, task: Task, seed: int) -> Episode:
    """Create an episode.

    Raises:
        ContractError: the environment returns no ``Episode``.
    """
    episode: Any = environment.episode(task, seed)
    if not isinstance(episode, Episode):
        fault = f"returned {quote(episode)}; give an agent_peft.environments.Episode"
        raise ContractError(place_in(environment, "episode"), fault)
    return episode


def opening_of(episode: Episode) -> list[Message]:
    """Start an episode, and return its opening.

    Raises:
        ContractError: that is no conversation.
    """
    opening: Any = episode.start()
    place = place_in(episode, "start")
    if not isinstance(opening, Iterable) or isinstance(opening, str | bytes | Mapping):
        raise ContractError(place, f"returned {quote(opening)}; {MESSAGES}")
    messages = list(opening)
    if not messages:
        raise ContractError(place, f"returned no message; {MESSAGES}")
    for message in messages:
        if not isinstance(message, Message) or not isinstance(message.content, str):
            raise ContractError(place, f"returned the message {quote(message)}; {MESSAGES}")
        if message.role not in ROLES:
            fault = f"returned a message of role {quote(message.role)}; a role is one of {', '.join(ROLES)}"
            raise ContractError(place, fault)
    return messages


def result_of(episode: Episode, action: str) -> StepResult:
    """Act in an episode, and return its result.

    Raises:
        ContractError: that is no ``StepResult``, or holds what none may.
    """
    result: Any = episode.step(action)
    place = place_in(episode, "step")
    if not isinstance(result, StepResult):
        raise ContractError(place, f"returned {quote(result)}; {RESULT}")
    stop_reason, score = result.stop_reason, result.score
    expected = {
        "observation": (isinstance(result.observation, str), "a text, empty at the end"),
        "outcome": (_is_one(result.outcome, Outcome), OUTCOMES),
        "stop_reason": (
            stop_reason is None or _is_one(stop_reason, StopReason),
            "None, or a StopReason at the end",
        ),
        "score": (
            score is None or (type(score) in (int, float) and 0 <= score <= 1),
            "None, or a number from 0 to 1",
        ),
    }
    for name, (valid, advice) in expected.items():
        if not valid:
            fault = f"returned a StepResult whose {name} is {quote(getattr(result, name))}; give {advice}"
            raise ContractError(place, fault)
    if type(result.outcome) is Outcome and (stop_reason is None or type(stop_reason) is StopReason):
        return result
    named = None if stop_reason is None else StopReason(stop_reason)  # a text of the same name is as good
    return replace(result, outcome=Outcome(result.outcome), stop_reason=named)


def quote(value: object) -> str:
    """Return a value as one line of at most ``MAX_SHOWN`` characters."""
    try:
        return printable(repr(value), MAX_SHOWN)
    except Exception:  # its __repr__ raises
        return f"a {type(value).__name__}"


def describe(error: BaseException) -> str:
    """Return the class and the text of an exception as one line."""
    try:
        return f"{type(error).__name__}: {printable(error, 2 * MAX_SHOWN)}"
    except Exception:  # its __str__ raises
        return type(error).__name__


def place_in(owner: object, name: str) -> str:
    """Return the name and the source line of a method or property: ``Chat.step (chat.py:31)``."""
    member: Any = inspect.unwrap(getattr(type(owner), name))
    code = getattr(getattr(member, "fget", member), "__code__", None)
    return f"{type(owner).__name__}.{name}" + (
        f" ({Path(code.co_filename).name}:{code.co_firstlineno})" if code is not None else ""
    )


def place_of(error: BaseException, owner: type) -> str:
    """Return the innermost line of the owner's file that an error passed through, or else the innermost line
    of all.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return owner.__name__
    own = getattr(sys.modules.get(owner.__module__), "__file__", None)
    frame = next((frame for frame in reversed(frames) if frame.filename == own), frames[-1])
    return f"{Path(frame.filename).name}:{frame.lineno}"


def _is_one(value: object, kind: type[StrEnum]) -> bool:
    return isinstance(value, str) and value in list(map(str, kind))


def _checked_id(place: str, task: Any) -> str:
    if not isinstance(task, Task) or not isinstance(task.id, str):
        raise ContractError(place, f"holds {quote(task)}; {TASKS}")
    if isinstance(task.skills, str) or not isinstance(task.content, Mapping):
        raise ContractError(
            place, f"holds {quote(task)}: skills are a list of texts, and content is a dict; {TASKS}"
        )
    return task.id
