"""The matrix products of linear layers on a CPU: torch's own (MKL on x86), or oneDNN's where that is faster.

In fp32, MKL reaches about half of oneDNN's speed on some AMD CPUs. Only large products in fp32 have a choice:
in 16 bits torch's own product is oneDNN's, and that of a narrow matrix, such as A or B of an adapter, was
faster in MKL where it was measured (an Intel Xeon). Both results are equal up to rounding.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MethodType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

logger = logging.getLogger(__name__)

MIN_SPEEDUP = 1.15  # of oneDNN, so that noise does not choose it
FEWEST, NARROWEST = 32, 128  # rows, and inputs or outputs, from which on oneDNN may be faster
ROWS, WIDTH, TRIALS = 256, 512, 9  # of the timed products, which take about 40 ms
K = TypeVar("K")

Product = Callable[..., Tensor]  # (n, out) from x (n, in), W (out, in) and the bias, if there is one


@dataclass(frozen=True)
class Library:
    """``torch`` or ``onednn``, and the reason for it in a few words."""

    name: str
    reason: str


def choose_library(configured: str, device: torch.device, dtype: torch.dtype) -> Library:
    """The library that ``policy.matmul`` asks for. ``auto`` is oneDNN if a measurement of milliseconds shows
    a speedup of ``MIN_SPEEDUP``. A library that does not exist here gets a warning, and torch's own is used.
    """
    if dtype != torch.float32 or device.type != "cpu" or not has_onednn():
        reason = "onednn is for float32 on a CPU" if has_onednn() else "this torch has no oneDNN"
        if configured == "onednn":
            logger.warning("policy.matmul: torch's own products are used, equal up to rounding: %s", reason)
        return Library("torch", reason)
    if configured != "auto":
        return Library(configured, "policy.matmul")
    times = speed_of_onednn()
    name = "onednn" if times >= MIN_SPEEDUP else "torch"
    return Library(name, f"oneDNN is {times:.1f} times as fast as torch's own; auto asks for {MIN_SPEEDUP}")


def has_onednn() -> bool:
    """Whether torch has oneDNN's linear layer, which is not a public part of it: torch's compiler uses it."""
    return hasattr(torch.ops.mkldnn, "_linear_pointwise") and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


@cache
def speed_of_onednn() -> float:
    """The speedup of oneDNN over torch's own product in fp32 on this CPU, forward and backward together. It
    is in CPU seconds of one thread, which other processes do not change.
    """
    x, weight, threads = torch.ones(ROWS, WIDTH), torch.ones(WIDTH, WIDTH), torch.get_num_threads()

    def both(product: Product) -> Callable[[], object]:
        return lambda: (product(x, weight), product(x, weight.T))

    torch.set_num_threads(1)
    try:
        works = {name: both(product) for name, product in PRODUCTS.items()}
        best = best_seconds(works, TRIALS, clock=time.thread_time)
    finally:
        torch.set_num_threads(threads)
    return best["torch"] / best["onednn"]


def best_seconds(
    works: Mapping[K, Callable[[], object]],
    trials: int,
    seconds: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[K, float]:
    """The seconds of each work, the best of a few alternating trials. A trial repeats it for ``seconds``."""
    best = dict.fromkeys(works, float("inf"))
    with torch.no_grad():
        for _ in range(trials):
            for name, work in works.items():
                begin, count = clock(), 0
                while not count or clock() - begin < seconds:
                    work()
                    count += 1
                best[name] = min(best[name], (clock() - begin) / count)
    return best


def onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``linear`` by oneDNN, which reads W and its transpose where they are. No gradient is recorded."""
    if len(x) >= FEWEST and x.dtype == weight.dtype == torch.float32:
        try:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
            return out
        except RuntimeError:  # it has no kernel for this layout
            pass
    return linear(x, weight, bias)


PRODUCTS: Mapping[str, Product] = {"torch": linear, "onednn": onednn}


def product_of(layer: nn.Module) -> Product:
    """The product that the weight of a linear layer is multiplied with."""
    product: Product = getattr(layer, "product", linear)
    return product


def use_onednn(model: nn.Module) -> None:
    """Let each wide linear layer of ``model`` (in place) multiply by oneDNN, forward and backward."""
    for layer in model.modules():
        if type(layer) in (nn.Linear, Conv1D) and min(cast(Tensor, layer.weight).shape) >= NARROWEST:
            layer.product = onednn  # type: ignore[assignment]
            layer.forward = MethodType(_forward, layer)


def _forward(layer: nn.Linear | Conv1D, x: Tensor) -> Tensor:
    if torch.is_autocast_enabled(x.device.type):
        return type(layer).forward(layer, x)  # type: ignore[arg-type]
    weight = layer.weight if isinstance(layer, nn.Linear) else layer.weight.T
    out: Tensor = _Linear.apply(x.reshape(-1, x.shape[-1]), weight, layer.bias)  # type: ignore[no-untyped-call]
    return out.view(*x.shape[:-1], -1)


class _Linear(torch.autograd.Function):
    """(n, out) from x (n, in), W (out, in) and the bias (out), each trained or not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return onednn(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            onednn(gradient, weight.T) if of_x else None,
            onednn(gradient.T, x.T) if of_weight else None,
            gradient.sum(0) if of_bias else None,
        )
