"""Conversations in a table of the user, for supervised stages: each assistant message is an action to learn,
its calls of tools and its thought included.

There is no outcome to grade, because a reply may be good in other words. An episode is correct if its replies
are the recorded ones, and unknown otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Any, Literal

from pydantic import Field, model_validator

from agent_peft.environments.base import Demonstrated, Episode
from agent_peft.environments.contract import ROLES
from agent_peft.environments.tables import TableConfig, TableEnvironment
from agent_peft.environments.task_files.reading import parse_literal
from agent_peft.environments.tool_calls import action_of
from agent_peft.replies import call_of
from agent_peft.types import AgentPeftError, Message, Outcome, StepResult, StopReason, Task, ToolCall

MESSAGES, TOOLS = "messages", "tools"
_THOUGHTS = ("thought", "reasoning_content", "reasoning", "thinking")  # keys of a message
_KEYS = ("role", "content", "from", "value")  # of messages, the last two in a form that is refused
_SPELLED = re.compile(r"\s*\[\s*\{\s*['\"](role|content|from|value)['\"]\s*:")


class ChatConfig(TableConfig):
    """Conversations to imitate, in a table of your own. A row is a task, for supervised stages only."""

    kind: str = "chat"
    messages: str | None = Field(
        default=None,
        description="column of the conversation, a list of {role, content} with the roles system, user, "
        "assistant and tool, and in OpenAI's form tool_calls and reasoning_content; null takes the column "
        "messages, or prompt and completion if they are set",
    )
    tools: str | None = Field(
        default=None,
        description="column of the tools that a conversation declares, a list of functions in OpenAI's form; "
        "null takes the column tools where a row has one",
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
        tools = {} if self.tools is None else {TOOLS: self.tools}
        if self.prompt is None or self.completion is None:
            return {MESSAGES: self.messages or MESSAGES, **tools}
        return {"prompt": self.prompt, "completion": self.completion, **tools}


class Chat(TableEnvironment):
    """The environment. A task's content is ``{"messages": [{"role", "content"}, …]}``, with ``tools`` where
    it has some. The model's chat template writes a conversation with tools, calls or thoughts.
    """

    config_class = ChatConfig
    measures = ("loss", "token_accuracy")
    config: ChatConfig

    def task(self, name: str, row: Mapping[str, Any], place: str) -> Task:
        column = self.config.tools or TOOLS
        tools = read_tools(place, row.get(column), column)
        content = {MESSAGES: as_json(self._messages(place, row)), **({TOOLS: tools} if tools else {})}
        return Task(name, content=content)

    def episode(self, task: Task, seed: int) -> ChatEpisode:
        messages, tools = self._of(task), self._tools(task)
        begin = self._begin(messages)
        return ChatEpisode(messages[:begin], messages[begin:], tools, is_native(messages, tools))

    def demonstration(self, task: Task) -> Sequence[str]:
        messages = self._of(task)
        replies = [m for m in messages[self._begin(messages) :] if m.role == "assistant"]
        if is_native(messages, self._tools(task)):
            return [Demonstrated.of(reply) for reply in replies]
        return [reply.content for reply in replies]

    def _tools(self, task: Task) -> list[dict[str, Any]]:
        return read_tools(f"task {task.id!r:.50}", task.content.get(TOOLS), TOOLS)

    def _begin(self, messages: Sequence[Message]) -> int:
        """The place of the first message that is an action."""
        roles = [message.role for message in messages]
        return roles.index("assistant") if self.config.turns == "all" else len(roles) - 1

    def _of(self, task: Task) -> list[Message]:
        return read_conversation(f"task {task.id!r:.50}", task.content.get(MESSAGES), MESSAGES, calls=True)

    def _messages(self, place: str, row: Mapping[str, Any]) -> list[Message]:
        columns = self.config.columns
        if MESSAGES in columns:
            return read_conversation(place, row.get(columns[MESSAGES]), columns[MESSAGES], calls=True)
        prompt, completion = columns["prompt"], columns["completion"]
        messages = read_messages(place, row.get(prompt), prompt, "user", calls=True)
        messages += read_messages(place, row.get(completion), completion, "assistant", calls=True)
        return check_turns(place, messages, completion)


class ChatEpisode(Episode):
    """A recorded conversation: whatever the reply, the recorded next message follows. Of one that is
    ``native``, results of calls may follow.
    """

    def __init__(
        self,
        opening: Sequence[Message],
        following: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        native: bool,
    ) -> None:
        self._opening, self._following, self.tools, self._native = opening, following, tools, native
        self._place = 0
        self._same = True
        self._over = False

    def start(self) -> Sequence[Message]:
        return self._opening

    def step(self, action: str) -> StepResult:
        if self._over:
            raise RuntimeError("the episode is over")
        reply, *later = self._following[self._place :]
        self._same = self._same and same_words(action, action_of(reply))
        between = tuple(takewhile(lambda message: message.role != "assistant", later))
        self._place += 1 + len(between)
        if not between:
            self._over = True
            outcome = Outcome.CORRECT if self._same else Outcome.UNKNOWN
            return StepResult("", True, outcome, StopReason.FINISHED)
        return StepResult(between[-1].content, messages=between if self._native else ())

    def close(self) -> None:
        self._over = True


def same_words(reply: str, recorded: str) -> bool:
    """Whether two texts are equal but for their white space, which some tokenizers change."""
    return reply.split() == recorded.split()


def is_native(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a conversation has more than texts, so that the chat template must write all of it."""
    return bool(tools) or any(one.tool_calls or one.thought is not None for one in messages)


def as_json(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as a task's content holds them."""
    return [message.to_json() for message in messages]


def read_tools(place: str, value: Any, column: str) -> list[dict[str, Any]]:
    """The tools of a row, from a list of functions in OpenAI's form, or its text; none where it is empty."""
    if isinstance(value, str) and value.strip():
        with suppress(ValueError):
            value = parse_literal(value)
    tools = []
    for item in value if isinstance(value, list | tuple) else [value] if value else ():
        function = item.get("function", item) if isinstance(item, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise AgentPeftError(
                f"{place}: {column} holds {item!r:.60}; give a list of {{name, description, parameters}}"
            )
        tools.append({"type": "function", "function": dict(function)})
    return tools


def read_conversation(place: str, value: Any, column: str, calls: bool = False) -> list[Message]:
    """A whole conversation, from a list of objects with role and content."""
    if not isinstance(value, list) and message_list(place, value, column) is None:
        raise AgentPeftError(f"{place}: {column} must be a list of {{role, content}}, not {value!r:.50}")
    return check_turns(place, read_messages(place, value, column, "user", calls), column)


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


def read_messages(
    place: str, value: Any, column: str, role: Literal["user", "assistant"], calls: bool = False
) -> list[Message]:
    """Messages, from a list of objects with role and content, or from a text: one message of ``role``.
    ``calls``: read calls of tools, their results and thoughts, too; without it calls are an error.
    """
    listed = message_list(place, value, column)
    if listed is None and isinstance(value, str) and value.strip():
        return [Message(role, value)]
    value = value if listed is None else listed
    if not isinstance(value, list) or not value:
        fault = "is empty" if not value or isinstance(value, str) else f"is {value!r:.50}"
        raise AgentPeftError(f"{place}: {column} {fault}; give a text, or a list of {{role, content}}")
    messages: list[Message] = []
    for number, item in enumerate(value, 1):
        where = f"{place}: {column}: message {number}"
        if not isinstance(item, Mapping) or not isinstance(item.get("role"), str):
            raise AgentPeftError(f"{where} is {item!r:.60}; write it as {{role, content}}")
        roles = ROLES if calls else ROLES[:3]
        if item["role"] not in roles:
            note = "" if calls else " (calls of tools are not trained here)"
            raise AgentPeftError(
                f"{where} has the role {item['role']!r:.30}; a role is {', '.join(roles)}{note}"
            )
        if calls and item["role"] in ("tool", "assistant"):
            messages.append(_read_native(where, item, messages))
            continue
        if not isinstance(item.get("content"), str) or not item["content"].strip():
            raise AgentPeftError(f"{where} has no text as its content; give it one, or leave it out")
        if item.get("tool_calls"):
            raise AgentPeftError(f"{where} calls tools, which are not trained; leave the conversation out")
        messages.append(Message(item["role"], item["content"]))
    return messages


def _read_native(where: str, item: Mapping[str, Any], before: Sequence[Message]) -> Message:
    """A message of the assistant or of a tool, in OpenAI's form. Results are in the order of their calls."""
    content = item.get("content")
    if item["role"] == "tool":
        results = len([*takewhile(lambda message: message.role == "tool", reversed(before))])
        called = before[-results - 1].tool_calls[results:] if len(before) > results else ()
        ident = item.get("tool_call_id")
        if not called or (ident and called[0].id and ident != called[0].id):
            raise AgentPeftError(
                f"{where} is a result without a call; write the results after their calls, in their order"
            )
        if not isinstance(content, str):
            raise AgentPeftError(f"{where} has {content!r:.30} as its content; give a text")
        return Message("tool", content)
    listed = item.get("tool_calls") or ()
    found = [
        call_of({"id": call.get("id"), **call.get("function", call)} if isinstance(call, Mapping) else call)
        for call in (listed if isinstance(listed, list | tuple) else [listed])
    ]
    if faults := [call.fault for call in found if call.fault]:
        raise AgentPeftError(f"{where}: {faults[0]} Write {{id, function: {{name, arguments}}}}")
    content = "" if content is None and found else content
    if not isinstance(content, str) or not (content.strip() or found):
        raise AgentPeftError(f"{where} has no text as its content; give it one, or leave it out")
    number = len(before)
    idents = [call.id or f"call{number:03}{place:02}" for place, call in enumerate(found)]
    made = [ToolCall(call.name, call.arguments, ident) for call, ident in zip(found, idents, strict=True)]
    thoughts = [item[key] for key in _THOUGHTS if isinstance(item.get(key), str) and item[key].strip()]
    return Message("assistant", content, tuple(made), thoughts[0] if thoughts else None)


def check_turns(place: str, messages: list[Message], column: str) -> list[Message]:
    """Return a conversation, if it begins with a system or user message, then user and assistant take turns,
    and an assistant message is the last.
    """
    expected, waiting = "user", 0
    for number, message in enumerate(messages, 1):
        if message.role == "system" and number == 1:
            continue
        if message.role != expected:
            raise AgentPeftError(
                f"{place}: {column}: message {number} is the {message.role}'s where the {expected}'s is "
                "expected; after a system message, user and assistant take turns, and results follow calls"
            )
        waiting = len(message.tool_calls) if message.role == "assistant" else max(0, waiting - 1)
        expected = "tool" if waiting else "user" if message.role == "assistant" else "assistant"
    if messages[-1].role != "assistant":
        raise AgentPeftError(f"{place}: {column}: the last message is not the assistant's; end with a reply")
    return messages
