"""The chat-history service: solved tasks as conversations, to be put before a task's own (few-shot
prompts).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Any

from agent_peft.environments.base import Environment
from agent_peft.environments.http import messages
from agent_peft.environments.http.app import JSON, FastAPI, Query, Response, new_app
from agent_peft.environments.http.messages import Refusal
from agent_peft.seeding import derive
from agent_peft.types import InfrastructureError, Message, Outcome, Task

logger = logging.getLogger(__name__)

MOST = 64  # LifelongAgentBench measures up to so many
TRIED = 1000  # tasks, until it is said that none has a demonstration


class ChatHistory:
    """Demonstrations of an environment's first tasks, replayed, so that what the agent reads is what the
    environment said.
    """

    def __init__(
        self, environment: Environment, in_thread: Callable[[Callable[[], Any]], Awaitable[Any]]
    ) -> None:
        self.environment, self.in_thread = environment, in_thread
        self._found: list[messages.Example] = []
        self._next = 0  # the task to try next
        self._one_at_a_time = asyncio.Lock()

    async def examples(self, count: int) -> messages.Examples:
        """The first ``count`` conversations, fewer where fewer tasks have a demonstration that solves
        them.
        """
        async with self._one_at_a_time:
            while len(self._found) < count and self._next < min(len(self.environment.tasks), TRIED):
                task = self.environment.tasks[self._next]
                conversation = None
                try:
                    conversation = await self.in_thread(partial(replay, self.environment, task))
                except InfrastructureError as error:
                    raise Refusal(502, messages.INFRASTRUCTURE, str(error)) from error
                except Exception:
                    logger.exception("task %r: its demonstration could not be replayed", task.id)
                self._next += 1
                if conversation is not None:
                    self._found.append(
                        messages.Example(
                            task=task.id, messages=tuple(messages.ChatMessage.of(m) for m in conversation)
                        )
                    )
        if not self._found:
            raise Refusal(
                404, "no_examples", "the environment has no task with a demonstration that solves it"
            )
        return messages.Examples(examples=tuple(self._found[:count]))


def replay(environment: Environment, task: Task) -> list[Message] | None:
    """The conversation of a task's demonstration, or None where there is none or it solves nothing."""
    actions = environment.demonstration(task)
    if actions is None:
        return None
    episode = environment.episode(task, derive(0, "example", task.id))
    try:
        conversation = list(episode.start())
        for action in actions:
            result = episode.step(action)
            conversation.append(Message("assistant", action))
            if result.done:
                return conversation if result.outcome is Outcome.CORRECT else None
            conversation.append(Message("user", result.observation))
        return None
    finally:
        episode.close()


def chat_history_app(history: ChatHistory) -> FastAPI:
    """The service, on a port of its own."""
    app = new_app(
        "Agent-PEFT chat history", "Conversations in which tasks were solved, to be put before a task's own."
    )

    @app.get(
        "/examples",
        response_model=messages.Examples,
        responses={404: {"model": messages.Problem}, 422: {"model": messages.Problem}},
    )
    async def examples(count: Annotated[int, Query(ge=1, le=MOST)] = 4) -> Response:
        """The first ``count`` conversations."""
        return JSON(await history.examples(count))

    return app
