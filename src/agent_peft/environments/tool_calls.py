"""Tool calls as JSON: how a reply that is one call is read and written."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from agent_peft.replies import Call, call_of
from agent_peft.types import Message, ToolCall

TWO_ACTIONS = "Two actions found. Write one action, wait for its result, then write the other."


class MalformedReply(ValueError):
    """A reply could not be parsed. The agent reads its text, which shows what to write."""


class NotAToolCall(MalformedReply):
    """A reply is not a tool call."""


def read_tool_call(reply: str, example: str) -> ToolCall:
    """Parse a reply that is one call: in ``<tool_call>`` tags, in a ```json block, or plain. The closing tag
    may be absent, since it may be a stop string. Takes time linear in the reply. Raises `NotAToolCall`, which
    shows ``example``, a call that the agent may write.

    >>> read_tool_call('<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>', "")
    ToolCall(name='bash', arguments={'command': 'ls'}, id=None)
    """
    calls = reply.count("<tool_call>")
    if calls > 1:
        raise NotAToolCall(TWO_ACTIONS)
    text = reply.split("<tool_call>")[1].split("</tool_call>")[0] if calls else reply
    text = re.sub(r"\A\s*+```(?:json)?|```\s*\Z", "", text).strip()
    try:
        call = json.loads(text, strict=False)  # a string may hold newlines as they are
    except (ValueError, RecursionError):
        raise NotAToolCall(f"No tool call found. Write\n{example}") from None
    if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
        raise NotAToolCall(f"A tool call is an object with name and arguments. Write\n{example}")
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):  # some models write them as a text of JSON
        try:
            arguments = json.loads(arguments, strict=False)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, Mapping):
        raise NotAToolCall("The arguments of a tool call are an object.")
    return ToolCall(call["name"], arguments)


def write_tool_call(name: str, /, **arguments: object) -> str:
    """
    >>> print(write_tool_call("bash", command="ls"))
    <tool_call>
    {"name": "bash", "arguments": {"command": "ls"}}
    </tool_call>
    """
    return f"<tool_call>\n{write_call(name, **arguments)}\n</tool_call>"


def write_call(name: str, /, **arguments: object) -> str:
    """A call as an episode with tools gets it.

    >>> write_call("bash", command="ls")
    '{"name": "bash", "arguments": {"command": "ls"}}'
    """
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False, default=repr)


def read_call(action: str) -> ToolCall:
    """Take back what `write_call` wrote. Raises `NotAToolCall`."""
    try:
        call = call_of(json.loads(action))
    except (ValueError, RecursionError):
        call = Call(fault="No tool call found.")
    if call.fault:
        raise NotAToolCall(call.fault)
    return ToolCall(call.name, call.arguments)


def action_of(message: Message) -> str:
    """What an episode gets of a reply: its calls, or where it has none, its text."""
    calls = [write_call(call.name, **call.arguments) for call in message.tool_calls]
    return "\n".join(calls) or message.content


def declare(name: str, description: str, /, **parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A tool in OpenAI's form, all of whose parameters are needed.

    >>> declare("ls", "Lists files.", path={"type": "string"})["function"]["parameters"]["required"]
    ['path']
    """
    schema = {"type": "object", "properties": parameters, "required": list(parameters)}
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}
