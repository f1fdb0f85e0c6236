"""How the policy is prepared for sampling, and restored afterwards."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Literal, cast

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers.pytorch_utils import Conv1D

from agent_peft.hardware import has_bf16
from agent_peft.policies.adapters import delta_of, lora_layers
from agent_peft.policies.engine.fused_linear import FusedLinear, suits
from agent_peft.policies.engine.lean import LeanDecoder
from agent_peft.policies.policy import Policy

# How the sampler computes: with our decoder, with the model's modules and prepared linear layers,
# or with the model as it is.
Way = Literal["lean", "layers", "modules"]


@contextmanager
def _replaced(children: Iterable[tuple[nn.Module, str, nn.Module]]) -> Iterator[None]:
    """Inside, each child takes its place in its parent; the original modules come back afterwards."""
    originals: list[tuple[nn.Module, str, nn.Module]] = []
    try:
        for parent, name, child in children:
            originals.append((parent, name, getattr(parent, name)))
            setattr(parent, name, child)
        yield
    finally:
        for parent, name, child in originals:
            setattr(parent, name, child)


def fused_layers(model: nn.Module) -> AbstractContextManager[None]:
    """Inside, each linear layer of ``model`` is a ``FusedLinear`` for oneDNN, with its adapter."""
    places = [
        (parent, name, child)
        for path, parent in model.named_modules()
        if not isinstance(parent, LoraLayer) and "lora_" not in path
        for name, child in parent.named_children()
        if _can_fuse(child)
    ]
    return _replaced((parent, name, FusedLinear([child], onednn=True)) for parent, name, child in places)


def _can_fuse(layer: nn.Module) -> bool:
    return isinstance(layer, LoraLayer) or type(layer) in (nn.Linear, Conv1D)


def lean_copy(policy: Policy) -> Policy:
    """A policy that samples with our decoder, which has copies of the linear layers' weights where that is
    faster (``copies_weights``). All else is shared. Its forward does not train.
    """
    copied, onednn = copy.copy(policy), suits(policy.base)
    with torch.no_grad():
        copied.decoder = cast(nn.Module, LeanDecoder(policy, copies_weights(policy), onednn))
        if onednn and _can_fuse(policy.head):
            copied.own_head = FusedLinear([policy.head], onednn=True)
    return copied


def copies_weights(policy: Policy) -> bool:
    """Whether our decoder copies the weights: always on a CPU, unless it emulates bfloat16."""
    wide = policy.dtype == torch.float32
    return suits(policy.base) or (policy.device.type == "cpu" and (wide or has_bf16(policy.device)))


@contextmanager
def sampling_weights(policy: Policy, way: Way, adapter: bool = True) -> Iterator[None]:
    """Inside, the policy is prepared for sampling, and no gradient is recorded. Do not train inside.

    Args:
        way: all but "modules" copy the weights, which pays for many forwards.
        adapter: False turns the adapter off; then ``way`` must be "modules".
    """
    model, copies = policy.model, way != "modules" and suits(policy.base)
    copies = copies or (way == "lean" and copies_weights(policy))
    with torch.no_grad(), ExitStack() as stack:
        if isinstance(model, PeftModel) and not adapter:
            stack.enter_context(model.disable_adapter())
        elif isinstance(model, PeftModel) and policy.dtype == torch.float32 and not copies:
            stack.enter_context(merged_lora(model))
        if way == "lean":
            stack.callback(vars(policy).update, decoder=policy.decoder, own_head=policy.own_head)
            vars(policy).update(vars(lean_copy(policy)))
        elif copies:
            stack.enter_context(fused_layers(policy.base))
        yield


@contextmanager
def merged_lora(model: nn.Module) -> Iterator[None]:
    """Context manager: each LoRA layer becomes a plain linear layer with weight ``W + s B A``. No dropout.

    The original modules and parameters come back afterwards, also after an exception, so no bit of W can
    drift. Do not train, save, nest, or ask for the reference inside.

    Args:
        model: one with LoRA layers, on any device. W + s B A is computed in fp32 and rounded once to W's
            dtype.
    """
    replaced: list[tuple[nn.Module, str, LoraLayer, nn.Module, nn.Parameter]] = []
    try:
        with torch.no_grad():
            for name, layer in lora_layers(model):
                parent_name, _, child = name.rpartition(".")
                parent, base = model.get_submodule(parent_name), layer.get_base_layer()
                original = cast(nn.Parameter, base.weight)
                weight = (original.float() + delta_of(layer)).to(original.dtype)
                replaced.append((parent, child, layer, base, original))
                base.weight = nn.Parameter(weight, requires_grad=False)
                setattr(parent, child, base)
        yield
    finally:
        for parent, child, layer, base, original in replaced:
            base.weight = original
            setattr(parent, child, layer)
