"""How the policy is prepared for sampling, and restored afterwards."""

from __future__ import annotations

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


def fused_layers(model: nn.Module, below: bool) -> AbstractContextManager[None]:
    """Inside, each linear layer that is a child of ``model``, or anywhere ``below``, is a ``FusedLinear`` for
    oneDNN, with its adapter.
    """
    places = [
        (parent, name, child)
        for path, parent in (model.named_modules() if below else [("", model)])
        if not isinstance(parent, LoraLayer) and "lora_" not in path
        for name, child in parent.named_children()
        if isinstance(child, LoraLayer) or type(child) in (nn.Linear, Conv1D)
    ]
    return _replaced((parent, name, FusedLinear([child], onednn=True)) for parent, name, child in places)


@contextmanager
def sampling_weights(policy: Policy, way: Way, adapter: bool = True) -> Iterator[None]:
    """Inside, the policy is prepared for sampling, and no gradient is recorded. Do not train inside.

    Args:
        way: all but "modules" copy the weights, which pays for many forwards.
        adapter: False turns the adapter off; then ``way`` must be "modules".
    """
    model, decoder, onednn = policy.model, policy.decoder, way != "modules" and suits(policy.base)
    wide, cpu = policy.dtype == torch.float32, policy.device.type == "cpu"
    copies = onednn or (way == "lean" and cpu and (wide or has_bf16(policy.device)))
    with torch.no_grad(), ExitStack() as stack:
        if isinstance(model, PeftModel) and not adapter:
            stack.enter_context(model.disable_adapter())
        elif isinstance(model, PeftModel) and wide and not copies:
            stack.enter_context(merged_lora(model))
        if way == "lean":
            stack.callback(setattr, policy, "decoder", decoder)
            policy.decoder = cast(nn.Module, LeanDecoder(policy, copies, onednn))
        if onednn:
            stack.enter_context(fused_layers(policy.base, below=way == "layers"))
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
