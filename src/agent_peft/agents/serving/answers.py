"""The server's answers, in OpenAI's words and with vLLM's token ids."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from agent_peft.agents.serving.conversation import Call, Optional
from agent_peft.environments.http.messages import Refusal

FinishReason = Literal["stop", "length", "tool_calls"]


class Logprob(BaseModel):
    """A token's log-probability in nats, under the distribution that it was drawn from, and the likeliest
    tokens in its place.
    """

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: Optional[list[Logprob]] = None


class ChatLogprobs(BaseModel):
    content: list[Logprob]
    refusal: None = None


class CompletionLogprobs(BaseModel):
    """Log-probabilities in nats; ``text_offset`` counts characters from the text's first one. An echoed
    prompt's first token has none.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(BaseModel):
    logprob: float


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # of each token by its id; None for the first


class Reply(BaseModel):
    """A message of the policy, or the part of it that is new."""

    role: Optional[Literal["assistant"]] = None
    content: str | None
    reasoning_content: Optional[str] = None
    tool_calls: Optional[list[Call]] = None


class Choice(BaseModel):
    """One reply: a ``message``, in a stream its ``delta``, or the ``text`` of a continuation."""

    index: int
    message: Optional[Reply] = None
    delta: Optional[Reply] = None
    text: Optional[str] = None
    logprobs: ChatLogprobs | CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    token_ids: Optional[list[int]] = None
    prompt_token_ids: Optional[list[int]] = None
    prompt_logprobs: Optional[PromptLogprobs] = None


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionBody(BaseModel):
    """A whole answer, or in a stream a part of it."""

    id: str
    object: Literal["chat.completion", "chat.completion.chunk", "text_completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: Optional[Usage] = None
    prompt_token_ids: Optional[list[int]] = None


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["agent-peft"] = "agent-peft"
    max_model_len: int
    root: Optional[str] = None  # the folder of an adapter that a client has loaded
    parent: Optional[str] = None  # the model under an adapter


class Models(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


class Problem(BaseModel):
    """The cause of a refusal in one line."""

    message: str
    type: str
    param: str | None = None
    code: str


class ErrorBody(BaseModel):
    error: Problem


KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


def problem_of(refusal: Refusal) -> dict[str, object]:
    """The content of a refusal, as OpenAI's clients read it."""
    kind = KINDS.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "server_error")
    return {"error": {"message": refusal.text, "type": kind, "param": None, "code": refusal.code}}
