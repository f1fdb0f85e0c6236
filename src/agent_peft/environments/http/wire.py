"""What goes over the wire: OpenEnv's reset, step and state, and what ours says beyond them.

An OpenEnv server answers with ``{observation, reward, done, metadata}``. Ours puts the facts into ``metadata`` (outcome, stop reason,
validity), and prices them for OpenEnv's clients: 1 for correct, 0 for incorrect, null where the outcome is unknown.

Texts are JSON in ASCII with ``\\u`` escapes, so that whatever a policy writes arrives as it was, lone surrogates included.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

from agent_peft.types import AgentPeftError, Message, Outcome, Role, StepResult, StopReason, Task

REQUEST_ID = "x-request-id"  # echoed, so that a response can never be taken for that of another request
CLIENT_ID = "x-client-id"  # episodes of a client that still speaks are not idle
MANY = 10_000  # more tasks than these (arithmetic has up to 10^17) are sent as they are asked for, and whole instead of by their ids
TRAIN = "train"  # the environment that is meant where none is named

# why a request was refused
UNKNOWN = "unknown_episode"  # never heard of: the server was started anew, or the episode was idle for too long
ENDED = "episode_ended"
CONFLICT = "conflict"  # another request under the same episode and index, or not the next index
FULL = "full"
INFRASTRUCTURE = "infrastructure"  # the world under the environment failed
LOST = frozenset({UNKNOWN, ENDED, CONFLICT, INFRASTRUCTURE})  # the episode counts for nothing

_REWARDS = {Outcome.CORRECT: 1.0, Outcome.INCORRECT: 0.0, Outcome.UNKNOWN: None}


def _is_text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("should be a text")
    return value


Text = Annotated[str, PlainValidator(_is_text), WithJsonSchema({"type": "string"})]  # pydantic's own str refuses lone surrogates
Name = Annotated[str, Field(min_length=1, max_length=255)]


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TaskMessage(_Message):
    """A task that the server does not have: it is sent whole."""

    id: str
    skills: tuple[str, ...] = ()
    content: dict[str, Any] = {}

    @classmethod
    def of(cls, task: Task) -> TaskMessage:
        return cls(id=task.id, skills=task.skills, content=dict(task.content))

    def task(self) -> Task:
        return Task(self.id, self.skills, self.content)


class ResetRequest(_Message):
    """Start an episode. The same request with the same ``episode_id`` starts none: it is answered as before."""

    episode_id: Name | None = Field(default=None, description="chosen by the client; null lets the server choose")
    environment: Name = Field(default=TRAIN, description="one of those that GET /metadata names")
    task: str | TaskMessage | None = Field(default=None, description="a task's id, or a whole one; null takes one by the seed, or the next")
    seed: int | None = Field(default=None, ge=0, lt=2**63)


class Action(_Message):
    """What the agent says."""

    text: Text
    metadata: dict[str, Any] = Field(default={}, description="not read")


class StepRequest(_Message):
    """Act. The same action under the same index is executed once: a repeated request is answered as before."""

    episode_id: Name
    index: int = Field(ge=0, description="0 for the first step of an episode")
    action: Action
    server_id: Name | None = Field(default=None, description="as reset told it: a step is not taken by a server started since")


class CloseRequest(_Message):
    """Free an episode. May be repeated."""

    episode_id: Name


class DemonstrationRequest(_Message):
    """Ask for actions that solve a task."""

    environment: Name = TRAIN
    task: str | TaskMessage


class ChatMessage(_Message):
    """One message of a conversation."""

    role: Role
    content: Text

    @classmethod
    def of(cls, message: Message) -> ChatMessage:
        return cls(role=message.role, content=message.content)

    def message(self) -> Message:
        return Message(self.role, self.content)


class Observation(_Message):
    """What the agent reads next: ``text``, and after a reset the whole opening of the conversation."""

    text: Text
    messages: tuple[ChatMessage, ...] = ()


class ResetFacts(_Message):
    """What is known of an episode that has begun."""

    episode_id: str
    server_id: str
    environment: str
    task: str


class ResetResponse(_Message):
    observation: Observation
    reward: float | None = None
    done: bool = False
    metadata: ResetFacts

    def messages(self) -> Sequence[Message]:
        return [message.message() for message in self.observation.messages]


class StepFacts(_Message):
    """What the environment found, beside what the agent reads."""

    episode_id: str
    index: int
    outcome: Outcome
    stop_reason: StopReason | None
    valid: bool


class StepResponse(_Message):
    observation: Observation
    reward: float | None
    done: bool
    metadata: StepFacts

    @classmethod
    def of(cls, result: StepResult, episode_id: str, index: int) -> StepResponse:
        facts = StepFacts(episode_id=episode_id, index=index, outcome=result.outcome, stop_reason=result.stop_reason, valid=result.valid)
        reward = _REWARDS[result.outcome] if result.done else None
        return cls(observation=Observation(text=result.observation), reward=reward, done=result.done, metadata=facts)

    def result(self) -> StepResult:
        facts = self.metadata
        return StepResult(self.observation.text, self.done, facts.outcome, facts.stop_reason, facts.valid)


class State(_Message):
    """OpenEnv's state: which episode, and how many steps it has taken."""

    episode_id: str
    step_count: int
    environment: str
    task: str
    done: bool


class TaskPage(_Message):
    total: int
    tasks: tuple[TaskMessage, ...]


class Demonstration(_Message):
    actions: tuple[Text, ...] | None


class Example(_Message):
    """A conversation in which a task was solved."""

    task: str
    messages: tuple[ChatMessage, ...]


class Examples(_Message):
    examples: tuple[Example, ...]


class Metadata(_Message):
    """OpenEnv's metadata, and what is served."""

    name: str
    description: str
    version: str
    server_id: str
    environments: dict[str, int] = Field(description="the number of tasks of each")


class Schemas(_Message):
    """JSON schemas, as OpenEnv's clients ask for them."""

    action: dict[str, Any]
    observation: dict[str, Any]
    state: dict[str, Any]


class Health(_Message):
    status: Literal["healthy"] = "healthy"


class Pong(_Message):
    status: Literal["ok"] = "ok"


class Problem(_Message):
    """Why a request was refused, in one line."""

    detail: str
    code: str


class Refusal(Exception):
    """A request is refused, with an HTTP status and one of the codes above."""

    def __init__(self, status: int, code: str, text: str) -> None:
        super().__init__(text)
        self.status, self.code, self.text = status, code, " ".join(text.split())


def encode(content: BaseModel | Mapping[str, Any]) -> bytes:
    """ASCII JSON.

    >>> encode({"text": "é"})
    b'{"text":"\\\\u00e9"}'
    """
    plain = content.model_dump() if isinstance(content, BaseModel) else content
    return json.dumps(plain, separators=(",", ":"), allow_nan=False).encode("ascii")


def missing_extra(package: str) -> AgentPeftError:
    """What to say where a package of the extra ``server`` is not installed."""
    return AgentPeftError(f"environments over HTTP need {package}: pip install 'agent-peft[server]'")
