"""Protection from clients that are not trusted: limits, who may send requests, and a throttled log."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_peft.addresses import is_loopback
from agent_peft.environments.http import messages
from agent_peft.environments.http.messages import Refusal
from agent_peft.printable import printable

Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# of Host or Origin
_HOST = re.compile(r"(?:[A-Za-z][A-Za-z0-9+.-]*://)?(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+)(?::[0-9]{1,5})?")

FREE = frozenset({"/api/ping", "/health"})  # need no token: they reveal nothing
LINES, SECONDS = 20, 60.0  # log lines of one place in the code, and in what time
MESSAGE, TRACEBACK = 1000, 4000  # characters of a log line and of a traceback


@dataclass(frozen=True)
class Limits:
    """Limits of a server. Sizes are in bytes; ``action_chars`` is in characters.

    >>> Limits(episodes=8).threads
    64
    """

    episodes: int = 1024  # at once
    idle_seconds: float = 3600.0  # until a session without a reset or a step is closed
    threads: int = 64  # environments that act at once; more wait for their turn
    message_bytes: int = 16 << 20  # of a session
    messages_bytes: int = 128 << 20  # of all sessions' messages that are still incomplete
    body_bytes: int = 1 << 20  # of a request
    bodies_bytes: int = 128 << 20  # of all requests together
    task_bytes: int = 1 << 20  # of a task that a reset brings
    tasks_bytes: int = 64 << 20  # of such tasks of all episodes together
    action_chars: int = messages.MAX_ACTION_CHARS
    connections: int = 1536  # at once, three quarters of them sessions; fewer if descriptors are few
    head_seconds: float = 10.0  # until a request has sent its header
    body_seconds: float = 30.0  # until it has sent its body, or a session a message
    answer_seconds: float = 120.0  # until a client has read its answer
    keep_alive_seconds: float = 75.0  # until a connection that asks for nothing is closed
    shutdown_seconds: float = 30.0  # that episodes get to finish a step when the server stops


def _detail(refusal: Refusal) -> Mapping[str, Any]:
    return {"detail": refusal.text, "code": refusal.code}


class Guard:
    """ASGI middleware that refuses what is not allowed. ``content_of``: the JSON of a refusal."""

    def __init__(
        self,
        app: App,
        limits: Limits,
        token: str | None,
        content_of: Callable[[Refusal], Mapping[str, Any]] = _detail,
    ) -> None:
        self.app, self.limits, self.content_of = app, limits, content_of
        self.expected = None if token is None else b"Bearer " + token.encode()
        self.bodies = 0  # bytes of all current requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self.app(scope, receive, send)
        headers, body = dict(scope["headers"]), bytearray()
        try:
            _check_framing(scope, headers)
            self._allow(scope["path"], scope["headers"])
            if scope["type"] == "http":
                await self._read(body, headers, receive)
                receive = _replay(bytes(body), receive)
            await self.app(scope, receive, send)
        except Refusal as refusal:
            await self._refuse(refusal, scope, send)
        finally:
            self.bodies -= len(body)

    def _allow(self, path: str, headers: Sequence[tuple[bytes, bytes]]) -> None:
        if self.expected is None:  # block web pages, whose requests come from this machine, too
            if b"host" not in dict(headers):  # HTTP/1.0 does not require one
                raise Refusal(400, "invalid", "the header Host is missing")
            for name, value in headers:
                if (name == b"origin" and not names_loopback(value)) or (
                    name == b"sec-fetch-site" and value.strip() == b"cross-site"
                ):
                    raise Refusal(403, "origin", "requests of web pages are not answered")
                if name == b"host" and not names_loopback(value):
                    host = value[:255].decode("latin-1")
                    raise Refusal(
                        403, "origin", f"this server is for this machine alone, and not named {host!r}"
                    )
        elif path not in FREE:
            sent = dict(headers)  # x-api-key is the header of Anthropic's clients
            given = sent.get(b"authorization", b"Bearer " + sent.get(b"x-api-key", b""))
            if not hmac.compare_digest(given, self.expected):
                raise Refusal(401, "token", "the header 'Authorization: Bearer TOKEN' is missing or wrong")

    async def _read(self, body: bytearray, headers: MutableMapping[bytes, bytes], receive: Receive) -> None:
        """Read the whole body into ``body``, and count it with those of all other requests. Raises `Refusal`:
        it is too long or too slow, or its JSON is too large.
        """
        most = self.limits.body_bytes
        announced = headers.get(b"content-length", b"0")
        if announced.isdigit() and int(announced[:20]) > most:
            length = announced[:20].decode()
            raise Refusal(413, "too_long", f"a request may have {most} bytes at most, this one has {length}")
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
            slow = f"the request took more than {self.limits.body_seconds:g} s to send its body"
            raise Refusal(408, "too_slow", slow) from None
        try:
            messages.decode(bytes(body))
        except (json.JSONDecodeError, UnicodeDecodeError):
            pass  # also an empty one: the application knows which requests need JSON
        except ValueError as error:
            raise Refusal(422, "invalid", f"the body cannot be read: {error}") from error

    async def _refuse(self, refusal: Refusal, scope: Scope, send: Send) -> None:
        kind = "http.response" if scope["type"] == "http" else "websocket.http.response"
        body = messages.to_json(self.content_of(refusal))
        length = str(len(body)).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", length),
            (b"connection", b"close"),
        ]
        if refusal.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        await send({"type": f"{kind}.start", "status": refusal.status, "headers": headers})
        await send({"type": f"{kind}.body", "body": body})


def _replay(body: bytes, receive: Receive) -> Receive:
    """Give the application a body that was read before it."""
    pending = [body]

    async def receive_body() -> Event:
        if pending:
            return {"type": "http.request", "body": pending.pop(), "more_body": False}
        return await receive()  # the client disconnects

    return receive_body


def _check_framing(scope: Scope, headers: MutableMapping[bytes, bytes]) -> None:
    """Refuse a request whose end a proxy may see elsewhere, and so pass on a second, hidden request."""
    if b"transfer-encoding" in headers and (
        b"content-length" in headers or scope.get("http_version") == "1.0"
    ):
        raise Refusal(
            400, "invalid", "a request has either a Content-Length or, in HTTP/1.1, a Transfer-Encoding"
        )


def names_loopback(value: bytes) -> bool:
    """Return whether a Host or an Origin names a loopback address.

    >>> [names_loopback(name) for name in (b"localhost:80", b"http://[::1]:80", b"[::1", b"null")]
    [True, True, False, False]
    """
    match = _HOST.fullmatch(value.decode("latin-1").strip())
    return match is not None and is_loopback(match[1].strip("[]").lower())


class LogThrottle(logging.Filter):
    """Passes ``LINES`` lines of each place in the code in ``SECONDS``; the next line counts those left out.

    Control characters of a message are escaped, and each line of a traceback begins with a bar, so that a
    client's text forges no line.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._places: dict[tuple[str, int], tuple[float, int]] = {}  # -> when its time began, lines since

    def filter(self, record: logging.LogRecord) -> bool:
        place, now = (record.pathname, record.lineno), self._clock()
        start, lines = self._places.get(place, (now, 0))
        left_out = ""
        if now - start > SECONDS:
            left_out = f" ({lines - LINES} more lines like this were left out)" if lines > LINES else ""
            start, lines = now, 0
        self._places[place] = start, lines + 1
        if lines >= LINES:
            return False
        record.msg, record.args = printable(record.getMessage().strip(), MESSAGE) + left_out, ()
        if record.exc_info:
            text = logging.Formatter().formatException(record.exc_info)
            text = text if len(text) <= TRACEBACK else "..." + text[-TRACEBACK:]  # the error is at its end
            record.exc_text = "\n".join(f"| {printable(line)}" for line in text.splitlines())
        return True


@contextlib.contextmanager
def throttled(names: Sequence[str]) -> Iterator[None]:
    """Context manager: these loggers are throttled."""
    throttle = LogThrottle()
    for name in names:
        logging.getLogger(name).addFilter(throttle)
    try:
        yield
    finally:
        for name in names:
            logging.getLogger(name).removeFilter(throttle)
