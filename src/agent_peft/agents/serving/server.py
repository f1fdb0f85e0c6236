"""The server of ``agent-peft serve-policy``."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from agent_peft.agents.serving.app import policy_app
from agent_peft.agents.serving.replies import Replies, problem_of
from agent_peft.environments.http.guard import Guard, Limits, is_loopback, throttled
from agent_peft.environments.http.transport import Address, Server, listen, within_descriptors
from agent_peft.policies.engine.service import Service
from agent_peft.types import AgentPeftError

LOGGERS = (
    "uvicorn.error",
    "asyncio",
    "agent_peft.agents.serving.replies",
    "agent_peft.policies.engine.service",
    "agent_peft.environments.http.transport",
)
GRACE = 10.0  # seconds that replies get to end when the server stops


class PolicyHost:
    """A server of policies and its listening socket.

    Args:
        most: replies at once, those that wait for a row included.

    Raises:
        AgentPeftError: an address is taken, or a token is needed.
    """

    def __init__(
        self, service: Service, address: Address, most: int, token: str | None = None, grace: float = GRACE
    ) -> None:
        if token is None and not is_loopback(address.host):
            raise AgentPeftError(
                f"{address.host} can be reached from other machines, so a token is needed: put one into an "
                "environment variable and name it with --token"
            )
        limits = replace(within_descriptors(Limits()), shutdown_seconds=grace)
        self.service, self.replies, self._grace = service, Replies(service, most), grace
        self._socket = listen(address)
        app = policy_app(self.replies)
        self._server = Server(Guard(app, limits, token, problem_of), limits)
        self._loop: asyncio.AbstractEventLoop | None = None
        host = f"[{address.host}]" if ":" in address.host else address.host
        self.url = f"http://{host}:{self._socket.getsockname()[1]}"

    async def run(self, ready: Callable[[], None] | None = None) -> None:
        """Serve until ``stop``. Then replies get some seconds to end; what is left is cut."""
        self._loop = asyncio.get_running_loop()
        if ready is not None:
            ready()
        with throttled(LOGGERS):
            await self._server.serve([self._socket])

    def stop(self) -> None:
        """Stop serving. Signal handlers and other threads may call this; a second call cuts at once."""
        hurried = self._server.should_exit
        self._server.should_exit = self.replies.stopping = True
        if self._loop is not None:
            with suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(
                    self._loop.call_later, 0.0 if hurried else self._grace, self.replies.stop
                )


def serve(service: Service, address: Address, most: int, token: str | None = None) -> None:
    """Serve until SIGTERM or SIGINT, and end the service. Print one line when the server listens.

    Raises:
        AgentPeftError: as ``PolicyHost``.
    """
    try:
        host = PolicyHost(service, address, most, token)

        def ready() -> None:
            names = ", ".join(service.policies)
            print(f"serving {names} on {host.url}/v1 (its API: {host.url}/docs)", flush=True)

        async def until_signalled() -> None:
            loop = asyncio.get_running_loop()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, host.stop)
            await host.run(ready)

        asyncio.run(until_signalled())
    finally:
        service.close()
