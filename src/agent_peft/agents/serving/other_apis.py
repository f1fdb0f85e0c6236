"""What the other APIs share: requests that become chat requests, and answers that are written as blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, StrictBool, ValidationError

from agent_peft.agents.serving.answers import CompletionBody, Reply, Usage, problem_of
from agent_peft.agents.serving.conversation import Call, First, Wire
from agent_peft.agents.serving.requests import ChatRequest
from agent_peft.config import first_error
from agent_peft.environments.http.messages import Refusal, one_line, to_json

Step = Literal["begin", "open", "delta", "close", "finish"]
Events = Iterator[tuple[str, dict[str, Any]]]  # names and contents


class Writer:
    """Writes one answer, whole or as the events of a stream."""

    def whole(self, body: CompletionBody) -> BaseModel | Mapping[str, Any]:
        """A whole answer."""
        return body

    def part(self, body: CompletionBody) -> bytes:
        """The events for a chunk. The last chunk has the usage, and no choices."""
        return event(body)

    def end(self) -> bytes:
        """The last events."""
        return b"data: [DONE]\n\n"

    def problem(self, refusal: Refusal) -> bytes:
        """An event in place of the rest."""
        return event(problem_of(refusal))


class BlockWriter(Writer):
    """A writer of answers that are lists of blocks: a ``thought``, a ``text``, and each ``call``."""

    def __init__(self) -> None:
        self.body: CompletionBody | None = None
        self.reason: str | None = None
        self.usage = Usage(prompt_tokens=0, completion_tokens=0, total_tokens=0)
        self.blocks: list[dict[str, Any]] = []  # those that are closed
        self._kind = self._text = ""  # of the open block
        self._call: Call | None = None

    def block(self, kind: str, text: str, call: Call | None = None) -> dict[str, Any]:
        """One block."""
        raise NotImplementedError

    def answer(self) -> dict[str, Any]:
        """The answer with all blocks so far."""
        raise NotImplementedError

    def events(self, step: Step, block: dict[str, Any], kind: str = "", text: str = "") -> Events:
        """The events of a step: of the answer, or of a block. ``text`` is what is new, at its end all."""
        raise NotImplementedError

    def whole(self, body: CompletionBody) -> Mapping[str, Any]:
        self._note(body)
        self.blocks = []
        for kind, text, call in _blocks_of(body.choices[0].message):
            self.blocks.append(self.block(kind, text, call))
        return self.answer()

    def part(self, body: CompletionBody) -> bytes:
        first = self.body is None
        self._note(body)
        return _joined(self._news(body, first))

    def end(self) -> bytes:
        return _joined(self._close()) + _joined(self.events("finish", self.answer()))

    def _note(self, body: CompletionBody) -> None:
        self.body, self.usage = body, body.usage or self.usage
        for choice in body.choices:
            self.reason = choice.finish_reason or self.reason

    def _news(self, body: CompletionBody, first: bool) -> Events:
        if first:
            yield from self.events("begin", self.answer())
        for kind, text, call in (block for choice in body.choices for block in _blocks_of(choice.delta)):
            if kind != self._kind or call:
                yield from self._close()
                self._kind, self._text, self._call = kind, "", call
                yield from self.events("open", self.block(kind, "", call), kind)
            self._text += text
            yield from self.events("delta", self.block(kind, "", call), kind, text)

    def _close(self) -> Events:
        if self._kind:
            block = self.block(self._kind, self._text, self._call)
            yield from self.events("close", block, self._kind, self._text)
            self.blocks.append(block)
            self._kind = ""


class OtherTool(Wire):
    type: Literal["custom", "function"] | None = None
    name: Any
    description: Any = None
    parameters: Any = None
    input_schema: Any = None
    NOT_READ: ClassVar = frozenset({"strict", "eager_input_streaming", "cache_control"})


class OtherFormat(Wire):
    type: Any = None
    content: Any = Field(default=None, alias="schema")
    NOT_READ: ClassVar = frozenset({"name", "description", "strict"})

    @property
    def response_format(self) -> dict[str, Any]:
        """The same key of ``/v1/chat/completions``."""
        schema = {} if self.content is None else {"json_schema": {"schema": self.content}}
        return {"type": self.type, **schema}


class Hint(Wire):
    """How much to think, and how to write."""

    type: Literal["enabled", "disabled", "adaptive"] | None = None
    effort: Any = None
    format: OtherFormat | None = None
    NOT_READ: ClassVar = frozenset({"summary", "generate_summary", "verbosity", "budget_tokens", "display"})


class OtherRequest(Wire):
    """The keys that requests of other APIs share. `ChatRequest` validates what is ``Any`` here."""

    model: Any = None
    stream: StrictBool = False
    temperature: Any = None
    top_p: Any = None
    tools: Annotated[tuple[OtherTool, ...], First, Field(max_length=128)] | None = None

    @property
    def functions(self) -> list[dict[str, Any]]:
        """The tools as functions of a chat request."""
        return [
            {
                "name": one.name,
                "description": one.description,
                "parameters": one.parameters or one.input_schema,
            }
            for one in self.tools or ()
        ]

    def chat(self, **content: Any) -> ChatRequest:
        """The same request to ``/v1/chat/completions``."""
        content |= {"model": self.model, "temperature": self.temperature, "top_p": self.top_p}
        content["tools"] = [{"type": "function", "function": one} for one in self.functions] or None
        content |= {"stream": True, "stream_options": {"include_usage": True}} if self.stream else {}
        try:
            return ChatRequest.model_validate({k: v for k, v in content.items() if v is not None})
        except ValidationError as error:
            raise Refusal(400, "invalid", one_line(first_error(error))) from error


def event(content: BaseModel | Mapping[str, Any], name: str = "") -> bytes:
    """A server-sent event."""
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + to_json(content) + b"\n\n"


def _joined(events: Events) -> bytes:
    return b"".join(event(content, name) for name, content in events)


def _blocks_of(reply: Reply | None) -> Iterator[tuple[str, str, Call | None]]:
    if reply and reply.reasoning_content:
        yield "thought", reply.reasoning_content, None
    if reply and reply.content:
        yield "text", reply.content, None
    for call in (reply and reply.tool_calls) or ():
        yield "call", call.function.arguments, call
