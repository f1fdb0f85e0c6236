"""A linear layer with its LoRA adapter as one operation: W x + s B A x, and one backward for both.

PEFT's own adds two outputs, which reads and writes everything that the layer gives three times over, and so does its gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class _Sum(torch.autograd.Function):
    """(n, out) of x (n, in), W (out, in), A (rank, in) and B (out, rank); W is not trained."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float) -> Tensor:
        low = (x @ a.T).mul_(scaling)
        ctx.save_for_backward(x, weight, a, b, low)
        ctx.scaling = scaling
        return nn.functional.linear(x, weight, bias).addmm_(low, b.T)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, Tensor, Tensor, None]:
        x, weight, a, b, low = ctx.saved_tensors
        below = (gradient @ b).mul_(ctx.scaling)
        of_x = (gradient @ weight).addmm_(below, a) if ctx.needs_input_grad[0] else None
        return of_x, None, None, below.T @ x, gradient.T @ low, None


class FusedLoraLinear(LoraLinear):
    """PEFT's layer; where it is more than this sum (dropout that acts, several precisions, adapter off), it computes it itself."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs or not self._plain(x):
            return super().forward(x, *args, **kwargs)
        base, (name,) = self.get_base_layer(), self.active_adapters
        a, b = self.lora_A[name].weight, self.lora_B[name].weight
        found: Tensor = _Sum.apply(x.flatten(0, -2), base.weight, base.bias, a, b, self.scaling[name])  # type: ignore[no-untyped-call]
        return found.view(*x.shape[:-1], -1)

    def _plain(self, x: Tensor) -> bool:
        base, names = self.get_base_layer(), self.active_adapters
        if self.disable_adapters or self.merged or len(names) != 1 or names[0] not in self.lora_A:
            return False
        (name,) = names
        dropout, weights = self.lora_dropout[name], [base.weight, self.lora_A[name].weight, self.lora_B[name].weight]
        drops = dropout.training and not isinstance(dropout, nn.Identity)  # a policy sets these alone to train
        if drops or name in self.lora_variant or self.lora_bias[name] or type(base) is not nn.Linear or base.weight.requires_grad:
            return False
        return all(weight.dtype == x.dtype for weight in weights) and not torch.is_autocast_enabled(x.device.type)
