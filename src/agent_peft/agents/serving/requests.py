"""The requests of clients: OpenAI's, and of vLLM's additions ``top_k`` and the token ids.

A key that would have no effect here is refused, so that nobody takes a reply for another than it is. The
default of OpenAI's API (or of vLLM's) is accepted for any key that they have, since it changes nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    FailFast,
    Field,
    JsonValue,
    StrictBool,
    StrictFloat,
    StrictInt,
    field_validator,
    model_validator,
)

from agent_peft.config import Config

MAX_CHOICES = 64  # replies of one request
MAX_ALTERNATIVES = 20
MAX_STOPS = 16
MAX_STOP_CHARS = 200
COLDEST = 0.01  # below it logits overflow; 0 is the argmax


class _FailFast(FailFast):
    """One that a union of types accepts, which needs a hash."""

    __hash__ = object.__hash__


First = _FailFast()  # of a million wrong items only the first is an error
Token = Annotated[StrictInt, Field(ge=0, lt=2**31)]
Text = Annotated[str, Field(strict=True)]
Stop = Annotated[str, Field(strict=True, min_length=1, max_length=MAX_STOP_CHARS)]
Stops = Annotated[tuple[Stop, ...], First, Field(max_length=MAX_STOPS)]


def _not_lukewarm(temperature: float) -> float:
    if 0 < temperature < COLDEST:
        raise ValueError(f"is 0, which takes the most likely token, or at least {COLDEST}")
    return temperature


class _Wire(Config):
    @model_validator(mode="before")
    @classmethod
    def _has_few_keys(cls, content: Any) -> Any:
        if isinstance(content, dict) and len(content) > 100:  # each unknown one is an error that takes memory
            raise ValueError("has more than 100 keys")
        return content


class Function(_Wire):
    """A function that the policy may call. ``parameters`` is its JSON schema."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: Literal[False] | None = None


class Tool(_Wire):
    type: Literal["function"]
    function: Function


class CalledFunction(_Wire):
    name: Text
    arguments: Text = Field(description="a JSON object, as text")


class Call(_Wire):
    """A call of a function by the policy."""

    id: Text = ""
    type: Literal["function"] = "function"
    function: CalledFunction
    index: StrictInt | None = Field(
        default=None, exclude_if=lambda index: index is None, description="not read"
    )


class TextPart(_Wire):
    type: Literal["text"]
    text: Text


class ChatMessage(_Wire):
    """One message. An assistant's may be sent as the server gave it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[tuple[TextPart, ...], First] | None = None
    name: Text | None = Field(default=None, description="not read")
    tool_calls: Annotated[tuple[Call, ...], First, Field(max_length=100)] | None = None
    tool_call_id: Text | None = Field(
        default=None, description="not read: results follow their calls in order"
    )
    refusal: Text | None = None
    audio: None = None
    function_call: None = None
    annotations: tuple[()] | None = None

    @model_validator(mode="after")
    def _says_something(self) -> ChatMessage:
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"a message of the role {self.role} has no tool_calls")
        if self.content is None and not self.tool_calls and self.role != "assistant":
            raise ValueError(f"a message of the role {self.role} needs a content")
        return self

    @property
    def text(self) -> str:
        if isinstance(self.content, tuple):
            return "".join(part.text for part in self.content)
        return self.content or ""


class StreamOptions(_Wire):
    include_usage: StrictBool = Field(default=False, description="a last chunk with the numbers of tokens")
    include_obfuscation: Literal[False] | None = None


class TextFormat(_Wire):
    type: Literal["text"]


class _Request(_Wire):
    """What both kinds of requests share."""

    model: str | None = Field(
        default=None, max_length=1000, description="one of GET /v1/models; null is the first"
    )
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    stop: Stop | Stops | None = Field(default=None, description="ends the reply, and is no part of its text")
    temperature: Annotated[StrictFloat, AfterValidator(_not_lukewarm)] | None = Field(
        default=None,
        ge=0,
        le=100,
        allow_inf_nan=False,
        description="0 takes the most likely token; null is 1",
    )
    top_p: StrictFloat | None = Field(default=None, gt=0, le=1)
    top_k: StrictInt | None = Field(default=None, ge=-1, lt=2**31, description="0 and -1 keep all tokens")
    seed: StrictInt | None = Field(
        default=None, ge=-(2**63), lt=2**63, description="decides the first choice; the others derive theirs"
    )
    n: StrictInt | None = Field(default=None, ge=1, le=MAX_CHOICES, description="replies to one prompt")
    return_token_ids: StrictBool | None = Field(
        default=None, description="also send prompt_token_ids, and the token_ids exactly as sampled"
    )
    # without an effect on a reply
    user: str | None = Field(default=None, description="not read")
    safety_identifier: str | None = Field(default=None, description="not read")
    prompt_cache_key: str | None = Field(default=None, description="not read")
    # only the values that change nothing
    presence_penalty: Literal[0] | None = None
    frequency_penalty: Literal[0] | None = None
    repetition_penalty: Literal[1] | None = None
    min_p: Literal[0] | None = None
    min_tokens: Literal[0] | None = None
    ignore_eos: Literal[False] | None = None
    stop_token_ids: tuple[()] | None = None
    include_stop_str_in_output: Literal[False] | None = None
    skip_special_tokens: Literal[True] | None = None
    logit_bias: dict[str, Any] | None = Field(default=None, max_length=0)
    service_tier: Literal["auto", "default"] | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _stops_are_texts(cls, stop: Any) -> Any:
        texts = stop if isinstance(stop, list) else [] if stop is None else [stop]
        if len(texts) > MAX_STOPS or not all(
            isinstance(text, str) and 1 <= len(text) <= MAX_STOP_CHARS for text in texts
        ):
            raise ValueError(
                f"is a text of 1 to {MAX_STOP_CHARS} characters, at most {MAX_STOPS} of them in a list, "
                "or null"
            )
        return stop

    @field_validator(
        "presence_penalty", "frequency_penalty", "repetition_penalty", "min_p", "min_tokens", mode="before"
    )
    @classmethod
    def _is_a_number(cls, number: Any) -> Any:
        if isinstance(number, bool):  # which equals 0 or 1
            raise ValueError("is a number")
        return int(number) if number in (0.0, 1.0) else number

    @model_validator(mode="after")
    def _streams_its_options(self) -> _Request:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else self.stop or ()


class ChatRequest(_Request):
    """A conversation; the policy writes the next message."""

    messages: Annotated[tuple[ChatMessage, ...], First, Field(min_length=1, max_length=10_000)]
    tools: Annotated[tuple[Tool, ...], First, Field(max_length=128)] | None = None
    tool_choice: Literal["auto", "none"] | None = Field(
        default=None, description="a call cannot be forced: say in a message that one is needed"
    )
    parallel_tool_calls: StrictBool | None = Field(
        default=None, description="false ends the reply after the first call"
    )
    max_tokens: StrictInt | None = Field(default=None, ge=1, lt=2**31, description="of the reply")
    max_completion_tokens: StrictInt | None = Field(default=None, ge=1, lt=2**31)
    logprobs: StrictBool | None = None
    top_logprobs: StrictInt | None = Field(default=None, ge=0, le=MAX_ALTERNATIVES)
    response_format: TextFormat | None = None
    store: Literal[False] | None = None
    modalities: tuple[Literal["text"]] | None = None
    verbosity: Literal["medium"] | None = None
    audio: None = None
    prediction: None = None
    add_generation_prompt: Literal[True] | None = None
    continue_final_message: Literal[False] | None = None
    metadata: dict[str, str] | None = Field(default=None, max_length=16, description="not read")

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        for key in ("tool_choice", "parallel_tool_calls"):
            if getattr(self, key) is not None and not self.tools:
                raise ValueError(f"{key} needs tools")
        if None not in (self.max_tokens, self.max_completion_tokens) and (
            self.max_tokens != self.max_completion_tokens
        ):
            raise ValueError("max_tokens and max_completion_tokens are one limit; give one of them")
        return self


class CompletionRequest(_Request):
    """A text or tokens; the policy continues them."""

    prompt: (
        Text
        | Annotated[tuple[Token, ...], First, Field(min_length=1)]
        | Annotated[tuple[Text, ...], First, Field(min_length=1, max_length=MAX_CHOICES)]
        | Annotated[
            tuple[Annotated[tuple[Token, ...], First, Field(min_length=1)], ...],
            First,
            Field(min_length=1, max_length=MAX_CHOICES),
        ]
    ) = Field(description="a text, tokens, or a list of these")
    max_tokens: StrictInt | None = Field(default=None, ge=1, lt=2**31, description="null is 16")
    logprobs: StrictInt | None = Field(default=None, ge=0, le=MAX_ALTERNATIVES)
    echo: Literal[False] | None = None
    suffix: None = None
    best_of: StrictInt | None = Field(default=None, ge=1, description="1, or as many as n: the best of all")

    @model_validator(mode="after")
    def _keeps_all(self) -> CompletionRequest:
        if self.best_of not in (None, 1, self.n or 1):
            raise ValueError("best_of is 1 or equal to n: replies are not ranked")
        return self

    @property
    def prompts(self) -> tuple[str | tuple[int, ...], ...]:
        if isinstance(self.prompt, str):
            return (self.prompt,)
        if isinstance(self.prompt[0], int):
            return (self.prompt,)
        return self.prompt
