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
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, ValidationError, field_validator

from agent_peft.addresses import checked_url
from agent_peft.config import first_error
from agent_peft.environments.base import Environment, EnvironmentConfig, Episode
from agent_peft.environments.http import messages
from agent_peft.environments.http.client import ClientSession, Connection, DefectError, SessionRefusal
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
    """An OpenEnv server's environment, over WebSocket sessions: its HTTP reset and step share no state."""

    config_class = OpenEnvConfig

    def __init__(self, config: OpenEnvConfig) -> None:
        """Read the server's schema, and check whether a seed decides an episode."""
        self.config: OpenEnvConfig = config
        self.connection = Connection(config.url, config.token, config.timeout)
        try:
            schema = self.connection.fetch(ServerSchemas, "/schema")
        except (InfrastructureError, DefectError) as error:
            raise AgentPeftError(f"{config.url}: no OpenEnv server answers: {error}") from error
        self.action_key = config.action_key or _only_text(_object(schema.action), config.url)
        texts = _texts(_object(schema.observation))
        self.observation_key = config.observation_key or (texts[0] if len(texts) == 1 else None)
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

    def close(self) -> None:
        self.connection.close()

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
        self._session = ClientSession(environment.connection)
        self._turns = 0
        self._rewards: list[float] = []

    def start(self) -> Sequence[Message]:
        config = self._environment.config
        try:
            answer = self._read(self._session.reset(self._reset))
        except SessionRefusal as refusal:
            raise InfrastructureError(
                f"{config.url}: reset failed: {messages.one_line(refusal)}"
            ) from refusal
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
        try:
            text = action.encode("utf-8", "replace").decode()  # not every server accepts lone surrogates
            answer = self._read(self._session.step({self._environment.action_key: text}))
            shown, valid = self._environment.show(answer.shown), True
        except SessionRefusal as refusal:
            answer, shown, valid = SessionAnswer(), str(refusal), False
        self._turns += 1
        if answer.reward is not None:
            self._rewards.append(answer.reward)
        if answer.done or self._turns >= self._environment.config.max_turns:
            self.close()
            reason = StopReason.FINISHED if answer.done else StopReason.TURN_LIMIT
            return StepResult("", True, self._outcome(), reason, valid)
        return StepResult(shown, valid=valid)

    def close(self) -> None:
        self._session.close()

    def _read(self, content: Mapping[str, Any]) -> SessionAnswer:
        try:
            return SessionAnswer.model_validate(content)
        except ValidationError as error:
            fault = messages.one_line(first_error(error))
            raise InfrastructureError(
                f"{self._environment.config.url}: the answer is not one of OpenEnv ({fault})"
            ) from error

    def _outcome(self) -> Outcome:
        if not self._rewards:
            return Outcome.UNKNOWN
        config = self._environment.config
        reward = math.fsum(self._rewards) if config.reward == "sum" else self._rewards[-1]
        return Outcome.CORRECT if reward >= config.threshold else Outcome.INCORRECT


class SessionAnswer(BaseModel):
    """A server's answer to a reset or a step."""

    observation: Any = {}
    reward: float | None = Field(default=None, allow_inf_nan=False)
    done: bool | None = False

    @property
    def shown(self) -> Mapping[str, Any]:
        return self.observation if isinstance(self.observation, dict) else {"observation": self.observation}


class ServerSchemas(BaseModel):
    """The JSON schemas of a server."""

    action: Any = None
    observation: Any = None


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
    texts, listed = _texts(schema), schema.get("required")
    required = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    candidates = [name for name in texts if name in required] or texts
    if len(candidates) == 1 and set(required) <= set(candidates):
        return candidates[0]
    keys = messages.one_line(", ".join(_object(schema.get("properties")))) or "none"
    raise AgentPeftError(
        f"{url}: an action is not one text (its keys: {keys}); set action_key, or write an environment of "
        "your own"
    )
