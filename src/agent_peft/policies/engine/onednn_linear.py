"""Weights in oneDNN's blocked layout while sampling on a CPU.

A decode step multiplies a few rows by weights that are too many for the caches. A plain matrix product first
copies the weights into the order in which it reads them, at every call; here that is done once for all steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from agent_peft.hardware import has_bf16

ROWS = 32  # the number of rows that the layout is chosen for; it works for any
LEAST = 1 << 24  # parameters: fewer stay in the caches


class BlockedLinear(nn.Module):
    """A linear layer that can only be computed, not trained, on a CPU.

    >>> layer = nn.Linear(3, 2)
    >>> torch.allclose(BlockedLinear(layer.weight, layer.bias)(torch.ones(1, 3)), layer(torch.ones(1, 3)), atol=1e-6)
    True
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.blocked: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), ROWS)
        self.bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.blocked, self.bias, "none", [], "")
        return found

    def plus(self, x: Tensor, more: Tensor) -> Tensor:
        """W x + bias + ``more`` (…, out), rounded once."""
        found: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, more, self.blocked, self.bias, "add")
        return found


class BlockedLora(nn.Module):
    """A linear layer and its LoRA adapter, side by side: W keeps its bits, and W x + s B A x is rounded once.

    Args:
        weight: W (out, in), in 16 bits, as ``a``: A (rank, in) and ``b``: B (out, rank) are.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float) -> None:
        super().__init__()
        self.base = BlockedLinear(weight, bias)
        self.a, self.b, self.scaling = a.detach(), b.detach(), scaling

    def forward(self, x: Tensor) -> Tensor:
        return self.base.plus(x, (x @ self.a.T).mul_(self.scaling) @ self.b.T)


def worth_it(model: nn.Module) -> bool:
    """Whether ``model``'s linear layers may be faster so."""
    weights = [
        m.weight for name, m in model.named_modules() if isinstance(m, nn.Linear) and "lora_" not in name
    ]
    alike = {(w.device, w.dtype) for w in weights}
    return len(alike) == 1 and pays(*alike.pop(), sum(w.numel() for w in weights))


def pays(device: torch.device, dtype: torch.dtype, weights: int) -> bool:
    """Whether the layout exists here (torch's own compiler uses it, but it is no public name) and may pay
    for so many weights.
    """
    exists = hasattr(torch.ops.mkldnn, "_linear_pointwise") and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    multiplies = dtype == torch.float32 or (dtype == torch.bfloat16 and has_bf16(device))
    return exists and device.type == "cpu" and multiplies and weights >= LEAST


@contextmanager
def blocked(model: nn.Module) -> Iterator[None]:
    """Inside, each linear layer of ``model`` is a blocked one. No gradient, no training."""
    replaced: list[tuple[nn.Module, str, nn.Linear]] = []
    try:
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.Linear:
                    replaced.append((parent, name, child))
                    setattr(parent, name, BlockedLinear(child.weight, child.bias))
        yield
    finally:
        for parent, name, child in replaced:
            setattr(parent, name, child)
