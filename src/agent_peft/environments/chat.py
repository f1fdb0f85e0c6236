"""Conversations in a table of the user, for supervised stages: each assistant message is an action to learn.

There is no outcome to grade, because a reply may be good in other words. An episode is correct if its replies
are the recorded ones, and unknown otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, model_validator

from agent_peft.environments.base import Episode
from agent_peft.environments.contract import ROLES
from agent_peft.environments.tables import TableConfig, TableEnvironment
from agent_peft.environments.task_files.reading import parse_literal
from agent_peft.types import AgentPeftError, Message, Outcome, StepResult, StopReason, Task

MESSAGES = "messages"
_KEYS = ("role", "content", "from", "value")  # of messages, the last two in a form that is refused
_SPELLED = re.compile(r"\s*\[\s*\{\s*['\"](role|content|from|value)['\"]\s*:")


class ChatConfig(TableConfig):
    """Conversations to imitate, in a table of your own. A row is a task, for supervised stages only."""

    kind: str = "chat"
    messages: str | None = Field(
        default=None,
        description="column of the conversation, a list of {role, content} with the roles system, user and "
        "assistant; null takes the column messages, or prompt and completion if they are set",
    )
    prompt: str | None = Field(
        default=None, description="column of the prompt, a text or a list of messages; it needs completion"
    )
    completion: str | None = Field(
        default=None, description="column of the reply, a text or a list of messages; it needs prompt"
    )
    turns: Literal["all", "last"] = Field(
        default="all", description="the assistant messages to learn: all, or the last one of a conversation"
    )

    @model_validator(mode="after")
    def _effective(self) -> ChatConfig:
        if (self.prompt is None) != (self.completion is None):
            key, other = ("prompt", "completion") if self.prompt is None else ("completion", "prompt")
            raise ValueError(f"{key} is missing: {other} names a column of single exchanges, which has both")
        if self.messages is not None and self.prompt is not None:
            raise ValueError("messages has no effect with prompt and completion; remove it, or these two")
        return self

    @property
    def columns(self) -> dict[str, str]:
        if self.prompt is None or self.completion is None:
            return {MESSAGES: self.messages or MESSAGES}
        return {"prompt": self.prompt, "completion": self.completion}


class Chat(TableEnvironment):
    """The environment. A task's content is ``{"messages": [{"role", "content"}, …]}``."""

    config_class = ChatConfig
    measures = ("loss", "token_accuracy")
    config: ChatConfig

    def task(self, name: str, row: Mapping[str, Any], place: str) -> Task:
        return Task(name, content={MESSAGES: as_json(self._messages(place, row))})

    def episode(self, task: Task, seed: int) -> ChatEpisode:
        messages = self._of(task)
        begin = self._begin(messages)
        return ChatEpisode(messages[:begin], messages[begin:])

    def demonstration(self, task: Task) -> Sequence[str]:
        messages = self._of(task)
        return [m.content for m in messages[self._begin(messages) :] if m.role == "assistant"]

    def _begin(self, messages: Sequence[Message]) -> int:
        """The place of the first message that is an action."""
        roles = [message.role for message in messages]
        return roles.index("assistant") if self.config.turns == "all" else len(roles) - 1

    def _of(self, task: Task) -> list[Message]:
        return read_conversation(f"task {task.id!r:.50}", task.content.get(MESSAGES), MESSAGES)

    def _messages(self, place: str, row: Mapping[str, Any]) -> list[Message]:
        columns = self.config.columns
        if MESSAGES in columns:
            return read_conversation(place, row.get(columns[MESSAGES]), columns[MESSAGES])
        prompt, completion = columns["prompt"], columns["completion"]
        messages = read_messages(place, row.get(prompt), prompt, "user")
        messages += read_messages(place, row.get(completion), completion, "assistant")
        return check_turns(place, messages, completion)


class ChatEpisode(Episode):
    """A recorded conversation: whatever the reply, the recorded next message follows."""

    def __init__(self, opening: Sequence[Message], following: Sequence[Message]) -> None:
        self._opening, self._following = opening, following
        self._place = 0
        self._same = True
        self._over = False

    def start(self) -> Sequence[Message]:
        return self._opening

    def step(self, action: str) -> StepResult:
        if self._over:
            raise RuntimeError("the episode is over")
        self._same = self._same and same_words(action, self._following[self._place].content)
        self._place += 2
        if self._place > len(self._following):
            self._over = True
            outcome = Outcome.CORRECT if self._same else Outcome.UNKNOWN
            return StepResult("", True, outcome, StopReason.FINISHED)
        return StepResult(self._following[self._place - 1].content)

    def close(self) -> None:
        self._over = True


def same_words(reply: str, recorded: str) -> bool:
    """Whether two texts are equal but for their white space, which some tokenizers change."""
    return reply.split() == recorded.split()


def as_json(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Messages as a task's content holds them."""
    return [{"role": message.role, "content": message.content} for message in messages]


def read_conversation(place: str, value: Any, column: str) -> list[Message]:
    """A whole conversation, from a list of objects with role and content."""
    if not isinstance(value, list) and message_list(place, value, column) is None:
        raise AgentPeftError(f"{place}: {column} must be a list of {{role, content}}, not {value!r:.50}")
    return check_turns(place, read_messages(place, value, column, "user"), column)


def read_prompt(place: str, value: Any, column: str) -> list[Message]:
    """The messages before a reply: a text, or a list of messages of which the user's is the last."""
    messages = read_messages(place, value, column, "user")
    if messages[-1].role != "user":
        raise AgentPeftError(
            f"{place}: {column}: the last message is the {messages[-1].role}'s; end with the user's, and put "
            "a reply into its own column"
        )
    return check_turns(place, [*messages, Message("assistant", "")], column)[:-1]


def message_list(place: str, value: Any, column: str) -> list[Any] | None:
    """The list in a table's value that is meant as messages, also where CSV holds it as text of JSON or
    Python; None where it is not. A text that begins as such a list and cannot be parsed is an error.

    >>> message_list("line 1", '[{"role": "user", "content": "1+1?"}]', "question")
    [{'role': 'user', 'content': '1+1?'}]
    """
    if isinstance(value, str) and _SPELLED.match(value):
        try:
            value = parse_literal(value)
        except ValueError as error:
            raise AgentPeftError(
                f"{place}: {column} begins as a list of messages, and is not JSON: {value[:50]!r}; write the "
                "list as JSON"
            ) from error
    if isinstance(value, Mapping) and {"role", "content"} <= value.keys():
        value = [value]
    if not isinstance(value, list):
        return None
    return value if any(isinstance(item, Mapping) and item.keys() & _KEYS for item in value) else None


def read_messages(place: str, value: Any, column: str, role: Literal["user", "assistant"]) -> list[Message]:
    """Messages, from a list of objects with role and content, or from a text: one message of ``role``."""
    listed = message_list(place, value, column)
    if listed is None and isinstance(value, str) and value.strip():
        return [Message(role, value)]
    value = value if listed is None else listed
    if not isinstance(value, list) or not value:
        fault = "is empty" if not value or isinstance(value, str) else f"is {value!r:.50}"
        raise AgentPeftError(f"{place}: {column} {fault}; give a text, or a list of {{role, content}}")
    messages = []
    for number, item in enumerate(value, 1):
        where = f"{place}: {column}: message {number}"
        if not isinstance(item, Mapping) or not isinstance(item.get("role"), str):
            raise AgentPeftError(f"{where} is {item!r:.60}; write it as {{role, content}}")
        if item["role"] not in ROLES:
            raise AgentPeftError(
                f"{where} has the role {item['role']!r:.30}; a role is {', '.join(ROLES)} (calls of "
                "tools are not trained)"
            )
        if not isinstance(item.get("content"), str) or not item["content"].strip():
            raise AgentPeftError(f"{where} has no text as its content; give it one, or leave it out")
        if item.get("tool_calls"):
            raise AgentPeftError(f"{where} calls tools, which are not trained; leave the conversation out")
        messages.append(Message(item["role"], item["content"]))
    return messages


def check_turns(place: str, messages: list[Message], column: str) -> list[Message]:
    """Return a conversation, if it begins with a system or user message, then user and assistant take turns,
    and an assistant message is the last.
    """
    expected = "user"
    for number, message in enumerate(messages, 1):
        if message.role == "system" and number == 1:
            continue
        if message.role != expected:
            raise AgentPeftError(
                f"{place}: {column}: message {number} is the {message.role}'s where the {expected}'s is "
                "expected; after a system message, user and assistant take turns"
            )
        expected = "assistant" if expected == "user" else "user"
    if messages[-1].role != "assistant":
        raise AgentPeftError(f"{place}: {column}: the last message is not the assistant's; end with a reply")
    return messages
