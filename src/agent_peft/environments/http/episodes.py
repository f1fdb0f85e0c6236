"""The episodes of a server: each request is executed at most once, whatever the network does to it.

All bookkeeping happens on the event loop's thread, so nothing here is locked; only the environments run on
threads.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import sys
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from agent_peft.environments.base import Environment, Episode
from agent_peft.environments.contract import ContractError, opened, opening_of, result_of
from agent_peft.environments.http import messages
from agent_peft.environments.http.limits import Limits
from agent_peft.environments.http.messages import Refusal
from agent_peft.seeding import derive
from agent_peft.types import AgentPeftError, InfrastructureError, Message, StepResult, Task

logger = logging.getLogger(__name__)
T = TypeVar("T")

PAGE = 500  # tasks in one answer
REMEMBERED = 4096  # episodes that are over, whose last answer may still be asked for again


@dataclass(frozen=True)
class _Whole:
    """What is remembered of a task that came with a request."""

    digest: bytes
    size: int


@dataclass(eq=False)
class _Episode:
    """One episode. ``count`` steps were asked for; ``last`` is the answer to the newest of them, under way or
    given.

    When it is over, no more is kept of it than a repeated request needs.
    """

    id: str
    environment: str
    task_id: str
    whole: _Whole | None  # the task came with the request
    seed: int
    client: str | None
    touched: float
    opening: asyncio.Task[messages.ResetResponse | Refusal] | None = None
    episode: Episode | None = None
    count: int = 0
    digest: bytes = b""
    last: asyncio.Task[messages.StepResponse | Refusal] | None = None
    kept: int = 0  # bytes of the newest answer
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


@dataclass(eq=False)
class Episodes:
    """The environments that are served, and their episodes.

    Every method but the constructor is called on one event loop.
    """

    environments: Mapping[str, Environment]
    limits: Limits = field(default_factory=Limits)
    clock: Callable[[], float] = time.monotonic
    server_id: str = field(
        default_factory=lambda: uuid.uuid4().hex
    )  # tells a server from one that was started in its place

    def __post_init__(self) -> None:
        self.open: dict[str, _Episode] = {}
        self.ended: OrderedDict[str, _Episode | None] = (
            OrderedDict()
        )  # None: closed by its client, who asks no more
        self.kept = 0  # bytes of the answers of those that ended
        self._seen: dict[str, float] = {}  # client -> when it last spoke
        self._tasks = {
            name: {task.id: task for task in served.tasks} if len(served.tasks) <= messages.MANY else {}
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
        """Start an episode, or answer again what was answered to the same request."""
        self.hear(client)
        name = request.episode_id or uuid.uuid4().hex
        if name in self.ended and self.ended[name] is None:
            raise Refusal(410, messages.ENDED, f"episode {name!r} is closed")
        record = self.open.get(name) or self.ended.get(name)
        if record is None:
            environment = self.environment(request.environment)
            task, whole, seed = self._choose(request)
            self._leave_room(whole)
            record = _Episode(name, request.environment, task.id, whole, seed, client, self.clock())
            self.open[name] = record
            record.opening = asyncio.create_task(self._begin(record, environment, task))
        else:
            _check_owner(record, client)
            if (
                request.seed not in (None, record.seed)
                or record.environment != request.environment
                or not _same_task(request.task, record)
            ):
                raise Refusal(
                    409, messages.CONFLICT, f"episode {name!r} was started with another task or seed"
                )
        if record.opening is None:
            raise Refusal(410, messages.ENDED, f"episode {name!r} is over")
        return await _answer(record.opening)

    async def step(self, request: messages.StepRequest, client: str | None = None) -> messages.StepResponse:
        """Act, or answer again what was answered to the same action under the same index."""
        self.hear(client)
        name, index, text = request.episode_id, request.index, request.action.text
        if request.server_id not in (None, self.server_id):
            raise Refusal(
                404, messages.UNKNOWN, f"episode {name!r} was lost: the server was started anew since"
            )
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
        """Free an episode, when it has done what it is doing. One that is not known is not started any
        more, should its reset come late.
        """
        self.hear(client)
        record = self.open.get(name)
        if record is not None:
            _check_owner(record, client)
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
            raise _refusal(error, task.id, mistaken=whole is not None) from error

    def state(self, name: str, client: str | None = None) -> messages.State:
        self.hear(client)
        return self._find(name, client).state

    async def reap(self) -> int:
        """Close the episodes that are idle. How many that were."""
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
        """Close every episode, each after the step it is at, and give the threads back.

        Args:
            seconds: that they get to finish a step; None takes the limits' ``shutdown_seconds``.
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

    # -- what is executed, once ------------------------------------------------------------------------------

    async def _begin(
        self, record: _Episode, environment: Environment, task: Task
    ) -> messages.ResetResponse | Refusal:
        def begin() -> Sequence[Message]:
            record.episode = opened(environment, task, record.seed)
            return opening_of(record.episode)

        answer: messages.ResetResponse | Refusal
        try:
            facts = messages.ResetFacts(
                episode_id=record.id,
                server_id=self.server_id,
                environment=record.environment,
                task=record.task_id,
            )
            shown = tuple(messages.ChatMessage.of(message) for message in await self.in_thread(begin))
            text = shown[-1].content if shown else ""
            answer = messages.ResetResponse(
                observation=messages.Observation(text=text, messages=shown), metadata=facts
            )
            record.kept = sum(sys.getsizeof(message.content) for message in shown)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # also what a library in Rust raises when it panics
            answer, record.over = _refusal(error, record.task_id, mistaken=record.whole is not None), True
        return await self._told(record, answer)

    async def _act(self, record: _Episode, text: str, index: int) -> messages.StepResponse | Refusal:
        def act() -> StepResult:
            if record.episode is None:
                raise RuntimeError("the episode was not started")
            return result_of(record.episode, text)

        answer: messages.StepResponse | Refusal
        try:
            result = await self.in_thread(act)
            answer = messages.StepResponse.of(result, record.id, index)
            record.kept = sys.getsizeof(result.observation)
            record.over = record.over or result.done
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            answer, record.over = (
                _refusal(error, record.task_id, acting=True, mistaken=record.whole is not None),
                True,
            )
        record.touched = self.clock()
        return await self._told(record, answer)

    async def _told(self, record: _Episode, answer: T) -> T:
        """The answer, after which an episode that is over holds nothing."""
        if record.over:
            await self._free(record)
        return answer

    async def _end(self, record: _Episode, closed: bool = False) -> None:
        """Free what an episode holds, at once or when what it is doing is done."""
        record.over, record.closed = True, record.closed or closed
        if not record.running:
            await self._free(record)

    async def _free(self, record: _Episode) -> None:
        """Its last answer is remembered, until its client says that it needs none."""
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

    # -- who and what ----------------------------------------------------------------------------------------

    def hear(self, client: str | None) -> None:
        if client is not None:
            self._seen[client] = self.clock()

    def _find(self, name: str, client: str | None) -> _Episode:
        record = self.open.get(name) or self.ended.get(name)
        if record is not None:
            _check_owner(record, client)
            return record
        if name in self.ended:
            raise Refusal(
                410, messages.ENDED, f"episode {name!r} is closed, by its client or because it was idle"
            )
        idle = f"it was idle for more than {self.limits.idle_seconds:g} s, or the server was started anew"
        raise Refusal(404, messages.UNKNOWN, f"there is no episode {name!r} ({idle}, or it never was)")

    def _remember(self, name: str, record: _Episode | None) -> None:
        self._forget(name)
        self.ended[name] = record
        self.kept += 0 if record is None else record.kept
        while len(self.ended) > REMEMBERED or self.kept > self.limits.answers_bytes:
            self._forget(next(iter(self.ended)))

    def _forget(self, name: str) -> None:
        record = self.ended.pop(name, None)
        self.kept -= 0 if record is None else record.kept

    def _leave_room(self, whole: _Whole | None) -> None:
        """
        Raises:
            Refusal: the server holds as much as it may.
        """
        limits = self.limits
        held = sum(not record.over for record in self.open.values())
        if (
            held >= limits.episodes or len(self.open) >= limits.episodes + limits.threads
        ):  # those that are closed may finish a step
            raise Refusal(
                429,
                messages.FULL,
                f"the server holds {limits.episodes} episodes, the most it may; start it with a larger --max-episodes, or ask for "
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
                    f"the whole tasks of all episodes may have {limits.tasks_bytes} bytes at most; ask for fewer",
                )

    def _task(self, environment: str, wanted: str | messages.TaskMessage) -> tuple[Task, _Whole | None]:
        """A task of ours by its id, or one that came with the request."""
        if isinstance(wanted, messages.TaskMessage):
            whole = _weigh(wanted)
            if whole.size > self.limits.task_bytes:
                raise Refusal(
                    413,
                    "too_long",
                    f"a task may have {self.limits.task_bytes} bytes at most, this one has {whole.size}",
                )
            return wanted.task(), whole
        if wanted not in self._tasks[environment]:
            why = (
                f"has no task {wanted!r}"
                if self._tasks[environment]
                else "has too many tasks to find one by its id: send it whole"
            )
            raise Refusal(404, "unknown_task", f"environment {environment!r} {why}")
        return self._tasks[environment][wanted], None

    def _choose(self, request: messages.ResetRequest) -> tuple[Task, _Whole | None, int]:
        """The task and the seed: those that are asked for, or a task by the seed, or the next of both."""
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
    """What was executed, shielded: a client that hangs up stops nothing."""
    answer = await asyncio.shield(task)
    if isinstance(answer, Refusal):
        raise answer
    return answer


def _check_owner(record: _Episode, client: str | None) -> None:
    """An episode belongs to the client that began it, if that said who it is."""
    if record.client not in (None, client):
        raise Refusal(409, messages.CONFLICT, f"episode {record.id!r} is another client's")


def _same_task(wanted: str | messages.TaskMessage | None, record: _Episode) -> bool:
    return wanted is None or (
        wanted == record.task_id if isinstance(wanted, str) else _weigh(wanted) == record.whole
    )


def _weigh(task: messages.TaskMessage) -> _Whole:
    """
    Raises:
        Refusal: it is nested too deeply, or holds a number or a text that JSON and UTF-8 cannot.
    """
    try:
        text = json.dumps([task.id, task.skills, task.content], ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise Refusal(422, "mistake", f"task {task.id!r} cannot be used here ({error})") from error
    return _Whole(hashlib.blake2b(text).digest(), len(text))


def _refusal(error: BaseException, task: str, *, mistaken: bool = False, acting: bool = False) -> Refusal:
    """
    Args:
        mistaken: what was raised may be the fault of the task, and whoever sent it is answerable for it.
        acting: it was raised at an action, when the environment had taken the task: a defect of it, which the
            agent's client is told.
    """
    if isinstance(error, InfrastructureError):
        return Refusal(502, messages.INFRASTRUCTURE, str(error) or "the environment failed")
    if isinstance(error, ContractError):
        told = f"task {task!r}: {error}"
        logger.error("%s", told)
        return Refusal(422 if mistaken or not acting else 500, messages.BROKEN if acting else "mistake", told)
    if isinstance(error, AgentPeftError):
        return Refusal(422, "mistake", str(error))
    told = f"{type(error).__name__}: {error}"
    if mistaken and not acting:
        return Refusal(422, "mistake", f"task {task!r} cannot be used here ({told})")
    logger.error("task %r: the environment raised", task, exc_info=error)
    return Refusal(
        422 if mistaken else 500,
        messages.BROKEN,
        f"the environment raised {told} (task {task!r}; the server's log holds more)",
    )
