"""The weights that the sampler computes with: the adapter folded in, and in oneDNN's layout on a CPU.

In fp32 the adapter is folded into the weights, so that sampling pays nothing for it. In 16 bits a weight
``W + s B A`` would be rounded to W wherever ``s B A`` is less than half a unit in its last place, so there
the adapter is computed separately from the weights.

A decode step multiplies a few rows by weights that do not fit into the caches. A plain matrix product first
copies the weights into the order in which it reads them, at every call; in oneDNN's blocked format that is
done once for all steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import cast

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from agent_peft.hardware import CACHED_WEIGHTS, has_bf16
from agent_peft.policies.adapters import ADAPTER, delta_of, factors, lora_layers
from agent_peft.policies.forward.products import has_onednn
from agent_peft.policies.policy import Policy

ROWS = 32  # the number of rows that the format is chosen for; it works for any


class OneDnnLinear(nn.Module):
    """A linear layer for a CPU that computes, but cannot be trained.

    >>> layer, x = nn.Linear(3, 2), torch.ones(1, 3)
    >>> torch.allclose(OneDnnLinear(layer.weight, layer.bias)(x), layer(x), atol=1e-6)
    True
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.blocked: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), ROWS)
        self.bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.blocked, self.bias, "none", [], "")
        return out

    def plus(self, x: Tensor, more: Tensor) -> Tensor:
        """W x + bias + ``more`` (…, out), rounded once."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, more, self.blocked, self.bias, "add")
        return out


class OneDnnLoraLinear(nn.Module):
    """A linear layer with its LoRA adapter next to it: W keeps its bits, and W x + s B A x is rounded once.

    Args:
        weight: W (out, in), in 16 bits, like ``a``: A (rank, in) and ``b``: B (out, rank).
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float) -> None:
        super().__init__()
        self.base = OneDnnLinear(weight, bias)
        self.a, self.b, self.scaling = a.detach(), b.detach(), scaling

    def forward(self, x: Tensor) -> Tensor:
        return self.base.plus(x, (x @ self.a.T).mul_(self.scaling) @ self.b.T)


def suits(model: nn.Module) -> bool:
    """Whether oneDNN's format may make the model's linear layers faster."""
    weights = [
        m.weight for name, m in model.named_modules() if isinstance(m, nn.Linear) and "lora_" not in name
    ]
    kinds = {(w.device, w.dtype) for w in weights}
    return len(kinds) == 1 and pays_off(*kinds.pop(), sum(w.numel() for w in weights))


def pays_off(device: torch.device, dtype: torch.dtype, weights: int) -> bool:
    """Whether the format exists here and may be faster for so many weights."""
    multiplies = dtype == torch.float32 or (dtype == torch.bfloat16 and has_bf16(device))
    return has_onednn() and device.type == "cpu" and multiplies and weights >= CACHED_WEIGHTS


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


def onednn_layers(model: nn.Module) -> AbstractContextManager[None]:
    """Inside, each plain linear layer of ``model`` is an ``OneDnnLinear``. No gradient, no training."""
    return _replaced(
        (parent, name, OneDnnLinear(child.weight, child.bias))
        for parent in list(model.modules())
        for name, child in list(parent.named_children())
        if type(child) is nn.Linear
    )


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
            stack.enter_context(separate_lora(policy.model))
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


def separate_lora(model: nn.Module) -> AbstractContextManager[None]:
    """Inside, each LoRA layer multiplies by W in oneDNN's layout, and adds ``s B A x`` to that product.

    An adapter that was not trained yet, whose B is 0, costs nothing. A and B are read once: do not train
    inside.
    """

    def prepared(layer: LoraLayer) -> nn.Module:
        base, (a, b) = layer.get_base_layer(), factors(layer)
        weight, bias = cast(Tensor, base.weight), cast(Tensor | None, base.bias)
        if getattr(layer, "fan_in_fan_out", False):
            weight = weight.T
        if not b.any():
            return OneDnnLinear(weight, bias)
        low_rank = a.to(weight.dtype), b.to(weight.dtype)
        return OneDnnLoraLinear(weight, bias, *low_rank, layer.scaling[ADAPTER])

    places = ((name.rpartition("."), layer) for name, layer in lora_layers(model))
    return _replaced(
        (model.get_submodule(parent), child, prepared(layer)) for (parent, _, child), layer in places
    )
