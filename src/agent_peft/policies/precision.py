"""The choice of the dtype that a policy computes in."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from agent_peft.hardware import CACHED_WEIGHTS, choose_device, has_bf16
from agent_peft.hub import hub_or_cache
from agent_peft.policies.config import PretrainedConfig, ScratchConfig
from agent_peft.policies.forward.products import PRODUCTS, best_seconds, choose_library
from agent_peft.policies.models.bundled import resolve_model
from agent_peft.policies.models.pretrained import read_model_config
from agent_peft.policies.models.shape import shape_of
from agent_peft.policies.models.start import start_of

logger = logging.getLogger(__name__)

MIN_SPEEDUP = 1.25  # of bfloat16 on a CPU, since float32 is exact
ROWS = 256  # of the timed products: between the rows of a decode step and those of a microbatch
WIDEST = 16_384  # of the timed products: wider ones take more memory and show no more
TRIALS, SECONDS = 5, 0.02  # trials of each dtype, and seconds of each trial


@dataclass(frozen=True)
class Precision:
    """A dtype, and the reason for it in a few words."""

    dtype: torch.dtype
    reason: str

    @property
    def name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def choose_precision(config: PretrainedConfig | ScratchConfig, *, fetch: bool = False) -> Precision:
    """The dtype that ``policy.dtype`` asks for.

    ``auto`` is bfloat16 on a GPU that multiplies it natively. On a CPU it is bfloat16 if the CPU multiplies
    it natively, the model is large, and a measurement of a quarter of a second shows a speedup of
    ``MIN_SPEEDUP``. bfloat16 that would be emulated gets a warning.

    Args:
        fetch: where the size of the model decides, fetch what it follows from: a bundled model, the converted
            GGUF file or the configuration of a hub model. Otherwise a model that is not on this machine gets
            float32, and the same configuration would get another dtype once it is there.
    """
    device = choose_device(config.device)
    if config.dtype == "float32":
        return Precision(torch.float32, "policy.dtype")
    if config.dtype == "bfloat16":
        if not has_bf16(device):
            logger.warning(
                "policy.dtype: bfloat16 is emulated on this %s, several times slower than float32: "
                "set policy.dtype=auto",
                "CPU" if device.type == "cpu" else torch.cuda.get_device_name(device),
            )
        return Precision(torch.bfloat16, "policy.dtype")
    if not has_bf16(device):
        return Precision(
            torch.float32,
            f"this {'CPU' if device.type == 'cpu' else 'GPU'} does not multiply bfloat16 natively",
        )
    if device.type != "cpu":
        return Precision(torch.bfloat16, "this GPU multiplies bfloat16 natively")
    if (shape := shape_of(config)) is None and fetch and isinstance(config, PretrainedConfig):
        shape = shape_of(_fetched(config))
    if shape is None:
        unknown = "the sizes of the model's layers are not known"
        later = "a run fetches the model first; its size then decides"
        return Precision(torch.float32, unknown if fetch else later)
    if shape.multiplied < CACHED_WEIGHTS:
        return Precision(torch.float32, "matrix products take little of the time of so small a model")
    hidden, middle = shape.hidden, max(max(linear.inputs, linear.outputs) for linear in shape.linears)
    times = speed_of_bf16(min(hidden, WIDEST), min(middle, WIDEST), torch.get_num_threads())
    dtype = torch.bfloat16 if times >= MIN_SPEEDUP else torch.float32
    return Precision(
        dtype,
        f"this CPU multiplies bfloat16 {times:.1f} times as fast as float32; auto asks for {MIN_SPEEDUP}",
    )


def _fetched(config: PretrainedConfig) -> PretrainedConfig:
    """The model that the policy starts from, on this machine."""
    model = resolve_model(start_of(config).model)
    if not Path(model).is_dir():
        with suppress(Exception), hub_or_cache():  # loading the model reports more
            read_model_config(model)
    return PretrainedConfig(model=model, lora=config.lora)


@cache
def speed_of_bf16(inputs: int, outputs: int, threads: int) -> float:
    """The speedup of bfloat16 over fp32 on this CPU, for products of (ROWS, inputs) and (inputs, outputs).

    Args:
        threads: the number of torch's threads; it only distinguishes cached results.
    """

    def product(dtype: torch.dtype) -> Callable[[], torch.Tensor]:
        x, weight = torch.ones(ROWS, inputs, dtype=dtype), torch.ones(outputs, inputs, dtype=dtype)
        multiply = PRODUCTS[choose_library("auto", x.device, dtype).name]
        return lambda: multiply(x, weight)

    best = best_seconds({dtype: product(dtype) for dtype in (torch.float32, torch.bfloat16)}, TRIALS, SECONDS)
    return best[torch.float32] / best[torch.bfloat16]
