"""Solved tasks as conversations, which a prompt shows before its own task (few-shot prompts)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from agent_peft.environments.base import Environment
from agent_peft.environments.contract import open_episode
from agent_peft.environments.http import messages
from agent_peft.environments.http.messages import Refusal
from agent_peft.environments.task_files.replay import replay
from agent_peft.seeding import derive
from agent_peft.types import InfrastructureError, Message, Outcome, Task

logger = logging.getLogger(__name__)

MAX_EXAMPLES = 64  # LifelongAgentBench measures with up to 64
MAX_TRIED = 1000  # tasks without a demonstration


class ChatHistory:
    """Demonstrations of an environment's first tasks. They are replayed, so that the agent reads the
    environment's real answers.
    """

    def __init__(
        self, environment: Environment, in_thread: Callable[[Callable[[], Any]], Awaitable[Any]]
    ) -> None:
        self.environment, self.in_thread = environment, in_thread
        self._examples: list[messages.Example] = []
        self._next = 0  # the task to try next
        self._one_at_a_time = asyncio.Lock()

    async def examples(self, count: int) -> messages.Examples:
        """The first ``count`` conversations; fewer if fewer tasks have a correct demonstration."""
        async with self._one_at_a_time:
            while len(self._examples) < count and self._next < min(len(self.environment.tasks), MAX_TRIED):
                task = self.environment.tasks[self._next]
                conversation = None
                try:
                    conversation = await self.in_thread(partial(solved_conversation, self.environment, task))
                except InfrastructureError as error:
                    raise Refusal(502, messages.INFRASTRUCTURE, str(error)) from error
                except Exception:
                    logger.exception("task %r: its demonstration could not be replayed", task.id)
                self._next += 1
                if conversation is not None:
                    self._examples.append(
                        messages.Example(
                            task=task.id, messages=tuple(messages.ChatMessage.of(m) for m in conversation)
                        )
                    )
        if not self._examples:
            raise Refusal(
                404, "no_examples", "the environment has no task with a demonstration that solves it"
            )
        return messages.Examples(examples=tuple(self._examples[:count]))


def solved_conversation(environment: Environment, task: Task) -> list[Message] | None:
    """The conversation of a task's demonstration. None where there is none, or it does not solve the task."""
    actions = environment.demonstration(task)
    if not actions:
        return None
    replayed = replay(open_episode(environment, task, derive(0, "example", task.id)), actions)
    return replayed.messages if replayed.results[-1].outcome is Outcome.CORRECT else None
