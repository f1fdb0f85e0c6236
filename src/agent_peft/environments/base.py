"""What an environment is: tasks, and episodes that answer actions with facts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from agent_peft.types import Message, StepResult, Task


class EnvironmentConfig(BaseModel):
    """Base of every environment's configuration: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Episode(ABC):
    """One run of an environment on one task. Owned by one thread at a time; many episodes run at once."""

    @abstractmethod
    def start(self) -> Sequence[Message]:
        """The conversation's opening (system and user messages). Called once, before the first ``step``."""

    @abstractmethod
    def step(self, action: str) -> StepResult:
        """Act. Anything a policy may write ends in a result, never in an exception of ours.

        Raises:
            RuntimeError: the episode is already done or closed (a fault of the caller).
            InfrastructureError: the world underneath failed. The actions are replayed in another one, and if
                that fails, too, the episode is incorrect. What an agent can break is better judged here than
                raised.
        """

    @abstractmethod
    def close(self) -> None:
        """Free everything the episode holds. May be called twice."""


class Environment(ABC):
    """The dynamics of a family of tasks. Holds no state of any episode, so it may be shared between
    threads.
    """

    @property
    @abstractmethod
    def tasks(self) -> Sequence[Task]:
        """The usable tasks, in a fixed order: the same configuration gives the same tasks."""

    @property
    def sandboxed(self) -> bool:
        """Whether an action can do no more than its episode allows; False if it can do what this process's
        user can.
        """
        return True

    @abstractmethod
    def episode(self, task: Task, seed: int) -> Episode:
        """A fresh episode of ``task``. Whatever is random in it comes from ``seed``.

        The task may be none of ``tasks`` but a stranger's, sent to a server: all that an episode relies on is
        checked here.

        Raises:
            AgentPeftError: the task is not as this environment's tasks are.
        """

    def demonstration(self, task: Task) -> Sequence[str] | None:
        """Actions that solve ``task`` (one text per turn), or None where none is known. For supervised
        stages and for validation.
        """
        return None

    def close(self) -> None:  # noqa: B027 (most environments hold nothing)
        """Free what all episodes shared. May be called twice."""
