"""Connections of the server: slow clients lose theirs, and there are never more than there are descriptors.

uvicorn limits the size of a request and the time of an idle connection. But it waits without end for the rest
of a header and for a client that does not read its answer, and it accepts connections until no descriptor is
left. An application cannot see these cases, so this module limits them.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from agent_peft.environments.http.app import uvicorn
from agent_peft.environments.http.limits import Limits

logger = logging.getLogger(__name__)

# connections, until those that are too many are closed; asyncio would take all that wait, a descriptor each
ACCEPTED = 8
WAITING = 1024  # connections that the kernel keeps until they are accepted
FRAGMENTS = 1000  # of one message of a WebSocket
TICKS = 5  # of uvicorn, ten in a second, between two looks at the clocks
UNAVAILABLE = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


def within_descriptors(limits: Limits) -> Limits:
    """With at most a third of the descriptors that this process may have for connections, since
    environments need some too.
    """
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (
        limits
        if descriptors < 0
        else replace(limits, connections=max(2, min(limits.connections, descriptors // 3)))
    )


class Config(uvicorn.Config):
    """uvicorn's, for an application that lives within ``limits``."""

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
            ws_max_size=limits.body_bytes,
            ws_per_message_deflate=False,
            timeout_keep_alive=int(limits.keep_alive_seconds),
            timeout_graceful_shutdown=int(limits.shutdown_seconds) + 1,
        )
        self.limits = limits


class Server(uvicorn.Server):
    """uvicorn's server, which also closes connections that wait for too long."""

    def __init__(self, app: Callable[..., Awaitable[None]], limits: Limits) -> None:
        super().__init__(Config(app, limits))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(WAITING)  # asyncio has set it to ACCEPTED

    async def on_tick(self, counter: int) -> bool:
        if counter % TICKS == 0:
            now = time.monotonic()
            for connection in list(self.server_state.connections):
                if isinstance(connection, HTTPConnection | WebSocketConnection):
                    connection.clock.look(connection.awaited, now)
        return await super().on_tick(counter)


class Clock:
    """Runs while a client is waited for, and closes its connection when that takes too long."""

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

    def look(self, awaited: tuple[str, object] | None, now: float) -> None:
        """
        Args:
            awaited: what the client is to do next, and in which request; None where it is not the client who
                is waited for.
        """
        if awaited is None or awaited != self.awaited:
            self.awaited, self.since = awaited, now
        elif now - self.since > self.seconds.get(awaited[0], self.most):
            self.transport.abort()


class HTTPConnection(H11Protocol):
    """HTTP/1.1."""

    def __init__(self, config: Config, *arguments: Any, **more: Any) -> None:
        super().__init__(config, *arguments, **more)
        self.limits = config.limits

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.clock = Clock(transport, self.limits)
        if len(self.connections) > self.limits.connections and not self._make_room():
            logger.warning("all of %d connections are busy: another is refused", self.limits.connections)
            transport.write(UNAVAILABLE)
            transport.close()

    def data_received(self, data: bytes) -> None:
        if not self.transport.is_closing():
            super().data_received(data)

    def send_400_response(self, msg: str) -> None:
        if self.cycle is not None and not self.cycle.response_complete:  # what it answers now goes nowhere
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
        """For what the client is waited for, and in which request."""
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
        """Close the connection whose client has been waited for the longest. Whether there is one."""
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
    """A WebSocket: ``openenv_session`` bounds how many there are, and how long they are idle."""

    def __init__(self, config: Config, *arguments: Any, **more: Any) -> None:
        super().__init__(config, *arguments, **more)
        self.limits, self.fragments = config.limits, 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.clock = Clock(self.transport, self.limits)

    @property
    def awaited(self) -> tuple[str, object] | None:
        if self.transport.is_closing():
            return "end", None
        if not self.writable.is_set():
            return "reading", None
        return None if self.handshake_complete else ("head", None)

    def handle_cont(self, event: Any) -> None:
        self.fragments += 1
        if self.fragments > FRAGMENTS:  # empty ones are no part of the size that is bounded
            self.transport.abort()
            return
        if event.fin:
            self.fragments = 0
        super().handle_cont(event)

    def handle_ping(self) -> None:
        if self.writable.is_set():
            super().handle_ping()
        else:
            self.conn.data_to_send()  # whoever reads nothing needs no answer; they would fill the memory
