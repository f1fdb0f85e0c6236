"""The answers of the server of policies: OpenAI's, and of vLLM's additions the token ids."""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, Field

from agent_peft.agents.serving.requests import Call

T = TypeVar("T")
Optional = Annotated[T | None, Field(exclude_if=lambda value: value is None)]  # left out where there is none


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Alternative(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Alternative):
    """A token's log-probability in nats, under the distribution that it was drawn from."""

    top_logprobs: list[Alternative]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None = None


class Reply(BaseModel):
    """A message of the policy."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    tool_calls: Optional[list[Call]] = None


class Delta(BaseModel):
    """The part of a message that is new."""

    role: Optional[Literal["assistant"]] = None
    content: Optional[str] = None
    tool_calls: Optional[list[Call]] = None


FinishReason = Literal["stop", "length", "tool_calls"]


class ChatChoice(BaseModel):
    index: int
    message: Reply
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    token_ids: Optional[list[int]] = None


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: Optional[list[int]] = None


class ChatDelta(BaseModel):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    token_ids: Optional[list[int]] = None


class ChatChunk(BaseModel):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatDelta]
    usage: Optional[Usage] = None
    prompt_token_ids: Optional[list[int]] = None


class CompletionLogprobs(BaseModel):
    """Log-probabilities in nats; ``text_offset`` counts characters from the reply's first one."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    token_ids: Optional[list[int]] = None
    prompt_token_ids: Optional[list[int]] = None


class Completion(BaseModel):
    """A whole answer, or in a stream a part of it."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Optional[Usage] = None


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["agent-peft"] = "agent-peft"
    max_model_len: int


class Models(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


class Problem(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str


class ErrorAnswer(BaseModel):
    """The cause of a refusal in one line."""

    error: Problem
