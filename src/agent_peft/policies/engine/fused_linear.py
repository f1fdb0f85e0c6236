"""Linear layers of the sampler: several as one product, the adapter folded in or next to them, in oneDNN's
layout on a CPU.

In fp32 the adapter is folded into the weights, so that sampling pays nothing for it. In 16 bits a weight
``W + s B A`` would be rounded to W wherever ``s B A`` is less than half a unit in its last place. There the
columns of ``s B`` are next to those of W, and ``A x`` below x: one product, whose sum is rounded once.

A decode step multiplies a few rows by weights that do not fit into the caches. A plain matrix product first
copies the weights into the order in which it reads them, at every call; in oneDNN's blocked format that is
done once for all steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from agent_peft.hardware import CACHED_WEIGHTS, has_bf16
from agent_peft.policies.adapters import ADAPTER, delta_of, factors
from agent_peft.policies.forward.products import has_onednn

ROWS = 32  # the number of rows that the format is chosen for; it works for any


class FusedLinear(nn.Module):
    """Linear layers that read the same input, as one product without gradient: x (…, in) to (…, Σ out).

    The weights are copied: an update of the adapter does not reach them.

    Args:
        layers: ``nn.Linear``, ``Conv1D``, or LoRA layers around them.
        onednn: lay the weights out for oneDNN, which pays for many products with few rows.

    >>> one, two, x = nn.Linear(3, 2), nn.Linear(3, 1), torch.ones(1, 3)
    >>> torch.allclose(FusedLinear([one, two], onednn=True)(x), torch.cat([one(x), two(x)], -1), atol=1e-6)
    True
    """

    def __init__(self, layers: Sequence[nn.Module], onednn: bool) -> None:
        super().__init__()
        self.onednn = onednn
        weights, biases, adapters = zip(*map(_parts, layers), strict=True)
        weight, self.a, self.bias = torch.cat(weights), None, None
        if any(bias is not None for bias in biases):
            absent = [w.new_zeros(len(w)) for w in weights]
            self.bias = torch.cat([a if b is None else b for a, b in zip(absent, biases, strict=True)])
        if any(adapter is not None for adapter in adapters):
            absent = [(torch.zeros(0, w.shape[1], device=w.device), w.new_zeros(len(w), 0)) for w in weights]
            a, b = zip(*(one or none for one, none in zip(adapters, absent, strict=True)), strict=True)
            self.a = torch.cat(a)
            weight = torch.cat([weight, torch.block_diag(*b)], 1)  # type: ignore[no-untyped-call]
        self.weight: Tensor = weight
        if onednn:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS)

    def forward(self, x: Tensor) -> Tensor:
        x = self._beside(x)
        if self.onednn:
            return cast(Tensor, torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], ""))
        return functional.linear(x, self.weight, self.bias)

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """The product plus ``residual`` (…, Σ out), rounded once with oneDNN."""
        if not self.onednn:
            return self.forward(x).add_(residual)
        inputs = self._beside(x), residual, self.weight, self.bias
        return cast(Tensor, torch.ops.mkldnn._linear_pointwise.binary(*inputs, "add"))

    def _beside(self, x: Tensor) -> Tensor:
        if self.a is None:
            return x
        # a product so small is faster in fp32, which has no preparation
        return torch.cat([x, functional.linear(x.float(), self.a).to(x.dtype)], -1)


def _parts(layer: nn.Module) -> tuple[Tensor, Tensor | None, tuple[Tensor, Tensor] | None]:
    """W (out, in), with the adapter folded in if it is in fp32; the bias; otherwise A (rank, in) in fp32
    and s B (out, rank). An adapter that was not trained yet, whose B is 0, costs nothing.
    """
    lora = layer if isinstance(layer, LoraLayer) else None
    base = layer if lora is None else lora.get_base_layer()
    weight, bias = cast(Tensor, base.weight).detach(), cast(Tensor | None, base.bias)
    adapter = None
    if lora is not None and weight.dtype == torch.float32:
        weight = weight + delta_of(lora)
    elif lora is not None:
        a, b = (factor.detach() for factor in factors(lora))
        if b.any():
            adapter = a.float(), (b * lora.scaling[ADAPTER]).to(weight.dtype)
    if isinstance(base, Conv1D):
        weight = weight.T
    return weight, None if bias is None else bias.detach(), adapter


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
