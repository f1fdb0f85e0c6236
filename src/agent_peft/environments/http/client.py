"""The client's side: requests to a server that is not trusted, and one WebSocket session per episode.

Answers are read up to a limit, within a time limit, uncompressed, and checked.
"""

from __future__ import annotations

import json
import logging
import ssl
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ValidationError

from agent_peft.addresses import is_loopback, read_token
from agent_peft.config import first_error
from agent_peft.environments.http import messages
from agent_peft.types import AgentPeftError, InfrastructureError

if TYPE_CHECKING:
    import httpx
    from websockets.sync.client import ClientConnection

logger = logging.getLogger(__name__)
T = TypeVar("T")
Answer = TypeVar("Answer", bound=BaseModel)

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0  # seconds between two attempts: doubled from the first to the longest
BUSY = frozenset({502, 503, 504})  # of a proxy before the server, or of a server without room
MAX_ANSWER_BYTES = 4 << 20  # more than any context holds


class DefectError(Exception):
    """The served environment raised, and not because its world failed: a defect of its code."""


class SessionRefusal(Exception):
    """A server refuses a message of a session, with one of OpenEnv's codes."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class _NoAnswer(Exception):
    """The attempt may be repeated."""


class _Full(_NoAnswer):
    """The server has no room until other episodes end."""


class Connection:
    """The address of a server, and its HTTP connections. May be shared between threads.

    Args:
        token: name of the environment variable that holds it.
        timeout: seconds for one answer.
        patience: seconds within which an unanswered request, or a session for which there is no room, is
            tried again.
    """

    def __init__(self, url: str, token: str | None, timeout: float, patience: float = 0.0) -> None:
        self.url, self.timeout, self.patience = url, timeout, patience
        self.received = 0  # bytes of all HTTP answers
        self.headers = {} if token is None else {"authorization": f"Bearer {read_token(token)}"}
        self.local = is_loopback(urlsplit(url).hostname or "")  # then no proxy is used
        self._down = False  # a request ran out of patience, so others try once
        self._tls = ssl.create_default_context() if url.startswith("https") else None
        try:
            import httpx
            from websockets import exceptions
            from websockets.sync.client import connect
        except ImportError as error:
            raise messages.missing_extra(error.name or "httpx") from error
        self._httpx, self.websockets, self._connect = httpx, exceptions, connect
        # of a WebSocket; an assertion of websockets fails if a server refuses before it has read the request
        self.failures = (self.websockets.WebSocketException, OSError, EOFError, AssertionError)
        self._client: httpx.Client = self._httpx.Client(
            base_url=url,
            headers={"content-type": "application/json", "accept-encoding": "identity", **self.headers},
            timeout=self._httpx.Timeout(timeout, connect=min(timeout, 10.0), pool=None),
            limits=self._httpx.Limits(
                max_connections=256, max_keepalive_connections=64, keepalive_expiry=60.0
            ),
            trust_env=not self.local,
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),  # none are kept
        )

    def fetch(
        self,
        model: type[Answer],
        path: str,
        message: BaseModel | None = None,
        params: Mapping[str, Any] | None = None,
        most: int = MAX_ANSWER_BYTES,
        nodes: int = messages.MAX_NODES,
    ) -> Answer:
        """Get an answer, or post a message that may be repeated. ``most``: bytes of the answer. ``nodes``:
        commas and brackets in it.
        """
        content = None if message is None else messages.to_json(message)
        request = self._client.build_request(
            "GET" if content is None else "POST", path, content=content, params=params
        )
        return self.parse(model, self.attempt(lambda: self._send(request, path, most, nodes), path))

    def attempt(self, call: Callable[[], T], path: str) -> T:
        """Call until there is an answer, for ``patience`` seconds. Raises `InfrastructureError`: no answer
        came; `AgentPeftError`: the server has had no room for too long.
        """
        end = time.monotonic() + (0.0 if self._down else self.patience)
        pause = FIRST_PAUSE
        while True:
            try:
                answer = call()
                self._down = False
                return answer
            except _NoAnswer as error:
                if time.monotonic() + pause > end:
                    text = f"{self.url}{path}: {messages.one_line(error)}"
                    if isinstance(error, _Full):
                        tried = f" (asked again for {self.patience:g} s)" if self.patience else ""
                        raise AgentPeftError(text + tried) from error
                    self._down = True
                    raise InfrastructureError(text) from error
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def parse(self, model: type[Answer], content: Any) -> Answer:
        try:
            return model.model_validate(content)
        except ValidationError as error:
            raise AgentPeftError(
                f"{self.url}: the server has another version of agent-peft, or is another program "
                f"({messages.one_line(first_error(error))})"
            ) from error

    def connect(self, stack: ExitStack) -> ClientConnection:
        """Open a WebSocket that ``stack`` closes."""
        parts = urlsplit(self.url)
        address = f"{'ws' if self._tls is None else 'wss'}://{parts.netloc}{parts.path}/ws"
        options: dict[str, Any] = {"proxy": None} if self.local else {}
        try:
            socket: ClientConnection = stack.enter_context(
                self._connect(
                    address,
                    ssl=self._tls,
                    additional_headers=self.headers,
                    open_timeout=self.timeout,
                    close_timeout=2.0,
                    ping_interval=None,  # the server pings
                    compression=None,
                    max_size=MAX_ANSWER_BYTES,
                    max_queue=1,
                    **options,
                )
            )
        except (*self.failures, ValueError) as error:  # a redirect may lead to an invalid URL
            status = getattr(getattr(error, "response", None), "status_code", 0)
            if status in (401, 403):
                raise self._denied(str(error)) from error
            raise _NoAnswer(f"connecting: {str(error) or type(error).__name__}") from error
        return socket

    def close(self) -> None:
        self._client.close()

    def _send(self, request: httpx.Request, path: str, most: int, nodes: int) -> Any:
        """Send once, and return the JSON of the answer."""
        try:
            response = self._client.send(request, stream=True)
            with closing(response):
                status, body = response.status_code, self._read(response, most)
        except self._httpx.RequestError as error:
            raise _NoAnswer(f"{type(error).__name__}: {error}".removesuffix(": ")) from error
        self.received += len(body)
        if status in BUSY and not body.startswith(b"{"):  # a proxy's page
            raise _NoAnswer(f"HTTP {status}")
        try:
            content = messages.decode(body, nodes)
        except ValueError as error:
            raise InfrastructureError(
                f"{self.url}{path}: the answer (HTTP {status}) is not JSON: {messages.one_line(error)}"
            ) from error
        if status != 200:
            raise self._refusal(path, status, content)
        return content

    def _refusal(self, path: str, status: int, content: Any) -> Exception:
        problem = messages.ErrorAnswer(detail=f"HTTP {status}", code="")
        with suppress(ValidationError):
            problem = messages.ErrorAnswer.model_validate(content)
        text = f"{self.url}{path}: {messages.one_line(problem.detail)}"
        if problem.code == messages.INFRASTRUCTURE:
            return InfrastructureError(text)
        if problem.code == messages.BROKEN:
            return DefectError(text)
        if status in BUSY:
            return _NoAnswer(problem.detail)
        return self._denied(problem.detail) if status in (401, 403) else AgentPeftError(text)

    def _denied(self, text: str) -> AgentPeftError:
        hint = "name the environment variable that holds the server's token with token"
        return AgentPeftError(f"{self.url}: {messages.one_line(text)}; {hint}")

    def _read(self, response: httpx.Response, most: int) -> bytes:
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            raise InfrastructureError(f"{self.url}: the answer is compressed, though identity was requested")
        body, end = bytearray(), time.monotonic() + self.timeout
        for piece in response.iter_raw():
            body += piece
            if len(body) > most:
                raise InfrastructureError(f"{self.url}: the answer has more than {most} bytes")
            if time.monotonic() > end:
                raise self._httpx.ReadTimeout(f"the answer takes more than {self.timeout:g} s")
        return bytes(body)


class _Envelope(BaseModel):
    type: str
    data: dict[str, Any] = {}


class _Error(BaseModel):
    code: str = ""
    message: str = "the server gave no reason"


class ClientSession:
    """The session of one episode. ``close`` may come from another thread at any time."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._stack = connection, ExitStack()
        self._socket: ClientConnection | None = None
        self._started = self._over = False

    def reset(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Open the session, and return the answer to its reset. Raises `SessionRefusal`: the server refuses
        it; `InfrastructureError`: the connection fails; `AgentPeftError`: the server has no room.
        """
        if self._started or self._over:
            raise RuntimeError("the episode was started before")
        self._started = True
        return self._connection.attempt(lambda: self._open(content), "/ws")

    def step(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to an action. Raises as ``reset``."""
        if self._over or self._socket is None:
            raise RuntimeError(
                "the episode is done or closed" if self._over else "the episode was not started"
            )
        return self._ask("step", content)

    def close(self) -> None:
        self._over = True
        try:
            self._stack.close()
        except self._connection.failures as error:
            logger.debug("%s: a session did not close well: %s", self._connection.url, error)

    def _open(self, content: Mapping[str, Any]) -> dict[str, Any]:
        self._socket = self._connection.connect(self._stack)
        if self._over:  # another thread has closed it meanwhile
            self.close()
            raise RuntimeError("the episode is done or closed")
        try:
            return self._ask("reset", content)
        except _Full:
            self._stack.close()
            raise

    def _ask(self, kind: str, content: Mapping[str, Any]) -> dict[str, Any]:
        url, connection = self._connection.url, self._connection
        assert self._socket is not None
        try:
            # a server without room answers before it is asked, and closes
            with suppress(connection.websockets.ConnectionClosed):
                self._socket.send(json.dumps({"type": kind, "data": dict(content)}))
            text = self._socket.recv(timeout=connection.timeout)
            envelope = _Envelope.model_validate(messages.decode(text))
            if envelope.type != "error":
                return envelope.data
            refusal = _Error.model_validate(envelope.data)
        except connection.failures as error:
            if self._over:  # another thread has closed it meanwhile
                raise RuntimeError("the episode is done or closed") from error
            self.close()
            raise InfrastructureError(
                f"{url}: {kind}: {messages.one_line(error) or type(error).__name__}"
            ) from error
        except ValueError as error:  # pydantic's too
            fault = first_error(error) if isinstance(error, ValidationError) else error
            raise InfrastructureError(
                f"{url}: {kind}: the answer cannot be read: {messages.one_line(fault)}"
            ) from error
        reason = messages.one_line(refusal.message)
        if refusal.code == "CAPACITY_REACHED":
            raise _Full(
                f"{reason}; let the server hold as many sessions as there are episodes at once "
                "(engine.rows, and a few), or set engine.rows lower"
            )
        if refusal.code in ("FACTORY_ERROR", "SESSION_ERROR"):
            raise InfrastructureError(f"{url}: {reason}")
        raise SessionRefusal(refusal.code, refusal.message)
