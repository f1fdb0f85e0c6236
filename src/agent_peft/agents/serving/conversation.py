"""The messages and tools of a conversation, and the tokens of prompts.

Tools are in the format of Hermes and Qwen: JSON in tags, in plain messages. Every chat template can frame
these, and the agents of our environments write calls in the same tags.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

from pydantic import FailFast, Field, JsonValue, StrictBool, StrictInt, model_validator
from torch import Tensor

from agent_peft.config import Config
from agent_peft.environments.tool_calls import NotAToolCall, read_tool_call, write_tool_call
from agent_peft.policies.policy import Policy
from agent_peft.types import AgentPeftError, Message, Role, ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
# as Qwen 2.5 and 3 were tuned on it, but for the names of the tools
INSTRUCTION = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""  # noqa: E501
_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "user",
}


class _FailFast(FailFast):
    """One that a union of types accepts, which needs a hash."""

    __hash__ = object.__hash__


T = TypeVar("T")
Optional = Annotated[T | None, Field(exclude_if=lambda value: value is None)]  # left out where there is none
NotRead = Annotated[T | None, Field(description="not read")]
First = _FailFast()  # of a million wrong items only the first is an error
Text = Annotated[str, Field(strict=True)]


class Wire(Config):
    """A part of a request. Keys that are ``NOT_READ`` are accepted whatever they hold."""

    NOT_READ: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _of_few_keys(cls, content: Any) -> Any:
        if not isinstance(content, dict):
            return content
        if len(content) > 100:  # each unknown one is an error that takes memory
            raise ValueError("has more than 100 keys")
        return {key: value for key, value in content.items() if key not in cls.NOT_READ}


class Function(Wire):
    """A function that the policy may call. ``parameters`` is its JSON schema."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    # clients send it always; the policy does not read it, and a call is not guaranteed to fit
    strict: StrictBool | None = Field(default=None, exclude=True, description="not read")


class Tool(Wire):
    type: Literal["function"]
    function: Function
    NOT_READ: ClassVar = frozenset({"cache_control"})


class CalledFunction(Wire):
    name: Text
    arguments: Text = Field(description="a JSON object, as text")


class Call(Wire):
    """A call of a function by the policy. Those of a stream have an index."""

    id: Text = ""
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Optional[StrictInt] = Field(default=None, description="not read")


class TextPart(Wire):
    type: Literal["text"]
    text: Text
    NOT_READ: ClassVar = frozenset({"cache_control"})


class ChatMessage(Wire):
    """One message. An assistant's may be sent as the server gave it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[tuple[TextPart, ...], First] | None = None
    name: NotRead[Text] = None
    tool_calls: Annotated[tuple[Call, ...], First, Field(max_length=100)] | None = None
    tool_call_id: Text | None = Field(
        default=None, description="not read: results follow their calls in order"
    )
    reasoning_content: Text | None = Field(
        default=None, description="an assistant's thought, as the server gave it"
    )
    reasoning: Text | None = Field(default=None, description="the same, in another word")
    thinking: Text | None = Field(default=None, description="the same, in another word")
    refusal: Text | None = None
    audio: None = None
    function_call: None = None
    annotations: tuple[()] | None = None

    @model_validator(mode="after")
    def _has_content(self) -> ChatMessage:
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"a message of the role {self.role} has no tool_calls")
        if self.content is None and not self.tool_calls and self.role != "assistant":
            raise ValueError(f"a message of the role {self.role} needs a content")
        return self

    @property
    def thought(self) -> str:
        """An assistant's thought."""
        thought = self.reasoning_content or self.reasoning or self.thinking or ""
        return thought if self.role == "assistant" else ""

    @property
    def text(self) -> str:
        if isinstance(self.content, tuple):
            return "".join(part.text for part in self.content)
        return self.content or ""


def text_prompt(prompt: str | Sequence[int], policy: Policy) -> list[int]:
    """The tokens of a text, in which special tokens may be spelled out; tokens stay as they are."""
    if not isinstance(prompt, str):
        size = cast(Tensor, policy.base.get_input_embeddings().weight).shape[0]
        if (largest := max(prompt)) >= size:
            raise AgentPeftError(f"prompt: {largest} is not a token of this model; it has {size}")
        return list(prompt)
    try:
        with policy.chat.encoding:
            tokens = list(policy.chat.tokenizer.encode(prompt))
    except Exception as error:  # the tokenizers library raises bare exceptions
        raise AgentPeftError(f"prompt: the tokenizer cannot encode {prompt[:80]!r}: {error}") from error
    if not tokens:
        raise AgentPeftError("prompt: has no tokens; give at least one character")
    return tokens


PLAIN = "plain"  # the dialect of `plain_messages`


def plain_messages(messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> list[Message]:
    """The conversation in plain messages: the system message describes the tools, calls are text of the
    assistant, and results that follow each other are one message of the user.
    """
    plain: list[Message] = []
    for number, message in enumerate(messages):
        text = message.text
        if message.role == "tool":
            text = f"<tool_response>\n{text}\n</tool_response>"
            if number and messages[number - 1].role == "tool":
                plain[-1] = Message("user", f"{plain[-1].content}\n{text}")
                continue
        calls = [
            write_tool_call(call.function.name, **arguments_of(call)) for call in message.tool_calls or ()
        ]
        plain.append(Message(_ROLES[message.role], "\n".join(filter(None, [text, *calls]))))
    if tools:
        signatures = (json.dumps(tool.model_dump(exclude_none=True), ensure_ascii=False) for tool in tools)
        instruction = INSTRUCTION.format(tools="\n".join(signatures))
        if plain[0].role == "system":
            plain[0] = Message("system", f"{plain[0].content}\n\n{instruction}")
        else:
            plain.insert(0, Message("system", instruction))
    return plain


def split_calls(text: str, tools: Sequence[Tool]) -> tuple[str, list[ToolCall]]:
    """A reply's text without its calls, and its calls. What looks like a call and is none stays text.

    >>> split_calls('Let me see. <tool_call>{"name": "ls", "arguments": {}}</tool_call>', ())
    ('Let me see. ', [ToolCall(name='ls', arguments={}, id=None)])
    """
    head, *blocks = text.split(OPEN)
    calls: list[ToolCall] = []
    for block in blocks:
        inside, _, after = block.partition(CLOSE)
        try:
            calls.append(read_tool_call(inside, ""))
            head += after if after.strip() else ""
        except NotAToolCall:
            head += OPEN + block
    if not blocks:  # some models write no tags
        with suppress(NotAToolCall):
            call = read_tool_call(text, "")
            if call.name in {tool.function.name for tool in tools}:
                return "", [call]
    return head, calls


def arguments_of(call: Call) -> dict[str, Any]:
    """The arguments of a call, which clients send as text."""
    content: Any = None
    with suppress(ValueError, RecursionError):
        content = json.loads(call.function.arguments or "{}")
    if not isinstance(content, dict):
        raise AgentPeftError(
            f"messages: the arguments of a call of {call.function.name!r:.80} are no JSON object; "
            "give one as text"
        )
    return content


def may_be_call(text: str) -> bool:
    """Whether a text that is still growing may become a call without tags."""
    return not text.strip() or text.lstrip()[0] in "{`"
