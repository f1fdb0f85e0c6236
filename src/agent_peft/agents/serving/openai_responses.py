"""``/v1/responses`` in its common part: text, functions and their results, translated to a chat request."""

from __future__ import annotations

import secrets
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from agent_peft.agents.serving.answers import problem_of
from agent_peft.agents.serving.conversation import Call, First, Text, Wire
from agent_peft.agents.serving.other_apis import BlockWriter, Events, Hint, OtherRequest, Step, event
from agent_peft.agents.serving.requests import ChatRequest
from agent_peft.environments.http.messages import Refusal

NAMES = {"text": "output_text", "thought": "reasoning_text", "call": "function_call_arguments"}
_EMPTY = {"content": [], "status": "in_progress"}  # of an item that begins


class Part(Wire):
    type: Literal["input_text", "output_text", "reasoning_text", "summary_text", "text"]
    text: Text
    NOT_READ: ClassVar = frozenset({"annotations", "logprobs"})


Parts = Text | Annotated[tuple[Part, ...], First] | None


class Item(Wire):
    """A message, a function call, its output, or the thought before them."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] = "assistant"
    content: Parts = None
    call_id: Any = None
    name: Any = None
    arguments: Any = None
    output: Parts = None
    NOT_READ: ClassVar = frozenset({"summary", "encrypted_content", "id", "status", "phase", "namespace"})


class NamedFunction(Wire):
    type: Literal["function"]
    name: Any

    @property
    def as_chat(self) -> dict[str, Any]:
        """The same choice of ``/v1/chat/completions``."""
        return {"type": "function", "function": {"name": self.name}}


class ResponsesRequest(OtherRequest):
    """A conversation; the policy writes the next items."""

    input: Text | Annotated[tuple[Item, ...], First, Field(min_length=1, max_length=10_000)]
    instructions: Text | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedFunction | None = None
    parallel_tool_calls: Any = None
    max_output_tokens: Any = Field(default=None, description="of the reply")
    reasoning: Hint | None = None
    text: Hint | None = None
    previous_response_id: None = Field(default=None, description="nothing is stored: send all items")
    conversation: None = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    NOT_READ: ClassVar = frozenset(
        {"stream_options", "store", "metadata", "include", "user", "service_tier", "safety_identifier",
         "prompt_cache_key", "prompt_cache_retention"}
    )  # fmt: skip

    def as_chat(self) -> ChatRequest:
        """The same request to ``/v1/chat/completions``."""
        choice, format = self.tool_choice, self.text and self.text.format
        return self.chat(
            messages=self._messages(),
            response_format=format and format.response_format,
            tool_choice=choice.as_chat if isinstance(choice, NamedFunction) else choice,
            parallel_tool_calls=self.parallel_tool_calls,
            max_tokens=self.max_output_tokens,
            reasoning_effort=self.reasoning and self.reasoning.effort,
        )

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        room: set[str] = set()  # keys that the last message, one of the assistant, may still get
        for item in self.input:
            if item.type == "function_call_output":
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
                room = set()
            elif item.type == "message" and item.role != "assistant":
                messages.append({"role": item.role, "content": _text(item.content)})
                room = set()
            else:
                key = {"reasoning": "reasoning_content", "message": "content"}.get(item.type, "tool_calls")
                if key not in room:
                    messages.append({"role": "assistant", "content": None})
                room = {"tool_calls"} if key != "reasoning_content" else {"content", "tool_calls"}
                if key == "tool_calls":
                    function = {"name": item.name, "arguments": item.arguments}
                    messages[-1].setdefault(key, []).append({"id": item.call_id, "function": function})
                else:
                    messages[-1][key] = _text(item.content)
        return messages


class ResponsesWriter(BlockWriter):
    """Writes one answer as a response."""

    def __init__(self, request: ResponsesRequest) -> None:
        super().__init__()
        self.request, self.id, self._number = request, f"resp_{secrets.token_hex(12)}", 0

    def block(self, kind: str, text: str, call: Call | None = None) -> dict[str, Any]:
        id = f"{self.id}_{len(self.blocks)}"
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        if kind == "thought":
            content = [{"type": "reasoning_text", "text": text}]
            return {"id": id, "type": "reasoning", "summary": [], "content": content}
        if call is not None:
            function = {"name": call.function.name, "arguments": text, "call_id": call.id}
            return {"id": id, "type": "function_call", "status": "completed", **function}
        return {
            "id": id,
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [part],
        }

    def answer(self) -> dict[str, Any]:
        assert self.body is not None
        request, used, choice = self.request, self.usage, self.request.tool_choice
        cut = self.reason == "length"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.body.created,
            "model": self.body.model,
            "status": "in_progress" if self.reason is None else "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "error": None,
            "output": list(self.blocks),
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "tool_choice": choice.model_dump() if isinstance(choice, NamedFunction) else choice or "auto",
            "tools": [{"type": "function", "strict": False, **function} for function in request.functions],
            "usage": self.reason
            and {
                "input_tokens": used.prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": used.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": used.total_tokens,
            },
        }

    def events(self, step: Step, block: dict[str, Any], kind: str = "", text: str = "") -> Events:
        name = f"response.{NAMES.get(kind)}"
        place = {"output_index": len(self.blocks), "item_id": block["id"]}
        if kind != "call":
            place["content_index"] = 0
        more: dict[str, Any] = {"logprobs": []} if kind == "text" else {}
        match step:
            case "begin":
                yield self._event("response.created", response=block)
            case "open":
                item = block | {key: new for key, new in _EMPTY.items() if key in block}
                yield self._event("response.output_item.added", output_index=len(self.blocks), item=item)
                if kind == "text":
                    yield self._event("response.content_part.added", **place, part=block["content"][0])
            case "delta":
                yield self._event(f"{name}.delta", **place, delta=text, **more)
            case "close":
                whole = {"arguments": text, "name": block["name"]} if kind == "call" else {"text": text}
                yield self._event(f"{name}.done", **place, **whole, **more)
                if kind == "text":
                    yield self._event("response.content_part.done", **place, part=block["content"][0])
                yield self._event("response.output_item.done", output_index=len(self.blocks), item=block)
            case "finish":
                yield self._event(f"response.{block['status']}", response=block)

    def problem(self, refusal: Refusal) -> bytes:
        error: Any = problem_of(refusal)["error"]
        content = self._event("error", code=error["code"], message=error["message"], param=None)[1]
        return event(content, "error")

    def _event(self, name: str, /, **content: Any) -> tuple[str, dict[str, Any]]:
        self._number += 1
        return name, {"type": name, "sequence_number": self._number - 1, **content}


def _text(content: Parts) -> str | None:
    return "".join(part.text for part in content) if isinstance(content, tuple) else content
