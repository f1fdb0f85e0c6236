"""The episodes of a server: each request is executed at most once, whatever the network does to it.

All bookkeeping happens on the event loop's thread, so nothing here is locked; only the environments run on threads.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from agent_peft.environments.base import Environment, Episode
from agent_peft.environments.http import wire
from agent_peft.environments.http.wire import Refusal
from agent_peft.seeding import derive
from agent_peft.types import AgentPeftError, InfrastructureError, Message, StepResult, Task

logger = logging.getLogger(__name__)
T = TypeVar("T")

PAGE = 500  # tasks in one answer
REMEMBERED = 4096  # episodes that are over, whose last answer may still be asked for again


@dataclass(frozen=True)
class Limits:
    """What a stranger may ask for, and for how long. Sizes are in bytes, but for ``action_chars``.

    >>> Limits(episodes=8).threads
    64
    """

    episodes: int = 1024  # at once
    idle_seconds: float = 600.0  # until an episode, none of whose client's requests came, is closed
    threads: int = 64  # environments that act at once; more wait for their turn
    body_bytes: int = 8 << 20
    body_seconds: float = 30.0  # until a request has sent its body
    action_chars: int = 1 << 20
    shutdown_seconds: float = 30.0  # that episodes get to finish a step when the server stops


@dataclass(eq=False)
class _Episode:
    """One episode. ``count`` steps were asked for; ``last`` is the answer to the newest of them, under way or given."""

    id: str
    environment: str
    task: Task
    seed: int
    foreign: bool  # the task came with the request
    client: str | None
    touched: float
    opening: asyncio.Task[wire.ResetResponse | Refusal] | None = None
    episode: Episode | None = None
    count: int = 0
    digest: bytes = b""
    last: asyncio.Task[wire.StepResponse | Refusal] | None = None
    over: bool = False  # takes no more steps: done, failed or closed

    @property
    def running(self) -> bool:
        return any(task is not None and not task.done() for task in (self.opening, self.last))

    @property
    def state(self) -> wire.State:
        return wire.State(episode_id=self.id, step_count=self.count, environment=self.environment, task=self.task.id, done=self.over)


@dataclass(eq=False)
class Episodes:
    """The environments that are served, and their episodes.

    Every method but the constructor is called on one event loop.
    """

    environments: Mapping[str, Environment]
    limits: Limits = Limits()
    clock: Callable[[], float] = time.monotonic
    server_id: str = field(default_factory=lambda: uuid.uuid4().hex)  # tells a server from one that was started in its place

    def __post_init__(self) -> None:
        self.open: dict[str, _Episode] = {}
        self.ended: OrderedDict[str, _Episode | None] = OrderedDict()  # None: closed by its client, who asks no more
        self._seen: dict[str, float] = {}  # client -> when it last spoke
        self._tasks = {
            name: {task.id: task for task in served.tasks} if len(served.tasks) <= wire.MANY else {}
            for name, served in self.environments.items()
        }
        self._threads = ThreadPoolExecutor(self.limits.threads, f"episodes-{self.server_id}")
        self._unnamed = 0  # resets that left the task or the seed to us

    async def in_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def environment(self, name: str) -> Environment:
        if name not in self.environments:
            raise Refusal(404, "unknown_environment", f"there is no environment {name!r} here; choose {' or '.join(self.environments)}")
        return self.environments[name]

    def task(self, environment: str, wanted: str | wire.TaskMessage) -> Task:
        self.environment(environment)
        if isinstance(wanted, wire.TaskMessage):
            return wanted.task()
        if wanted not in self._tasks[environment]:
            why = f"has no task {wanted!r}" if self._tasks[environment] else "has too many tasks to find one by its id: send it whole"
            raise Refusal(404, "unknown_task", f"environment {environment!r} {why}")
        return self._tasks[environment][wanted]

    async def reset(self, request: wire.ResetRequest, client: str | None = None) -> wire.ResetResponse:
        """Start an episode, or answer again what was answered to the same request."""
        self.hear(client)
        name = request.episode_id or uuid.uuid4().hex
        if name in self.ended and self.ended[name] is None:
            raise Refusal(410, wire.ENDED, f"episode {name!r} is closed")
        record = self.open.get(name) or self.ended.get(name)
        if record is None:
            if len(self.open) >= self.limits.episodes:
                raise Refusal(
                    429,
                    wire.FULL,
                    f"the server holds {self.limits.episodes} episodes, the most it may; start it with a larger --max-episodes, or ask for "
                    f"fewer at once (those of a client that is gone are freed after {self.limits.idle_seconds:g} s)",
                )
            environment, (task, seed) = self.environment(request.environment), self._choose(request)
            foreign = isinstance(request.task, wire.TaskMessage)
            record = _Episode(name, request.environment, task, seed, foreign, client, self.clock())
            self.open[name] = record
            record.opening = asyncio.create_task(self._begin(record, environment))
        elif request.seed not in (None, record.seed) or record.environment != request.environment or not _names(request.task, record.task):
            raise Refusal(409, wire.CONFLICT, f"episode {name!r} was started with another task or seed")
        assert record.opening is not None
        return await _answer(record.opening)

    async def step(self, request: wire.StepRequest, client: str | None = None) -> wire.StepResponse:
        """Act, or answer again what was answered to the same action under the same index."""
        self.hear(client)
        name, index, text = request.episode_id, request.index, request.action.text
        if request.server_id not in (None, self.server_id):
            raise Refusal(404, wire.UNKNOWN, f"episode {name!r} was lost: the server was started anew since")
        if len(text) > self.limits.action_chars:
            raise Refusal(413, "too_long", f"an action may have {self.limits.action_chars} characters at most, this one has {len(text)}")
        record = self._find(name)
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass")).digest()
        if record.last is not None and index == record.count - 1:
            if digest != record.digest:
                raise Refusal(409, wire.CONFLICT, f"episode {name!r} has taken another action as its step {index}")
            return await _answer(record.last)
        if record.over:
            raise Refusal(410, wire.ENDED, f"episode {name!r} is over")
        if index != record.count or record.running:
            busy = "one request at a time" if record.running else f"its next step is {record.count}, not {index}"
            raise Refusal(409, wire.CONFLICT, f"episode {name!r}: {busy}")
        record.count, record.digest, record.touched = record.count + 1, digest, self.clock()
        record.last = asyncio.create_task(self._act(record, text, index))
        return await _answer(record.last)

    async def close(self, name: str, client: str | None = None) -> None:
        """Free an episode, after what it is doing. One that is not known is not started any more, should its reset come late."""
        self.hear(client)
        record = self.open.get(name)
        if record is not None:
            await self._end(record)
        self._remember(name, None)

    async def demonstration(self, request: wire.DemonstrationRequest) -> tuple[str, ...] | None:
        """Actions that solve a task, or None where none are known."""
        environment, task = self.environment(request.environment), self.task(request.environment, request.task)
        try:
            actions = await self.in_thread(lambda: environment.demonstration(task))
        except Exception as error:
            raise _refusal(error, task, isinstance(request.task, wire.TaskMessage)) from error
        return None if actions is None else tuple(actions)

    def state(self, name: str) -> wire.State:
        return self._find(name).state

    async def reap(self) -> int:
        """Close the episodes that are idle. How many that were."""
        now, idle = self.clock(), self.limits.idle_seconds
        late = [e for e in self.open.values() if not e.running and now - max(e.touched, self._seen.get(e.client or "", 0.0)) > idle]
        for record in late:
            logger.warning("episode %s was idle for more than %g s and is closed", record.id, idle)
            await self.close(record.id)
        speaking = {record.client for record in self.open.values()}
        self._seen = {client: when for client, when in self._seen.items() if client in speaking}
        return len(late)

    async def shutdown(self) -> None:
        """Close every episode, each after the step it is at, and give the threads back."""
        under_way = [task for e in self.open.values() for task in (e.opening, e.last) if task is not None and not task.done()]
        if under_way:
            _, late = await asyncio.wait(under_way, timeout=self.limits.shutdown_seconds)
            if late:
                logger.warning("%d episodes are still at a step after %g s", len(late), self.limits.shutdown_seconds)
        await asyncio.gather(*(self._end(record) for record in list(self.open.values()) if not record.running))
        self._threads.shutdown(wait=not self.open, cancel_futures=True)

    # -- what is executed, once -----------------------------------------------------------------------------------------------------

    async def _begin(self, record: _Episode, environment: Environment) -> wire.ResetResponse | Refusal:
        def begin() -> Sequence[Message]:
            record.episode = environment.episode(record.task, record.seed)
            return record.episode.start()

        try:
            messages = await self.in_thread(begin)
        except Exception as error:
            await self._end(record, wait=False)
            return _refusal(error, record.task, record.foreign)
        facts = wire.ResetFacts(episode_id=record.id, server_id=self.server_id, environment=record.environment, task=record.task.id)
        shown = tuple(wire.ChatMessage.of(message) for message in messages)
        return wire.ResetResponse(observation=wire.Observation(text=shown[-1].content if shown else "", messages=shown), metadata=facts)

    async def _act(self, record: _Episode, text: str, index: int) -> wire.StepResponse | Refusal:
        def act() -> StepResult:
            if record.episode is None:
                raise RuntimeError("the episode was not started")
            return record.episode.step(text)

        try:
            result = await self.in_thread(act)
        except Exception as error:
            await self._end(record, wait=False)
            return _refusal(error, record.task, record.foreign)
        if result.done:
            await self._end(record, wait=False)
        record.touched = self.clock()
        return wire.StepResponse.of(result, record.id, index)

    async def _end(self, record: _Episode, wait: bool = True) -> None:
        """Free what an episode holds. Its last answer is remembered, until its client says that it needs none."""
        record.over = True
        under_way = [task for task in (record.opening, record.last) if task is not None and not task.done()]
        if wait and under_way:
            await asyncio.wait(under_way)
        episode, record.episode = record.episode, None
        try:
            if episode is not None:
                await self.in_thread(episode.close)
        except Exception:
            logger.exception("episode %s could not be closed", record.id)
        finally:
            if self.open.pop(record.id, None) is not None:
                self._remember(record.id, record)

    # -- who and what ---------------------------------------------------------------------------------------------------------------

    def hear(self, client: str | None) -> None:
        if client is not None:
            self._seen[client] = self.clock()

    def _find(self, name: str) -> _Episode:
        record = self.open.get(name) or self.ended.get(name)
        if record is not None:
            return record
        if name in self.ended:
            raise Refusal(410, wire.ENDED, f"episode {name!r} is closed, by its client or because it was idle")
        idle = f"it was idle for more than {self.limits.idle_seconds:g} s, or the server was started anew"
        raise Refusal(404, wire.UNKNOWN, f"there is no episode {name!r} ({idle}, or it never was)")

    def _remember(self, name: str, record: _Episode | None) -> None:
        self.ended[name] = record
        self.ended.move_to_end(name)
        while len(self.ended) > REMEMBERED:
            self.ended.popitem(last=False)

    def _choose(self, request: wire.ResetRequest) -> tuple[Task, int]:
        """The task and the seed: those that are asked for, or a task by the seed, or the next of both."""
        number = self._unnamed
        if request.seed is None:
            self._unnamed += 1
        seed = derive(0, "reset", number) if request.seed is None else request.seed
        if request.task is not None:
            return self.task(request.environment, request.task), seed
        tasks = self.environments[request.environment].tasks
        if not tasks:
            raise Refusal(404, "unknown_task", f"environment {request.environment!r} has no tasks")
        return tasks[(number if request.seed is None else derive(seed, "task")) % len(tasks)], seed


async def _answer(task: asyncio.Task[T | Refusal]) -> T:
    """What was executed, shielded: a client that hangs up stops nothing."""
    answer = await asyncio.shield(task)
    if isinstance(answer, Refusal):
        raise answer
    return answer


def _names(wanted: str | wire.TaskMessage | None, task: Task) -> bool:
    return wanted is None or (wanted == task.id if isinstance(wanted, str) else wanted.task() == task)


def _refusal(error: Exception, task: Task, foreign: bool) -> Refusal:
    if isinstance(error, InfrastructureError):
        return Refusal(502, wire.INFRASTRUCTURE, str(error) or "the environment failed")
    if isinstance(error, AgentPeftError):
        return Refusal(422, "mistake", str(error))
    told = f"{type(error).__name__}: {error}"
    if foreign:  # whoever sends a task is answerable for it
        return Refusal(422, "mistake", f"task {task.id!r} cannot be used here ({told})")
    logger.error("task %s: the environment raised", task.id, exc_info=error)
    return Refusal(500, "broken", f"the environment raised {told} (task {task.id!r}; the server's log holds more)")
