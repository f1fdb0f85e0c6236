"""Tools in conversations, in the format of Hermes and Qwen: JSON in tags, in plain messages. Every chat
template can frame these, and the agents of our environments write calls in the same tags.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from agent_peft.agents.serving.requests import ChatMessage, Tool
from agent_peft.environments.tool_calls import NotAToolCall, ToolCall, read_tool_call, write_tool_call
from agent_peft.types import AgentPeftError, Message, Role

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


def plain_messages(messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> list[Message]:
    """The conversation in plain messages: tools are told in the system message, calls are text of the
    assistant, and results that follow each other are one message of the user.

    Raises:
        AgentPeftError: the arguments of a call are no JSON object.
    """
    plain: list[Message] = []
    for number, message in enumerate(messages):
        text = message.text
        if message.role == "tool":
            text = f"<tool_response>\n{text}\n</tool_response>"
            if number and messages[number - 1].role == "tool":
                plain[-1] = Message("user", f"{plain[-1].content}\n{text}")
                continue
        calls = [_written(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
        plain.append(Message(_ROLES[message.role], "\n".join(filter(None, [text, *calls]))))
    if tools:
        told = INSTRUCTION.format(tools="\n".join(map(_signature, tools)))
        if plain[0].role == "system":
            plain[0] = Message("system", f"{plain[0].content}\n\n{told}")
        else:
            plain.insert(0, Message("system", told))
    return plain


def split_calls(text: str, tools: Sequence[Tool]) -> tuple[str, list[ToolCall]]:
    """A reply's text without its calls, and its calls. What looks like a call and is none stays text.

    >>> split_calls('Let me see. <tool_call>{"name": "ls", "arguments": {}}</tool_call>', ())
    ('Let me see. ', [ToolCall(name='ls', arguments={})])
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


def may_be_call(text: str) -> bool:
    """Whether a text that is still growing may become a call without tags."""
    return not text.strip() or text.lstrip()[0] in "{`"


def _signature(tool: Tool) -> str:
    return json.dumps(tool.model_dump(exclude_none=True), ensure_ascii=False)


def _written(name: str, arguments: str) -> str:
    content: Any = None
    with suppress(ValueError, RecursionError):
        content = json.loads(arguments or "{}")
    if not isinstance(content, dict):
        raise AgentPeftError(
            f"messages: the arguments of a call of {name!r:.80} are no JSON object; give one as text"
        )
    return write_tool_call(name, **content)
