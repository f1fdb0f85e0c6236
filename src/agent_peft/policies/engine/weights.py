"""The weights that the sampler computes with: the adapter folded in, and in oneDNN's layout on a CPU.

In fp32 the adapter is folded into the weights, so that sampling pays nothing for it. In 16 bits a weight
``W + s B A`` would be rounded to W wherever ``s B A`` is less than half a unit in its last place, so there
the adapter is computed separately from the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import cast

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from agent_peft.policies.adapters import ADAPTER, delta_of, factors, lora_layers
from agent_peft.policies.engine.onednn_linear import OneDnnLinear, OneDnnLoraLinear, onednn_layers
from agent_peft.policies.policy import Policy


@contextmanager
def sampling_weights(policy: Policy, onednn: bool, adapter: bool = True) -> Iterator[None]:
    """Inside, the policy's layers are prepared for sampling, and no gradient is recorded.

    Args:
        onednn: also lay the weights out for oneDNN, which pays for many forwards.
        adapter: False turns the adapter off; then ``onednn`` must be False, too.
    """
    with torch.no_grad(), ExitStack() as stack:
        if isinstance(policy.model, PeftModel) and not adapter:
            stack.enter_context(policy.model.disable_adapter())
        elif isinstance(policy.model, PeftModel) and policy.dtype == torch.float32:
            stack.enter_context(merged_lora(policy.model, OneDnnLinear if onednn else None))
        elif isinstance(policy.model, PeftModel) and onednn:
            stack.enter_context(beside(policy.model))
        if onednn:
            stack.enter_context(onednn_layers(policy.base))
        yield


@contextmanager
def merged_lora(
    model: nn.Module, linear: Callable[[Tensor, Tensor | None], nn.Module] | None = None
) -> Iterator[None]:
    """Context manager: each LoRA layer becomes a plain linear layer with weight ``W + s B A``. No dropout.

    The original modules and parameters come back afterwards, also after an exception, so no bit of W can
    drift. Do not train, save, nest, or ask for the reference inside.

    Args:
        model: one with LoRA layers, on any device. W + s B A is computed in fp32 and rounded once to W's
            dtype.
        linear: makes the layers from weight and bias, in place of plain linear ones. Layers of other kinds
            (GPT-2's Conv1D) stay as they are.
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
                if linear is not None and type(base) is nn.Linear:
                    setattr(parent, child, linear(weight, base.bias))
                else:
                    base.weight = nn.Parameter(weight, requires_grad=False)
                    setattr(parent, child, base)
        yield
    finally:
        for parent, child, layer, base, original in replaced:
            base.weight = original
            setattr(parent, child, layer)


@contextmanager
def beside(model: nn.Module) -> Iterator[None]:
    """Inside, each LoRA layer multiplies by W in oneDNN's layout, and adds ``s B A x`` to that product.

    An adapter that was not trained yet, whose B is 0, costs nothing. As with ``merged_lora``, the original
    modules come back afterwards. A and B are read once: do not train inside.
    """
    replaced: list[tuple[nn.Module, str, LoraLayer]] = []
    try:
        for name, layer in lora_layers(model):
            parent_name, _, child = name.rpartition(".")
            parent, base = model.get_submodule(parent_name), layer.get_base_layer()
            weight, (a, b) = cast(Tensor, base.weight), factors(layer)
            if getattr(layer, "fan_in_fan_out", False):
                weight = weight.T
            replaced.append((parent, child, layer))
            low_rank = a.to(weight.dtype), b.to(weight.dtype)
            bias, scaling = cast(Tensor | None, base.bias), layer.scaling[ADAPTER]
            prepared = (
                OneDnnLoraLinear(weight, bias, *low_rank, scaling) if b.any() else OneDnnLinear(weight, bias)
            )
            setattr(parent, child, prepared)
        yield
    finally:
        for parent, child, layer in replaced:
            setattr(parent, child, layer)
