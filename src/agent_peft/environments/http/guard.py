"""The guard in front of the application: who may send requests, how large, and how slowly. Plain ASGI."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any

from agent_peft.environments.http import messages
from agent_peft.environments.http.limits import Limits
from agent_peft.environments.http.messages import Refusal

Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_HOST = re.compile(
    r"(?:[A-Za-z][A-Za-z0-9+.-]*://)?(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+)(?::[0-9]{1,5})?"
)  # of Host or Origin

FREE = frozenset({"/api/ping", "/health"})  # answered to everybody: they tell nothing


def _detail(refusal: Refusal) -> Mapping[str, Any]:
    return {"detail": refusal.text, "code": refusal.code}


class Guard:
    """Refuses what is not allowed before the application sees it, and echoes the request's id.

    Args:
        content_of: what a refusal's answer says, as JSON.
    """

    def __init__(
        self,
        app: App,
        limits: Limits,
        token: str | None,
        content_of: Callable[[Refusal], Mapping[str, Any]] = _detail,
    ) -> None:
        self.app, self.limits, self.content_of = app, limits, content_of
        self.expected = None if token is None else b"Bearer " + token.encode()
        self.bodies = 0  # bytes of all requests that are under way

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self.app(scope, receive, send)
        headers = dict(scope["headers"])
        request_id = headers.get(messages.REQUEST_ID.encode(), b"")
        echo = (
            [(messages.REQUEST_ID.encode(), request_id)]
            if 0 < len(request_id) <= 64 and request_id.isalnum()
            else []
        )

        async def send_echo(event: Event) -> None:
            if event["type"] == "http.response.start":
                event["headers"] = [*event.get("headers", ()), *echo]
            await send(event)

        try:
            _check_framing(scope, headers)
            self._allow(scope["path"], scope["headers"])
            if scope["type"] == "websocket":
                return await self.app(scope, receive, send)
        except Refusal as refusal:
            return await _refuse(scope["type"], refusal, send_echo, self.content_of)
        body = bytearray()
        try:
            await self._read(body, scope["path"], headers, receive)
            await self._answer(bytes(body), scope, receive, send_echo)
        except Refusal as refusal:
            await _refuse("http", refusal, send_echo, self.content_of)
        finally:
            self.bodies -= len(body)

    async def _answer(self, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        given = False

        async def receive_body() -> Event:
            nonlocal given
            if given:
                return await receive()  # the client's hanging up
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app(scope, receive_body, send)

    def _allow(self, path: str, headers: Sequence[tuple[bytes, bytes]]) -> None:
        if self.expected is None:
            # without a token, a web page that somebody looks at must not speak to his loopback
            if b"host" not in dict(headers):  # HTTP/1.0 does not ask for one
                raise Refusal(400, "invalid", "the header Host is missing")
            for name, value in headers:
                if (name == b"origin" and not names_loopback(value)) or (
                    name == b"sec-fetch-site" and value.strip() == b"cross-site"
                ):
                    raise Refusal(403, "origin", "requests of web pages are not answered")
                if name == b"host" and not names_loopback(value):
                    raise Refusal(
                        403,
                        "origin",
                        "this server is for this machine alone, and has no name such as "
                        f"{value[:255].decode('latin-1')!r}",
                    )
        elif path not in FREE and not hmac.compare_digest(
            dict(headers).get(b"authorization", b""), self.expected
        ):
            raise Refusal(401, "token", "the header 'Authorization: Bearer TOKEN' is missing or wrong")

    async def _read(
        self, body: bytearray, path: str, headers: MutableMapping[bytes, bytes], receive: Receive
    ) -> None:
        """The whole body into ``body``, counted with those of all other requests.

        Raises:
            Refusal: it is too long, too slow, or has more in it than a request of ours.
        """
        most = (
            self.limits.body_bytes if path == "/step" else min(self.limits.body_bytes, self.limits.task_bytes)
        )
        announced = headers.get(b"content-length", b"0")
        if announced.isdigit() and int(announced[:20]) > most:
            raise Refusal(
                413,
                "too_long",
                f"a request may have {most} bytes at most, this one has {announced[:20].decode()}",
            )
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                more = True
                while more:
                    event = await receive()
                    if event["type"] == "http.disconnect":
                        raise Refusal(400, "cut", "the request ended before its body did")
                    piece, more = event.get("body", b""), event.get("more_body", False)
                    body += piece
                    self.bodies += len(piece)
                    if len(body) > most:
                        raise Refusal(413, "too_long", f"a request may have {most} bytes at most")
                    if self.bodies > self.limits.bodies_bytes:
                        raise Refusal(
                            503, "busy", "the server reads as many bytes of requests as it may; ask again"
                        )
        except TimeoutError:
            raise Refusal(
                408, "too_slow", f"the request took more than {self.limits.body_seconds:g} s to send its body"
            ) from None
        try:
            messages.decode(bytes(body))
        except (json.JSONDecodeError, UnicodeDecodeError):
            pass  # also an empty one: the application knows which requests need JSON
        except ValueError as error:
            raise Refusal(422, "invalid", f"the body cannot be read: {error}") from error


def _check_framing(scope: Scope, headers: MutableMapping[bytes, bytes]) -> None:
    """A proxy may see another end of such a request than we do, and pass a second, hidden one on."""
    if b"transfer-encoding" in headers and (
        b"content-length" in headers or scope.get("http_version") == "1.0"
    ):
        raise Refusal(
            400, "invalid", "a request has either a Content-Length or, in HTTP/1.1, a Transfer-Encoding"
        )


async def _refuse(
    kind: str, refusal: Refusal, send: Send, content_of: Callable[[Refusal], Mapping[str, Any]]
) -> None:
    if kind == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": refusal.text[:100]})
        return
    body = messages.encode(content_of(refusal))
    length = str(len(body)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", length), (b"connection", b"close")]
    if refusal.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def names_loopback(value: bytes) -> bool:
    """Whether a Host or an Origin names this machine to itself alone.

    >>> [names_loopback(name) for name in (b"localhost:80", b"http://[::1]:80", b"[::1", b"null")]
    [True, True, False, False]
    """
    match = _HOST.fullmatch(value.decode("latin-1").strip())
    return match is not None and is_loopback(match[1].strip("[]").lower())


def is_loopback(host: str) -> bool:
    """Whether ``host`` names this machine to itself alone.

    >>> [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "example.org")]
    [True, True, True, False, False]
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
