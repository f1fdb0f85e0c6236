"""The sampler's own decoder for models that are built like Llama (Qwen, Mistral, SmolLM, Gemma, Phi-3).

A decode step is short, so every operation counts. Products with the same input are one, the residual is added
by the product, and no module of Transformers is between them: a third of the operations. Keys, values and
attention are those of ``TierCache``. Whether a model is built like this is not read from its name: it must
have these parts and no others, and the sampler proves this decoder against the model's own when it is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

from agent_peft.policies.engine.fused_linear import FusedLinear
from agent_peft.policies.engine.kv_cache import TierCache
from agent_peft.policies.engine.shared_attention import attend_with_prefixes
from agent_peft.policies.forward.attention import refuse_window
from agent_peft.policies.forward.language_model import LanguageModel

PARTS = {
    *("input_layernorm", "self_attn", "resid_attn_dropout"),
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "q_norm", "k_norm", "o_proj"),
    *("post_attention_layernorm", "mlp", "resid_mlp_dropout"),
    *("gate_proj", "up_proj", "gate_up_proj", "act_fn", "activation_fn", "down_proj"),
}


class LeanDecoder:
    """Takes the place of ``LanguageModel.decoder`` while the policy samples, with a ``TierCache``.

    It does not synchronize with the device, and its shapes follow from those of its inputs, so that a CUDA
    graph can capture it.

    Args:
        copies: weights with the same input are copied into one (``FusedLinear``); otherwise the model's
            own linear layers compute.
        onednn: the copies are laid out for oneDNN.

    Raises:
        AttributeError: the model has other parts.
        ValueError: it has a sliding window.
    """

    def __init__(self, model: LanguageModel, copies: bool, onednn: bool) -> None:
        refuse_window(model.text_config)
        decoder: Any = model.decoder
        self.embed, self.rotary = decoder.embed_tokens, decoder.rotary_emb
        self.layers = [_Layer(layer, model, copies, onednn) for layer in decoder.layers]
        self.norm = _RmsNorm(decoder.norm)

    def __call__(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor,
        past_key_values: TierCache,
        use_cache: bool = True,
    ) -> Any:
        """See ``TierCache.read``: tokens and positions (B, Q), and the additive mask (B, 1, Q, extent)."""
        x = self.embed(input_ids)
        cos, sin = self.rotary(x, position_ids)
        half = sin.shape[-1] // 2
        sin = torch.cat([-sin[..., :half], sin[..., half:]], -1)
        rotation = cos.unsqueeze(2), sin.unsqueeze(2)
        for layer in self.layers:
            x = layer(x, rotation, attention_mask, past_key_values)
        return SimpleNamespace(last_hidden_state=self.norm(x))


class _Layer:
    def __init__(self, layer: Any, model: LanguageModel, copies: bool, onednn: bool) -> None:
        config, attention, mlp = model.text_config, layer.self_attn, layer.mlp
        parts = {name for part in (layer, attention, mlp) for name, _ in part.named_children()}
        parts |= {name for name, _ in attention.named_parameters(recurse=False)}
        if parts - PARTS:
            raise AttributeError(f"{type(layer).__name__} has {', '.join(sorted(parts - PARTS))}")

        def fused(*layers: nn.Module) -> FusedLinear | _SideBySide:
            return FusedLinear(layers, onednn) if copies else _SideBySide(layers)

        self.index: int = attention.layer_idx
        self.kv_heads: int = config.num_key_value_heads
        self.groups: int = config.num_attention_heads // self.kv_heads
        self.size, self.scale = cast(int, attention.head_dim), cast(float, attention.scaling)
        self.rotates = bool(getattr(attention, "use_rope", True))  # SmolLM3 leaves some layers out
        self.before = _RmsNorm(layer.input_layernorm), _RmsNorm(layer.post_attention_layernorm)
        self.of_heads = [
            _RmsNorm(getattr(attention, x)) for x in ("q_norm", "k_norm") if hasattr(attention, x)
        ]
        whole = hasattr(attention, "qkv_proj")  # Phi-3 has one product by itself
        inputs = [attention.qkv_proj] if whole else [attention.q_proj, attention.k_proj, attention.v_proj]
        self.qkv, self.out = fused(*inputs), fused(attention.o_proj)
        self.gate_up = fused(*([mlp.gate_up_proj] if whole else [mlp.gate_proj, mlp.up_proj]))
        self.down = fused(mlp.down_proj)
        self.activation = mlp.activation_fn if whole else mlp.act_fn

    def __call__(self, x: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor, cache: TierCache) -> Tensor:
        rows, length, heads = *x.shape[:2], self.kv_heads * self.groups
        states = self.qkv(self.before[0](x)).view(rows, length, heads + 2 * self.kv_heads, self.size)
        turned, value = states.split([heads + self.kv_heads, self.kv_heads], 2)
        if self.of_heads:
            parts = zip(self.of_heads, turned.split([heads, self.kv_heads], 2), strict=True)
            turned = torch.cat([norm(part) for norm, part in parts], 2)
        if self.rotates:
            turned = _rotate(turned, *rotation)
        query, key = turned.split([heads, self.kv_heads], 2)
        keys, values = cache.update(key.transpose(1, 2), value.transpose(1, 2), self.index)
        # heads that share their keys become queries of one head
        query = query.view(rows, length, self.kv_heads, self.groups, self.size).permute(0, 2, 3, 1, 4)
        query = query.reshape(rows, self.kv_heads, self.groups * length, self.size)
        out = attend_with_prefixes(query, keys, values, mask, cache.prefixes(self.index), self.scale)
        out = out.view(rows, self.kv_heads, self.groups, length, self.size).permute(0, 3, 1, 2, 4)
        x = self.out.plus(out.reshape(rows, length, heads * self.size), x)
        gate, up = self.gate_up(self.before[1](x)).chunk(2, -1)
        return self.down.plus(self.activation(gate).mul_(up), x)


class _SideBySide:
    """The interface of ``FusedLinear`` over the model's own layers, without a copy of their weights."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.layers = layers

    def __call__(self, x: Tensor) -> Tensor:
        out = [layer(x) for layer in self.layers]
        return cast(Tensor, out[0] if len(out) == 1 else torch.cat(out, -1))

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        return self(x) + residual


class _RmsNorm:
    """A norm of Transformers as one operation of torch. Gemma's weights are distances from 1."""

    def __init__(self, module: Any) -> None:
        weight: Tensor = module.weight.detach()
        scale = module(torch.ones_like(weight))
        self.weight = weight if (scale - weight).norm() <= (scale - weight - 1).norm() else 1 + weight
        self.epsilon: float = getattr(module, "variance_epsilon", None) or module.eps

    def __call__(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, self.weight.shape, self.weight, self.epsilon)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021) of x (B, Q, heads, D), in the first dimensions that cos and sin
    (B, Q, 1, R) have. The first half of sin is negative.
    """
    size = cos.shape[-1]
    turned = x if size == x.shape[-1] else x[..., :size]
    turned = (turned * cos).addcmul_(turned.roll(size // 2, -1), sin)
    return turned if size == x.shape[-1] else torch.cat([turned, x[..., size:]], -1)
