"""What is proven of a model on a few tokens, when a policy is made of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from agent_peft.policies.forward.attention_override import attempt
from agent_peft.policies.models.positions import bound_of, window_of
from agent_peft.seeding import derive
from agent_peft.types import AgentPeftError, Message

if TYPE_CHECKING:
    from agent_peft.policies.policy import Policy

_SYSTEM = "You answer questions about a database. Write one statement at a time, and say when you are done."
_USER = "How many rows of the table 'orders' have a price above 120, and which customer has ordered most often since May?"
_LONGEST = 64  # tokens of an opening
_ALLOWED = 4  # times the rounding that was measured


def prove_head(policy: Policy) -> None:
    """Hidden states and head apart must give the model's own logits: some models scale them in between.

    Raises:
        AgentPeftError: they do not.
    """
    tokens = _tokens(policy, 4)
    with torch.no_grad():
        own = policy.base(input_ids=tokens).logits
        ours = policy.logits(policy.decoder(input_ids=tokens).last_hidden_state)
    narrow = (
        2**-7 * float(own.abs().max()) if policy.dtype != torch.float32 else 0.0
    )  # its logits are of 16 bits, ours are not
    if not torch.allclose(own.float(), ours.float(), rtol=1e-4, atol=1e-4 + narrow):
        raise AgentPeftError(
            f"{type(policy.base).__name__} changes its logits after the output layer in a way Agent-PEFT does not know; please report it"
        )


def prove_window(policy: Policy) -> None:
    """The masks that we make must have the window that the model gives its own: shown on a few tokens, with a
    window that cuts them.

    Raises:
        AgentPeftError: they do not.
    """
    if window_of(policy.base.config) is None:
        return
    tokens = _tokens(policy, 8)
    positions = torch.arange(8, device=policy.device).unsqueeze(0)
    causal = (positions[:, :, None] >= positions[:, None, :]).unsqueeze(1)
    with torch.no_grad(), _window(policy, 3):
        own = policy.decoder(input_ids=tokens).last_hidden_state.float()
        ours = attempt(lambda: policy.hidden_states(tokens, positions, causal).float())
    if (
        not isinstance(ours, Tensor)
        or (own - ours).norm() > (1e-3 if policy.dtype == torch.float32 else 0.05) * own.norm()
    ):
        raise AgentPeftError(
            f"{type(policy.base).__name__} attends within a sliding window in a way Agent-PEFT does not know; take another policy.model"
        )


def prove_tiles(policy: Policy) -> bool:
    """Whether the model's attention can be replaced by ours, tile by tile. On a GPU, where tiles are too
    small, it is not.
    """
    if policy.device.type != "cpu" or policy.base.config._attn_implementation != "sdpa":
        return False
    tokens, positions = _tokens(policy, 4), torch.arange(4).unsqueeze(0)
    with torch.no_grad():
        own = policy.decoder(input_ids=tokens).last_hidden_state
        ours = attempt(lambda: policy._along_tree(tokens, positions, torch.full((4,), 4)))
    if not isinstance(ours, Tensor):
        return False
    if policy.dtype == torch.float32:
        return torch.allclose(own, ours, rtol=1e-3, atol=1e-3)
    return bool((own - ours).float().norm() <= 0.05 * own.float().norm())


def opening(policy: Policy) -> list[int]:
    """At least 40 tokens, or all that the model has positions for, as it really sees them: a short
    conversation, in the words that its tokenizer knows.

    Control tokens where none belong would make hidden states so large that what is rounded off of them says
    nothing.
    """
    try:
        tokens = policy.chat.opening([Message("system", _SYSTEM), Message("user", _USER)])
    except AgentPeftError:  # an alphabet without letters, such as one for sums
        special = policy.chat.end_of_turn | set(policy.chat.tokenizer.all_special_ids)
        plain = [i for i in range(len(policy.chat.tokenizer)) if i not in special] or [0]
        tokens = [plain[derive(0, "opening", place) % len(plain)] for place in range(40)]
    bound = bound_of(policy.base.config)
    return tokens[: _LONGEST if bound is None else min(_LONGEST, bound.positions)]


def measure_rounding(policy: Policy) -> float:
    """What bounds ``Policy.drift`` (nats) between two ways to compute the same log-probabilities that are
    both exact.

    The model reads an opening as a whole, and again in pieces, the last ones token by token, with the cache
    of Transformers. What lies between is rounding, for this model and dtype; a few times that is allowed.
    Ways that differ in more than rounding are nats apart.
    """
    tokens = opening(policy)
    ids = torch.tensor([tokens], device=policy.device)

    def in_pieces() -> Tensor:
        cache, states, half = DynamicCache(config=policy.base.config), [], len(tokens) // 2
        for piece in (ids[:, :half], *torch.split(ids[:, half:], 1, dim=1)):
            states.append(
                policy.decoder(input_ids=piece, past_key_values=cache, use_cache=True).last_hidden_state
            )
        return policy.logprobs_of(torch.cat(states, 1), ids)

    with torch.no_grad():
        whole = policy.logprobs_of(policy.decoder(input_ids=ids).last_hidden_state, ids)
        pieces = attempt(in_pieces)
    measured = (
        policy.drift(whole - pieces) if isinstance(pieces, Tensor) and pieces.shape == whole.shape else 0.0
    )
    least, most = (1e-3, 1e-2) if policy.dtype == torch.float32 else (0.02, 0.3)
    return min(max(_ALLOWED * measured, least), most)


def masks_by_place(decoder: nn.Module) -> bool:
    """Whether some layer keeps a square mask of its own (GPT-Neo's window), for keys that lie in the order
    of their positions: a trie's do not.
    """
    return any(
        mask.dtype == torch.bool and mask.dim() > 1 and mask.shape[-1] == mask.shape[-2] > 1
        for mask in decoder.buffers()
    )


def _tokens(policy: Policy, count: int) -> Tensor:
    vocabulary: int = policy.base.config.get_text_config().vocab_size
    return torch.arange(count, device=policy.device).unsqueeze(0) % vocabulary


@contextmanager
def _window(policy: Policy, size: int) -> Iterator[None]:
    """Another sliding window, which a model reads from its configuration whenever it makes a mask."""
    configs: list[Any] = [policy.base.config.get_text_config(), policy.decoder.config]
    before = [config.sliding_window for config in configs]
    try:
        for config in configs:
            config.sliding_window = size
        yield
    finally:
        for config, own in zip(configs, before, strict=True):
            config.sliding_window = own
