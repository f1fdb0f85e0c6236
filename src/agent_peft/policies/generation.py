"""Text for prompts, drawn by the sampler that also draws the episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from agent_peft.config import validated
from agent_peft.policies.engine import load_sampler
from agent_peft.policies.engine.base import Sampler
from agent_peft.policies.policy import Policy
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.seeding import derive
from agent_peft.types import AgentPeftError, Message

Prompt = str | Sequence[Message | Mapping[str, str]]


class _Reply:
    """A conversation that ends with its first action."""

    def __init__(self, prompt: Sequence[int], seed: int) -> None:
        self.prompt, self.seed, self.action = prompt, seed, tuple[int, ...]()

    def act(self, action: Sequence[int], logprobs: Sequence[float], room: int) -> None:
        self.action = tuple(action)


def generate(
    policy: Policy | Sampler,
    prompts: Prompt | Sequence[Prompt],
    sampling: SamplingConfig | Mapping[str, object] | None = None,
    seed: int = 0,
) -> list[str]:
    """One reply to each prompt, as text without special tokens. Greedy unless ``sampling`` has a temperature.

    Args:
        policy: a policy, or a sampler of one (which spares its start where this is called often).
        prompts: a text, which becomes a user message, or a conversation, which is a list of ``Message`` or of
            ``{"role": …, "content": …}``; or a list of such prompts.
        sampling: the keys of ``sampling`` in a configuration, such as ``{"max_new_tokens": 32}``.
        seed: decides all that is drawn; a prompt's reply depends on its position and not on its neighbours.
    """
    if not isinstance(sampling, SamplingConfig):
        sampling = validated(SamplingConfig, {"temperature": 0.0, **(sampling or {})}, "sampling")
    sampler = load_sampler(policy) if isinstance(policy, Policy) else policy
    openings = [sampler.chat.opening(messages) for messages in _conversations(prompts)]
    for number, tokens in enumerate(openings):
        if len(tokens) >= sampling.max_tokens:
            raise AgentPeftError(
                f"prompt {number} has {len(tokens)} tokens, so there is no room for a reply within "
                f"sampling.max_tokens: {sampling.max_tokens}; raise that, or shorten the prompt"
            )
    replies = [_Reply(tokens, derive(seed, "generate", number)) for number, tokens in enumerate(openings)]
    sampler.generate(replies, sampling)
    return [sampler.chat.decode_action(reply.action) for reply in replies]


def _conversations(prompts: Prompt | Sequence[Prompt]) -> list[list[Message]]:
    """Each prompt as messages. A list that begins with a message is one conversation."""
    if not isinstance(prompts, list | tuple) or (prompts and isinstance(prompts[0], Message | Mapping)):
        prompts = [cast(Prompt, prompts)]
    return [
        [_message(part) for part in (prompt if isinstance(prompt, list | tuple) else [prompt])]
        for prompt in prompts
    ]


def _message(part: object) -> Message:
    if isinstance(part, str):
        return Message("user", part)
    if isinstance(part, Mapping) and set(part) == {"role", "content"}:
        part = Message(part["role"], part["content"])
    if isinstance(part, Message) and isinstance(part.content, str):
        return part
    raise AgentPeftError(
        f"{part!r:.80} is not a prompt; give a text, or a conversation as a list of Message(role, content)"
    )
