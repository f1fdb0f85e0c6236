"""The contract of an environment: what it must be and return. A breach is one line that names the place, the
fault, and what belongs there.
"""

from __future__ import annotations

import inspect
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import ValidationError

from agent_peft.config import Config, first_error
from agent_peft.environments.base import Environment, EnvironmentConfig, Episode
from agent_peft.printable import printable
from agent_peft.replies import UNCLOSED_THOUGHT, read_reply
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


class ContractError(AgentPeftError):
    """An environment is, or has returned, what none may. ``place`` is the code at fault."""

    def __init__(self, place: str, fault: str) -> None:
        super().__init__(f"{place} {fault}")
        self.place = place


@dataclass(frozen=True)
class Expected:
    """What a method must return: a class, a condition on each of its fields, and both in words."""

    kind: type
    text: str
    fields: Mapping[str, Callable[[Any], bool]] = field(default_factory=dict)

    def check(self, value: object, owner: object, method: str) -> None:
        """Raise `ContractError` unless ``value``, returned by a method of ``owner``, is as expected."""
        if not isinstance(value, self.kind):
            raise self.error(quote(value), owner, method)
        for name, fits in self.fields.items():
            if not fits(part := getattr(value, name)):
                raise self.error(f"a {self.kind.__name__} whose {name} is {quote(part)}", owner, method)

    def error(self, fault: str, owner: object, method: str) -> ContractError:
        return ContractError(place_in(owner, method), f"returned {fault}; give {self.text}")


EPISODE = Expected(Episode, "an agent_peft.environments.Episode")
TASK = Expected(
    Task,
    "a list of agent_peft.types.Task(id, skills, content): a text, a list of texts, and a dict",
    {
        "id": lambda value: isinstance(value, str),
        "skills": lambda value: not isinstance(value, str),
        "content": lambda value: isinstance(value, Mapping),
    },
)
MESSAGE = Expected(
    Message,
    f"a list of agent_peft.types.Message(role, content) with a role of {', '.join(ROLES)}, such as "
    '[Message("user", "What is 1 + 1?")]',
    {"role": lambda value: value in list(ROLES), "content": lambda value: isinstance(value, str)},
)
RESULT = Expected(
    StepResult,
    "an agent_peft.types.StepResult: StepResult(text), or at the end StepResult('', True, outcome, "
    "stop_reason) with an Outcome and a StopReason; a grade from 0 to 1 is its score",
    {
        "observation": lambda value: isinstance(value, str),
        "outcome": lambda value: isinstance(value, str) and value in list(Outcome),
        "stop_reason": lambda value: value is None or (isinstance(value, str) and value in list(StopReason)),
        "score": lambda value: value is None or (type(value) in (int, float) and 0 <= value <= 1),
        "messages": lambda value: isinstance(value, tuple) and all(isinstance(one, Message) for one in value),
    },
)


def configured(
    config_class: type[AnyConfig], settings: Mapping[str, Any], place: str = "environment"
) -> AnyConfig:
    """Return the configuration that a mapping describes. An error names the first wrong key."""
    try:
        return config_class.model_validate(dict(settings))
    except ValidationError as error:
        raise AgentPeftError(first_error(error, place, config_class)) from error


def construct(environment_class: type[Environment], config: EnvironmentConfig) -> Environment:
    """Call an environment's class with its configuration."""
    try:
        return environment_class(config)
    except (AgentPeftError, InfrastructureError):
        raise
    except Exception as error:
        where = place_of(error, environment_class)
        raise AgentPeftError(
            f"{environment_class.__name__} cannot be made: {error_text(error)}, at {where}; {CALL}"
        ) from error


def refuse_class(environment: object) -> None:
    """Raise if an environment's class, name or configuration is given in place of an environment."""
    if isinstance(environment, type | str | Mapping):
        name = environment.__name__ if isinstance(environment, type) else f"{environment!r:.80}"
        kind = "class" if isinstance(environment, type) else type(environment).__name__
        raise AgentPeftError(f"environment: {name} is a {kind}; give agent_peft.load_environment({name})")


def check_ids(environment: Environment) -> None:
    """Check that there are tasks, and that each has a different id: tasks of one id would count as one."""
    try:
        tasks: Any = environment.tasks
        listed = hasattr(tasks, "__len__") and hasattr(tasks, "__getitem__")
        if not listed or isinstance(tasks, str | Mapping):
            raise TASK.error(quote(tasks), environment, "tasks")
        count = len(tasks)
        if count == 0:
            raise TASK.error("no tasks", environment, "tasks")
        checked = tasks if isinstance(tasks, list | tuple) or count <= MAX_CHECKED_TASKS else ()
        ids = Counter[str]()
        for task in checked:
            TASK.check(task, environment, "tasks")
            ids[task.id] += 1
    except (AgentPeftError, InfrastructureError):
        raise
    except Exception as error:
        fault = f"{error_text(error)}, at {place_of(error, type(environment))}"
        raise AgentPeftError(f"{place_in(environment, 'tasks')}: {fault}; give {TASK.text}") from error
    for name, times in ids.most_common(1):
        if times > 1:
            fault = f"has {times} tasks whose id is {quote(name)}, which would count as one"
            raise ContractError(place_in(environment, "tasks"), f"{fault}; give each task its own id")


def open_episode(environment: Environment, task: Task, seed: int) -> Episode:
    episode = environment.episode(task, seed)
    EPISODE.check(episode, environment, "episode")
    return episode


def opening_of(episode: Episode) -> list[Message]:
    """Start an episode, and return its opening."""
    opening: Any = episode.start()
    listed = isinstance(opening, Iterable) and not isinstance(opening, str | bytes | Mapping)
    messages = list(opening) if listed else []
    if not messages:
        raise MESSAGE.error(quote(opening), episode, "start")
    for message in messages:
        MESSAGE.check(message, episode, "start")
    return messages


def tools_of(episode: Episode) -> list[dict[str, Any]]:
    """The tools that an episode declares."""
    tools: Any = episode.tools
    for tool in tools if isinstance(tools, list | tuple) else [tools]:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            text = 'a list of {"type": "function", "function": {"name", "description", "parameters"}}'
            raise ContractError(f"{type(episode).__name__}.tools", f"holds {quote(tool)}; give {text}")
    return [dict(tool) for tool in tools]


def result_of(episode: Episode, action: str, fault: str | None = None) -> StepResult:
    """Act in an episode, and return its result. An outcome or a stop reason may be the text of one.

    The episode gets the action without its thoughts, so that no environment acts on a thought. It gets an
    empty action where a thought is not closed. ``fault``: of an action that was read before: what is wrong
    with it, or an empty text.
    """
    if fault is None:
        reply = read_reply(action)
        action = action if reply.thought is None else reply.text
        fault = "" if reply.closed else UNCLOSED_THOUGHT
    result = episode.step(action)
    RESULT.check(result, episode, "step")
    if fault:
        unread = result.stop_reason is None and not result.valid
        observation = fault if unread else result.observation
        result = replace(result, valid=False, observation=observation)
    outcome, stop_reason = result.outcome, result.stop_reason
    if type(outcome) is Outcome and (stop_reason is None or type(stop_reason) is StopReason):
        return result
    reason = None if stop_reason is None else StopReason(stop_reason)
    return replace(result, outcome=Outcome(outcome), stop_reason=reason)


def quote(value: object) -> str:
    """The ``repr`` of a value, as one line of at most ``MAX_SHOWN`` characters."""
    try:
        return printable(repr(value), MAX_SHOWN)
    except Exception:  # its __repr__ raises
        return f"a {type(value).__name__}"


def error_text(error: BaseException) -> str:
    """The class and the text of an exception, as one line."""
    try:
        return f"{type(error).__name__}: {printable(error, 2 * MAX_SHOWN)}"
    except Exception:  # its __str__ raises
        return type(error).__name__


def place_in(owner: object, name: str) -> str:
    """The name and the source line of a method or property: ``Chat.step (chat.py:31)``."""
    member: Any = inspect.unwrap(getattr(type(owner), name))
    code = getattr(getattr(member, "fget", member), "__code__", None)
    return f"{type(owner).__name__}.{name}" + (
        f" ({Path(code.co_filename).name}:{code.co_firstlineno})" if code is not None else ""
    )


def place_of(error: BaseException, owner: type) -> str:
    """The innermost line of the owner's file that an error passed through, or else the innermost of all."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return owner.__name__
    own = getattr(sys.modules.get(owner.__module__), "__file__", None)
    frame = next((frame for frame in reversed(frames) if frame.filename == own), frames[-1])
    return f"{Path(frame.filename).name}:{frame.lineno}"
