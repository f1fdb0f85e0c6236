"""A causal language model in two parts: the decoder, which gives hidden states, and the output layer.

The output layer computes a chunk of predictors at a time: a tensor (B, T, V) never exists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig, PreTrainedModel

from agent_peft.policies.forward.attention import TREE, Override, cut_tiles, overriding
from agent_peft.policies.forward.products import Product, product_of
from agent_peft.policies.forward.trie import Layout
from agent_peft.policies.models.positions import window_of
from agent_peft.policies.sampling import SamplingConfig, log_distribution
from agent_peft.types import AgentPeftError


class LanguageModel:
    """Reads tokens under a mask of our own, which a token trie and a cache of keys and values need.

    Args:
        model: a causal language model of Transformers, or a PeftModel around one. It stays in evaluation
            mode.

    Attributes:
        base: the model without PEFT's wrapper.
        decoder: the part of it that gives hidden states.
        own_head: takes the place of the model's output layer while the policy samples.
        tiled: whether tries are read with ``tree_attention``; otherwise the model gets a dense mask.
    """

    def __init__(self, model: PreTrainedModel | PeftModel) -> None:
        self.model = model.eval()
        self.base = cast(PreTrainedModel, model.get_base_model() if isinstance(model, PeftModel) else model)
        self.decoder: nn.Module = self.base.get_decoder()  # type: ignore[no-untyped-call]
        self.own_head: nn.Module | None = None
        self.tiled = False
        self._layer_types = set(getattr(self.text_config, "layer_types", None) or ())
        if "chunked_attention" in self._layer_types:
            raise AgentPeftError(
                f"{type(self.base).__name__} attends in chunks; Agent-PEFT supports full and sliding-window "
                "attention only: choose another policy.model"
            )

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.base.parameters()).dtype

    @property
    def head(self) -> nn.Module:
        """The output layer."""
        head = self.own_head
        return self.base.get_output_embeddings() if head is None else head  # type: ignore[no-untyped-call]

    @property
    def text_config(self) -> PreTrainedConfig:
        return self.base.config.get_text_config()

    @property
    def softcap(self) -> float | None:
        """The bound that the model puts on its logits with tanh (Gemma 2)."""
        return getattr(self.text_config, "final_logit_softcapping", None) or None

    def read(self, tokens: Tensor, **inputs: Any) -> Tensor:
        """Last hidden states (B, Q, H) of tokens (B, Q). ``inputs`` go to the decoder."""
        return cast(Tensor, self.decoder(input_ids=tokens, **inputs).last_hidden_state)

    def hidden_states(self, tokens: Tensor, positions: Tensor, mask: Tensor, cache: Any = None) -> Tensor:
        """Last hidden states (B, Q, H) of tokens (B, Q) at positions (B, Q) under a mask (B, 1, Q, K) of
        bool.

        The K keys are those of the cache, each at the index of its position, or those of ``tokens``.
        """
        keys = positions if cache is None else torch.arange(mask.shape[-1], device=mask.device).unsqueeze(0)
        return self.read(
            tokens,
            position_ids=positions,
            attention_mask=self._layer_masks(mask, positions, keys),
            past_key_values=cache,
            use_cache=cache is not None,
        )

    def tree_states(self, tokens: Tensor, positions: Tensor, ends: Tensor) -> Tensor:
        """Last hidden states (1, N, H) of a trie's nodes: tokens, positions (1, N) and ends (N,).

        Each tile of nodes is compared only with the nodes that it sees (``tree_attention``).
        """
        config = self.text_config
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        tiles = cut_tiles(ends, self.dtype, config.num_attention_heads // kv_heads)
        unused = torch.zeros(1, 1, 1, 1, device=self.device)  # keeps the model from making a mask
        with overriding(Override(config, TREE, tiles)):
            return self.read(tokens, position_ids=positions, attention_mask=unused, use_cache=False)

    def packed_states(self, layout: Layout) -> Tensor:
        """Last hidden states (R, N, H) of the nodes of a layout."""
        tokens, positions = layout.tokens.to(self.device), layout.positions.to(self.device)
        if self.tiled:
            return self.tree_states(tokens, positions, layout.ends[0].to(self.device))
        return self.hidden_states(tokens, positions, layout.mask().to(self.device))

    def padded_states(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Last hidden states (B, T, H) of right-padded tokens (B, T), under the model's own causal mask."""
        attention_mask = torch.arange(tokens.shape[1], device=self.device) < lengths[:, None]
        return self.read(tokens, attention_mask=attention_mask.long(), use_cache=False)

    def _layer_masks(self, mask: Tensor, queries: Tensor, keys: Tensor) -> Tensor | dict[str, Tensor]:
        """``mask`` as the model expects it: cut to its window, one for each type of layer, or additive."""
        window = window_of(self.text_config)
        near = mask
        # Transformers takes a mask of four dimensions as it is and applies no window to it.
        if window is not None and mask.shape[-1] > window:
            near = mask & (queries[:, None, :, None] - keys[:, None, None, :] < window)
        # Each layer would turn a boolean mask into an additive one, and keep its copy for the backward.
        if self.base.config._attn_implementation == "eager" or torch.is_grad_enabled():
            added = self._additive(mask)
            mask, near = added, added if near is mask else self._additive(near)
        if "sliding_attention" in self._layer_types:
            return {kind: near if kind == "sliding_attention" else mask for kind in self._layer_types}
        return mask if self._layer_types else near

    def _additive(self, mask: Tensor) -> Tensor:
        return torch.zeros_like(mask, dtype=self.dtype).masked_fill_(~mask, torch.finfo(self.dtype).min)

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., V) logits of last hidden states (..., H)."""
        logits: Tensor = self.head(hidden)
        return torch.tanh(logits / self.softcap) * self.softcap if self.softcap else logits

    def logprobs_of(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """(B, T - 1) log-probabilities in nats of tokens[:, 1:], from last hidden states (B, T, H)."""
        return self.logits(hidden[:, :-1]).float().log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)

    def drift(self, difference: Tensor) -> float:
        """One number for differences of log-probabilities: in fp32 the largest; in 16 bits the mean, since
        there rounding alone may move one unlikely token far.
        """
        if not len(difference):
            return 0.0
        difference = difference.abs()
        return float(difference.max() if self.dtype == torch.float32 else difference.mean())


Measure = Callable[[Tensor, slice], Tensor]
"""(log-probabilities (n, V), which of the states they are of) -> (n,)"""


def entropy_of(logp: Tensor, _: slice) -> Tensor:
    """(n,) entropies in nats of log-probabilities (n, V)."""
    return -(logp.exp() * logp.masked_fill(logp.isneginf(), 0.0)).sum(-1)


CHUNK = 256 * 49152  # logits that exist at once: 48 MiB in fp32


def logprobs_of_targets(
    head: nn.Module,
    plain: bool,
    logits: Callable[[Tensor], Tensor],
    states: Tensor,
    targets: Tensor,
    sampling: SamplingConfig,
    measures: Sequence[Measure] = (),
    within: Callable[[slice], AbstractContextManager[None]] = lambda _: nullcontext(),
) -> tuple[Tensor, ...]:
    """Log-probabilities (n,) in nats of targets (n,) under the sampling distribution, from hidden states
    (n, H), and what each of ``measures`` gives for the whole distributions, also (n,).

    Args:
        head: the output layer. If it is a linear layer without bias that is not trained, the backward does
            not compute the logits again.
        plain: whether the head's output is the logits.
        logits: gives (n, V) logits of states (n, H): the head, and what follows it.
        within: gives the context in which the logits of a slice of the states are computed.
    """
    if not len(targets):
        empty = states.new_zeros(0, dtype=torch.float32)
        return (empty,) * (1 + len(measures))
    frozen = isinstance(head, nn.Linear) and head.bias is None and not head.weight.requires_grad
    if plain and frozen and not measures:
        logp: Tensor = _Frozen.apply(  # type: ignore[no-untyped-call]
            states, head.weight, targets, sampling, product_of(head)
        )
        return (logp,)

    def score(states: Tensor, target: Tensor, places: slice) -> tuple[Tensor, ...]:
        with within(places):
            logp = log_distribution(logits(states), sampling, keep=target)
        taken = logp.gather(-1, target.unsqueeze(-1)).squeeze(-1)
        return taken, *(measure(logp, places) for measure in measures)

    pieces, size = [], _rows(states, head)
    one_piece = len(targets) <= size or not torch.is_grad_enabled()
    for start in range(0, len(targets), size):
        places = slice(start, start + size)
        inputs = states[places], targets[places], places
        # checkpointed: the backward computes these logits again instead of keeping them all
        pieces.append(score(*inputs) if one_piece else checkpoint(score, *inputs, use_reentrant=False))
    return tuple(torch.cat(part) for part in zip(*pieces, strict=True))


def _rows(states: Tensor, head: nn.Module) -> int:
    """The number of states whose logits fill a chunk."""
    vocabulary = getattr(head, "out_features", states.shape[-1])
    return max(1, CHUNK // int(vocabulary))


class _Frozen(torch.autograd.Function):
    """d log p(t) / d state = (W[t] - Σ_v p(v) W[v]) / temperature, computed in the forward, where p is at
    hand.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        targets: Tensor,
        sampling: SamplingConfig,
        product: Product,
    ) -> Tensor:
        taken, slopes = [], []
        size = max(1, CHUNK // len(weight))
        for piece, target in zip(torch.split(states, size), torch.split(targets, size), strict=True):
            logp = log_distribution(product(piece, weight), sampling, keep=target)
            taken.append(logp.gather(-1, target.unsqueeze(-1)).squeeze(-1))
            if ctx.needs_input_grad[0]:
                # For a likely token W[t] and p(t) W[t] nearly cancel, so subtract before rounding.
                slope = logp.exp_().neg_()
                slope.scatter_add_(-1, target.unsqueeze(-1), torch.ones_like(slope[:, :1]))
                slopes.append(product(slope.to(weight.dtype), weight.T))
        if slopes:
            ctx.save_for_backward(torch.cat(slopes).div_(sampling.temperature or 1.0))
        return torch.cat(taken)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        (slopes,) = ctx.saved_tensors
        return gradient.unsqueeze(-1).to(slopes.dtype) * slopes, None, None, None, None
