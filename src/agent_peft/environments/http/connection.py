"""A client's side of the wire: requests that are tried again until they are answered, and answers that cannot
be mistaken.

Trying again is safe because the server executes a request once (see ``hosting``). An answer that echoes
another request's id, as a network that repeats itself may deliver, is thrown away with its connection. A
server is not trusted to be one: what it answers is read up to a limit, in a time, uncompressed, and checked.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from http.cookiejar import CookieJar, DefaultCookiePolicy
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ValidationError

from agent_peft.config import first_error
from agent_peft.environments.http import messages
from agent_peft.environments.http.guard import is_loopback
from agent_peft.types import AgentPeftError, InfrastructureError

if TYPE_CHECKING:
    import httpx

Answer = TypeVar("Answer", bound=BaseModel)

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0  # seconds between two attempts: doubled from the first to the longest
BUSY = frozenset({502, 503, 504})  # of whatever stands between us and the server
MAX_ANSWER_BYTES = 4 << 20  # bytes: more than any context holds
# a server's pages are shorter, unless a single task is longer
MAX_PAGE_BYTES = 4 * messages.MAX_PAGE_BYTES
UNCOMPRESSED = {"accept-encoding": "identity"}  # a few bytes could be a gigabyte


class DefectError(Exception):
    """The environment that is served raised, other than for the world under it: a defect of its code, as
    it would be here.
    """


class _Lost(Exception):
    """No answer, or not ours."""


class _Full(_Lost):
    """The server holds as much as it may, until episodes end."""


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
        headers = {
            messages.CLIENT_ID: uuid.uuid4().hex,
            "content-type": "application/json",
            **UNCOMPRESSED,
            **authorization(token),
        }
        self.received = 0  # bytes of all answers
        self._timeout = timeout
        self._client: httpx.Client = self._httpx.Client(
            base_url=url,
            headers=headers,
            timeout=self._httpx.Timeout(timeout, connect=min(timeout, 10.0), pool=None),
            limits=self._httpx.Limits(
                max_connections=256, max_keepalive_connections=64, keepalive_expiry=60.0
            ),
            trust_env=not is_local(url),
            cookies=CookieJar(
                DefaultCookiePolicy(allowed_domains=[])
            ),  # none: a server could send more and more of them
        )
        self._down = (
            False  # one request has lost its patience: others do not wait as long for the same server
        )

    def get(
        self,
        path: str,
        model: type[Answer],
        params: Mapping[str, Any] | None = None,
        longest: int = MAX_ANSWER_BYTES,
        nodes: int = messages.MAX_NODES,
        patient: bool = True,
    ) -> Answer:
        """
        Args:
            longest: bytes of the answer.
            nodes: commas and brackets in it.
            patient: whether it is asked again where no answer comes.
        """
        return self._parse(
            model, self._request("GET", path, patient=patient, longest=longest, nodes=nodes, params=params)
        )

    def post(self, path: str, model: type[Answer], message: BaseModel, patient: bool = True) -> Answer:
        return self._parse(
            model, self._request("POST", path, content=messages.encode(message), patient=patient)
        )

    def close(self) -> None:
        self._client.close()

    def _request(
        self,
        method: str,
        path: str,
        *,
        patient: bool = True,
        longest: int = MAX_ANSWER_BYTES,
        nodes: int = messages.MAX_NODES,
        **more: Any,
    ) -> Any:
        """The JSON of the answer.

        Raises:
            InfrastructureError: no answer came in time, or the episode is lost.
            DefectError: the environment raised.
            AgentPeftError: the server refuses the request, for a reason that trying again does not change, or
                has been full for too long.
        """
        end = time.monotonic() + (self.patience if patient and not self._down else 0.0)
        pause = FIRST_PAUSE
        while True:
            try:
                answer = self._once(method, path, longest, nodes, more)
                self._down = False
                return answer
            except _Lost as error:
                if time.monotonic() + pause > end:
                    if isinstance(error, _Full):
                        raise AgentPeftError(
                            f"{self.url}{path}: {error} (asked again for {self.patience:g} s)"
                        ) from error
                    self._down = self._down or patient
                    raise InfrastructureError(f"{self.url}{path}: {messages.one_line(error)}") from error
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _once(self, method: str, path: str, longest: int, nodes: int, more: Mapping[str, Any]) -> Any:
        request_id = uuid.uuid4().hex
        try:
            # streamed, so that an answer to another request is closed unread, and its connection with it
            with self._client.stream(
                method, path, headers={messages.REQUEST_ID: request_id}, **more
            ) as response:
                status, echo = response.status_code, response.headers.get(messages.REQUEST_ID)
                if echo != request_id:
                    if echo or status in BUSY:
                        raise _Lost("the answer is to another request" if echo else f"HTTP {status}")
                    raise AgentPeftError(
                        f"{self.url}{path}: the answer (HTTP {status}) comes from no agent-peft server; "
                        "set another url"
                    )
                body = read_answer(response, longest, self._timeout)
            self.received += len(body)
            found = messages.decode(body, nodes)
        except self._httpx.RequestError as error:
            raise _Lost(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__) from error
        except TooLong as error:
            raise InfrastructureError(f"{self.url}{path}: {error}") from error
        except ValueError as error:
            raise _Lost(f"the answer is not JSON: {error}") from error
        if status != 200:
            self._refused(path, status, found)
        return found

    def _refused(self, path: str, status: int, told: Any) -> None:
        problem = messages.ErrorAnswer(detail=f"HTTP {status}", code="")
        with suppress(ValidationError):
            problem = messages.ErrorAnswer.model_validate(told)
        detail = messages.one_line(problem.detail)
        if problem.code in messages.LOST:
            raise InfrastructureError(f"{self.url}{path}: {detail}")
        if problem.code == messages.BROKEN:
            raise DefectError(f"{self.url}{path}: {detail}")
        if problem.code == messages.FULL:
            raise _Full(detail)
        if status in BUSY:
            raise _Lost(detail)
        if status in (401, 403):
            raise AgentPeftError(
                f"{self.url}: {detail}; name the environment variable that holds the server's token with "
                "token"
            )
        raise AgentPeftError(f"{self.url}{path}: {detail}")

    def _parse(self, model: type[Answer], found: Any) -> Answer:
        try:
            return model.model_validate(found)
        except ValidationError as error:
            fault = messages.one_line(first_error(error))
            raise AgentPeftError(
                f"{self.url}: the server speaks another version of agent-peft ({fault})"
            ) from error


class TooLong(Exception):
    """An answer of more bytes than are read, or compressed."""


def read_answer(response: httpx.Response, longest: int, seconds: float) -> bytes:
    """The body of an answer that is streamed.

    Raises:
        TooLong: it has more than ``longest`` bytes, or is compressed.
        httpx.RequestError: it does not come, or not in time.
    """
    if response.headers.get("content-encoding", "identity").lower() != "identity":
        raise TooLong("the answer is compressed, though it was asked not to be")
    body, end = bytearray(), time.monotonic() + seconds
    for piece in response.iter_raw():
        body += piece
        if len(body) > longest:
            raise TooLong(f"the answer has more than {longest} bytes")
        if time.monotonic() > end:
            raise import_httpx().ReadTimeout(f"the answer takes more than {seconds:g} s")
    return bytes(body)


def import_httpx() -> ModuleType:
    """Import httpx, only here.

    Raises:
        AgentPeftError: it is not installed.
    """
    try:
        import httpx
    except ImportError as error:
        raise messages.missing_extra("httpx") from error
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
        raise AgentPeftError(
            f"token: the environment variable {variable!r} {wrong}; put the server's token there"
        )
    return token


def is_local(url: str) -> bool:
    """Whether a URL names this machine, where no proxy is asked.

    >>> is_local("http://127.0.0.1:8000"), is_local("https://example.org")
    (True, False)
    """
    return is_loopback(urlsplit(url).hostname or "")


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
