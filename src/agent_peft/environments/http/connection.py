"""A client's side of the wire: requests that are tried again until they are answered, and answers that cannot be mistaken.

Trying again is safe because the server executes a request once (see ``hosting``). An answer that echoes another request's id, as a
network that repeats itself may deliver, is thrown away with its connection.
"""

from __future__ import annotations

import ipaddress
import os
import time
import uuid
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ValidationError

from agent_peft.environments.http import wire
from agent_peft.types import AgentPeftError, InfrastructureError

if TYPE_CHECKING:
    import httpx

Answer = TypeVar("Answer", bound=BaseModel)

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0  # seconds between two attempts: doubled from the first to the longest
BUSY = frozenset({502, 503, 504})  # of whatever stands between us and the server


class _Lost(Exception):
    """No answer, or not ours."""


class Connection:
    """One server. May be shared between threads."""

    def __init__(self, url: str, token: str | None, timeout: float, patience: float) -> None:
        """
        Args:
            token: the name of the environment variable that holds it.
            timeout: seconds for one answer.
            patience: seconds within which a request that was not answered is tried again.
        """
        self.url, self.patience = url, patience
        self._httpx = import_httpx()
        headers = {wire.CLIENT_ID: uuid.uuid4().hex, "content-type": "application/json", **authorization(token)}
        self._client: httpx.Client = self._httpx.Client(
            base_url=url,
            headers=headers,
            timeout=self._httpx.Timeout(timeout, connect=min(timeout, 10.0), pool=None),
            limits=self._httpx.Limits(max_connections=256, max_keepalive_connections=64, keepalive_expiry=60.0),
            trust_env=not is_local(url),
        )
        self._down = False  # one request has lost its patience: others do not wait as long for the same server

    def get(self, path: str, model: type[Answer], params: Mapping[str, Any] | None = None) -> Answer:
        return self._parse(model, self._request("GET", path, params=params))

    def post(self, path: str, model: type[Answer], message: BaseModel, patient: bool = True) -> Answer:
        return self._parse(model, self._request("POST", path, content=wire.encode(message), patient=patient))

    def close(self) -> None:
        self._client.close()

    def _request(self, method: str, path: str, *, content: bytes | None = None, params: Any = None, patient: bool = True) -> Any:
        """The JSON of the answer.

        Raises:
            InfrastructureError: no answer came in time, or the episode is lost.
            AgentPeftError: the server refuses the request, for a reason that trying again does not change.
        """
        end = time.monotonic() + (self.patience if patient and not self._down else 0.0)
        pause = FIRST_PAUSE
        while True:
            try:
                answer = self._once(method, path, content, params)
                self._down = False
                return answer
            except _Lost as error:
                if time.monotonic() + pause > end:
                    self._down = True
                    raise InfrastructureError(f"{self.url}{path}: {error}") from error
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _once(self, method: str, path: str, content: bytes | None, params: Any) -> Any:
        request_id = uuid.uuid4().hex
        try:
            # streamed, so that an answer to another request is closed unread, and its connection with it
            with self._client.stream(method, path, content=content, params=params, headers={wire.REQUEST_ID: request_id}) as response:
                status, echo = response.status_code, response.headers.get(wire.REQUEST_ID)
                if echo != request_id:
                    if echo or status in BUSY:
                        raise _Lost("the answer is to another request" if echo else f"HTTP {status}")
                    raise AgentPeftError(f"{self.url}{path}: the answer (HTTP {status}) comes from no agent-peft server; set another url")
                response.read()
                found = response.json()
        except self._httpx.RequestError as error:
            raise _Lost(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__) from error
        except ValueError as error:
            raise _Lost(f"the answer is not JSON: {error}") from error
        if status != 200:
            self._refused(path, status, found if isinstance(found, dict) else {})
        return found

    def _refused(self, path: str, status: int, told: Mapping[str, Any]) -> None:
        code, detail = told.get("code"), told.get("detail", f"HTTP {status}")
        if code in wire.LOST:
            raise InfrastructureError(f"{self.url}{path}: {detail}")
        if status in (401, 403):
            raise AgentPeftError(f"{self.url}: {detail}; name the environment variable that holds the server's token with token")
        raise AgentPeftError(f"{self.url}{path}: {detail}")

    def _parse(self, model: type[Answer], found: Any) -> Answer:
        try:
            return model.model_validate(found)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise AgentPeftError(f"{self.url}: the server speaks another version of agent-peft ({where}: {first['msg']})") from error


def import_httpx() -> ModuleType:
    """The one place where httpx is imported.

    Raises:
        AgentPeftError: it is not installed.
    """
    try:
        import httpx
    except ImportError as error:
        raise wire.missing_extra("httpx") from error
    return httpx


def authorization(variable: str | None) -> dict[str, str]:
    """The header that bears the token of an environment variable.

    Raises:
        AgentPeftError: the variable is not set.
    """
    return {} if variable is None else {"authorization": f"Bearer {read_token(variable)}"}


def read_token(variable: str) -> str:
    """The token that an environment variable holds.

    Raises:
        AgentPeftError: it is not set, or holds what cannot go into a header.
    """
    token = os.environ.get(variable, "")
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        wrong = "is not set" if not token else "holds spaces, or characters that are not printable ASCII"
        raise AgentPeftError(f"token: the environment variable {variable!r} {wrong}; put the server's token there")
    return token


def is_local(url: str) -> bool:
    """Whether a URL names this machine, where no proxy is asked.

    >>> is_local("http://127.0.0.1:8000"), is_local("https://example.org")
    (True, False)
    """
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def checked_url(url: str, schemes: tuple[str, ...] = ("http", "https")) -> str:
    """The URL without a slash at its end.

    Raises:
        ValueError: it is none.

    >>> checked_url("http://127.0.0.1:8000/")
    'http://127.0.0.1:8000'
    """
    parts = urlsplit(url)
    if parts.scheme not in schemes or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"{url!r} is no URL of a server; write it as {schemes[0]}://HOST:PORT")
    return url.rstrip("/")
