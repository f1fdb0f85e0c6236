"""Properties of a model that a policy relies on, proven on a few tokens when the policy is made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from agent_peft.policies.forward.attention import attempt
from agent_peft.policies.forward.language_model import LanguageModel
from agent_peft.policies.forward.trie import build_trie, fill_rows
from agent_peft.policies.models.positions import window_of
from agent_peft.policies.tokenization import ChatTokenizer
from agent_peft.seeding import derive
from agent_peft.types import AgentPeftError, Message

_SYSTEM = "You answer questions about a database. Write one statement at a time, and say when you are done."
_USER = (
    "How many rows of the table 'orders' have a price above 120, "
    "and which customer has ordered most often since May?"
)
_MAX_OPENING = 64  # tokens
SINGLE = 8  # the last tokens of an opening, which are read one by one, as a sampler reads
ALLOWED = 4  # times the rounding that was measured


def prove_head(model: LanguageModel) -> None:
    """The output layer on the decoder's states must give the model's own logits. Some models scale them."""
    tokens = _tokens(model, 4)
    with torch.no_grad():
        theirs = model.base(input_ids=tokens).logits
        ours = model.logits(model.read(tokens))
    # in 16 bits the model rounds its logits, and we do not
    narrow = 2**-7 * float(theirs.abs().max()) if model.dtype != torch.float32 else 0.0
    if not torch.allclose(theirs.float(), ours.float(), rtol=1e-4, atol=1e-4 + narrow):
        raise AgentPeftError(
            f"{type(model.base).__name__} changes its logits after the output layer in a way that Agent-PEFT "
            "does not support; please report it, and take another policy.model"
        )


def prove_window(model: LanguageModel) -> None:
    """Our masks must have the sliding window of the model's own: compared on a few tokens, with a window
    that is narrower than they are.
    """
    if window_of(model.base.config) is None:
        return
    tokens = _tokens(model, 8)
    positions = torch.arange(8, device=model.device).unsqueeze(0)
    causal = (positions[:, :, None] >= positions[:, None, :]).unsqueeze(1)
    with torch.no_grad(), _window(model, 3):
        theirs = model.read(tokens).float()
        ours = attempt(lambda: model.hidden_states(tokens, positions, causal).float())
    bound = (1e-3 if model.dtype == torch.float32 else 0.05) * theirs.norm()
    if isinstance(ours, Exception) or (theirs - ours).norm() > bound:
        raise AgentPeftError(
            f"{type(model.base).__name__} attends within a sliding window in a way that Agent-PEFT does not "
            "support; take another policy.model"
        )


def prove_tiles(model: LanguageModel) -> bool:
    """Whether tree attention can replace the model's own. It is for CPUs: a GPU needs larger products."""
    if model.device.type != "cpu" or model.base.config._attn_implementation != "sdpa":
        return False
    tokens, positions = _tokens(model, 4), torch.arange(4).unsqueeze(0)
    with torch.no_grad():
        theirs = model.read(tokens)
        ours = attempt(lambda: model.tree_states(tokens, positions, torch.full((4,), 4)))
    if isinstance(ours, Exception):
        return False
    if model.dtype == torch.float32:
        return torch.allclose(theirs, ours, rtol=1e-3, atol=1e-3)
    return bool((theirs - ours).float().norm() <= 0.05 * theirs.float().norm())


def refuse_packing(model: LanguageModel, tokens: list[int], rounding: float) -> str | None:
    """The reason why the model cannot read a token trie, or None if it can: a model that keeps a running
    state, such as Mamba, would carry it from one branch into the next.

    Three sequences that branch are read as one trie, and as the rows of a batch by the model itself.
    """
    if _keeps_square_mask(model.decoder):
        return f"{type(model.base).__name__} masks keys by their index in a row"
    half = len(tokens) // 2
    sequences = [tokens[: half // 2] + tokens[half:], tokens, tokens[:half] + tokens[half + 1 :]]
    ids = torch.tensor([sequence[: len(sequences[0])] for sequence in sequences])  # rows of one length
    layout = fill_rows([build_trie(ids.tolist())], [range(len(ids))])
    ids = ids.to(model.device)
    with torch.no_grad():
        packed = attempt(lambda: model.packed_states(layout).flatten(0, 1))
        if isinstance(packed, Exception):
            return f"the model refused a tree mask ({packed})"
        ours = model.logprobs_of(torch.stack([packed[path] for path in layout.paths]), ids)
        difference = ours - model.logprobs_of(model.read(ids), ids)
    if (drift := model.drift(difference.flatten())) <= rounding:
        return None
    return f"packed and padded log-probabilities differ by {drift:.2g}"


def opening(chat: ChatTokenizer, positions: int | None) -> list[int]:
    """The tokens of the beginning of a short conversation, as the model really sees them: at least 40, or
    as many as the model has ``positions`` for.

    Control tokens where none belong would make hidden states so large that their rounding means nothing.
    """
    try:
        tokens = chat.opening([Message("system", _SYSTEM), Message("user", _USER)])
    except AgentPeftError:  # an alphabet without letters, such as one for sums
        special = chat.end_of_turn | set(chat.tokenizer.all_special_ids)
        plain = [i for i in range(len(chat.tokenizer)) if i not in special] or [0]
        tokens = [plain[derive(0, "opening", place) % len(plain)] for place in range(40)]
    return tokens[: min(_MAX_OPENING, positions or _MAX_OPENING)]


def measure_rounding(model: LanguageModel, tokens: list[int]) -> float:
    """The bound in nats on ``drift`` between two exact ways to compute the same log-probabilities.

    The model reads the tokens in one forward, and again in pieces, the last ones token by token, with
    Transformers' cache. The difference is rounding, for this model and dtype; a few times as much is allowed.
    Computations that differ in more than rounding are nats apart.
    """
    ids = torch.tensor([tokens], device=model.device)

    def in_pieces() -> Tensor:
        cache, states, half = DynamicCache(config=model.base.config), [], len(tokens) // 2
        singly = max(half, len(tokens) - SINGLE)
        for piece in (ids[:, :half], ids[:, half:singly], *torch.split(ids[:, singly:], 1, dim=1)):
            if not piece.numel():
                continue
            states.append(model.read(piece, past_key_values=cache, use_cache=True))
        return model.logprobs_of(torch.cat(states, 1), ids)

    with torch.no_grad():
        whole = model.logprobs_of(model.read(ids), ids)
        pieces = attempt(in_pieces)
    measured = 0.0
    if isinstance(pieces, Tensor) and pieces.shape == whole.shape:
        measured = model.drift(whole - pieces)
    low, high = (1e-3, 1e-2) if model.dtype == torch.float32 else (0.02, 0.3)
    return min(max(ALLOWED * measured, low), high)


def _keeps_square_mask(decoder: nn.Module) -> bool:
    """Whether a layer masks keys in the order of positions (GPT-Neo's window). A trie has another order."""
    return any(
        mask.dtype == torch.bool and mask.dim() > 1 and mask.shape[-1] == mask.shape[-2] > 1
        for mask in decoder.buffers()
    )


def _tokens(model: LanguageModel, count: int) -> Tensor:
    vocabulary: int = model.text_config.vocab_size
    first = 1 + (getattr(model.text_config, "pad_token_id", None) or 0)  # padding makes some models warn
    return (first + torch.arange(count, device=model.device)).unsqueeze(0) % vocabulary


@contextmanager
def _window(model: LanguageModel, size: int) -> Iterator[None]:
    """Another sliding window. A model reads it from its configuration whenever it makes a mask."""
    configs: list[Any] = [model.text_config, model.decoder.config]
    before = [config.sliding_window for config in configs]
    try:
        for config in configs:
            config.sliding_window = size
        yield
    finally:
        for config, window in zip(configs, before, strict=True):
            config.sliding_window = window
