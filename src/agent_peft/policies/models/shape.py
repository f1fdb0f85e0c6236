"""The sizes of a model, from its configuration. The model is built without weights, so this costs neither
memory nor a download.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from agent_peft.files import check_regular
from agent_peft.lookup import may_import
from agent_peft.policies.config import LoraSettings, PretrainedConfig, ScratchConfig
from agent_peft.policies.models import bundled
from agent_peft.policies.models.pretrained import (
    build_model,
    cause,
    read_model_config,
)
from agent_peft.policies.models.start import start_of
from agent_peft.policies.models.tokenizer import character_tokenizer
from agent_peft.types import AgentPeftError

# Tensors as wide as the MLP that an activation function keeps for its backward, without its output. A
# function that is one kernel keeps 1: its input.
_ACTIVATIONS = {"quick_gelu": 2, "relu": 0}


@dataclass(frozen=True)
class LinearShape:
    """A linear layer.

    ``last`` marks the block's output projection (o_proj, down_proj). The block's other layers all read the
    block's input.
    """

    name: str
    inputs: int
    outputs: int
    attention: bool  # in the attention block, else in the MLP
    last: bool
    adapted: bool


@dataclass(frozen=True)
class ModelShape:
    """The sizes on which memory depends. All layers are taken to be like the first."""

    parameters: int
    layers: int
    hidden: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_size: int
    norms: tuple[int, ...]  # widths of the norms of the first layer
    rms: bool  # the norms are several operations in fp32, otherwise one kernel
    activation: int  # see _ACTIVATIONS
    gated: bool
    eager: bool  # attention keeps its scores
    masks: int  # 2 where there are full and sliding layers, otherwise 1
    plain: bool  # attention adds nothing to its scores, so ours may replace it
    linears: tuple[LinearShape, ...]  # of the first layer
    stored: int = 0  # bytes per number in the model's file; 0 if it has none

    @property
    def multiplied(self) -> int:
        """Weights of all linear layers, the output layer's included."""
        return (
            self.layers * sum(linear.inputs * linear.outputs for linear in self.linears)
            + self.vocabulary * self.hidden
        )


def shape_of(config: PretrainedConfig | ScratchConfig) -> ModelShape | None:
    """The sizes of a policy's model, or None where they are unknown: for a custom module, a model that is
    not on this machine yet, or one that is not a stack of attention layers.
    """
    if isinstance(config, ScratchConfig) and is_custom(config):
        may_import(config.architecture["model_type"])  # reports the name to a caller that may not import it
    model = config_at_hand(config)
    if model is None:
        return None
    stored = getattr(model.dtype, "itemsize", 0)  # building it forgets the dtype
    noisy = logging.getLogger("transformers")
    level = noisy.level
    noisy.setLevel(logging.ERROR)
    try:
        with torch.device("meta"):
            built = build_model(model)
    finally:
        noisy.setLevel(level)
    try:
        return replace(measure_shape(built, config.lora), stored=stored)
    except (AttributeError, IndexError, TypeError, ZeroDivisionError):  # no decoder of layers with attention
        return None


def is_custom(config: ScratchConfig) -> bool:
    """Whether the architecture is a module of the user's own, ``package.module:Class``."""
    name = config.architecture.get("model_type")
    return isinstance(name, str) and ":" in name


def scratch_architecture(config: ScratchConfig, tokenizer: PreTrainedTokenizerBase) -> Any:
    """The Transformers configuration of a model from scratch; its special tokens are the tokenizer's."""
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    try:
        return AutoConfig.for_model(**{**ids, **config.architecture, "vocab_size": len(tokenizer)})
    except Exception as error:  # Transformers checks some values, each in its own way
        raise AgentPeftError(f"policy.architecture: Transformers refuses it: {cause(error)}") from error


def config_at_hand(config: PretrainedConfig | ScratchConfig) -> Any:
    """The Transformers configuration of a policy, or None where it is not known without a download."""
    if isinstance(config, ScratchConfig):
        if is_custom(config):
            return None
        return scratch_architecture(config, character_tokenizer(config.alphabet))
    try:
        model = start_of(config).model
    except AgentPeftError:  # loading it reports the same
        return None
    return config_here(model)


def measure_shape(model: Any, lora: LoraSettings | None) -> ModelShape:
    """The sizes of a causal language model without an adapter, on any device."""
    text = model.config.get_text_config()
    layers = layers_of(model.get_decoder())
    linears = tuple(_linears(layers[0], lora))
    heads = text.num_attention_heads
    mlp = [linear for linear in linears if not linear.attention]
    up = sum(linear.outputs for linear in mlp if not linear.last)
    down = max((linear.inputs for linear in mlp if linear.last), default=text.hidden_size)
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    head_size = getattr(text, "head_dim", None) or text.hidden_size // heads
    norms = {
        name.rpartition(".")[2]: module
        for name, module in layers[0].named_modules()
        if type(module).__name__.endswith("Norm")
    }
    # of q_norm and k_norm; others read the hidden state
    widths = {"q": heads * head_size, "k": kv_heads * head_size}
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


def layers_of(decoder: nn.Module) -> list[nn.Module]:
    """The layers that Transformers would checkpoint. Of a custom module: the members of its
    ``nn.ModuleList`` and ``nn.Sequential`` that have parts.

    >>> block = lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> parts = {"embedding": nn.Embedding(3, 2), "blocks": nn.ModuleList([block(), block()])}
    >>> len(layers_of(nn.ModuleDict(parts)))
    2
    """
    layers: list[nn.Module] = [
        module for module in decoder.modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    if not layers:
        lists = [module for module in decoder.modules() if isinstance(module, nn.ModuleList | nn.Sequential)]
        members = [member for one in lists for member in one if any(member.children())]
        inside = {id(part) for member in members for part in member.modules() if part is not member}
        layers = [member for member in members if id(member) not in inside]
    if not layers:
        raise AgentPeftError(
            "policy.activation_checkpointing: the model has no nn.ModuleList of layers whose activations "
            "could be computed again; set it to false"
        )
    return layers


def _linears(layer: nn.Module, lora: LoraSettings | None) -> Iterator[LinearShape]:
    """The linear layers of a layer, block by block; the output projection is a block's last one."""
    blocks: dict[str, list[tuple[str, nn.Linear | Conv1D]]] = {}
    for name, module in layer.named_modules():
        if isinstance(module, nn.Linear | Conv1D):
            blocks.setdefault(name.rpartition(".")[0], []).append((name, module))
    for block, members in blocks.items():
        for place, (name, module) in enumerate(members):
            targets = lora.target_modules if lora is not None else []
            adapted = targets == "all-linear" or any(
                name == target or name.endswith(f".{target}") for target in targets
            )
            outputs, inputs = module.weight.T.shape if isinstance(module, Conv1D) else module.weight.shape
            yield LinearShape(
                name,
                inputs,
                outputs,
                "attn" in block or "attention" in block,
                place == len(members) - 1,
                adapted,
            )


def _activation(text: Any) -> str:
    names = ("hidden_activation", "hidden_act", "activation_function")
    return str(next((name for key in names if (name := getattr(text, key, None))), ""))


def config_here(name: str) -> PreTrainedConfig | None:
    """The configuration of a bundled model, a folder or a hub id, without a download. It is None if it is
    not on this machine, or damaged.
    """
    config: PreTrainedConfig | None = read_here(name, read_model_config)
    return config


def read_here(name: str, read: Callable[..., Any]) -> Any:
    """What ``read`` returns for a model, or None if it is not on this machine, or damaged."""
    folder = bundled.cached(name) if name in bundled.BUNDLED else Path(name)
    if folder is None or folder.suffix == ".gguf":
        return None
    check_regular(folder)
    try:
        return read(str(folder), download=False)
    except AgentPeftError:
        raise
    except Exception:  # loading the model reports more
        return None
