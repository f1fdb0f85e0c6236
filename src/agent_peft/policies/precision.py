"""Which dtype a policy computes in, and why."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from agent_peft.hardware import choose_device, has_bf16
from agent_peft.policies.config import PretrainedConfig, ScratchConfig
from agent_peft.policies.engine.onednn_linear import LEAST
from agent_peft.policies.models.shape import shape_of

logger = logging.getLogger(__name__)

WORTH = 1.25  # how many times as fast bfloat16 must be on a CPU: float32 is exact
ROWS = 256  # of the products that are timed: between a decode step's and a microbatch's
TRIALS, SECONDS = 5, 0.1  # of each dtype, and of each trial


@dataclass(frozen=True)
class Precision:
    """A dtype, and in a few words what speaks for it."""

    dtype: torch.dtype
    reason: str

    @property
    def name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def choose_precision(config: PretrainedConfig | ScratchConfig) -> Precision:
    """What ``policy.dtype`` says. ``auto`` is bfloat16 on a GPU that has it, and on a CPU that multiplies it
    by itself, where a model is large enough for products to matter and a measurement of a second says that
    they are faster. bfloat16 where it is emulated is told.
    """
    device = choose_device(config.device)
    if config.dtype == "float32":
        return Precision(torch.float32, "policy.dtype")
    if config.dtype == "bfloat16":
        if not has_bf16(device):
            logger.warning(
                "policy.dtype: bfloat16 is emulated on this %s, several times slower than float32: set policy.dtype=auto",
                "CPU" if device.type == "cpu" else torch.cuda.get_device_name(device),
            )
        return Precision(torch.bfloat16, "policy.dtype")
    if not has_bf16(device):
        return Precision(
            torch.float32,
            f"this {'CPU' if device.type == 'cpu' else 'GPU'} does not multiply bfloat16 by itself",
        )
    if device.type != "cpu":
        return Precision(torch.bfloat16, "this GPU multiplies bfloat16 by itself")
    if (shape := shape_of(config)) is None:
        return Precision(torch.float32, "the model's size is not known before it is loaded")
    if shape.multiplied < LEAST:
        return Precision(torch.float32, "products of so small a model take little of the time")
    middle = max(max(linear.inputs, linear.outputs) for linear in shape.linears)
    times = speed_of_bf16(shape.hidden, middle, torch.get_num_threads())
    dtype = torch.bfloat16 if times >= WORTH else torch.float32
    return Precision(
        dtype, f"this CPU multiplies bfloat16 {times:.1f} times as fast as float32; {WORTH} is worth it"
    )


@cache
def speed_of_bf16(inputs: int, outputs: int, threads: int) -> float:
    """How many times as fast as in fp32 this CPU multiplies (ROWS, inputs) by (inputs, outputs) in bfloat16:
    the best of a few trials of each, in turn.

    Args:
        threads: of torch, by which an answer is remembered.
    """
    best = {torch.float32: float("inf"), torch.bfloat16: float("inf")}
    products = {dtype: _product(dtype, inputs, outputs) for dtype in best}
    for _ in range(TRIALS):
        for dtype, product in products.items():
            begin, count = time.perf_counter(), 0
            while time.perf_counter() - begin < SECONDS or not count:
                product()
                count += 1
            best[dtype] = min(best[dtype], (time.perf_counter() - begin) / count)
    return best[torch.float32] / best[torch.bfloat16]


def _product(dtype: torch.dtype, inputs: int, outputs: int) -> Callable[[], torch.Tensor]:
    x, weight = torch.ones(ROWS, inputs, dtype=dtype), torch.ones(outputs, inputs, dtype=dtype)
    with torch.no_grad():
        torch.nn.functional.linear(x, weight)  # the first one makes the kernel
    return lambda: torch.nn.functional.linear(x, weight)
