"""OpenAI's requests, with vLLM's ``top_k`` and token ids.

A key that would change a reply and cannot here is refused, so that nobody takes a reply for another than it
is. What cannot change a reply, such as a key's default, is accepted.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    Field,
    JsonValue,
    StrictBool,
    StrictFloat,
    StrictInt,
    field_validator,
    model_validator,
)

from agent_peft.agents.serving.conversation import (
    CLOSE,
    ChatMessage,
    First,
    NotRead,
    Text,
    Tool,
    Wire,
)
from agent_peft.environments.http.messages import Refusal
from agent_peft.policies.sampling import SamplingConfig

MAX_CHOICES = 64  # replies of one request
MAX_ALTERNATIVES = 20
MAX_STOPS = 16
MAX_STOP_CHARS = 200
COLDEST = 0.01  # below it logits overflow; 0 is the argmax
COMPLETION_TOKENS = 16  # of a continuation, where a request names no limit

Token = Annotated[StrictInt, Field(ge=0, lt=2**31)]
Tokens = Annotated[tuple[Token, ...], First, Field(min_length=1)]
Count = Annotated[StrictInt, Field(ge=1, lt=2**31)]
Alternatives = Annotated[StrictInt, Field(ge=0, le=MAX_ALTERNATIVES)]
Stop = Annotated[str, Field(strict=True, min_length=1, max_length=MAX_STOP_CHARS)]
Stops = Annotated[tuple[Stop, ...], First, Field(max_length=MAX_STOPS)]


def _not_lukewarm(temperature: float) -> float:
    if 0 < temperature < COLDEST:
        raise ValueError(f"is 0, which takes the most likely token, or at least {COLDEST}")
    return temperature


class StreamOptions(Wire):
    include_usage: StrictBool = Field(default=False, description="a last chunk with the numbers of tokens")
    include_obfuscation: Literal[False] | None = None


class Schema(Wire):
    name: Text | None = None
    description: NotRead[Text] = None
    content: dict[str, JsonValue] = Field(default_factory=dict, alias="schema")
    strict: NotRead[StrictBool] = None


class Format(Wire):
    """The form of a reply."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> Format:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("type: json_schema and the key json_schema need each other")
        return self

    @property
    def form(self) -> dict[str, Any] | None:
        """The JSON schema of the reply. None for text."""
        if self.json_schema is not None:
            return self.json_schema.content
        return None if self.type == "text" else {"type": "object"}


class Named(Wire):
    name: Text


class NamedTool(Wire):
    type: Literal["function"]
    function: Named


class _Request(Wire):
    """The keys that both kinds of requests share."""

    model: str | None = Field(
        default=None, max_length=1000, description="one of GET /v1/models; null is the first"
    )
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    stop: Stop | Stops | None = Field(
        default=None, description="ends the reply, and is not a part of its text"
    )
    temperature: Annotated[StrictFloat, AfterValidator(_not_lukewarm)] | None = Field(
        default=None,
        ge=0,
        le=100,
        allow_inf_nan=False,
        description="0 takes the most likely token; null is 1",
    )
    top_p: StrictFloat | None = Field(default=None, gt=0, le=1)
    top_k: StrictInt | None = Field(default=None, ge=-1, lt=2**31, description="0 and -1 keep all tokens")
    min_p: StrictFloat | None = Field(default=None, ge=0, le=1, description="vLLM's key; default 0")
    max_thinking_tokens: Count | None = Field(
        default=None, description="after so many tokens of thoughts, an open thought is closed by force"
    )
    seed: StrictInt | None = Field(
        default=None, ge=-(2**63), lt=2**63, description="decides the first choice; the others derive theirs"
    )
    n: StrictInt | None = Field(default=None, ge=1, le=MAX_CHOICES, description="replies to one prompt")
    return_token_ids: StrictBool | None = Field(
        default=None, description="also send prompt_token_ids, and the token_ids exactly as sampled"
    )
    stop_token_ids: Annotated[tuple[Token, ...], First, Field(max_length=64)] | None = Field(
        default=None, description="tokens that end a turn of the model, which end a reply in any case"
    )
    skip_special_tokens: StrictBool | None = Field(
        default=None, description="false needs return_token_ids: the text never holds special tokens"
    )
    # without an effect on a reply
    user: NotRead[str] = None
    safety_identifier: NotRead[str] = None
    prompt_cache_key: NotRead[str] = None
    service_tier: NotRead[Literal["auto", "default", "flex", "scale", "priority"]] = None
    # only the values that change nothing
    presence_penalty: Literal[0] | None = None
    frequency_penalty: Literal[0] | None = None
    repetition_penalty: Literal[1] | None = None
    min_tokens: Literal[0] | None = None
    ignore_eos: Literal[False] | None = None
    include_stop_str_in_output: Literal[False] | None = None
    logit_bias: dict[str, Any] | None = Field(default=None, max_length=0)

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
        "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", mode="before"
    )
    @classmethod
    def _is_a_number(cls, number: Any) -> Any:
        if isinstance(number, bool):  # which equals 0 or 1
            raise ValueError("is a number")
        return int(number) if number in (0.0, 1.0) else number

    @model_validator(mode="after")
    def _has_a_text_alone(self) -> _Request:
        if self.skip_special_tokens is False and not self.return_token_ids:
            raise ValueError("skip_special_tokens: false needs return_token_ids: true")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else self.stop or ()

    @property
    def has_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage


class ChatRequest(_Request):
    """A conversation; the policy writes the next message."""

    messages: Annotated[tuple[ChatMessage, ...], First, Field(min_length=1, max_length=10_000)]
    tools: Annotated[tuple[Tool, ...], First, Field(max_length=128)] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = Field(
        default=None, description="required, or a named one: the reply is one call"
    )
    parallel_tool_calls: StrictBool | None = Field(
        default=None, description="false ends the reply after the first call"
    )
    max_tokens: Count | None = Field(default=None, description="of the reply")
    max_completion_tokens: Count | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Alternatives | None = None
    response_format: Format | None = None
    modalities: tuple[Literal["text"]] | None = None
    audio: None = None
    prediction: None = None
    add_generation_prompt: Literal[True] | None = None
    continue_final_message: Literal[False] | None = None
    store: NotRead[StrictBool] = None
    verbosity: NotRead[Literal["low", "medium", "high"]] = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = Field(
        default=None, description="a hint, read where the chat template has a key for it"
    )
    chat_template_kwargs: dict[str, StrictBool | StrictInt | StrictFloat | Text] | None = Field(
        default=None, max_length=16, description="keys of the chat template, which it must have"
    )
    enable_thinking: StrictBool | None = Field(default=None, description="a key of the chat template")
    metadata: dict[str, str] | None = Field(default=None, max_length=16, description="not read")

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if len({self.max_tokens, self.max_completion_tokens} - {None}) > 1:
            raise ValueError("max_tokens and max_completion_tokens are one limit; give one of them")
        if isinstance(self.tool_choice, NamedTool) and not self.forced:
            raise ValueError(f"tool_choice: {self.tool_choice.function.name[:80]!r} is none of the tools")
        if self.tool_choice == "required" and not self.tools:
            raise ValueError("tool_choice: required needs tools")
        return self

    @property
    def forced(self) -> tuple[Tool, ...]:
        """The tools of which the reply must call one."""
        choice, tools = self.tool_choice, self.tools or ()
        if isinstance(choice, NamedTool):
            return tuple(tool for tool in tools if tool.function.name == choice.function.name)
        return tools if choice == "required" else ()

    @property
    def offered(self) -> tuple[Tool, ...]:
        """The tools that the policy may call."""
        return () if self.tool_choice == "none" else self.tools or ()

    @property
    def stops(self) -> tuple[str, ...]:
        once = self.offered and self.parallel_tool_calls is False
        return (*super().stops, CLOSE) if once else super().stops

    @property
    def most_new(self) -> int | None:
        """The limit of a reply; None leaves all that there is room for."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def has_logprobs(self) -> bool:
        return bool(self.logprobs)

    @property
    def alternatives(self) -> int:
        return self.top_logprobs or 0


class CompletionRequest(_Request):
    """A text or tokens; the policy continues them."""

    prompt: (
        Text
        | Tokens
        | Annotated[tuple[Text, ...], First, Field(min_length=1, max_length=MAX_CHOICES)]
        | Annotated[tuple[Tokens, ...], First, Field(min_length=1, max_length=MAX_CHOICES)]
    ) = Field(description="a text, tokens, or a list of these")
    max_tokens: StrictInt | None = Field(
        default=None, ge=0, lt=2**31, description="null is 16; 0 with echo draws nothing"
    )
    logprobs: Alternatives | None = None
    prompt_logprobs: Literal[0] | None = Field(
        default=None, description="0: also the log-probabilities of the prompt's tokens, at temperature 1"
    )
    echo: StrictBool | None = Field(
        default=None,
        description="the answer begins with the prompt, whose log-probabilities are at temperature 1",
    )
    suffix: None = None
    best_of: StrictInt | None = Field(default=None, ge=1, description="1, or as many as n: the best of all")

    @model_validator(mode="after")
    def _keeps_all(self) -> CompletionRequest:
        if self.best_of not in (None, 1, self.n or 1):
            raise ValueError("best_of is 1 or equal to n: replies are not ranked")
        if self.stream and self.reads_prompt:
            key = "echo" if self.echo else "prompt_logprobs"
            raise ValueError(f"{key} needs stream: false")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens: 0 needs echo: true")
        return self

    @property
    def prompts(self) -> tuple[str | tuple[int, ...], ...]:
        one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return (self.prompt,) if one else self.prompt  # type: ignore[return-value]

    @property
    def reads_prompt(self) -> bool:
        """Whether the answer has log-probabilities of the prompt, or its text."""
        return bool(self.echo) or self.prompt_logprobs is not None

    offered: ClassVar[tuple[Tool, ...]] = ()

    @property
    def most_new(self) -> int:
        return COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def has_logprobs(self) -> bool:
        return self.logprobs is not None

    @property
    def alternatives(self) -> int:
        return self.logprobs or 0


def check_stops(request: ChatRequest | CompletionRequest, ends: frozenset[int]) -> None:
    """Refuse ``stop_token_ids`` that do not end a turn."""
    if others := set(request.stop_token_ids or ()) - ends:
        raise Refusal(400, "invalid", f"stop_token_ids: {min(others)} ends no turn here; {sorted(ends)} do")


def sampling_of(request: ChatRequest | CompletionRequest, prompt: int, limit: int) -> SamplingConfig:
    """How the replies to a prompt of so many tokens are drawn. ``limit`` is of both together."""
    room, most_new = limit - prompt, request.most_new
    if room < max(1, most_new or 1):
        wanted = f"the prompt has {prompt} tokens" + (f", and the reply may have {most_new}" * bool(most_new))
        raise Refusal(
            400, "context_length_exceeded", f"{wanted}; together they may have {limit}; ask for fewer"
        )
    return SamplingConfig(
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        top_k=max(0, request.top_k or 0),
        min_p=request.min_p or 0.0,
        max_thinking_tokens=request.max_thinking_tokens,
        max_new_tokens=most_new or room,
        max_tokens=limit,
        stop=request.stops,
    )
