"""Linear layers with their weights in oneDNN's blocked memory format, for sampling on a CPU.

A decode step multiplies a few rows by weights that do not fit into the caches. A plain matrix product first
copies the weights into the order in which it reads them, at every call; here that is done once for all steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from agent_peft.hardware import CACHED_WEIGHTS, has_bf16

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
    """Whether the format exists here and may be faster for so many weights. It is no public part of torch,
    whose compiler uses it.
    """
    exists = hasattr(torch.ops.mkldnn, "_linear_pointwise") and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    multiplies = dtype == torch.float32 or (dtype == torch.bfloat16 and has_bf16(device))
    return exists and device.type == "cpu" and multiplies and weights >= CACHED_WEIGHTS


@contextmanager
def onednn_layers(model: nn.Module) -> Iterator[None]:
    """Inside, each plain linear layer of ``model`` is an ``OneDnnLinear``. No gradient, no training."""
    replaced: list[tuple[nn.Module, str, nn.Linear]] = []
    try:
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.Linear:
                    replaced.append((parent, name, child))
                    setattr(parent, name, OneDnnLinear(child.weight, child.bias))
        yield
    finally:
        for parent, name, child in replaced:
            setattr(parent, name, child)
