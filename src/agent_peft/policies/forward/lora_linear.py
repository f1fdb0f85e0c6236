"""A linear layer with its LoRA adapter as one operation: W x + s B A x, and one backward for both.

PEFT's own layer adds two outputs. That reads and writes the whole output three times, and the gradient
again. In 16 bits it also rounds W x before it adds s B A x, and so loses a change of less than half a unit
in the last place of W x: of a change of 1e-3 W x, half. Here the matrix product adds W x in its fp32
accumulator to the adapter's output, and the sum is rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.pytorch_utils import Conv1D

from agent_peft.policies.forward.products import Product, product_of


class _Sum(torch.autograd.Function):
    """(n, out) from x (n, in), W (out, in), A (rank, in) and B (out, rank). W is not trained. A and B may
    be fp32 where x and W are in 16 bits. ``product`` multiplies by W in fp32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        scaling: float,
        product: Product,
    ) -> Tensor:
        ctx.scaling, ctx.trained, ctx.product = scaling, a.dtype, product
        a, b = a.to(x.dtype), b.to(x.dtype)
        low = (x @ a.T).mul_(scaling)
        ctx.save_for_backward(x, weight, a, b, low)
        if x.dtype == torch.float32:
            return product(x, weight, bias).addmm_(low, b.T)
        own = low @ b.T if bias is None else torch.addmm(bias, low, b.T)  # with W's bias
        return torch.addmm(own, x, weight.T)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, Tensor, Tensor, None, None]:
        x, weight, a, b, low = ctx.saved_tensors
        below, of_x = (gradient @ b).mul_(ctx.scaling), None
        if ctx.needs_input_grad[0]:
            if x.dtype == torch.float32:
                of_x = ctx.product(gradient, weight.T).addmm_(below, a)
            else:
                of_x = torch.addmm(below @ a, gradient, weight)
        of_a, of_b = (below.T @ x).to(ctx.trained), (gradient.T @ low).to(ctx.trained)
        return of_x, None, None, of_a, of_b, None, None


class FusedLoraLinear(LoraLinear):
    """PEFT's layer. Where the layer is more than this sum (active dropout, autocast, adapter off), PEFT's own
    code computes it.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs or not self._plain(x):
            return super().forward(x, *args, **kwargs)
        base, (name,) = self.get_base_layer(), self.active_adapters
        a, b = self.lora_A[name].weight, self.lora_B[name].weight
        weight = base.weight.T if self.fan_in_fan_out else base.weight
        inputs = x.flatten(0, -2), weight, base.bias, a, b, self.scaling[name], product_of(base)
        out: Tensor = _Sum.apply(*inputs)  # type: ignore[no-untyped-call]
        return out.view(*x.shape[:-1], -1)

    def _plain(self, x: Tensor) -> bool:
        base, names = self.get_base_layer(), self.active_adapters
        if self.disable_adapters or self.merged or len(names) != 1 or names[0] not in self.lora_A:
            return False
        (name,) = names
        dropout, low_rank = self.lora_dropout[name], [self.lora_A[name].weight, self.lora_B[name].weight]
        drops = dropout.training and not isinstance(dropout, nn.Identity)
        if drops or name in self.lora_variant or self.lora_bias[name] or base.weight.requires_grad:
            return False
        if type(base) is not (Conv1D if self.fan_in_fan_out else nn.Linear) or torch.is_autocast_enabled(
            x.device.type
        ):
            return False
        return base.weight.dtype == x.dtype and all(
            weight.dtype in (x.dtype, torch.float32) for weight in low_rank
        )


class FusedLoraConv1D(FusedLoraLinear):
    """The same for GPT-2's linear layer, which keeps its weight transposed."""

    def __init__(self, target: nn.Module, adapter_name: str, config: LoraConfig, **kwargs: Any) -> None:
        config.fan_in_fan_out = True
        super().__init__(target, adapter_name, config=config, is_target_conv_1d_layer=True, **kwargs)
