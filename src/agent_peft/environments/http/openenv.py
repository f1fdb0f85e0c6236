"""Training on an OpenEnv server (https://github.com/huggingface/OpenEnv).

OpenEnv gives a reward where our environments state facts: a reward of at least ``threshold`` is CORRECT, a
smaller one is INCORRECT, and no reward is UNKNOWN. OpenEnv has seeds where our environments have tasks:
task n is the server's reset with the n-th seed.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, Field, ValidationError, field_validator

from agent_peft.config import first_error
from agent_peft.environments.base import Environment, EnvironmentConfig, Episode
from agent_peft.environments.http import messages
from agent_peft.environments.http.connection import (
    MAX_ANSWER_BYTES,
    UNCOMPRESSED,
    TooLong,
    authorization,
    checked_url,
    import_httpx,
    is_local,
    read_answer,
)
from agent_peft.seeding import derive
from agent_peft.types import (
    AgentPeftError,
    InfrastructureError,
    Message,
    Outcome,
    StepResult,
    StopReason,
    Task,
)

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection

logger = logging.getLogger(__name__)

NOT_TEXT = frozenset({"done", "reward", "metadata"})  # of every OpenEnv observation
OURS = frozenset({"seed", "episode_id"})


class OpenEnvConfig(EnvironmentConfig):
    """A server, the keys of its actions and observations, and the meaning of its reward."""

    kind: str = "openenv"
    url: Annotated[str, AfterValidator(checked_url)] = Field(
        description="address of the server, such as http://127.0.0.1:8000"
    )
    num_tasks: int = Field(ge=1, description="number of tasks; task n is a reset with the n-th seed")
    seed: int = Field(default=0, description="seed that the seeds of the resets are derived from")
    token: str | None = Field(
        default=None,
        description="name of the environment variable that holds a bearer token; null sends none",
    )
    max_turns: int = Field(
        default=8, ge=1, description="maximum number of turns; then the episode ends and is graded"
    )
    threshold: float = Field(
        default=1.0, allow_inf_nan=False, description="smallest reward that counts as correct"
    )
    reward: Literal["last", "sum"] = Field(
        default="last", description="reward of an episode: that of its last step, or the sum of all"
    )
    action_key: str | None = Field(
        default=None,
        description="key of an action that takes the agent's text; null takes the one text of /schema",
    )
    observation_key: str | None = Field(
        default=None,
        description="key that the agent reads; null takes the one text of /schema, or else all keys as JSON",
    )
    system_prompt: str = Field(default="", description="system message; empty for none")
    prompt: str = Field(default="", description="text before the first observation")
    reset: dict[str, Any] = Field(default={}, description="arguments of reset in addition to the seed")
    timeout: float = Field(default=60.0, gt=0, description="time limit of one answer in seconds")

    @field_validator("reset")
    @classmethod
    def _leaves_the_seed(cls, reset: dict[str, Any]) -> dict[str, Any]:
        if taken := OURS & set(reset):
            raise ValueError(f"{min(taken)!r} is set for every episode; leave it out")
        return reset


class OpenEnv(Environment):
    """An OpenEnv server's environment, over its WebSocket sessions (its HTTP reset and step share no
    state).
    """

    config_class = OpenEnvConfig

    def __init__(self, config: OpenEnvConfig) -> None:
        """Read the server's schema, and check whether a seed decides an episode.

        Raises:
            AgentPeftError: no server answers, or its actions and observations are not texts.
        """
        self.config: OpenEnvConfig = config
        self._headers = authorization(config.token)
        schema = self._schema()
        self.action_key = config.action_key or _only_text(_object(schema.get("action")), config.url)
        self.observation_key = config.observation_key or _text_key(_object(schema.get("observation")))
        # within 31 bits, since servers hand it to NumPy
        seeds = [derive(config.seed, "openenv", number) >> 32 for number in range(config.num_tasks)]
        self._tasks = tuple(
            Task(id=f"seed-{number}", content={"seed": seed}) for number, seed in enumerate(seeds)
        )
        self._check_seeding()

    @property
    def tasks(self) -> Sequence[Task]:
        return self._tasks

    def episode(self, task: Task, seed: int) -> OpenEnvEpisode:
        """Create an episode. ``seed`` is not used, because OpenEnv has one seed, which is the task."""
        return OpenEnvEpisode(self, {**self.config.reset, "seed": task.content["seed"]})

    def show(self, observation: Mapping[str, Any]) -> str:
        """The text of an observation, as the agent reads it."""
        if self.observation_key is None:
            return json.dumps(
                {key: value for key, value in observation.items() if key not in NOT_TEXT}, ensure_ascii=False
            )
        value = observation.get(self.observation_key, "")
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    def connect(self) -> OpenEnvConnection:
        return OpenEnvConnection(self.config, self._headers)

    def _schema(self) -> Mapping[str, Any]:
        httpx, config = import_httpx(), self.config
        headers = {**UNCOMPRESSED, **self._headers}
        try:
            with (
                httpx.Client(
                    headers=headers, timeout=config.timeout, trust_env=not is_local(config.url)
                ) as client,
                client.stream("GET", f"{config.url}/schema") as response,
            ):
                response.raise_for_status()
                return _object(messages.decode(read_answer(response, MAX_ANSWER_BYTES, config.timeout)))
        except (httpx.HTTPError, TooLong, ValueError) as error:
            raise AgentPeftError(
                f"{config.url}: no OpenEnv server answers: {messages.one_line(error)}"
            ) from error

    def _check_seeding(self) -> None:
        openings = []
        for _ in range(2):
            episode = self.episode(self._tasks[0], 0)
            try:
                openings.append(episode.start())
            except InfrastructureError as error:
                raise AgentPeftError(f"{self.config.url}: cannot be reset: {error}") from error
            finally:
                episode.close()
        if openings[0] != openings[1]:
            logger.warning(
                "%s: two resets with one seed differ, so the episodes of a task may be of different problems",
                self.config.url,
            )


class OpenEnvEpisode(Episode):
    """One session. An action that the server refuses is invalid, and the agent reads the cause."""

    def __init__(self, environment: OpenEnv, reset: Mapping[str, Any]) -> None:
        self._environment, self._reset = environment, reset
        self._session: OpenEnvConnection | None = None
        self._over = False
        self._turns = 0
        self._rewards: list[float] = []

    def start(self) -> Sequence[Message]:
        if self._over or self._session is not None:
            raise RuntimeError("the episode was started before")
        config = self._environment.config
        self._session = self._environment.connect()
        if self._over:  # it was closed meanwhile, by another thread
            self._session.close()
            raise RuntimeError("the episode is done or closed")
        answer = self._session.ask("reset", self._reset)
        if answer.error is not None:
            raise InfrastructureError(f"{config.url}: reset failed: {messages.one_line(answer.error)}")
        text = "\n".join(
            part for part in (config.prompt, self._environment.show(answer.shown)) if part.strip()
        )
        if not text:
            raise AgentPeftError(
                f"{config.url}: the first observation is empty; set prompt, so that the agent has "
                "something to read"
            )
        system = [Message("system", config.system_prompt)] if config.system_prompt else []
        return [*system, Message("user", text)]

    def step(self, action: str) -> StepResult:
        if self._over or self._session is None:
            raise RuntimeError(
                "the episode is done or closed" if self._over else "the episode was not started"
            )
        self._turns += 1
        answer = self._session.ask("step", {self._environment.action_key: _plain(action)})
        valid = answer.error is None
        if answer.reward is not None:
            self._rewards.append(answer.reward)
        if answer.done or self._turns >= self._environment.config.max_turns:
            self.close()
            reason = StopReason.FINISHED if answer.done else StopReason.TURN_LIMIT
            return StepResult("", True, self._outcome(), reason, valid)
        return StepResult(
            self._environment.show(answer.shown) if answer.error is None else answer.error, valid=valid
        )

    def close(self) -> None:
        self._over = True
        if self._session is not None:
            self._session.close()

    def _outcome(self) -> Outcome:
        if not self._rewards:
            return Outcome.UNKNOWN
        config = self._environment.config
        reward = math.fsum(self._rewards) if config.reward == "sum" else self._rewards[-1]
        return Outcome.CORRECT if reward >= config.threshold else Outcome.INCORRECT


class Answer(BaseModel):
    """A server's answer to one message: an observation, or the cause of a refusal."""

    observation: Any = {}
    reward: float | None = Field(default=None, allow_inf_nan=False)
    done: bool | None = False
    error: str | None = None

    @property
    def shown(self) -> Mapping[str, Any]:
        return self.observation if isinstance(self.observation, dict) else {"observation": self.observation}


class _Envelope(BaseModel):
    type: str
    data: dict[str, Any] = {}


class _ErrorContent(BaseModel):
    code: str = ""
    message: str = "the server gave no reason"


class OpenEnvConnection:
    """A WebSocket to an OpenEnv server, with one answer for each message.

    Raises:
        InfrastructureError: from every method except ``close``, if the connection fails.
        AgentPeftError: the server has no room for one more session.
    """

    def __init__(self, config: OpenEnvConfig, headers: Mapping[str, str]) -> None:
        try:
            from websockets.exceptions import ConnectionClosed, WebSocketException
            from websockets.sync.client import connect
        except ImportError as error:
            raise messages.missing_extra("websockets") from error
        self.url, self.timeout, self._failures = (
            config.url,
            config.timeout,
            (WebSocketException, OSError, EOFError),
        )
        self._closed, self._stack = ConnectionClosed, ExitStack()
        parts = urlsplit(config.url)
        address = f"{'wss' if parts.scheme == 'https' else 'ws'}://{parts.netloc}{parts.path}/ws"
        options: dict[str, Any] = {"proxy": None} if is_local(config.url) else {}
        try:
            self._socket: ClientConnection = self._stack.enter_context(
                connect(
                    address,
                    additional_headers=dict(headers),
                    open_timeout=config.timeout,
                    close_timeout=2.0,
                    compression=None,
                    max_size=MAX_ANSWER_BYTES,
                    max_queue=1,
                    **options,
                )
            )
        except (*self._failures, ValueError) as error:  # a redirect may lead to what is no URL
            raise self._failed("connecting", error) from error

    def ask(self, kind: str, content: Mapping[str, Any]) -> Answer:
        try:
            with suppress(self._closed):  # a server without room says so before it is asked, and hangs up
                self._socket.send(json.dumps({"type": kind, "data": dict(content)}))
            envelope = _Envelope.model_validate(messages.decode(self._socket.recv(timeout=self.timeout)))
            if envelope.type == "error":
                return self._refused(_ErrorContent.model_validate(envelope.data))
            return Answer.model_validate({**envelope.data, "error": None})
        except self._failures as error:
            self.close()
            raise self._failed(kind, error) from error
        except ValidationError as error:
            fault = messages.one_line(first_error(error))
            raise InfrastructureError(
                f"{self.url}: {kind}: the answer is not one of OpenEnv ({fault})"
            ) from error
        except ValueError as error:
            raise InfrastructureError(
                f"{self.url}: {kind}: the answer cannot be read: {messages.one_line(error)}"
            ) from error

    def close(self) -> None:
        try:
            self._stack.close()
        except self._failures as error:
            logger.debug("%s: a session did not close well: %s", self.url, error)

    def _failed(self, kind: str, error: Exception) -> InfrastructureError:
        return InfrastructureError(f"{self.url}: {kind}: {messages.one_line(error) or type(error).__name__}")

    def _refused(self, refusal: _ErrorContent) -> Answer:
        if refusal.code == "CAPACITY_REACHED":
            raise AgentPeftError(
                f"{self.url}: {messages.one_line(refusal.message)}; let the server hold as many sessions as "
                "there are episodes at once "
                "(engine.rows, and a few), or set engine.rows lower"
            )
        if refusal.code in ("FACTORY_ERROR", "SESSION_ERROR"):
            raise InfrastructureError(f"{self.url}: {messages.one_line(refusal.message)}")
        return Answer(error=refusal.message)


def _plain(text: str) -> str:
    """Replace lone surrogates, which not every server accepts."""
    return text.encode("utf-8", "replace").decode()


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _texts(schema: Mapping[str, Any]) -> list[str]:
    properties = _object(schema.get("properties"))
    return [
        name
        for name, about in properties.items()
        if _object(about).get("type") == "string" and name not in NOT_TEXT
    ]


def _only_text(schema: Mapping[str, Any], url: str) -> str:
    listed = schema.get("required")
    texts, required = (
        _texts(schema),
        [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else [],
    )
    candidates = [name for name in texts if name in required] or texts
    if len(candidates) == 1 and set(required) <= set(candidates):
        return candidates[0]
    keys = messages.one_line(", ".join(_object(schema.get("properties")))) or "none"
    raise AgentPeftError(
        f"{url}: an action is not one text (its keys: {keys}); set action_key, or write an environment of "
        "your own"
    )


def _text_key(schema: Mapping[str, Any]) -> str | None:
    texts = _texts(schema)
    return texts[0] if len(texts) == 1 else None
