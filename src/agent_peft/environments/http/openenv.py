"""Train on anyone's OpenEnv server (https://github.com/huggingface/OpenEnv): its reset, its observations, its
reward.

OpenEnv prices, where our environments state facts: a reward of at least ``threshold`` is CORRECT, a smaller
one INCORRECT, none at all UNKNOWN. It has seeds, where ours have tasks: task n is the server's reset with the
n-th seed.
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

from agent_peft.environments.base import Environment, EnvironmentConfig, Episode
from agent_peft.environments.http import messages
from agent_peft.environments.http.connection import (
    LONGEST_ANSWER,
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
    """A server, what its actions and observations are called, and how its reward is read."""

    kind: Literal["openenv"] = "openenv"
    url: Annotated[str, AfterValidator(checked_url)] = Field(description="such as http://127.0.0.1:8000")
    num_tasks: int = Field(ge=1, description="how many seeds")
    seed: int = Field(default=0, description="another seed gives other seeds to the server")
    token: str | None = Field(
        default=None, description="the name of the environment variable that holds a bearer token"
    )
    max_turns: int = Field(default=8, ge=1, description="then the episode ends, graded all the same")
    threshold: float = Field(
        default=1.0, allow_inf_nan=False, description="the smallest reward that is correct"
    )
    reward: Literal["last", "sum"] = Field(
        default="last", description="of an episode: its last step's, or the sum of all"
    )
    action_key: str | None = Field(
        default=None, description="where the agent's text goes; null: the one text that /schema asks for"
    )
    observation_key: str | None = Field(
        default=None, description="what the agent reads; null: the one text of /schema, else all, as JSON"
    )
    system_prompt: str = Field(default="", description="said first; empty: nothing")
    prompt: str = Field(default="", description="before the first observation")
    reset: dict[str, Any] = Field(default={}, description="what reset is given beside the seed")
    timeout: float = Field(default=60.0, gt=0, description="seconds for one answer")

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

    def __init__(self, config: OpenEnvConfig) -> None:
        """Read the server's schema, and see whether a seed decides an episode.

        Raises:
            AgentPeftError: no server answers, or its actions and observations are not texts.
        """
        self.config = config
        self._headers = authorization(config.token)
        schema = self._schema()
        self.action_key = config.action_key or _only_text(_object(schema.get("action")), config.url)
        self.observation_key = config.observation_key or _text_key(_object(schema.get("observation")))
        # within 31 bits, since servers hand it to NumPy
        seeds = [derive(config.seed, "openenv", number) >> 32 for number in range(config.num_tasks)]
        self._tasks = tuple(
            Task(id=f"seed-{number}", content={"seed": seed}) for number, seed in enumerate(seeds)
        )
        self._see_whether_seeds_count()

    @property
    def tasks(self) -> Sequence[Task]:
        return self._tasks

    def episode(self, task: Task, seed: int) -> OpenEnvEpisode:
        """``seed`` draws nothing here: OpenEnv has one seed, and it is the task."""
        return OpenEnvEpisode(self, {**self.config.reset, "seed": task.content["seed"]})

    def show(self, observation: Mapping[str, Any]) -> str:
        """What the agent reads of an observation."""
        if self.observation_key is None:
            return json.dumps(
                {key: value for key, value in observation.items() if key not in NOT_TEXT}, ensure_ascii=False
            )
        value = observation.get(self.observation_key, "")
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    def connect(self) -> Session:
        return Session(self.config, self._headers)

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
                return _object(messages.decode(read_answer(response, LONGEST_ANSWER, config.timeout)))
        except (httpx.HTTPError, TooLong, ValueError) as error:
            raise AgentPeftError(
                f"{config.url}: no OpenEnv server answers: {messages.one_line(error)}"
            ) from error

    def _see_whether_seeds_count(self) -> None:
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
    """One session. What the server refuses to execute is an invalid action, and the agent reads why."""

    def __init__(self, environment: OpenEnv, reset: Mapping[str, Any]) -> None:
        self._environment, self._reset = environment, reset
        self._session: Session | None = None
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
        shown = "\n".join(
            part for part in (config.prompt, self._environment.show(answer.shown)) if part.strip()
        )
        if not shown:
            raise AgentPeftError(
                f"{config.url}: the first observation is empty; set prompt, so that the agent has something to read"
            )
        system = [Message("system", config.system_prompt)] if config.system_prompt else []
        return [*system, Message("user", shown)]

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
    """What a server said to one message: an observation, or why it refused."""

    observation: Any = {}
    reward: float | None = Field(default=None, allow_inf_nan=False)
    done: bool | None = False
    error: str | None = None

    @property
    def shown(self) -> Mapping[str, Any]:
        return self.observation if isinstance(self.observation, dict) else {"observation": self.observation}


class _Told(BaseModel):
    type: str
    data: dict[str, Any] = {}


class _Refused(BaseModel):
    code: str = ""
    message: str = "the server gave no reason"


class Session:
    """A WebSocket to an OpenEnv server: one message, one answer.

    Raises:
        InfrastructureError: of all methods but ``close``, where the connection fails.
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
                    max_size=LONGEST_ANSWER,
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
            told = _Told.model_validate(messages.decode(self._socket.recv(timeout=self.timeout)))
            if told.type == "error":
                return self._refused(_Refused.model_validate(told.data))
            return Answer.model_validate({**told.data, "error": None})
        except self._failures as error:
            self.close()
            raise self._failed(kind, error) from error
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = messages.one_line(".".join(map(str, first["loc"])))
            raise InfrastructureError(
                f"{self.url}: {kind}: the answer is not one of OpenEnv ({where}: {first['msg']})"
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

    def _refused(self, told: _Refused) -> Answer:
        if told.code == "CAPACITY_REACHED":
            raise AgentPeftError(
                f"{self.url}: {messages.one_line(told.message)}; let the server hold as many sessions as there are episodes at once "
                "(engine.rows, and a few), or set engine.rows lower"
            )
        if told.code in ("FACTORY_ERROR", "SESSION_ERROR"):
            raise InfrastructureError(f"{self.url}: {messages.one_line(told.message)}")
        return Answer(error=told.message)


def _plain(text: str) -> str:
    """Lone surrogates cannot be sent to everybody."""
    return text.encode("utf-8", "replace").decode()


def _object(found: Any) -> dict[str, Any]:
    return found if isinstance(found, dict) else {}


def _texts(schema: Mapping[str, Any]) -> list[str]:
    properties = _object(schema.get("properties"))
    return [
        name
        for name, about in properties.items()
        if _object(about).get("type") == "string" and name not in NOT_TEXT
    ]


def _only_text(schema: Mapping[str, Any], url: str) -> str:
    told = schema.get("required")
    texts, required = (
        _texts(schema),
        [name for name in told if isinstance(name, str)] if isinstance(told, list) else [],
    )
    wanted = [name for name in texts if name in required] or texts
    if len(wanted) == 1 and set(required) <= set(wanted):
        return wanted[0]
    keys = messages.one_line(", ".join(_object(schema.get("properties")))) or "none"
    raise AgentPeftError(
        f"{url}: an action is not one text (its keys: {keys}); set action_key, or write an environment of your own"
    )


def _text_key(schema: Mapping[str, Any]) -> str | None:
    texts = _texts(schema)
    return texts[0] if len(texts) == 1 else None
