"""The server of ``agent-peft serve``: environments over HTTP, many episodes at once. It needs the extra
``server``.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice
from typing import Annotated, Any

from pydantic import BaseModel

from agent_peft.addresses import is_loopback
from agent_peft.environments.base import Environment
from agent_peft.environments.contract import open_episode
from agent_peft.environments.http import messages
from agent_peft.environments.http.guard import Guard, Limits, throttled
from agent_peft.environments.http.messages import Refusal
from agent_peft.environments.http.sessions import Sessions
from agent_peft.environments.http.transport import (
    JSON,
    Address,
    FastAPI,
    Query,
    Response,
    Server,
    WebSocket,
    listen,
    new_app,
    within_descriptors,
)
from agent_peft.environments.task_files.replay import replay
from agent_peft.seeding import derive
from agent_peft.types import AgentPeftError, InfrastructureError, Message, Outcome, Task
from agent_peft.version import __version__

logger = logging.getLogger(__name__)

LOGGERS = (
    "uvicorn.error",
    "asyncio",
    *(f"agent_peft.environments.http.{name}" for name in ("server", "sessions", "transport")),
)
CLOSING = 10.0  # seconds for closing environments one of whose steps does not end
PAGE = 500  # tasks in one answer
MAX_EXAMPLES = 64  # LifelongAgentBench measures with up to 64
MAX_TRIED = 1000  # tasks without a demonstration

REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": messages.ErrorAnswer}
    for status in (400, 401, 403, 404, 408, 413, 415, 422, 429, 502, 503)
}


def environment_app(sessions: Sessions) -> FastAPI:
    """The environments' API. ``Guard`` protects it."""
    app = new_app(
        "Agent-PEFT environments",
        "Tasks over HTTP. Reset, step and state are messages of the WebSocket /ws, as in OpenEnv.",
    )
    solved = SolvedExamples(sessions)

    def route(
        method: str, path: str, model: type[Any] | None
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        return app.api_route(path, methods=[method], response_model=model, responses=REFUSALS)

    @route("POST", "/api/ping", None)
    async def ping() -> Response:
        """Whether the server answers."""
        return JSON({"status": "ok"})

    @route("GET", "/tasks", messages.TaskPage)
    async def tasks(
        environment: Annotated[str, Query(max_length=255)] = messages.TRAIN,
        offset: Annotated[int, Query(ge=0, lt=2**62)] = 0,
        limit: Annotated[int, Query(ge=1, le=PAGE)] = PAGE,
    ) -> Response:
        """Up to ``limit`` tasks in their order from ``offset`` on; fewer if the answer would be too long.

        Their contents may hold solutions: they are for trainers, not for agents.
        """
        everything = sessions.environment(environment).tasks
        page: list[messages.TaskMessage] = []
        size = 0
        for task in everything[offset : offset + limit]:
            message = messages.TaskMessage.of(task)
            size += len(messages.to_json(message))
            if page and size > messages.MAX_PAGE_BYTES:
                break
            page.append(message)
        return JSON(messages.TaskPage(total=len(everything), tasks=tuple(page)))

    @route("POST", "/demonstration", messages.Demonstration)
    async def demonstration(request: messages.DemonstrationRequest) -> Response:
        """Actions that solve a task, or null where none are known."""
        return JSON(messages.Demonstration.of(await sessions.demonstration(request)))

    @route("GET", "/examples", messages.Examples)
    async def examples(count: Annotated[int, Query(ge=1, le=MAX_EXAMPLES)] = 4) -> Response:
        """The first ``count`` solved tasks of the first environment, as conversations."""
        return JSON(await solved.first(count))

    @route("GET", "/metadata", None)
    async def metadata() -> Response:
        """The environments that are served, with their numbers of tasks."""
        about = "Environments; an action is {text}, an observation {text, messages}."
        counts = {name: len(served.tasks) for name, served in sessions.environments.items()}
        return JSON(
            {"name": "agent-peft", "description": about, "version": __version__, "environments": counts}
        )

    @route("GET", "/schema", None)
    async def schema() -> Response:
        """JSON schemas of actions, observations and states."""
        models: dict[str, type[BaseModel]] = {
            "action": messages.Action,
            "observation": messages.Observation,
            "state": messages.State,
        }
        return JSON({name: model.model_json_schema() for name, model in models.items()})

    @route("GET", "/health", messages.Health)
    async def health() -> Response:
        """Whether the server runs."""
        return JSON(messages.Health())

    @app.websocket("/ws")
    async def session(socket: WebSocket) -> None:
        await sessions.converse(socket)

    return app


class SolvedExamples:
    """Demonstrations of the first environment's first tasks, for few-shot prompts. They are replayed, so that
    the agent reads the environment's real answers.
    """

    def __init__(self, sessions: Sessions) -> None:
        self.sessions, self.environment = sessions, next(iter(sessions.environments.values()))
        self._examples: list[messages.Example] = []
        self._next = 0  # the task to try next
        self._one_at_a_time = asyncio.Lock()

    async def first(self, count: int) -> messages.Examples:
        """Return the first ``count`` conversations; fewer if fewer tasks have a correct demonstration."""
        async with self._one_at_a_time:
            while len(self._examples) < count and self._next < min(len(self.environment.tasks), MAX_TRIED):
                task = self.environment.tasks[self._next]
                conversation = None
                try:
                    solve = partial(solved_conversation, self.environment, task)
                    conversation = await self.sessions.in_thread(solve)
                except InfrastructureError as error:
                    raise Refusal(502, messages.INFRASTRUCTURE, str(error)) from error
                except Exception:
                    logger.exception("task %r: its demonstration could not be replayed", task.id)
                self._next += 1
                if conversation is not None:
                    chat = tuple(messages.WireMessage.of(message) for message in conversation)
                    self._examples.append(messages.Example(task=task.id, messages=chat))
        if not self._examples:
            raise Refusal(
                404, "no_examples", "the environment has no task with a demonstration that solves it"
            )
        return messages.Examples(examples=tuple(self._examples[:count]))


def solved_conversation(environment: Environment, task: Task) -> list[Message] | None:
    """Return the conversation of a task's demonstration, or None unless it solves the task."""
    actions = environment.demonstration(task)
    if not actions:
        return None
    replayed = replay(open_episode(environment, task, derive(0, "example", task.id)), actions)
    return replayed.messages if replayed.results[-1].outcome is Outcome.CORRECT else None


class Host:
    """A server and its listening socket."""

    def __init__(
        self,
        environments: Mapping[str, Environment],
        address: Address,
        limits: Limits,
        token: str | None = None,
    ) -> None:
        if token is None and not is_loopback(address.host):
            raise AgentPeftError(
                f"{address.host} can be reached from other machines, so a token is needed: put one into an "
                "environment variable and name it with --token"
            )
        for name, environment in environments.items():
            if token is None and not environment.sandboxed:
                raise AgentPeftError(
                    f"{name} runs without a sandbox, so whoever reaches this server (any user of this "
                    "machine does) acts as its user: "
                    "choose a sandbox, or put a token into an environment variable and name it with --token"
                )
        check_tasks(environments)
        limits = within_descriptors(limits)
        self.sessions = Sessions(environments, limits)
        self._socket = listen(address)
        self._server = Server(Guard(environment_app(self.sessions), limits, token), limits)
        self._stopped: float | None = None
        host = f"[{address.host}]" if ":" in address.host else address.host
        self.url = f"http://{host}:{self._socket.getsockname()[1]}"

    async def run(self, ready: Callable[[], None] | None = None) -> None:
        """Serve until ``stop``, then close all episodes but those at a step that does not end."""
        try:
            if ready is not None:
                ready()
            with throttled(LOGGERS):
                await self._server.serve([self._socket])
        finally:
            spent = 0.0 if self._stopped is None else time.monotonic() - self._stopped
            await self.sessions.shutdown(max(0.0, self.sessions.limits.shutdown_seconds - spent))

    def stop(self) -> None:
        """Stop serving. Signal handlers and other threads may call this."""
        self._stopped = self._stopped or time.monotonic()
        self._server.should_exit = True


def serve(
    environments: Mapping[str, Environment], address: Address, limits: Limits, token: str | None = None
) -> None:
    """Serve until SIGTERM or SIGINT, then close everything. Print one line when the server listens.

    Call this last: if a step does not end, the process exits without it.
    """
    try:
        host = Host(environments, address, limits, token)

        def ready() -> None:
            names = " and ".join(
                f"{name} ({len(environment.tasks)} tasks)" for name, environment in environments.items()
            )
            print(f"serving {names} on {host.url} (its API: {host.url}/docs)", flush=True)

        async def until_signalled() -> None:
            loop = asyncio.get_running_loop()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, host.stop)
            await host.run(ready)

        asyncio.run(until_signalled())
    except BaseException:
        _close(environments)
        raise
    if not host.sessions.open:
        _close(environments)
        return
    closing = threading.Thread(target=_close, args=(environments,), daemon=True)
    closing.start()
    closing.join(CLOSING)
    logger.warning("%d episodes were at a step that did not end", len(host.sessions.open))
    sys.stdout.flush()
    os._exit(1)  # Python would wait for their threads


def _close(environments: Mapping[str, Environment]) -> None:
    for environment in environments.values():
        environment.close()


def check_tasks(environments: Mapping[str, Environment]) -> None:
    """Refuse environments one of whose tasks is not JSON."""
    for name, environment in environments.items():
        for task in islice(environment.tasks, messages.MAX_LISTED_TASKS):
            try:
                messages.to_json(messages.TaskMessage.of(task))
            except (TypeError, ValueError, RecursionError) as error:
                raise AgentPeftError(
                    f"{name}: task {task.id!r:.200} cannot be sent: {messages.one_line(error)}"
                ) from error
