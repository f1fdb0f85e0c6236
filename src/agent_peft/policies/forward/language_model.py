"""A causal language model in two parts: the decoder, which gives hidden states, and the output layer."""

from __future__ import annotations

from typing import Any, cast

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from agent_peft.policies.forward import tree_attention
from agent_peft.policies.forward.attention_override import Override, overriding
from agent_peft.policies.forward.trie import Layout
from agent_peft.policies.models.positions import window_of
from agent_peft.types import AgentPeftError


class LanguageModel:
    """Reads tokens under a mask of our own, which a token trie and a cache of keys and values need.

    Args:
        model: a causal language model of Transformers, or a PeftModel around one. It stays in evaluation
            mode.

    Attributes:
        base: the model without PEFT's wrapper.
        decoder: the part of it that gives hidden states.
        tiled: whether tries are read with ``tree_attention``; otherwise the model gets a dense mask.
    """

    def __init__(self, model: PreTrainedModel | PeftModel) -> None:
        self.model = model.eval()
        self.base = cast(PreTrainedModel, model.get_base_model() if isinstance(model, PeftModel) else model)
        self.decoder: nn.Module = self.base.get_decoder()  # type: ignore[no-untyped-call]
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
        """The output layer. While the policy samples, another one may take its place."""
        return self.base.get_output_embeddings()  # type: ignore[no-untyped-call,no-any-return]

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
        tiles = tree_attention.cut_tiles(ends, self.dtype, config.num_attention_heads // kv_heads)
        unused = torch.zeros(1, 1, 1, 1, device=self.device)  # keeps the model from making a mask
        with overriding(Override(config, tree_attention.NAME, tiles)):
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
