"""What a request asks the engine for: the tokens of its prompts, and their sampling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor

from agent_peft.agents.serving.requests import ChatRequest, CompletionRequest, Tool
from agent_peft.agents.serving.tools import plain_messages
from agent_peft.environments.http.messages import Refusal
from agent_peft.policies.policy import Policy
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.policies.tokenization import ChatTokenizer
from agent_peft.types import AgentPeftError


def chat_prompt(request: ChatRequest, tools: Sequence[Tool], chat: ChatTokenizer) -> list[int]:
    """The tokens of a conversation up to the next message of the policy.

    Raises:
        AgentPeftError: the chat template or the tokenizer refuses it.
    """
    return chat.opening(plain_messages(request.messages, tools))


def text_prompt(prompt: str | Sequence[int], policy: Policy) -> list[int]:
    """The tokens of a text, in which special tokens may be spelled out; tokens stay as they are.

    Raises:
        AgentPeftError: the tokenizer cannot encode the text, it has no tokens, or the model lacks a token.
    """
    if not isinstance(prompt, str):
        size = cast(Tensor, policy.base.get_input_embeddings().weight).shape[0]
        if (largest := max(prompt)) >= size:
            raise AgentPeftError(f"prompt: {largest} is no token of this model; it has {size}")
        return list(prompt)
    try:
        with policy.chat.encoding:
            tokens = list(policy.chat.tokenizer.encode(prompt))
    except Exception as error:  # the tokenizers library raises bare exceptions
        raise AgentPeftError(f"prompt: the tokenizer cannot encode {prompt[:80]!r}: {error}") from error
    if not tokens:
        raise AgentPeftError("prompt: has no tokens; give at least one character")
    return tokens


def sampling_of(
    request: ChatRequest | CompletionRequest,
    prompt: int,
    limit: int,
    most_new: int | None,
    stops: Sequence[str],
) -> SamplingConfig:
    """How a request's replies are drawn.

    Args:
        prompt: tokens of the prompt.
        limit: tokens of prompt and reply together.
        most_new: tokens of the reply; None leaves all that there is room for.

    Raises:
        Refusal: there is no room for the reply.
    """
    room = limit - prompt
    if room < max(1, most_new or 1):
        wanted = f"the prompt has {prompt} tokens" + (f", and the reply may have {most_new}" * bool(most_new))
        raise Refusal(
            400, "context_length_exceeded", f"{wanted}; together they may have {limit}; ask for fewer"
        )
    return SamplingConfig(
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        top_k=max(0, request.top_k or 0),
        max_new_tokens=most_new or room,
        max_tokens=limit,
        stop=tuple(stops),
    )
