"""The record of an episode on a server: what a repeated request needs."""

from __future__ import annotations

import asyncio
import hashlib
import json
from dataclasses import dataclass

from agent_peft.environments.base import Episode
from agent_peft.environments.http import messages
from agent_peft.environments.http.messages import Refusal


@dataclass(frozen=True)
class WholeTask:
    """Digest and size of a task that came with a request."""

    digest: bytes
    size: int


@dataclass(eq=False)
class EpisodeRecord:
    """An episode of the server. ``count`` is the number of its steps; ``last`` is the task that answers the
    newest one. After its end it keeps only the answer that a repeated request needs.
    """

    id: str
    environment: str
    task_id: str
    whole: WholeTask | None  # the task came with the request
    seed: int
    client: str | None
    touched: float
    opening: asyncio.Task[messages.ResetResponse | Refusal] | None = None
    episode: Episode | None = None
    count: int = 0
    digest: bytes = b""
    last: asyncio.Task[messages.StepResponse | Refusal] | None = None
    answer_bytes: int = 0  # bytes of the newest answer
    over: bool = False  # takes no more steps: done, failed or closed
    closed: bool = False  # nobody asks for its answers any more

    @property
    def running(self) -> bool:
        return any(task is not None and not task.done() for task in (self.opening, self.last))

    @property
    def state(self) -> messages.State:
        return messages.State(
            episode_id=self.id,
            step_count=self.count,
            environment=self.environment,
            task=self.task_id,
            done=self.over,
        )


def check_owner(record: EpisodeRecord, client: str | None) -> None:
    """Check that the client is the one that began the episode; an unnamed client owns nothing.

    Raises:
        Refusal: it is another client.
    """
    if record.client not in (None, client):
        raise Refusal(409, messages.CONFLICT, f"episode {record.id!r} is another client's")


def is_same_task(task: str | messages.TaskMessage | None, record: EpisodeRecord) -> bool:
    return task is None or (
        task == record.task_id if isinstance(task, str) else fingerprint(task) == record.whole
    )


def fingerprint(task: messages.TaskMessage) -> WholeTask:
    """Return the digest and the size of a task.

    Raises:
        Refusal: it is nested too deeply, or holds a number or a text that JSON in UTF-8 cannot.
    """
    try:
        text = json.dumps([task.id, task.skills, task.content], ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise Refusal(422, "mistake", f"task {task.id!r} cannot be used here ({error})") from error
    return WholeTask(hashlib.blake2b(text).digest(), len(text))
