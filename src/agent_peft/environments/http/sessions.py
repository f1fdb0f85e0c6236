"""The server's side of OpenEnv's WebSocket sessions: ``{"type": "reset" | "step" | "state" | "close",
"data": {...}}``, one episode at a time.

An episode ends with its session, so no request is repeated, and steps need no index. All bookkeeping is on
the event loop's thread, without locks; only environments run on other threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from agent_peft.config import first_error
from agent_peft.environments.base import Environment, Episode
from agent_peft.environments.contract import ContractError, open_episode, opening_of, result_of
from agent_peft.environments.http import messages
from agent_peft.environments.http.guard import Limits
from agent_peft.environments.http.messages import Refusal
from agent_peft.environments.http.transport import JSON, WebSocket, WebSocketDisconnect
from agent_peft.seeding import derive
from agent_peft.types import AgentPeftError, InfrastructureError, StepResult, Task

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Sessions:
    """The environments of a server, and its sessions. Call all methods on one event loop."""

    def __init__(self, environments: Mapping[str, Environment], limits: Limits | None = None) -> None:
        self.environments, self.limits = environments, limits or Limits()
        self.connected: dict[Session, WebSocket] = {}
        self.open: dict[Session, int] = {}  # sessions with an open episode -> bytes of the task it brought
        self._leaving: set[asyncio.Task[None]] = set()
        self._tasks = {
            name: {task.id: task for task in served.tasks}
            if len(served.tasks) <= messages.MAX_LISTED_TASKS
            else {}
            for name, served in environments.items()
        }
        self.name = f"episodes-{uuid.uuid4().hex}"  # of the threads
        self._threads = ThreadPoolExecutor(self.limits.threads, self.name)
        self._unnamed = 0  # resets without a seed

    async def converse(self, socket: WebSocket) -> None:
        """Serve one connection until it ends, is idle for too long, or must make room for another."""
        if len(self.connected) >= max(1, self.limits.connections * 3 // 4) and not await self._make_room():
            answer = {"detail": "the server has no room for another session", "code": messages.FULL}
            await socket.send_denial_response(JSON(answer, 503))
            return
        session = Session(self)
        self.connected[session] = socket
        try:
            await socket.accept()
            while await self._exchange(socket, session):
                pass
        except (WebSocketDisconnect, TimeoutError):
            pass
        finally:
            self.connected.pop(session, None)
            leaving = asyncio.create_task(session.leave())
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)

    async def in_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def environment(self, name: str) -> Environment:
        if name not in self.environments:
            choice = " or ".join(self.environments)
            raise Refusal(
                404, "unknown_environment", f"there is no environment {name!r} here; choose {choice}"
            )
        return self.environments[name]

    async def demonstration(self, request: messages.DemonstrationRequest) -> tuple[str, ...] | None:
        """Return actions that solve a task, or None where none are known."""
        environment = self.environment(request.environment)
        task, size = self._task(request.environment, request.task)
        try:
            actions = await self.in_thread(lambda: environment.demonstration(task))
            return None if actions is None else tuple(actions)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            raise refusal_of(error, task.id, own=size > 0) from error

    def choose(self, request: messages.ResetRequest) -> tuple[Task, int, int]:
        """Return the task of a reset, its bytes if the reset brought it, and the seed.

        Without a task the seed chooses one; without both, the next one is taken.
        """
        number = self._unnamed
        if request.seed is None:
            self._unnamed += 1
        seed = derive(0, "reset", number) if request.seed is None else request.seed
        if request.task is not None:
            return *self._task(request.environment, request.task), seed
        tasks = self.environment(request.environment).tasks
        if not tasks:
            raise Refusal(404, "unknown_task", f"environment {request.environment!r} has no tasks")
        return tasks[(number if request.seed is None else derive(seed, "task")) % len(tasks)], 0, seed

    def add(self, session: Session, size: int) -> None:
        """Count a session's episode as open. Raises `Refusal`: there is no room."""
        limits = self.limits
        held = sum(not each.over for each in self.open)
        # episodes without a client may finish a step
        if held >= limits.episodes or len(self.open) >= limits.episodes + limits.threads:
            most = f"the server holds {limits.episodes} episodes, the most it may"
            raise Refusal(429, messages.FULL, f"{most}; start it with a larger --max-episodes")
        if size and size + sum(self.open.values()) > limits.tasks_bytes:
            most = f"the whole tasks of all episodes may have {limits.tasks_bytes} bytes at most"
            raise Refusal(429, messages.FULL, f"{most}; ask for fewer")
        self.open[session] = size

    async def shutdown(self, seconds: float | None = None) -> None:
        """End the threads after the current steps. ``seconds``: None takes ``limits.shutdown_seconds``."""
        if self._leaving:
            limit = self.limits.shutdown_seconds if seconds is None else seconds
            _, late = await asyncio.wait(self._leaving, timeout=limit)
            if late:
                logger.warning("%d episodes are still at a step after %g s", len(late), limit)
        self._threads.shutdown(wait=not self.open, cancel_futures=True)

    async def _exchange(self, socket: WebSocket, session: Session) -> bool:
        """Answer one message. Return whether there may be another. Raises `TimeoutError`: the client does not
        read; `WebSocketDisconnect`: it is gone.
        """
        answer: dict[str, Any] | None
        try:
            async with asyncio.timeout_at(session.acted + self.limits.idle_seconds):
                text = await socket.receive_text()
        except TimeoutError:
            await socket.close(1001, "no step for too long")
            return False
        except KeyError:  # starlette's, where the message is bytes
            answer = _error("send text, not bytes", "INVALID_JSON")
        else:
            session.answering = asyncio.create_task(session.answer(text))
            ahead = asyncio.create_task(socket.receive())  # notices a client that leaves during a step
            await asyncio.wait({session.answering, ahead}, return_when=asyncio.FIRST_COMPLETED)
            if ahead.done():
                if ahead.result()["type"] != "websocket.disconnect":
                    await socket.close(1008, "one message at a time")
                return False
            ahead.cancel()
            answer, session.answering = session.answering.result(), None
        if answer is None:
            await socket.close()
            return False
        async with asyncio.timeout(self.limits.answer_seconds):
            await socket.send_text(messages.to_json(answer).decode("ascii"))
        return True

    async def _make_room(self) -> bool:
        """Close the longest idle session without an episode. Return whether there is one."""
        idle = [session for session in self.connected if session.episode is None and not session.answering]
        if not idle:
            return False
        oldest = min(idle, key=lambda session: session.acted)
        with contextlib.suppress(WebSocketDisconnect, RuntimeError):  # it closes already
            await self.connected.pop(oldest).close(1013, "another session needs the room")
        return True

    def _task(self, environment: str, named: str | messages.TaskMessage) -> tuple[Task, int]:
        """Return the task of an id, or the one that came with the request and its bytes."""
        if isinstance(named, messages.TaskMessage):
            return named.task(), self._size(named)
        self.environment(environment)
        if named not in self._tasks[environment]:
            why = (
                f"has no task {named!r}"
                if self._tasks[environment]
                else "has too many tasks to find one by its id: send it whole"
            )
            raise Refusal(404, "unknown_task", f"environment {environment!r} {why}")
        return self._tasks[environment][named], 0

    def _size(self, task: messages.TaskMessage) -> int:
        try:
            text = json.dumps([task.id, task.skills, task.content], ensure_ascii=False, allow_nan=False)
            size = len(text.encode())
        except (ValueError, RecursionError) as error:
            raise Refusal(422, "mistake", f"task {task.id!r} cannot be used here ({error})") from error
        if size > self.limits.task_bytes:
            most = f"a task may have {self.limits.task_bytes} bytes at most"
            raise Refusal(413, "too_long", f"{most}, this one has {size}")
        return size


class Session:
    """One connection, and its current episode."""

    def __init__(self, sessions: Sessions) -> None:
        self.sessions, self.limits = sessions, sessions.limits
        self.episode: Episode | None = None
        self.state: messages.State | None = None  # of the current episode, or of the last one
        self.own = False  # the reset brought the task
        self.over = False  # the client is gone
        self.answering: asyncio.Task[dict[str, Any] | None] | None = None
        self.acted = time.monotonic()  # the time of the last reset or step

    async def answer(self, text: str) -> dict[str, Any] | None:
        """Return the answer to one message, or None to the last."""
        try:
            message = messages.decode(text)
        except ValueError as error:
            return _error(f"not JSON: {error}", "INVALID_JSON")
        kind = message.get("type") if isinstance(message, dict) else None
        content = message.get("data", {}) if isinstance(message, dict) else {}
        del message
        try:
            match kind:
                case "reset":
                    return _observation(await self.reset(messages.ResetRequest.model_validate(content)))
                case "step":
                    return _observation(await self.step(messages.Action.model_validate(content)))
                case "state":
                    none = {"episode_id": None, "step_count": 0}
                    return {"type": "state", "data": self.state.model_dump() if self.state else none}
                case "close":
                    return None
                case _:
                    text = f"there is no message of type {kind!r:.50}; send reset, step, state or close"
                    return _error(text, "UNKNOWN_TYPE")
        except ValidationError as error:
            return _error(messages.one_line(first_error(error)), "VALIDATION_ERROR")
        except Refusal as refusal:
            return _error(refusal.text, messages.OPENENV_CODES.get(refusal.code, "VALIDATION_ERROR"))

    async def reset(self, request: messages.ResetRequest) -> messages.ResetResponse:
        """Start an episode. The previous one ends."""
        await self._free()
        environment = self.sessions.environment(request.environment)
        task, size, seed = self.sessions.choose(request)
        self.sessions.add(self, size)
        self.own = size > 0
        self.state = messages.State(
            episode_id=request.episode_id or uuid.uuid4().hex,
            step_count=0,
            environment=request.environment,
            task=task.id,
            done=False,
        )

        def begin() -> tuple[messages.WireMessage, ...]:
            self.episode = open_episode(environment, task, seed)
            opening = opening_of(self.episode)
            if self.episode.tools:
                raise AgentPeftError(messages.UNSERVED)
            return tuple(map(messages.WireMessage.of, opening))

        opening = await self._run(begin, acting=False)
        text = opening[-1].content if opening else ""
        return messages.ResetResponse(
            observation=messages.Observation(text=text, messages=opening), metadata=self.state
        )

    async def step(self, action: messages.Action) -> messages.StepResponse:
        episode, state = self.episode, self.state
        if episode is None or state is None:
            raise Refusal(409, messages.CONFLICT, "there is no episode: send reset first")
        if len(action.text) > self.limits.action_chars:
            most = f"an action may have {self.limits.action_chars} characters at most"
            raise Refusal(413, "too_long", f"{most}, this one has {len(action.text)}")
        self.state = state.model_copy(update={"step_count": state.step_count + 1})

        def act() -> StepResult:
            result = result_of(episode, action.text)
            _ = tuple(map(messages.WireMessage.of, result.messages))
            return result

        result = await self._run(act, acting=True)
        if result.done:
            await self._free()
        return messages.StepResponse.of(result, state.episode_id, state.step_count)

    async def leave(self) -> None:
        """Close the episode after its current step, because its client is gone."""
        self.over = True
        if self.answering is not None:
            await asyncio.wait({self.answering})
        await self._free()

    async def _run(self, call: Callable[[], T], acting: bool) -> T:
        """Call on a thread. An exception ends the episode. ``acting``: the task was accepted before."""
        assert self.state is not None
        try:
            return await self.sessions.in_thread(call)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # also what a library in Rust raises when it panics
            await self._free()
            raise refusal_of(error, self.state.task, own=self.own, acting=acting) from error
        finally:
            self.acted = time.monotonic()

    async def _free(self) -> None:
        """Close the episode, if there is one. Its task is forgotten."""
        episode, self.episode = self.episode, None
        try:
            if episode is not None:
                await self.sessions.in_thread(episode.close)
        except asyncio.CancelledError:
            raise
        except BaseException:
            logger.exception("an episode could not be closed")
        finally:
            if self.sessions.open.pop(self, None) is not None and self.state is not None:
                self.state = self.state.model_copy(update={"done": True})


def refusal_of(error: BaseException, task: str, *, own: bool = False, acting: bool = False) -> Refusal:
    """Return the refusal for an exception of an environment.

    Args:
        own: the task came with the request, so the client may have caused the exception.
        acting: the environment had accepted the task, so the exception is a defect of the environment.
    """
    if isinstance(error, InfrastructureError):
        return Refusal(502, messages.INFRASTRUCTURE, str(error) or "the environment failed")
    if isinstance(error, ContractError):
        detail = f"task {task!r}: {error}"
        logger.error("%s", detail)
        return Refusal(500, messages.BROKEN, detail) if acting else Refusal(422, "mistake", detail)
    if isinstance(error, AgentPeftError):
        return Refusal(422, "mistake", str(error))
    detail = f"{type(error).__name__}: {error}"
    if own and not acting:
        return Refusal(422, "mistake", f"task {task!r} cannot be used here ({detail})")
    logger.error("task %r: the environment raised", task, exc_info=error)
    text = f"the environment raised {detail} (task {task!r}; see the server's log)"
    return Refusal(422 if own else 500, messages.BROKEN, text)


def _observation(response: BaseModel) -> dict[str, Any]:
    return {"type": "observation", "data": response.model_dump()}


def _error(text: str, code: str) -> dict[str, Any]:
    return {"type": "error", "data": {"message": messages.one_line(text), "code": code}}
