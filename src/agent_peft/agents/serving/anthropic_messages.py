"""Anthropic's ``/v1/messages`` in its common part: text, thoughts, tools and their results, translated to a
chat request.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StrictBool

from agent_peft.agents.serving.answers import problem_of
from agent_peft.agents.serving.conversation import Call, First, Text, Wire
from agent_peft.agents.serving.other_apis import BlockWriter, Events, Hint, OtherRequest, Step, event
from agent_peft.agents.serving.requests import ChatRequest
from agent_peft.environments.http.messages import Refusal

STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
DELTAS = {
    "thought": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


class Block(Wire):
    """A text, a thought, a call, or its result."""

    type: Literal["text", "thinking", "redacted_thinking", "tool_use", "tool_result"]
    text: Text = ""
    thinking: Text = ""
    id: Any = None
    name: Any = None
    input: dict[str, Any] | None = None
    tool_use_id: Any = None
    content: Any = ""
    NOT_READ: ClassVar = frozenset({"signature", "data", "caller", "citations", "cache_control", "is_error"})


class BlockMessage(Wire):
    role: Literal["system", "user", "assistant"]
    content: Text | Annotated[tuple[Block, ...], First]


class ToolChoice(Wire):
    type: Literal["auto", "none", "any", "tool"]
    name: Any = None
    disable_parallel_tool_use: StrictBool | None = None

    @property
    def as_chat(self) -> str | dict[str, Any]:
        """The same choice of ``/v1/chat/completions``."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class MessagesRequest(OtherRequest):
    """A conversation; the policy writes the next message."""

    max_tokens: Any = Field(description="of the reply")
    messages: Annotated[tuple[BlockMessage, ...], First, Field(min_length=1, max_length=10_000)]
    system: Any = None
    tool_choice: ToolChoice | None = None
    stop_sequences: Any = None
    top_k: Any = None
    thinking: Hint | None = None
    output_config: Hint | None = None
    NOT_READ: ClassVar = frozenset({"metadata", "service_tier", "context_management", "cache_control"})

    def as_chat(self) -> ChatRequest:
        """The same request to ``/v1/chat/completions``."""
        choice, effort = self.tool_choice, self.output_config and self.output_config.effort
        format = self.output_config and self.output_config.format
        effort = "none" if self.thinking and self.thinking.type == "disabled" else effort
        return self.chat(
            messages=list(self._messages()),
            tool_choice=choice and choice.as_chat,
            response_format=format and format.response_format,
            parallel_tool_calls=False if choice and choice.disable_parallel_tool_use else None,
            max_tokens=self.max_tokens,
            stop=self.stop_sequences or None,
            top_k=self.top_k,
            reasoning_effort="xhigh" if effort == "max" else effort,
        )

    def _messages(self) -> Iterator[dict[str, Any]]:
        if self.system:
            yield {"role": "system", "content": self.system}
        for message in self.messages:
            blocks = message.content
            if isinstance(blocks, str):
                yield {"role": message.role, "content": blocks}
                continue
            calls = [
                {"id": one.id, "function": {"name": one.name, "arguments": json.dumps(one.input or {})}}
                for one in blocks
                if one.type == "tool_use"
            ]
            results = [one for one in blocks if one.type == "tool_result"]
            for one in results:
                yield {"role": "tool", "tool_call_id": one.tool_use_id, "content": one.content}
            text = "".join(one.text for one in blocks)
            if text or not results:
                thought = "".join(one.thinking for one in blocks) or None
                content = {"role": message.role, "content": text, "reasoning_content": thought}
                yield content | ({"tool_calls": calls} if calls else {})


class MessagesWriter(BlockWriter):
    """Writes one answer as a message."""

    def block(self, kind: str, text: str, call: Call | None = None) -> dict[str, Any]:
        if kind == "thought":
            return {"type": "thinking", "thinking": text, "signature": ""}
        if call is None:
            return {"type": "text", "text": text}
        content = json.loads(text) if text else {}
        return {"type": "tool_use", "id": call.id, "name": call.function.name, "input": content}

    def answer(self) -> dict[str, Any]:
        assert self.body is not None
        return {
            "id": self.body.id.replace("chatcmpl-", "msg_"),
            "type": "message",
            "role": "assistant",
            "model": self.body.model,
            "content": list(self.blocks),
            "stop_reason": self.reason and STOPS[self.reason],
            "stop_sequence": None,
            "usage": {
                "input_tokens": self.usage.prompt_tokens,
                "output_tokens": self.usage.completion_tokens,
            },
        }

    def events(self, step: Step, block: dict[str, Any], kind: str = "", text: str = "") -> Events:
        index = len(self.blocks)
        match step:
            case "begin":
                yield _event("message_start", message=block)
            case "open":
                yield _event("content_block_start", index=index, content_block=block)
            case "delta":
                type, key = DELTAS[kind]
                yield _event("content_block_delta", index=index, delta={"type": type, key: text})
            case "close":
                yield _event("content_block_stop", index=index)
            case "finish":
                delta = {key: block[key] for key in ("stop_reason", "stop_sequence")}
                yield _event("message_delta", delta=delta, usage=block["usage"])
                yield _event("message_stop")

    def problem(self, refusal: Refusal) -> bytes:
        return event({"type": "error", **problem_of(refusal)}, "error")


def _event(name: str, **content: Any) -> tuple[str, dict[str, Any]]:
    return name, {"type": name, **content}
