"""What an environment must be and return. Where a class of a user's own is or returns something else, one
line says what, and where.
"""

from __future__ import annotations

import difflib
import inspect
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_type_hints

from pydantic import ValidationError

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

Config = TypeVar("Config", bound=EnvironmentConfig)

ROLES: tuple[str, ...] = get_args(Role)
LOOKED_AT = 10_000  # tasks that are made as they are looked at may be very many
LONGEST = 60  # characters of a value that is shown
CALL = "a class is called with one argument, a dict of the keys beside kind: def __init__(self, config)"
TASKS = "give a list of agent_peft.types.Task(id, skills, content)"
MESSAGES = (
    'give a list of agent_peft.types.Message(role, content), such as [Message("user", "What is 1 + 1?")]'
)
RESULT = "give an agent_peft.types.StepResult: StepResult(observation), or at the end StepResult('', True, outcome, stop_reason)"


class ContractError(AgentPeftError):
    """An environment is, or has returned, what none may. ``place`` is the code at fault."""

    def __init__(self, place: str, fault: str) -> None:
        super().__init__(f"{place} {fault}")
        self.place = place


def configured(config_class: type[Config], settings: Mapping[str, Any]) -> Config:
    """The configuration that a mapping describes.

    Raises:
        AgentPeftError: it does not fit; with the first key that is wrong, and the nearest one where there is
            none of that name.
    """
    try:
        return config_class.model_validate(dict(settings))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, ("environment", *first["loc"])))
        near = (
            difflib.get_close_matches(str(first["loc"][-1]), config_class.model_fields, 1)
            if first["type"] == "extra_forbidden"
            else []
        )
        advice = f" (did you mean {near[0]!r}?)" if near else ""
        raise AgentPeftError(f"{where}: {first['msg']}{advice}") from error


def build(own: type[Environment], settings: Mapping[str, Any]) -> Environment:
    """An environment of a user's own class, which is called with the settings.

    Where its ``__init__`` annotates the argument with a subclass of ``EnvironmentConfig``, it gets one, and
    an unknown key is an error.

    Raises:
        AgentPeftError: the settings do not fit, or the class fails.
    """
    config_class, call = _config_class(own), cast(Callable[[Any], Environment], own)
    config: Any = dict(settings) if config_class is None else configured(config_class, settings)
    try:
        return call(config)
    except (AgentPeftError, InfrastructureError):
        raise
    except Exception as error:
        raise AgentPeftError(
            f"{own.__name__} cannot be made: {described(error)}, at {place_of(error, own)}; {CALL}"
        ) from error


def check_tasks(environment: Environment, kind: str) -> None:
    """
    Raises:
        AgentPeftError: there are no tasks, or they are none, or several have one id, which would count as
            one.
    """
    place = f"environment {kind}: {place_in(environment, 'tasks')}"
    try:
        tasks: Any = environment.tasks
        if isinstance(tasks, str | Mapping) or not (
            hasattr(tasks, "__len__") and hasattr(tasks, "__getitem__")
        ):
            raise ContractError(place, f"is {shown(tasks)}; {TASKS}")
        count = len(tasks)
        looked_at: Iterable[Any] = tasks if isinstance(tasks, list | tuple) or count <= LOOKED_AT else ()
        ids = Counter(_checked_id(place, task) for task in looked_at)
    except (AgentPeftError, InfrastructureError):
        raise
    except Exception as error:
        raise AgentPeftError(
            f"{place}: {described(error)}, at {place_of(error, type(environment))}; {TASKS}"
        ) from error
    if count == 0:
        raise ContractError(place, f"has no tasks; {TASKS}")
    name, times = ids.most_common(1)[0] if ids else ("", 1)
    if times > 1:
        raise ContractError(
            place,
            f"has {times} tasks whose id is {shown(name)}, which would count as one; give each task an id of its own",
        )


def opened(environment: Environment, task: Task, seed: int) -> Episode:
    """
    Raises:
        ContractError: what it returns is no episode.
    """
    episode: Any = environment.episode(task, seed)
    if not isinstance(episode, Episode):
        raise ContractError(
            place_in(environment, "episode"),
            f"returned {shown(episode)}; give an agent_peft.environments.Episode",
        )
    return episode


def opening_of(episode: Episode) -> list[Message]:
    """What an episode begins with.

    Raises:
        ContractError: that is no conversation.
    """
    found: Any = episode.start()
    place = place_in(episode, "start")
    if not isinstance(found, Iterable) or isinstance(found, str | bytes | Mapping):
        raise ContractError(place, f"returned {shown(found)}; {MESSAGES}")
    messages = list(found)
    if not messages:
        raise ContractError(place, f"returned no message; {MESSAGES}")
    for message in messages:
        if not isinstance(message, Message) or not isinstance(message.content, str):
            raise ContractError(place, f"returned the message {shown(message)}; {MESSAGES}")
        if message.role not in ROLES:
            raise ContractError(
                place,
                f"returned a message of role {shown(message.role)}; a role is one of {', '.join(ROLES)}",
            )
    return messages


def result_of(episode: Episode, action: str) -> StepResult:
    """What an episode answers to an action.

    Raises:
        ContractError: that is no result.
    """
    found: Any = episode.step(action)
    if not isinstance(found, StepResult):
        raise ContractError(place_in(episode, "step"), f"returned {shown(found)}; {RESULT}")
    expected = {
        "observation": (isinstance(found.observation, str), "a text, empty at the end"),
        "outcome": (_is_one(found.outcome, Outcome), "Outcome.CORRECT, Outcome.INCORRECT or Outcome.UNKNOWN"),
        "stop_reason": (
            found.stop_reason is None or _is_one(found.stop_reason, StopReason),
            "None, or a StopReason at the end",
        ),
    }
    for name, (right, wanted) in expected.items():
        if not right:
            raise ContractError(
                place_in(episode, "step"),
                f"returned a StepResult whose {name} is {shown(getattr(found, name))}; give {wanted}",
            )
    return found


def shown(value: object) -> str:
    """A value in a line, cut where it is long."""
    try:
        return printable(repr(value), LONGEST)
    except Exception:  # a value that cannot say what it is
        return f"a {type(value).__name__}"


def described(error: BaseException) -> str:
    """What was raised, in a line."""
    try:
        return f"{type(error).__name__}: {printable(error, 2 * LONGEST)}"
    except Exception:  # an error that cannot say what it is
        return type(error).__name__


def place_in(owner: object, name: str) -> str:
    """Where a method or property of an object is written: ``Chat.step (chat.py:31)``."""
    member: Any = inspect.unwrap(getattr(type(owner), name))
    code = getattr(getattr(member, "fget", member), "__code__", None)
    return f"{type(owner).__name__}.{name}" + (
        f" ({Path(code.co_filename).name}:{code.co_firstlineno})" if code is not None else ""
    )


def place_of(error: BaseException, owner: type) -> str:
    """The innermost line of the owner's own file that an error passed through; the innermost of all where
    there is none.
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
        raise ContractError(place, f"holds {shown(task)}; {TASKS}")
    if isinstance(task.skills, str) or not isinstance(task.content, Mapping):
        raise ContractError(
            place, f"holds {shown(task)}: skills are a list of texts, and content is a dict; {TASKS}"
        )
    return task.id


def _config_class(own: type[Environment]) -> type[EnvironmentConfig] | None:
    """What the first argument of ``__init__`` is annotated with, if that is a configuration."""
    try:
        _, first, *_ = inspect.signature(own.__init__).parameters
        hint = get_type_hints(own.__init__).get(first)
    except Exception:  # no such argument, or annotations that name what is not there
        return None
    return (
        hint
        if isinstance(hint, type) and issubclass(hint, EnvironmentConfig) and hint is not EnvironmentConfig
        else None
    )
