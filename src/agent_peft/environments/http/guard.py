"""What stands before every request: who may speak, how much, and how long that may take. Plain ASGI."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from agent_peft.environments.http import wire
from agent_peft.environments.http.hosting import Limits
from agent_peft.environments.http.wire import Refusal

Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

FREE = frozenset({"/api/ping", "/health"})  # answered to everybody: they tell nothing


class Guard:
    """Refuses what is not allowed before the application sees it, and echoes the request's id."""

    def __init__(self, app: App, limits: Limits, token: str | None) -> None:
        self.app, self.limits = app, limits
        self.expected = None if token is None else b"Bearer " + token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self.app(scope, receive, send)
        headers = dict(scope["headers"])
        request_id = headers.get(wire.REQUEST_ID.encode(), b"")
        echo = [(wire.REQUEST_ID.encode(), request_id)] if 0 < len(request_id) <= 64 and request_id.isalnum() else []

        async def send_echo(event: Event) -> None:
            if event["type"] == "http.response.start":
                event["headers"] = [*event.get("headers", ()), *echo]
            await send(event)

        try:
            self._allow(scope["path"], headers)
            if scope["type"] == "websocket":
                return await self.app(scope, receive, send)
            body = await self._body(headers, receive)
        except Refusal as refusal:
            return await _refuse(scope["type"], refusal, send_echo)
        given = False

        async def receive_body() -> Event:
            nonlocal given
            if given:
                return await receive()  # the client's hanging up
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app(scope, receive_body, send_echo)

    def _allow(self, path: str, headers: MutableMapping[bytes, bytes]) -> None:
        if self.expected is None:
            # without a token, a web page that somebody looks at must not speak to his loopback
            origin = headers.get(b"origin")
            if origin is not None and not is_loopback(urlsplit(origin.decode("latin-1")).hostname or ""):
                raise Refusal(403, "origin", "requests of web pages are not answered")
            host = urlsplit("//" + headers.get(b"host", b"localhost").decode("latin-1")).hostname or ""
            if not is_loopback(host):
                raise Refusal(403, "origin", f"this server is for this machine alone, and has no name such as {host!r}")
        elif path not in FREE and not hmac.compare_digest(headers.get(b"authorization", b""), self.expected):
            raise Refusal(401, "token", "the header 'Authorization: Bearer TOKEN' is missing or wrong")

    async def _body(self, headers: MutableMapping[bytes, bytes], receive: Receive) -> bytes:
        most = self.limits.body_bytes
        announced = headers.get(b"content-length", b"0")
        if announced.isdigit() and int(announced[:20]) > most:
            raise Refusal(413, "too_long", f"a request may have {most} bytes at most, this one has {announced[:20].decode()}")
        body = bytearray()
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                more = True
                while more:
                    event = await receive()
                    if event["type"] == "http.disconnect":
                        raise Refusal(400, "cut", "the request ended before its body did")
                    body += event.get("body", b"")
                    more = event.get("more_body", False)
                    if len(body) > most:
                        raise Refusal(413, "too_long", f"a request may have {most} bytes at most")
        except TimeoutError:
            raise Refusal(408, "too_slow", f"the request took more than {self.limits.body_seconds:g} s to send its body") from None
        return bytes(body)


async def _refuse(kind: str, refusal: Refusal, send: Send) -> None:
    if kind == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": refusal.text[:100]})
        return
    body = wire.encode({"detail": refusal.text, "code": refusal.code})
    length = str(len(body)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", length), (b"connection", b"close")]
    if refusal.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def is_loopback(host: str) -> bool:
    """Whether ``host`` names this machine to itself alone.

    >>> is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("localhost"), is_loopback("0.0.0.0"), is_loopback("example.org")
    (True, True, True, False, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
