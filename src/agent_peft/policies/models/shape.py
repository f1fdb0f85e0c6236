"""How large a model is, read from its configuration: the model is built without weights, so this costs
neither memory nor a download.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from agent_peft.lookup import may_import
from agent_peft.policies.adapters import LoraSettings
from agent_peft.policies.config import PretrainedConfig, ScratchConfig
from agent_peft.policies.forward.activation_checkpointing import layers_of
from agent_peft.policies.models.bundled import config_here
from agent_peft.policies.models.pretrained import build, cause
from agent_peft.policies.tokenization import character_tokenizer
from agent_peft.types import AgentPeftError

# tensors as wide as the MLP that an activation function keeps for its backward, beside what it gives; 1, its
# input, where it is one kernel
_ACTIVATIONS = {"quick_gelu": 2, "relu": 0}


@dataclass(frozen=True)
class LinearShape:
    """A linear layer. ``last``: it reads what its block has made; the others of the block all read what
    came in.
    """

    name: str
    inputs: int
    outputs: int
    attention: bool  # in the attention block, else in the MLP
    last: bool
    adapted: bool


@dataclass(frozen=True)
class ModelShape:
    """What memory depends on. Every layer is taken to be like the first one."""

    parameters: int
    layers: int
    hidden: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_size: int
    norms: tuple[int, ...]  # widths of the first layer's
    rms: bool  # norms that Transformers writes out, in fp32; else one kernel
    activation: int  # see _ACTIVATIONS
    gated: bool
    eager: bool  # attention that keeps its scores
    masks: int  # full, sliding
    plain: bool  # attention that adds nothing to its scores, so that ours may take its place
    linears: tuple[LinearShape, ...]  # of the first layer

    @property
    def multiplied(self) -> int:
        """Weights of all linear layers, the output layer's included."""
        return (
            self.layers * sum(linear.inputs * linear.outputs for linear in self.linears)
            + self.vocabulary * self.hidden
        )


def shape_of(config: PretrainedConfig | ScratchConfig) -> ModelShape | None:
    """None where it cannot be known: a module of one's own, a model that is not here yet, or one that is
    no stack of attention layers.
    """
    if isinstance(config, ScratchConfig) and ":" in (own := str(config.architecture.get("model_type"))):
        may_import(own)  # it is not imported here, but told to whoever does not trust it
    model = config_at_hand(config)
    if model is None:
        return None
    noisy = logging.getLogger("transformers")
    level = noisy.level
    noisy.setLevel(logging.ERROR)
    try:
        with torch.device("meta"):
            built = build(model)
    finally:
        noisy.setLevel(level)
    try:
        return measure(built, config.lora)
    except (AttributeError, IndexError, TypeError, ZeroDivisionError):  # no decoder of layers with attention
        return None


def scratch_architecture(config: ScratchConfig, tokenizer: PreTrainedTokenizerBase) -> Any:
    """The Transformers configuration of a model from scratch; its special tokens are the tokenizer's."""
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    try:
        return AutoConfig.for_model(**{**ids, **config.architecture, "vocab_size": len(tokenizer)})
    except Exception as error:  # Transformers checks some values, each in its own way
        raise AgentPeftError(f"policy.architecture: Transformers refuses it: {cause(error)}") from error


def config_at_hand(config: PretrainedConfig | ScratchConfig) -> Any:
    """The Transformers configuration of a policy, as far as it is known without a download: None where it is
    not.

    Raises:
        AgentPeftError: it asks for what is never done, see ``check_config``.
    """
    if isinstance(config, ScratchConfig):
        if ":" in str(config.architecture.get("model_type")):
            return None
        return scratch_architecture(config, character_tokenizer(config.alphabet))
    return config_here(config.model)


def measure(model: Any, lora: LoraSettings | None) -> ModelShape:
    """The shape of a causal language model without an adapter, on any device; ``lora`` is what it is to
    get.
    """
    text = model.config.get_text_config()
    layers = layers_of(model.get_decoder())
    linears = tuple(_linears(layers[0], lora))
    heads = text.num_attention_heads
    mlp = [linear for linear in linears if not linear.attention]
    up, down = (
        sum(linear.outputs for linear in mlp if not linear.last),
        max((x.inputs for x in mlp if x.last), default=text.hidden_size),
    )
    kv_heads, head_size = (
        getattr(text, "num_key_value_heads", None) or heads,
        getattr(text, "head_dim", None) or text.hidden_size // heads,
    )
    norms = {
        name.rpartition(".")[2]: module
        for name, module in layers[0].named_modules()
        if type(module).__name__.endswith("Norm")
    }
    widths = {
        "q": heads * head_size,
        "k": kv_heads * head_size,
    }  # of q_norm and k_norm; others read the hidden state
    kinds = set(getattr(text, "layer_types", None) or ())
    return ModelShape(
        parameters=sum(p.numel() for p in model.parameters()),
        layers=len(layers),
        hidden=text.hidden_size,
        vocabulary=text.vocab_size,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        norms=tuple(widths.get(name.partition("_")[0], text.hidden_size) for name in norms),
        rms=not any(isinstance(norm, nn.LayerNorm) for norm in norms.values()),
        activation=_ACTIVATIONS.get(_activation(text), 1),
        gated=up >= 2 * down,
        eager=model.config._attn_implementation == "eager",
        plain=model.config._attn_implementation == "sdpa" and not getattr(text, "sliding_window", None),
        masks=1 + ("sliding_attention" in kinds and "full_attention" in kinds),
        linears=linears,
    )


def _linears(layer: nn.Module, lora: LoraSettings | None) -> Iterator[LinearShape]:
    """Those of a layer, block by block: the last one of each block is written last in every model there
    is.
    """
    blocks: dict[str, list[tuple[str, nn.Module]]] = {}
    for name, module in layer.named_modules():
        if _is_linear(module):
            blocks.setdefault(name.rpartition(".")[0], []).append((name, module))
    for block, members in blocks.items():
        for place, (name, module) in enumerate(members):
            targets = lora.target_modules if lora is not None else []
            adapted = targets == "all-linear" or any(
                name == target or name.endswith(f".{target}") for target in targets
            )
            yield LinearShape(
                name,
                *_sizes(module),
                "attn" in block or "attention" in block,
                place == len(members) - 1,
                adapted,
            )


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | Conv1D)


def _sizes(module: Any) -> tuple[int, int]:
    return (module.nx, module.nf) if isinstance(module, Conv1D) else (module.in_features, module.out_features)


def _activation(text: Any) -> str:
    names = ("hidden_activation", "hidden_act", "activation_function")
    return str(next((found for name in names if (found := getattr(text, name, None))), ""))
