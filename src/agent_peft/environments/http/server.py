"""The server of ``agent-peft serve``: environments over HTTP, many episodes at once. It needs the extra
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
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any

from pydantic import BaseModel

from agent_peft.environments.base import Environment
from agent_peft.environments.http import messages
from agent_peft.environments.http.app import JSON, FastAPI, Header, Query, Response, WebSocket, new_app
from agent_peft.environments.http.chat_history import MAX_EXAMPLES, ChatHistory
from agent_peft.environments.http.episodes import PAGE, Episodes
from agent_peft.environments.http.guard import Guard, is_loopback
from agent_peft.environments.http.limits import Limits
from agent_peft.environments.http.log_throttle import throttled
from agent_peft.environments.http.openenv_session import Sessions
from agent_peft.environments.http.transport import Server, within_descriptors
from agent_peft.types import AgentPeftError
from agent_peft.version import __version__

logger = logging.getLogger(__name__)

LOGGERS = (
    "uvicorn.error",
    "asyncio",
    *(
        f"agent_peft.environments.http.{name}"
        for name in ("refusals", "episodes", "transport", "chat_history")
    ),
)
CLOSING = 10.0  # seconds for closing environments one of whose steps does not end

Client = Annotated[str | None, Header(alias=messages.CLIENT_ID, max_length=64)]
REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": messages.ErrorAnswer}
    for status in (400, 401, 403, 404, 408, 409, 410, 413, 415, 422, 429, 503)
}


def environment_app(episodes: Episodes, history: ChatHistory) -> FastAPI:
    """The environments' API. ``Guard`` protects it."""
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
        """Start an episode. A repeated request gets the first answer again."""
        return JSON(await episodes.reset(request or messages.ResetRequest(), client))

    @route("POST", "/step", messages.StepResponse)
    async def step(request: messages.StepRequest, client: Client = None) -> Response:
        """Act. A repeated request with the same index gets the first answer again."""
        return JSON(await episodes.step(request, client))

    @route("POST", "/close", messages.Pong)
    async def close(request: messages.CloseRequest, client: Client = None) -> Response:
        """Free an episode. May be repeated."""
        await episodes.close(request.episode_id, client)
        return JSON(messages.Pong())

    @route("GET", "/state", messages.State)
    async def state(episode_id: Annotated[str, Query(max_length=255)], client: Client = None) -> Response:
        """The number of steps of an episode, and whether it is done."""
        return JSON(episodes.state(episode_id, client))

    @route("GET", "/tasks", messages.TaskPage)
    async def tasks(
        environment: Annotated[str, Query(max_length=255)] = messages.TRAIN,
        offset: Annotated[int, Query(ge=0, lt=2**62)] = 0,
        limit: Annotated[int, Query(ge=1, le=PAGE)] = PAGE,
    ) -> Response:
        """Up to ``limit`` tasks in their order from ``offset`` on; fewer if the answer would be too long.

        Their contents may hold solutions: they are for trainers, not for agents.
        """
        everything = episodes.environment(environment).tasks
        page: list[messages.TaskMessage] = []
        size = 0
        for task in everything[offset : offset + limit]:
            message = messages.TaskMessage.of(task)
            size += len(messages.encode(message))
            if page and size > messages.MAX_PAGE_BYTES:
                break
            page.append(message)
        return JSON(messages.TaskPage(total=len(everything), tasks=tuple(page)))

    @route("POST", "/demonstration", messages.Demonstration)
    async def demonstration(request: messages.DemonstrationRequest) -> Response:
        """Actions that solve a task, or null where none are known."""
        return JSON(messages.Demonstration.of(await episodes.demonstration(request)))

    @route("GET", "/examples", messages.Examples)
    async def examples(count: Annotated[int, Query(ge=1, le=MAX_EXAMPLES)] = 4) -> Response:
        """The first ``count`` solved tasks of the first environment, as conversations."""
        return JSON(await history.examples(count))

    @route("GET", "/metadata", messages.Metadata)
    async def metadata() -> Response:
        """The environments that are served."""
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
    """The address to listen on. Port 0 takes a free one.

    >>> Address("127.0.0.1").port
    8000
    """

    host: str = "127.0.0.1"
    port: int = 8000


class Host:
    """A server and its listening socket.

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
                f"{address.host} can be reached from other machines, so a token is needed: put one into an "
                "environment variable "
                "and name it with --token"
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
        self.episodes = Episodes(environments, limits)
        history = ChatHistory(next(iter(environments.values())), self.episodes.in_thread)
        self._socket = listen(address)
        self._server = Server(Guard(environment_app(self.episodes, history), limits, token), limits)
        self._stopped: float | None = None
        host = f"[{address.host}]" if ":" in address.host else address.host
        self.url = f"http://{host}:{self._socket.getsockname()[1]}"

    async def run(self, ready: Callable[[], None] | None = None) -> None:
        """Serve until ``stop``, then close every episode. Episodes at a step that does not end stay in
        ``episodes.open``.
        """
        reaper = asyncio.create_task(self._reap())
        try:
            if ready is not None:
                ready()
            with throttled(LOGGERS):
                await self._server.serve([self._socket])
        finally:
            reaper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reaper
            spent = 0.0 if self._stopped is None else time.monotonic() - self._stopped
            await self.episodes.shutdown(max(0.0, self.episodes.limits.shutdown_seconds - spent))

    def stop(self) -> None:
        """Stop serving. Signal handlers and other threads may call this."""
        self._stopped = self._stopped or time.monotonic()
        self._server.should_exit = True

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(min(self.episodes.limits.idle_seconds / 4, 15.0))
            await self.episodes.reap()


def serve(
    environments: Mapping[str, Environment], address: Address, limits: Limits, token: str | None = None
) -> None:
    """Serve until SIGTERM or SIGINT, then close everything. Print one line when the server listens.

    Call this last: if a step does not end, the process is ended without it.

    Raises:
        AgentPeftError: an address is taken, or a token is needed.
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
    """Check that every task can be written as JSON.

    Raises:
        AgentPeftError: one cannot.
    """
    for name, environment in environments.items():
        for task in islice(environment.tasks, messages.MAX_LISTED_TASKS):
            try:
                messages.encode(messages.TaskMessage.of(task))
            except (TypeError, ValueError, RecursionError) as error:
                raise AgentPeftError(
                    f"{name}: task {task.id!r:.200} cannot be sent: {messages.one_line(error)}"
                ) from error


def listen(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        if not 0 <= address.port < 1 << 16:
            raise OSError(0, "a port is a number from 0 to 65535")
        listening = socket.create_server((address.host, address.port), family=family, backlog=1024)
    except OSError as error:
        cause = os.strerror(error.errno) if error.errno else error.strerror  # create_server names the address
        raise AgentPeftError(
            f"cannot listen on {address.host}, port {address.port} ({cause}); set --host or --port"
        ) from error
    # accepted connections inherit it. Without it each answer, a head and a body, waits 40 ms for an
    # acknowledgement
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening
