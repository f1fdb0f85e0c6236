"""The messages between server and client: OpenEnv's reset, step and state, and our additions.

An OpenEnv server answers with ``{observation, reward, done, metadata}``. Ours puts the facts into
``metadata`` (outcome, stop reason, validity, score). For OpenEnv's clients it also sets the reward: 1 for
correct, 0 for incorrect, null where the outcome is unknown. JSON is ASCII with ``\\u`` escapes, so every text
of a policy arrives unchanged, also with lone surrogates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    FailFast,
    Field,
    PlainValidator,
    StrictBool,
    StrictInt,
    WithJsonSchema,
    model_validator,
)

from agent_peft.config import Config
from agent_peft.environments.base import Mistake
from agent_peft.files import unique_keys
from agent_peft.lookup import install
from agent_peft.printable import printable
from agent_peft.types import AgentPeftError, Message, Outcome, StepResult, StopReason, Task

# above this many tasks (arithmetic has up to 10^17), clients fetch pages when they need them, and send a
# task's full content instead of its id
MAX_LISTED_TASKS = 10_000
TRAIN = "train"  # the default environment

MAX_ACTION_CHARS = 1 << 20  # characters; in JSON up to twelve times as many bytes
MAX_PAGE_BYTES = 8 << 20  # bytes of tasks in one answer; a longer task is sent alone
MAX_NODES = 200_000  # commas and brackets of a request; as Python's objects each takes up to a hundred bytes
# nested brackets; Python fails at some hundreds, and at different numbers for reading, writing and comparing
MAX_DEPTH = 100
LINE = 500  # characters of a refusal

# codes of refusals; a session sends OpenEnv's code for each
UNSERVED = "an environment whose episodes declare tools is not served; choose another protocol"
FULL = "full"
CONFLICT = "conflict"  # a step without an episode, or after its end
INFRASTRUCTURE = "infrastructure"  # the world under the environment failed
BROKEN = "broken"  # the environment's code raised, which is a defect and not a failure of the world
OPENENV_CODES = {
    FULL: "CAPACITY_REACHED",
    CONFLICT: "EXECUTION_ERROR",
    INFRASTRUCTURE: "SESSION_ERROR",
    BROKEN: "EXECUTION_ERROR",
}  # all others are VALIDATION_ERROR

# one that does not end goes to the end, or many would be tried
_STRINGS = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
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


# pydantic's own str refuses lone surrogates
Text = Annotated[str, PlainValidator(_is_text), WithJsonSchema({"type": "string"})]
Object = Annotated[Mapping[str, Any], PlainValidator(_is_object), WithJsonSchema({"type": "object"})]
Name = Annotated[str, Field(min_length=1, max_length=255)]
Number = Annotated[float, Field(strict=True)]  # true and "1" are none
TaskName = Annotated[str, Field(max_length=1000)]
First = FailFast()  # of a million wrong items only the first is an error, or the errors would fill the memory


class _Message(Config):
    @model_validator(mode="before")
    @classmethod
    def _has_few_keys(cls, content: Any) -> Any:
        # each unknown one is an error that takes memory
        if isinstance(content, Mapping) and len(content) > 100:
            raise ValueError("has more than 100 keys")
        return content


class TaskMessage(_Message):
    """A whole task, for a server that does not have it."""

    id: TaskName
    skills: Annotated[tuple[Annotated[str, Field(max_length=255)], ...], First, Field(max_length=100)] = ()
    content: Object = Field(default={})

    @classmethod
    def of(cls, task: Task) -> TaskMessage:
        return cls(id=task.id, skills=task.skills, content=dict(task.content))

    def task(self) -> Task:
        return Task(self.id, self.skills, self.content)


class ResetRequest(_Message):
    """Start an episode. The session's previous one ends."""

    episode_id: Name | None = Field(default=None, description="a label; null lets the server choose one")
    environment: Name = Field(default=TRAIN, description="one of those that GET /metadata names")
    task: TaskName | TaskMessage | None = Field(
        default=None, description="a task's id, or a whole one; null takes one by the seed, or the next"
    )
    seed: StrictInt | None = Field(default=None, ge=0, lt=2**63)


class Action(_Message):
    """The agent's action."""

    text: Text
    metadata: Object = Field(default={}, description="not read")


class DemonstrationRequest(_Message):
    """Ask for actions that solve a task."""

    environment: Name = TRAIN
    task: TaskName | TaskMessage


class WireMessage(_Message):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: Text

    @classmethod
    def of(cls, message: Message) -> WireMessage:
        if message.role == "tool":
            raise AgentPeftError(UNSERVED)
        return cls(role=message.role, content=message.content)

    def message(self) -> Message:
        return Message(self.role, self.content)


class Observation(_Message):
    """The text that the agent reads next, and after a reset the whole opening of the conversation."""

    text: Text
    messages: Annotated[tuple[WireMessage, ...], First] = ()


class State(_Message):
    """An episode, and how many steps it has taken."""

    episode_id: str
    step_count: StrictInt
    environment: str
    task: str
    done: StrictBool


class ResetResponse(_Message):
    observation: Observation
    reward: Number | None = None
    done: StrictBool = False
    metadata: State

    def messages(self) -> Sequence[Message]:
        return [message.message() for message in self.observation.messages]


class StepFacts(_Message):
    """The facts of a step."""

    episode_id: str
    index: StrictInt
    outcome: Outcome
    stop_reason: StopReason | None
    valid: StrictBool
    # left out where there is none, for clients that know no scores
    score: Number | None = Field(default=None, ge=0, le=1, exclude_if=lambda score: score is None)


class StepResponse(_Message):
    observation: Observation
    reward: Number | None
    done: StrictBool
    metadata: StepFacts

    @model_validator(mode="after")
    def _says_why_it_ended(self) -> StepResponse:
        if self.done != (self.metadata.stop_reason is not None):
            raise ValueError("a step has a stop reason exactly when it is the last")
        return self

    @classmethod
    def of(cls, result: StepResult, episode_id: str, index: int) -> StepResponse:
        facts = StepFacts(
            episode_id=episode_id,
            index=index,
            outcome=result.outcome,
            stop_reason=result.stop_reason,
            valid=result.valid,
            score=result.score,
        )
        reward = _REWARDS[result.outcome] if result.done else None
        return cls(
            observation=Observation(text=result.observation), reward=reward, done=result.done, metadata=facts
        )

    def result(self) -> StepResult:
        facts = self.metadata
        return StepResult(
            self.observation.text, self.done, facts.outcome, facts.stop_reason, facts.valid, facts.score
        )


class TaskPage(_Message):
    total: StrictInt = Field(ge=0, lt=2**62)
    tasks: Annotated[tuple[TaskMessage, ...], First]


class Demonstration(_Message):
    actions: Annotated[tuple[Text, ...], Field(max_length=10_000)] | None
    # the places of those that are mistakes; left out where there is none, for clients that know none
    mistakes: Annotated[tuple[StrictInt, ...], Field(max_length=10_000)] = Field(
        default=(), exclude_if=lambda mistakes: not mistakes
    )

    @classmethod
    def of(cls, actions: Sequence[str] | None) -> Demonstration:
        if actions is None:
            return cls(actions=None)
        mistakes = (number for number, action in enumerate(actions) if isinstance(action, Mistake))
        return cls(actions=tuple(actions), mistakes=tuple(mistakes))

    def replies(self) -> Sequence[str] | None:
        if self.actions is None:
            return None
        places = frozenset(self.mistakes)
        return tuple(Mistake(text) if number in places else text for number, text in enumerate(self.actions))


class Example(_Message):
    """A conversation in which a task was solved."""

    task: str
    messages: Annotated[tuple[WireMessage, ...], First]


class Examples(_Message):
    examples: Annotated[tuple[Example, ...], First]


class Health(_Message):
    status: Literal["healthy"] = "healthy"


class ErrorAnswer(_Message):
    """The cause of a refusal in one line."""

    detail: str
    code: str


class Refusal(Exception):
    """A request is refused, with an HTTP status and one of the codes above."""

    def __init__(self, status: int, code: str, text: str) -> None:
        super().__init__(text)
        self.status, self.code, self.text = status, code, one_line(text)


def one_line(text: object) -> str:
    r"""Return a stranger's text as one short line of printable characters.

    >>> one_line("two\nlines"), one_line("x" * 1000)[-5:]
    ('two lines', 'xx...')
    """
    return printable(" ".join(str(text)[: 2 * LINE].split()), LINE)


def decode(text: bytes | str, nodes: int = MAX_NODES) -> Any:
    """Parse a stranger's JSON text. Raises `ValueError`: it is not JSON in UTF-8, is nested too deeply, would
    be more than ``nodes`` objects, or has a key twice.
    """
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    check_json(raw, nodes)
    return json.loads(raw, object_pairs_hook=unique_keys)


def check_json(text: bytes | bytearray, nodes: int = MAX_NODES) -> None:
    r"""Check the size of a JSON text before it is parsed: a megabyte of brackets would take a hundred
    megabytes as Python's objects. Raises `ValueError`: it would become more than ``nodes`` objects, is nested
    too deeply, or is not in UTF-8 (in UTF-16 the check would miss brackets).

    >>> check_json(b'{"a": [1, 2, "[[[\\",,,"]}', nodes=4)
    """
    if b"\0" in text:
        raise ValueError("it is not JSON in UTF-8")
    # so many texts, keys included, are between so many commas
    outside = _STRINGS.sub(b"", text, 2 * nodes + 2)
    if sum(map(outside.count, (b",", b"[", b"{"))) > nodes:
        raise ValueError(f"it has more than {nodes} commas and brackets")
    depths = accumulate(1 if bracket in b"[{" else -1 for bracket in outside.translate(None, _NO_BRACKETS))
    if max(depths, default=0) > MAX_DEPTH:
        raise ValueError(f"its brackets are nested more than {MAX_DEPTH} deep")


def to_json(content: BaseModel | Mapping[str, Any]) -> bytes:
    """ASCII JSON.

    >>> to_json({"text": "é"})
    b'{"text":"\\\\u00e9"}'
    """
    plain = content.model_dump() if isinstance(content, BaseModel) else content
    return json.dumps(plain, separators=(",", ":"), allow_nan=False).encode("ascii")


def missing_extra(package: str) -> AgentPeftError:
    """The error for a missing package of the extra ``server``."""
    return AgentPeftError(f"HTTP needs {package}: {install('server')}")
