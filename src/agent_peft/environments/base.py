"""The interface of an environment: tasks, and episodes that answer actions with facts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pydantic import model_validator

from agent_peft.config import Config
from agent_peft.environments.tool_calls import action_of
from agent_peft.types import Message, StepResult, Task

OUTCOMES = ("success", "score", "reward")  # the measures of an environment that grades its episodes


class EnvironmentConfig(Config):
    """The base of every environment's configuration. It is frozen, and an unknown key is an error."""

    kind: str = ""  # a row of ENVIRONMENTS, or package.module:Class; set when an environment is loaded


class NoKeys(EnvironmentConfig):
    """The configuration of an environment that declares no keys. Its validator needs a separate class: with a
    validator that runs first, pydantic treats JSON as Python, where a list is not a tuple.
    """

    @model_validator(mode="before")
    @classmethod
    def _has_no_keys(cls, settings: Any) -> Any:
        if isinstance(settings, Mapping) and set(settings) - {"kind"}:
            raise ValueError(
                f"{settings.get('kind')} takes no keys; set its config_class to a subclass of "
                "agent_peft.environments.EnvironmentConfig that declares them"
            )
        return settings


class Episode(ABC):
    """One run of an environment on one task. One thread at a time may use it; many episodes run at once.

    An episode with ``tools`` (functions in OpenAI's form) is acted in by calling them. The model's own chat
    template writes the tools, the calls and their results. ``step`` then gets one call as `write_call`
    writes it, or an empty text where the reply is not one call.
    """

    tools: Sequence[Mapping[str, Any]] = ()

    @abstractmethod
    def start(self) -> Sequence[Message]:
        """Return the opening (system and user messages). It is called once, before the first ``step``."""

    @abstractmethod
    def step(self, action: str) -> StepResult:
        """Act. Whatever a policy writes must end in a result, never in an exception.

        Raises:
            RuntimeError: the episode is already done or closed, which is a fault of the caller.
            InfrastructureError: the world under the environment failed. The actions are replayed in another
                episode, and if that fails, too, the episode is incorrect. If an agent can cause a failure,
                grade it here instead of raising.
        """

    @abstractmethod
    def close(self) -> None:
        """Free everything that the episode holds. It may be called twice, and from another thread."""


class Mistake(str):
    """A wrong reply that a demonstration shows before it repairs it. The environment answers it as any other
    reply. The policy reads both, and does not learn to make the mistake. Of the next reply it learns
    only what that reply changes.

    >>> [Mistake("SELECT prices FROM t"), "SELECT price FROM t"][0]
    'SELECT prices FROM t'
    """


class Demonstrated(str):
    """A reply of a demonstration that is more than a text: ``message`` has its calls and its thought. The
    text is what `Episode.step` gets.
    """

    message: Message

    @classmethod
    def of(cls, message: Message) -> Demonstrated:
        """
        >>> Demonstrated.of(Message("assistant", "4", thought="2 + 2"))
        '4'
        """
        demonstrated = cls(action_of(message))
        demonstrated.message = message
        return demonstrated


@dataclass(frozen=True)
class Inspection:
    """The result of replaying one task; ``cause`` is None where the task can be used. ``warning`` is a line
    about a weakness of its evaluation.

    >>> Inspection(gold_is_correct=True, nothing_is_correct=False, cause=None).cause is None
    True
    """

    gold_is_correct: bool
    nothing_is_correct: bool
    cause: str | None
    warning: str | None = None


@dataclass(frozen=True)
class TaskFiles:
    """The operations of an environment on files of tasks, for ``agent-peft generate``, ``validate`` and
    ``download``. An operation is None where the environment does not offer it.
    """

    # it takes the keys of ``generate_config`` as arguments, and returns the entries of a file by their ids
    generate: Callable[..., Mapping[str, Mapping[str, Any]]] | None = None
    generate_config: type[Config] = Config
    # its argument is the environment's configuration; it yields each task's id with its inspection, up to
    # the configuration's limit. None replays the demonstrations of the loaded environment
    inspect: Callable[[Any], Iterable[tuple[str, Inspection]]] | None = None
    download: Callable[[Path], Sequence[Path]] | None = None  # writes into a folder; returns the files


class Environment(ABC):
    """The dynamics of a family of tasks. It holds no state of any episode, so threads may share it.

    A subclass is called with one argument, an instance of its ``config_class``. Without it, the keys have
    their defaults.
    """

    config_class: ClassVar[type[EnvironmentConfig]] = NoKeys
    task_files: ClassVar[TaskFiles] = TaskFiles()
    # what an evaluation measures: outcomes of episodes, or the likelihood of recorded replies that no outcome
    # grades, of which the first is compared
    measures: ClassVar[tuple[str, ...]] = OUTCOMES

    def __init__(self, config: Any = None) -> None:
        self.config: Any = self.config_class() if config is None else config

    @property
    @abstractmethod
    def tasks(self) -> Sequence[Task]:
        """The usable tasks in a fixed order. The same configuration gives the same tasks."""

    @property
    def sandboxed(self) -> bool:
        """Whether an action is confined to its episode. If not, it can do all that our user can."""
        return True

    @abstractmethod
    def episode(self, task: Task, seed: int) -> Episode:
        """Create an episode of ``task``. All randomness in it comes from ``seed``.

        The task may come from a client of a server instead of from ``tasks``: check all that the episode
        relies on, and raise `AgentPeftError` if the task has another form.
        """

    def demonstration(self, task: Task) -> Sequence[str] | None:
        """Return actions that solve ``task``, one text per turn, or None where none are known. Supervised
        stages and validation use them. A text that is a `Mistake` is read, but not learned.
        """
        return None

    def reference(self, task: Task) -> str | None:
        """Return what would have been right, for people who read an episode, or None where it is not known:
        by default the demonstration. It is asked for once for each group of episodes.
        """
        actions = self.demonstration(task)
        return None if actions is None else "\n\n".join(actions)

    def rejection(self, task: Task) -> Sequence[str] | None:
        """Return actions that are worse than the demonstration, one text per turn, or None where none are
        known. Stages that learn from preferences use them.
        """
        return None

    def close(self) -> None:  # noqa: B027 (most environments hold nothing)
        """Free everything that the episodes share. It may be called twice."""
