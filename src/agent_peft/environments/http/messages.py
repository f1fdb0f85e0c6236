"""What goes over the wire: OpenEnv's reset, step and state, and what ours says beyond them.

An OpenEnv server answers with ``{observation, reward, done, metadata}``. Ours puts the facts into
``metadata`` (outcome, stop reason, validity), and prices them for OpenEnv's clients: 1 for correct, 0 for
incorrect, null where the outcome is unknown.

Texts are JSON in ASCII with ``\\u`` escapes, so that whatever a policy writes arrives as it was, lone
surrogates included.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, PlainValidator, WithJsonSchema, model_validator

from agent_peft.printable import printable
from agent_peft.types import AgentPeftError, Message, Outcome, Role, StepResult, StopReason, Task

REQUEST_ID = "x-request-id"  # echoed, so that a response can never be taken for that of another request
CLIENT_ID = "x-client-id"  # episodes of a client that still speaks are not idle
# more tasks than these (arithmetic has up to 10^17) are sent as they are asked for, and whole instead of by
# their ids
MANY = 10_000
TRAIN = "train"  # the environment that is meant where none is named

LONGEST_ACTION = 1 << 20  # characters; in JSON up to twelve times as many bytes
LONGEST_PAGE = 8 << 20  # bytes of tasks in one answer, but for a task that is longer by itself
MOST_NODES = 200_000  # commas and brackets of a request; as Python's objects each takes up to a hundred bytes
# brackets within brackets; Python gives up at some hundreds, at different ones when it reads, writes and
# compares
DEEPEST = 100
LINE = 500  # characters of a refusal

# why a request was refused
UNKNOWN = (
    "unknown_episode"  # never heard of: the server was started anew, or the episode was idle for too long
)
ENDED = "episode_ended"
CONFLICT = "conflict"  # another request under the same episode and index, or not the next index
FULL = "full"
INFRASTRUCTURE = "infrastructure"  # the world under the environment failed
BROKEN = "broken"  # the environment's code raised: a defect of it, not a failure of the world
LOST = frozenset({UNKNOWN, ENDED, CONFLICT, INFRASTRUCTURE})  # the episode counts for nothing

_STRINGS = re.compile(
    rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL
)  # one that does not end goes to the end, or many would be tried
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_REWARDS = {Outcome.CORRECT: 1.0, Outcome.INCORRECT: 0.0, Outcome.UNKNOWN: None}


def _is_text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("should be a text")
    return value


def _is_object(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError("should be an object")
    return value


def _nothing(value: Any) -> Mapping[str, Any]:
    _is_object(value)
    return {}  # what is not read is not kept


Text = Annotated[
    str, PlainValidator(_is_text), WithJsonSchema({"type": "string"})
]  # pydantic's own str refuses lone surrogates
Object = Annotated[Mapping[str, Any], PlainValidator(_is_object), WithJsonSchema({"type": "object"})]
Unread = Annotated[Mapping[str, Any], PlainValidator(_nothing), WithJsonSchema({"type": "object"})]
Name = Annotated[str, Field(min_length=1, max_length=255)]
TaskName = Annotated[str, Field(max_length=1000)]
First = FailFast()  # of a million wrong items only the first is an error, or the errors would fill the memory


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _has_few_keys(cls, content: Any) -> Any:
        if (
            isinstance(content, Mapping) and len(content) > 100
        ):  # each unknown one is an error that takes memory
            raise ValueError("has more than 100 keys")
        return content


class TaskMessage(_Message):
    """A task that the server does not have: it is sent whole."""

    id: TaskName
    skills: Annotated[tuple[Annotated[str, Field(max_length=255)], ...], First, Field(max_length=100)] = ()
    content: Object = {}

    @classmethod
    def of(cls, task: Task) -> TaskMessage:
        return cls(id=task.id, skills=task.skills, content=dict(task.content))

    def task(self) -> Task:
        return Task(self.id, self.skills, self.content)


class ResetRequest(_Message):
    """Start an episode. The same request with the same ``episode_id`` starts none: it is answered as
    before.
    """

    episode_id: Name | None = Field(
        default=None, description="chosen by the client; null lets the server choose"
    )
    environment: Name = Field(default=TRAIN, description="one of those that GET /metadata names")
    task: TaskName | TaskMessage | None = Field(
        default=None, description="a task's id, or a whole one; null takes one by the seed, or the next"
    )
    seed: int | None = Field(default=None, ge=0, lt=2**63)


class Action(_Message):
    """What the agent says."""

    text: Text
    metadata: Unread = Field(default={}, description="not read")


class StepRequest(_Message):
    """Act. The same action under the same index is executed once: a repeated request is answered as
    before.
    """

    episode_id: Name
    index: int = Field(ge=0, lt=2**31, description="0 for the first step of an episode")
    action: Action
    server_id: Name | None = Field(
        default=None, description="as reset told it: a step is not taken by a server started since"
    )


class CloseRequest(_Message):
    """Free an episode. May be repeated."""

    episode_id: Name


class DemonstrationRequest(_Message):
    """Ask for actions that solve a task."""

    environment: Name = TRAIN
    task: TaskName | TaskMessage


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
    messages: Annotated[tuple[ChatMessage, ...], First] = ()


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

    @model_validator(mode="after")
    def _says_why_it_ended(self) -> StepResponse:
        if self.done != (self.metadata.stop_reason is not None):
            raise ValueError("a step tells a stop reason exactly when it is the last")
        return self

    @classmethod
    def of(cls, result: StepResult, episode_id: str, index: int) -> StepResponse:
        facts = StepFacts(
            episode_id=episode_id,
            index=index,
            outcome=result.outcome,
            stop_reason=result.stop_reason,
            valid=result.valid,
        )
        reward = _REWARDS[result.outcome] if result.done else None
        return cls(
            observation=Observation(text=result.observation), reward=reward, done=result.done, metadata=facts
        )

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
    total: int = Field(ge=0, lt=2**62)
    tasks: Annotated[tuple[TaskMessage, ...], First]


class Demonstration(_Message):
    actions: Annotated[tuple[Text, ...], Field(max_length=10_000)] | None


class Example(_Message):
    """A conversation in which a task was solved."""

    task: str
    messages: Annotated[tuple[ChatMessage, ...], First]


class Examples(_Message):
    examples: Annotated[tuple[Example, ...], First]


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
        self.status, self.code, self.text = status, code, one_line(text)


def one_line(text: object) -> str:
    r"""What others wrote, as one short line that a terminal shows as it is.

    >>> one_line("two\nlines"), one_line("x" * 1000)[-5:]
    ('two lines', 'xx...')
    """
    return printable(" ".join(str(text)[: 2 * LINE].split()), LINE)


def decode(text: bytes | str, nodes: int = MOST_NODES) -> Any:
    """What a JSON text of a stranger says.

    Raises:
        ValueError: it is not JSON in UTF-8, or is nested too deeply, or would be more than ``nodes`` objects.
    """
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    check_json(raw, nodes)
    return json.loads(raw)


def check_json(text: bytes | bytearray, nodes: int = MOST_NODES) -> None:
    r"""Whether a text, if it is JSON, is fit to be read: a megabyte of brackets would be a hundred of
    Python's objects.

    Raises:
        ValueError: it would be more than ``nodes`` objects, is nested too deeply, or is not in UTF-8 (in
            UTF-16, brackets could hide).

    >>> check_json(b'{"a": [1, 2, "[[[\\",,,"]}', nodes=4)
    """
    if b"\0" in text:
        raise ValueError("it is not JSON in UTF-8")
    outside = _STRINGS.sub(
        b"", text, 2 * nodes + 2
    )  # so many texts, keys included, stand between so many commas
    if sum(map(outside.count, (b",", b"[", b"{"))) > nodes:
        raise ValueError(f"it has more than {nodes} commas and brackets")
    depths = accumulate(1 if bracket in b"[{" else -1 for bracket in outside.translate(None, _NO_BRACKETS))
    if max(depths, default=0) > DEEPEST:
        raise ValueError(f"its brackets are nested more than {DEEPEST} deep")


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
