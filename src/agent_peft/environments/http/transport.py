"""uvicorn and FastAPI as the servers of this package use them: one-line refusals, and limits on connections.

uvicorn limits the size of a request and the time of an idle connection. But it waits without end for the rest
of a header and for a client that does not read, and it accepts connections until no descriptor is left. An
application cannot see these cases, so this module limits them. It needs the extra ``server``.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from agent_peft.config import first_error
from agent_peft.environments.http import messages
from agent_peft.environments.http.guard import Limits
from agent_peft.environments.http.messages import Refusal
from agent_peft.types import AgentPeftError
from agent_peft.version import __version__

try:  # the one place where the server's packages are imported
    import h11
    import uvicorn
    from fastapi import FastAPI, Query, Request, Response, WebSocket, WebSocketDisconnect
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import StreamingResponse
    from starlette.exceptions import HTTPException
    from uvicorn.protocols.http.h11_impl import H11Protocol
    from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
except ImportError as error:
    raise messages.missing_extra(error.name or "fastapi") from error

__all__ = [
    "JSON",
    "Address",
    "FastAPI",
    "HTTPException",
    "Query",
    "Request",
    "RequestValidationError",
    "Response",
    "Server",
    "StreamingResponse",
    "WebSocket",
    "WebSocketDisconnect",
    "listen",
    "new_app",
    "within_descriptors",
]

logger = logging.getLogger(__name__)

# connections until surplus ones are closed; asyncio would accept all that wait, a descriptor each
ACCEPTED = 8
WAITING = 1024  # connections that the kernel keeps until they are accepted
FRAGMENTS = 1000  # of one message of a WebSocket
TICKS = 5  # of uvicorn, ten in a second, between two checks of the clocks
UNAVAILABLE = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class JSON(Response):
    """An answer in ASCII. FastAPI's own would refuse lone surrogates."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return messages.to_json(content)


def new_app(title: str, description: str) -> FastAPI:
    """Create an application whose errors are ``{"detail", "code"}``."""
    app = FastAPI(title=title, description=description, version=__version__, redirect_slashes=False)

    def problem(status: int, code: str, text: str, headers: Any = None) -> Response:
        return JSON({"detail": text, "code": code}, status, headers=headers)

    @app.exception_handler(Refusal)
    async def refused(_: Request, refusal: Refusal) -> Response:
        return problem(refusal.status, refusal.code, refusal.text)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        return problem(422, "invalid", messages.one_line(first_error(error)))

    @app.exception_handler(HTTPException)
    async def other(_: Request, error: HTTPException) -> Response:
        return problem(error.status_code, "http", str(error.detail), error.headers)

    @app.exception_handler(Exception)
    async def broken(_: Request, error: Exception) -> Response:
        return problem(500, messages.BROKEN, f"internal error ({type(error).__name__}); see the server's log")

    return app


@dataclass(frozen=True)
class Address:
    """The address to listen on. Port 0 takes a free one.

    >>> Address("127.0.0.1").port
    8000
    """

    host: str = "127.0.0.1"
    port: int = 8000


def listen(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        if not 0 <= address.port < 1 << 16:
            raise OSError(0, "a port is a number from 0 to 65535")
        listening = socket.create_server((address.host, address.port), family=family, backlog=WAITING)
    except OSError as error:
        cause = os.strerror(error.errno) if error.errno else error.strerror  # create_server names the address
        raise AgentPeftError(
            f"cannot listen on {address.host}, port {address.port} ({cause}); set --host or --port"
        ) from error
    # inherited by connections. Without it an answer of two packets waits 40 ms for an acknowledgement
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def within_descriptors(limits: Limits) -> Limits:
    """Bound the connections by a third of this process's descriptors, since environments need some, too."""
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if descriptors < 0:
        return limits
    return replace(limits, connections=max(2, min(limits.connections, descriptors // 3)))


class ServerConfig(uvicorn.Config):
    """uvicorn's configuration for an application with these limits."""

    def __init__(self, app: Callable[..., Awaitable[None]], limits: Limits) -> None:
        super().__init__(
            app,
            http=HTTPConnection,
            ws=WebSocketConnection,
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=ACCEPTED,
            ws_max_size=limits.message_bytes,
            ws_per_message_deflate=False,
            ws_ping_timeout=limits.answer_seconds,
            timeout_keep_alive=int(limits.keep_alive_seconds),
            timeout_graceful_shutdown=int(limits.shutdown_seconds) + 1,
        )
        self.limits = limits
        self.incomplete = 0  # bytes of all sessions' messages that are not complete


class Server(uvicorn.Server):
    """uvicorn's server, which also closes connections whose client is too slow."""

    def __init__(self, app: Callable[..., Awaitable[None]], limits: Limits) -> None:
        super().__init__(ServerConfig(app, limits))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(WAITING)  # asyncio has set it to ACCEPTED

    async def on_tick(self, counter: int) -> bool:
        if counter % TICKS == 0:
            now = time.monotonic()
            for connection in list(self.server_state.connections):
                if isinstance(connection, HTTPConnection | WebSocketConnection):
                    connection.clock.check(connection.awaited, now)
        return await super().on_tick(counter)


class ClientTimer:
    """Measures how long a client is waited for, and closes its connection after the limit."""

    def __init__(self, transport: asyncio.Transport, limits: Limits) -> None:
        self.transport = transport
        self.seconds = {
            "head": limits.head_seconds,
            "body": limits.body_seconds + 5.0,
            "idle": limits.keep_alive_seconds + 5.0,
        }
        self.most = limits.answer_seconds  # for what is not named
        self.awaited: object = None
        self.since = time.monotonic()

    def check(self, awaited: tuple[str, object] | None, now: float) -> None:
        """``awaited``: the client's next action, and the request it is part of; None if the server acts."""
        if awaited is None or awaited != self.awaited:
            self.awaited, self.since = awaited, now
        elif now - self.since > self.seconds.get(awaited[0], self.most):
            self.transport.abort()


class HTTPConnection(H11Protocol):
    """HTTP/1.1 with limits on slow heads, bodies and readers, and on the number of connections.

    The public settings do not reach these: ``timeout_keep_alive`` ends at a request's first byte,
    ``limit_concurrency`` counts only requests whose head was read, and ``h11_max_incomplete_event_size``
    bounds bytes, not time.
    """

    def __init__(self, config: ServerConfig, *arguments: Any, **more: Any) -> None:
        super().__init__(config, *arguments, **more)
        self.limits = config.limits

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.clock = ClientTimer(transport, self.limits)
        if len(self.connections) > self.limits.connections and not self._make_room():
            logger.warning("all of %d connections are busy: another is refused", self.limits.connections)
            transport.write(UNAVAILABLE)
            transport.close()

    def data_received(self, data: bytes) -> None:
        if not self.transport.is_closing():
            super().data_received(data)

    def send_400_response(self, msg: str) -> None:
        if self.cycle is not None and not self.cycle.response_complete:  # its answer is dropped
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        if self.transport.get_write_buffer_size():  # close() waits until all is read
            self.transport.abort()

    @property
    def awaited(self) -> tuple[str, object] | None:
        """The client's next action, and the request it is part of; None if the server acts."""
        if self.transport.is_closing():
            return "end", None
        if self.flow.write_paused:
            return "reading", self.cycle
        if self.conn.their_state is h11.SEND_BODY:
            return "body", self.cycle
        if self.conn.their_state is h11.IDLE:  # uvicorn stops its clock at the first byte
            return "head" if self.timeout_keep_alive_task is None else "idle", self.cycle
        return None

    def _make_room(self) -> bool:
        """Close the connection whose client has been waited for the longest. Return whether there is one."""
        waiting = [
            c
            for c in self.connections
            if isinstance(c, HTTPConnection) and c is not self and c.awaited is not None
        ]
        if not waiting:
            return False
        logger.warning(
            "there are %d connections: one is closed for another, the one that waits the longest",
            self.limits.connections,
        )
        slowest = min(waiting, key=lambda connection: connection.clock.since)
        self.connections.discard(slowest)
        slowest.transport.abort()
        return True


class WebSocketConnection(WebSocketsSansIOProtocol):
    """A WebSocket with limits on slow messages and readers, empty fragments and unread pongs.

    ``ws_max_size`` bounds one message in bytes, ``ws_ping_timeout`` finds a lost client: neither sees these.
    """

    def __init__(self, config: ServerConfig, *arguments: Any, **more: Any) -> None:
        super().__init__(config, *arguments, **more)
        self.settings, self.incomplete = config, 0
        self.fragments = self.fragment_bytes = 0  # of the current message

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.clock = ClientTimer(self.transport, self.settings.limits)

    def connection_lost(self, exc: Exception | None) -> None:
        self._hold(0)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._hold(len(self.conn.reader.buffer) + self.fragment_bytes)
        if self.settings.incomplete > self.settings.limits.messages_bytes:
            self.transport.abort()

    async def send(self, message: Any) -> None:
        await super().send(message)
        if message["type"] == "websocket.http.response.body":  # a refusal, which uvicorn logs as an error
            self.handshake_complete = True

    def _hold(self, size: int) -> None:
        """Count the bytes of a message that is not complete."""
        self.settings.incomplete += size - self.incomplete
        self.incomplete = size

    @property
    def awaited(self) -> tuple[str, object] | None:
        if self.transport.is_closing():
            return "end", None
        if not self.writable.is_set():
            return "reading", None
        if self.incomplete and self.handshake_complete:
            return "body", None
        return None if self.handshake_complete else ("head", None)

    def handle_text(self, event: Any) -> None:
        self.fragment_bytes += len(event.data)
        super().handle_text(event)

    def handle_bytes(self, event: Any) -> None:
        self.fragment_bytes += len(event.data)
        super().handle_bytes(event)

    def handle_cont(self, event: Any) -> None:
        self.fragments, self.fragment_bytes = self.fragments + 1, self.fragment_bytes + len(event.data)
        if self.fragments > FRAGMENTS:  # empty ones do not count as bytes
            self.transport.abort()
            return
        super().handle_cont(event)

    def send_receive_event_to_app(self) -> None:
        self.fragments = self.fragment_bytes = 0
        super().send_receive_event_to_app()

    def handle_ping(self) -> None:
        if self.writable.is_set():
            super().handle_ping()
        else:
            self.conn.data_to_send()  # drop the pong of a client that reads nothing
