"""The episodes of a server. Each request is executed at most once, however often the network repeats it.

All bookkeeping happens on the thread of the event loop, so there are no locks; only the environments run on
other threads.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import sys
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from agent_peft.environments.base import Environment
from agent_peft.environments.contract import open_episode, opening_of, result_of
from agent_peft.environments.http import messages
from agent_peft.environments.http.limits import Limits
from agent_peft.environments.http.messages import Refusal
from agent_peft.environments.http.records import (
    EpisodeRecord,
    WholeTask,
    check_owner,
    fingerprint,
    is_same_task,
)
from agent_peft.environments.http.refusals import refusal_of
from agent_peft.seeding import derive
from agent_peft.types import Message, StepResult, Task

logger = logging.getLogger(__name__)
T = TypeVar("T")

PAGE = 500  # tasks in one answer
MAX_ENDED = 4096  # episodes that are over, whose last answer may still be asked for again


@dataclass(eq=False)
class Episodes:
    """The environments that are served, and their episodes. Call all methods on one event loop."""

    environments: Mapping[str, Environment]
    limits: Limits = field(default_factory=Limits)
    clock: Callable[[], float] = time.monotonic
    server_id: str = field(
        default_factory=lambda: uuid.uuid4().hex
    )  # tells a server from one that was started in its place

    def __post_init__(self) -> None:
        self.open: dict[str, EpisodeRecord] = {}
        self.ended: OrderedDict[str, EpisodeRecord | None] = (
            OrderedDict()
        )  # None: closed by its client, who asks no more
        self.ended_bytes = 0  # bytes of the answers of those that ended
        self._seen: dict[str, float] = {}  # client -> when it last spoke
        self._tasks = {
            name: {task.id: task for task in served.tasks}
            if len(served.tasks) <= messages.MAX_LISTED_TASKS
            else {}
            for name, served in self.environments.items()
        }
        self._threads = ThreadPoolExecutor(self.limits.threads, f"episodes-{self.server_id}")
        self._unnamed = 0  # resets that left the task or the seed to us

    async def in_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def environment(self, name: str) -> Environment:
        if name not in self.environments:
            raise Refusal(
                404,
                "unknown_environment",
                f"there is no environment {name!r} here; choose {' or '.join(self.environments)}",
            )
        return self.environments[name]

    async def reset(
        self, request: messages.ResetRequest, client: str | None = None
    ) -> messages.ResetResponse:
        """Start an episode, or repeat the answer to the same request."""
        self.touch(client)
        name = request.episode_id or uuid.uuid4().hex
        if name in self.ended and self.ended[name] is None:
            raise Refusal(410, messages.ENDED, f"episode {name!r} is closed")
        record = self.open.get(name) or self.ended.get(name)
        if record is None:
            environment = self.environment(request.environment)
            task, whole, seed = self._choose(request)
            self._leave_room(whole)
            record = EpisodeRecord(name, request.environment, task.id, whole, seed, client, self.clock())
            self.open[name] = record
            record.opening = asyncio.create_task(self._begin(record, environment, task))
        else:
            check_owner(record, client)
            if (
                request.seed not in (None, record.seed)
                or record.environment != request.environment
                or not is_same_task(request.task, record)
            ):
                raise Refusal(
                    409, messages.CONFLICT, f"episode {name!r} was started with another task or seed"
                )
        if record.opening is None:
            raise Refusal(410, messages.ENDED, f"episode {name!r} is over")
        return await _answer(record.opening)

    async def step(self, request: messages.StepRequest, client: str | None = None) -> messages.StepResponse:
        """Act, or repeat the answer to the same action under the same index."""
        self.touch(client)
        name, index, text = request.episode_id, request.index, request.action.text
        if request.server_id not in (None, self.server_id):
            raise Refusal(404, messages.UNKNOWN, f"episode {name!r} was lost: the server has been restarted")
        if len(text) > self.limits.action_chars:
            raise Refusal(
                413,
                "too_long",
                f"an action may have {self.limits.action_chars} characters at most, this one has {len(text)}",
            )
        record = self._find(name, client)
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass")).digest()
        if record.last is not None and index == record.count - 1:
            if digest != record.digest:
                raise Refusal(
                    409, messages.CONFLICT, f"episode {name!r} has taken another action as its step {index}"
                )
            return await _answer(record.last)
        if record.over:
            raise Refusal(410, messages.ENDED, f"episode {name!r} is over")
        if index != record.count or record.running:
            busy = (
                "one request at a time" if record.running else f"its next step is {record.count}, not {index}"
            )
            raise Refusal(409, messages.CONFLICT, f"episode {name!r}: {busy}")
        record.count, record.digest, record.touched = record.count + 1, digest, self.clock()
        record.last = asyncio.create_task(self._act(record, text, index))
        return await _answer(record.last)

    async def close(self, name: str, client: str | None = None) -> None:
        """Free an episode when its current step is done. An unknown episode is marked as closed, so that a
        late reset does not start it.
        """
        self.touch(client)
        record = self.open.get(name)
        if record is not None:
            check_owner(record, client)
            await self._end(record, closed=True)
        self._remember(name, None)

    async def demonstration(self, request: messages.DemonstrationRequest) -> tuple[str, ...] | None:
        """Actions that solve a task, or None where none are known."""
        environment = self.environment(request.environment)
        task, whole = self._task(request.environment, request.task)
        try:
            actions = await self.in_thread(lambda: environment.demonstration(task))
            return None if actions is None else tuple(actions)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            raise refusal_of(error, task.id, mistaken=whole is not None) from error

    def state(self, name: str, client: str | None = None) -> messages.State:
        self.touch(client)
        return self._find(name, client).state

    async def reap(self) -> int:
        """Close idle episodes, and return their number."""
        now, idle = self.clock(), self.limits.idle_seconds
        late = [
            e
            for e in self.open.values()
            if not e.running
            and (
                now - max(e.touched, self._seen.get(e.client or "", 0.0)) > idle
                or now - e.touched > self.limits.longest_seconds
            )
        ]
        for record in late:
            logger.warning("episode %r was idle for more than %g s and is closed", record.id, idle)
            await self._end(record, closed=True)
        speaking = {record.client for record in self.open.values()}
        self._seen = {client: when for client, when in self._seen.items() if client in speaking}
        return len(late)

    async def shutdown(self, seconds: float | None = None) -> None:
        """Close every episode after its current step, and end the threads.

        Args:
            seconds: time limit for the current steps; None takes ``limits.shutdown_seconds``.
        """
        under_way = [
            task
            for e in self.open.values()
            for task in (e.opening, e.last)
            if task is not None and not task.done()
        ]
        if under_way:
            _, late = await asyncio.wait(
                under_way, timeout=self.limits.shutdown_seconds if seconds is None else seconds
            )
            if late:
                logger.warning(
                    "%d episodes are still at a step after %g s", len(late), self.limits.shutdown_seconds
                )
        await asyncio.gather(
            *(self._end(record) for record in list(self.open.values()) if not record.running)
        )
        self._threads.shutdown(wait=not self.open, cancel_futures=True)

    # -- execution, once per request -------------------------------------------------------------------------

    async def _begin(
        self, record: EpisodeRecord, environment: Environment, task: Task
    ) -> messages.ResetResponse | Refusal:
        def begin() -> Sequence[Message]:
            record.episode = open_episode(environment, task, record.seed)
            return opening_of(record.episode)

        answer: messages.ResetResponse | Refusal
        try:
            facts = messages.ResetFacts(
                episode_id=record.id,
                server_id=self.server_id,
                environment=record.environment,
                task=record.task_id,
            )
            opening = tuple(messages.ChatMessage.of(message) for message in await self.in_thread(begin))
            text = opening[-1].content if opening else ""
            answer = messages.ResetResponse(
                observation=messages.Observation(text=text, messages=opening), metadata=facts
            )
            record.answer_bytes = sum(sys.getsizeof(message.content) for message in opening)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # also what a library in Rust raises when it panics
            answer, record.over = refusal_of(error, record.task_id, mistaken=record.whole is not None), True
        return await self._told(record, answer)

    async def _act(self, record: EpisodeRecord, text: str, index: int) -> messages.StepResponse | Refusal:
        def act() -> StepResult:
            if record.episode is None:
                raise RuntimeError("the episode was not started")
            return result_of(record.episode, text)

        answer: messages.StepResponse | Refusal
        try:
            result = await self.in_thread(act)
            answer = messages.StepResponse.of(result, record.id, index)
            record.answer_bytes = sys.getsizeof(result.observation)
            record.over = record.over or result.done
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            answer, record.over = (
                refusal_of(error, record.task_id, acting=True, mistaken=record.whole is not None),
                True,
            )
        record.touched = self.clock()
        return await self._told(record, answer)

    async def _told(self, record: EpisodeRecord, answer: T) -> T:
        """Return the answer, and free an episode that is over."""
        if record.over:
            await self._free(record)
        return answer

    async def _end(self, record: EpisodeRecord, closed: bool = False) -> None:
        """Free an episode, at once or after its current step."""
        record.over, record.closed = True, record.closed or closed
        if not record.running:
            await self._free(record)

    async def _free(self, record: EpisodeRecord) -> None:
        """Close an episode. Its last answer is kept until its client closes it, too."""
        episode, record.episode = record.episode, None
        try:
            if episode is not None:
                await self.in_thread(episode.close)
        except asyncio.CancelledError:
            raise
        except BaseException:
            logger.exception("episode %r could not be closed", record.id)
        finally:
            if self.open.pop(record.id, None) is not None:
                if record.count:  # whoever has taken a step has read the opening
                    record.opening = None
                self._remember(record.id, None if record.closed else record)

    # -- lookup and limits -----------------------------------------------------------------------------------

    def touch(self, client: str | None) -> None:
        if client is not None:
            self._seen[client] = self.clock()

    def _find(self, name: str, client: str | None) -> EpisodeRecord:
        record = self.open.get(name) or self.ended.get(name)
        if record is not None:
            check_owner(record, client)
            return record
        if name in self.ended:
            raise Refusal(
                410, messages.ENDED, f"episode {name!r} is closed, by its client or because it was idle"
            )
        idle = f"it was idle for more than {self.limits.idle_seconds:g} s, or the server was restarted"
        raise Refusal(404, messages.UNKNOWN, f"there is no episode {name!r} ({idle}, or it never was)")

    def _remember(self, name: str, record: EpisodeRecord | None) -> None:
        self._forget(name)
        self.ended[name] = record
        self.ended_bytes += 0 if record is None else record.answer_bytes
        while len(self.ended) > MAX_ENDED or self.ended_bytes > self.limits.answers_bytes:
            self._forget(next(iter(self.ended)))

    def _forget(self, name: str) -> None:
        record = self.ended.pop(name, None)
        self.ended_bytes -= 0 if record is None else record.answer_bytes

    def _leave_room(self, whole: WholeTask | None) -> None:
        """Check that there is room for one more episode.

        Raises:
            Refusal: there is none.
        """
        limits = self.limits
        held = sum(not record.over for record in self.open.values())
        if (
            held >= limits.episodes or len(self.open) >= limits.episodes + limits.threads
        ):  # those that are closed may finish a step
            raise Refusal(
                429,
                messages.FULL,
                f"the server holds {limits.episodes} episodes, the most it may; start it with a larger "
                "--max-episodes, or ask for "
                f"fewer at once (those of a client that is gone are freed after {limits.idle_seconds:g} s)",
            )
        if whole is not None:
            size = whole.size + sum(
                record.whole.size for record in self.open.values() if record.whole is not None
            )
            if size > limits.tasks_bytes:
                raise Refusal(
                    429,
                    messages.FULL,
                    f"the whole tasks of all episodes may have {limits.tasks_bytes} bytes at most; ask for "
                    "fewer",
                )

    def _task(self, environment: str, named: str | messages.TaskMessage) -> tuple[Task, WholeTask | None]:
        """The task of an id, or the whole task that came with the request."""
        if isinstance(named, messages.TaskMessage):
            whole = fingerprint(named)
            if whole.size > self.limits.task_bytes:
                raise Refusal(
                    413,
                    "too_long",
                    f"a task may have {self.limits.task_bytes} bytes at most, this one has {whole.size}",
                )
            return named.task(), whole
        if named not in self._tasks[environment]:
            why = (
                f"has no task {named!r}"
                if self._tasks[environment]
                else "has too many tasks to find one by its id: send it whole"
            )
            raise Refusal(404, "unknown_task", f"environment {environment!r} {why}")
        return self._tasks[environment][named], None

    def _choose(self, request: messages.ResetRequest) -> tuple[Task, WholeTask | None, int]:
        """The task and the seed of a request. Without a task the seed chooses one; without both, the next
        ones are taken.
        """
        number = self._unnamed
        if request.seed is None:
            self._unnamed += 1
        seed = derive(0, "reset", number) if request.seed is None else request.seed
        if request.task is not None:
            return *self._task(request.environment, request.task), seed
        tasks = self.environments[request.environment].tasks
        if not tasks:
            raise Refusal(404, "unknown_task", f"environment {request.environment!r} has no tasks")
        return tasks[(number if request.seed is None else derive(seed, "task")) % len(tasks)], None, seed


async def _answer(task: asyncio.Task[T | Refusal]) -> T:
    """Await an execution, shielded, because a client that hangs up must not stop it."""
    answer = await asyncio.shield(task)
    if isinstance(answer, Refusal):
        raise answer
    return answer
