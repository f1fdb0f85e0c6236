"""``agent-peft serve``: environments for anyone who speaks HTTP, many episodes at once. Needs the extra
``server``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Annotated, Any

from pydantic import BaseModel

from agent_peft import __version__
from agent_peft.environments.base import Environment
from agent_peft.environments.http import messages
from agent_peft.environments.http.app import JSON, FastAPI, Header, Query, Response, WebSocket, new_app
from agent_peft.environments.http.chat_history import ChatHistory, chat_history_app
from agent_peft.environments.http.episodes import PAGE, Episodes
from agent_peft.environments.http.guard import Guard, is_loopback
from agent_peft.environments.http.limits import Limits
from agent_peft.environments.http.log_throttle import throttled
from agent_peft.environments.http.openenv_session import Sessions
from agent_peft.environments.http.transport import Server, within_descriptors
from agent_peft.types import AgentPeftError

logger = logging.getLogger(__name__)

LOGGERS = (
    "uvicorn.error",
    "asyncio",
    *(f"agent_peft.environments.http.{name}" for name in ("hosting", "transport", "chat_history")),
)
CLOSING = 10.0  # seconds that environments get to close where a step of them does not end

Client = Annotated[str | None, Header(alias=messages.CLIENT_ID, max_length=64)]
REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": messages.Problem}
    for status in (400, 401, 403, 404, 408, 409, 410, 413, 415, 422, 429, 503)
}


def environment_app(episodes: Episodes) -> FastAPI:
    """The environments' API, without what guards it: see ``Guard``."""
    sessions = Sessions(episodes)
    app = new_app(
        "Agent-PEFT environments",
        "Reset, step and state as in OpenEnv (HTTP and the WebSocket /ws), and tasks.",
    )

    def route(
        method: str, path: str, model: type[Any], **more: Any
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        return app.api_route(path, methods=[method], response_model=model, responses=REFUSALS, **more)

    @route("POST", "/reset", messages.ResetResponse)
    async def reset(request: messages.ResetRequest | None = None, client: Client = None) -> Response:
        """Start an episode, once: a request that comes again is answered as before."""
        return JSON(await episodes.reset(request or messages.ResetRequest(), client))

    @route("POST", "/step", messages.StepResponse)
    async def step(request: messages.StepRequest, client: Client = None) -> Response:
        """Act, once: a request that comes again, with the same index, is answered as before."""
        return JSON(await episodes.step(request, client))

    @route("POST", "/close", messages.Pong)
    async def close(request: messages.CloseRequest, client: Client = None) -> Response:
        """Free an episode. May be repeated."""
        await episodes.close(request.episode_id, client)
        return JSON(messages.Pong())

    @route("GET", "/state", messages.State)
    async def state(episode_id: Annotated[str, Query(max_length=255)], client: Client = None) -> Response:
        """How far an episode has come."""
        return JSON(episodes.state(episode_id, client))

    @route("GET", "/tasks", messages.TaskPage)
    async def tasks(
        environment: Annotated[str, Query(max_length=255)] = messages.TRAIN,
        offset: Annotated[int, Query(ge=0, lt=2**62)] = 0,
        limit: Annotated[int, Query(ge=1, le=PAGE)] = PAGE,
    ) -> Response:
        """The tasks in their order, ``limit`` from ``offset`` on, or fewer where these would be too long for
        one answer.

        Their contents may hold solutions: they are for trainers, not agents.
        """
        everything = episodes.environment(environment).tasks
        page: list[messages.TaskMessage] = []
        size = 0
        for task in everything[offset : offset + limit]:
            message = messages.TaskMessage.of(task)
            size += len(messages.encode(message))
            if page and size > messages.LONGEST_PAGE:
                break
            page.append(message)
        return JSON(messages.TaskPage(total=len(everything), tasks=tuple(page)))

    @route("POST", "/demonstration", messages.Demonstration)
    async def demonstration(request: messages.DemonstrationRequest) -> Response:
        """Actions that solve a task, or null where none are known."""
        return JSON(messages.Demonstration(actions=await episodes.demonstration(request)))

    @route("GET", "/metadata", messages.Metadata)
    async def metadata() -> Response:
        """Which environments are served."""
        counts = {name: len(environment.tasks) for name, environment in episodes.environments.items()}
        about = "Environments of Agent-PEFT; an action is {text}, an observation {text, messages}."
        return JSON(
            messages.Metadata(
                name="agent-peft",
                description=about,
                version=__version__,
                server_id=episodes.server_id,
                environments=counts,
            )
        )

    @route("GET", "/schema", messages.Schemas)
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
    async def openenv(socket: WebSocket) -> None:
        await sessions.converse(socket)

    return app


@dataclass(frozen=True)
class Address:
    """Where to listen: ``port`` for the environments, ``examples_port`` for their example conversations; 0
    takes a free one.

    >>> Address("127.0.0.1", 8000).ports
    (8000, 8001)
    """

    host: str = "127.0.0.1"
    port: int = 8000
    examples_port: int | None = None  # null: the one after ``port``

    @property
    def ports(self) -> tuple[int, int]:
        after = self.port + 1 if self.port else 0
        return self.port, after if self.examples_port is None else self.examples_port


class Host:
    """A server that listens, and one of its example conversations beside it.

    Raises:
        AgentPeftError: an address is taken, or a token is needed.
    """

    def __init__(
        self,
        environments: Mapping[str, Environment],
        address: Address,
        limits: Limits,
        token: str | None = None,
    ) -> None:
        if token is None and not is_loopback(address.host):
            raise AgentPeftError(
                f"{address.host} can be reached from other machines, so a token is needed: put one into an environment variable "
                "and name it with --token"
            )
        for name, environment in environments.items():
            if token is None and not environment.sandboxed:
                raise AgentPeftError(
                    f"{name} runs without a sandbox, so whoever reaches this server (any user of this machine does) acts as its user: "
                    "choose a sandbox, or put a token into an environment variable and name it with --token"
                )
        check_tasks(environments)
        limits = within_descriptors(limits)
        self.episodes = Episodes(environments, limits)
        history = ChatHistory(next(iter(environments.values())), self.episodes.in_thread)
        self._sockets = _listen(address)
        apps = (environment_app(self.episodes), chat_history_app(history))
        few = replace(limits, connections=max(1, limits.connections // 4))  # of examples one asks once
        self._servers = [
            Server(Guard(app, limits, token), bounds) for app, bounds in zip(apps, (limits, few), strict=True)
        ]
        self._stopped: float | None = None
        shown = f"[{address.host}]" if ":" in address.host else address.host
        self.url, self.examples_url = (
            f"http://{shown}:{socket.getsockname()[1]}" for socket in self._sockets
        )

    async def run(self, ready: Callable[[], None] | None = None) -> None:
        """Serve until ``stop``, then close every episode, but for those at a step that does not end (they
        stay in ``episodes.open``).
        """
        reaper = asyncio.create_task(self._reap())
        try:
            if ready is not None:
                ready()
            with throttled(LOGGERS):
                await asyncio.gather(
                    *(server.serve([sock]) for server, sock in zip(self._servers, self._sockets, strict=True))
                )
        finally:
            reaper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reaper
            spent = 0.0 if self._stopped is None else time.monotonic() - self._stopped
            await self.episodes.shutdown(max(0.0, self.episodes.limits.shutdown_seconds - spent))

    def stop(self) -> None:
        """May be called from a signal handler, or another thread."""
        self._stopped = self._stopped or time.monotonic()
        for server in self._servers:
            server.should_exit = True

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(min(self.episodes.limits.idle_seconds / 4, 15.0))
            await self.episodes.reap()


def serve(
    environments: Mapping[str, Environment], address: Address, limits: Limits, token: str | None = None
) -> None:
    """Serve until SIGTERM or SIGINT, then close everything. Prints one line when it listens.

    The process ends even if a step does not: it is the last thing that the process does.

    Raises:
        AgentPeftError: an address is taken, or a token is needed.
    """
    try:
        host = Host(environments, address, limits, token)

        def ready() -> None:
            names = " and ".join(
                f"{name} ({len(environment.tasks)} tasks)" for name, environment in environments.items()
            )
            print(
                f"serving {names} on {host.url} (its API: {host.url}/docs), example conversations on {host.examples_url}",
                flush=True,
            )

        async def until_signalled() -> None:
            loop = asyncio.get_running_loop()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, host.stop)
            await host.run(ready)

        asyncio.run(until_signalled())
    except BaseException:
        _close(environments)
        raise
    if not host.episodes.open:
        _close(environments)
        return
    closing = threading.Thread(target=_close, args=(environments,), daemon=True)
    closing.start()
    closing.join(CLOSING)
    logger.warning("%d episodes were at a step that did not end", len(host.episodes.open))
    sys.stdout.flush()
    os._exit(1)  # Python would wait for their threads


def _close(environments: Mapping[str, Environment]) -> None:
    for environment in environments.values():
        environment.close()


def check_tasks(environments: Mapping[str, Environment]) -> None:
    """Raises:
    AgentPeftError: a task cannot be written as JSON.
    """
    for name, environment in environments.items():
        for task in islice(environment.tasks, messages.MANY):
            try:
                messages.encode(messages.TaskMessage.of(task))
            except (TypeError, ValueError, RecursionError) as error:
                raise AgentPeftError(
                    f"{name}: task {task.id!r:.200} cannot be sent: {messages.one_line(error)}"
                ) from error


def _listen(address: Address) -> list[socket.socket]:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    sockets: list[socket.socket] = []
    for option, port in zip(("--port", "--examples-port"), address.ports, strict=True):
        try:
            if not 0 <= port < 1 << 16:
                raise OSError(0, "a port is a number from 0 to 65535")
            sockets.append(socket.create_server((address.host, port), family=family, backlog=1024))
            # inherited by what is accepted: without it each answer, a head and a body, waits 40 ms for an
            # acknowledgement
            sockets[-1].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            for earlier in sockets:
                earlier.close()
            raise AgentPeftError(
                f"cannot listen on {address.host}, port {port} ({error.strerror}); set --host or {option}"
            ) from error
    return sockets
