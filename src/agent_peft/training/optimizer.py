"""AdamW and the learning rate's schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor
from torch.nn import Parameter
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

Schedule = Literal["constant", "linear", "cosine"]


class OptimizerConfig(BaseModel):
    """AdamW (Loshchilov and Hutter, 2019). A LoRA adapter wants about ten times the learning rate of full
    fine-tuning.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    learning_rate: float = Field(default=2e-4, gt=0)
    weight_decay: float = Field(
        default=0.0, ge=0, description="of matrices; vectors (norms, biases) are never decayed"
    )
    betas: tuple[float, float] = (0.9, 0.99)
    epsilon: float = Field(default=1e-8, gt=0)
    max_grad_norm: float = Field(
        default=1.0, gt=0, description="the gradient is scaled down to this 2-norm; .inf never does"
    )
    warmup_steps: int = Field(default=0, ge=0, description="optimizer updates from almost 0 to learning_rate")
    schedule: Schedule = Field(default="constant", description="what follows the warm-up")
    min_lr_ratio: float = Field(
        default=0.0, ge=0, le=1, description="where the schedule ends, as a part of learning_rate"
    )

    @model_validator(mode="after")
    def _checked(self) -> OptimizerConfig:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError("betas must be at least 0 and less than 1")
        if self.schedule == "constant" and self.min_lr_ratio:
            raise ValueError(
                "min_lr_ratio has no effect with schedule: constant; use linear or cosine, or leave it out"
            )
        return self


class MasterWeights:
    """What the optimizer steps on: fp32 copies of the parameters that are trained in 16 bits, and the others
    themselves.

    A bf16 number has 8 bits: an update of less than a 500th of a weight would be rounded away, every time. In
    the copy such updates add up (Micikevicius et al. 2018, "Mixed precision training", 3.1). Gradients are
    summed over microbatches in fp32, too. What acts is the copy, rounded so that small updates of many
    weights show at once, see ``rounded``.

    Attributes:
        parameters: in the order of those that were given.
    """

    def __init__(self, parameters: Iterable[Parameter]) -> None:
        self.parameters: list[Parameter] = []
        self._pairs: list[tuple[Parameter, Parameter]] = []  # in 16 bits, its copy
        for parameter in parameters:
            if parameter.dtype == torch.float32:
                self.parameters.append(parameter)
                continue
            copy = Parameter(parameter.detach().float())
            self.parameters.append(copy)
            self._pairs.append((parameter, copy))

    def take_gradients(self) -> None:
        """Move the gradients of a backward to the copies, on top of those that are there."""
        for parameter, copy in self._pairs:
            if (gradient := parameter.grad) is not None:
                copy.grad = gradient.float() if copy.grad is None else copy.grad.add_(gradient)
                parameter.grad = None

    def publish(self) -> None:
        """Round the copies into the parameters: after each of the optimizer's steps."""
        with torch.no_grad():
            for parameter, copy in self._pairs:
                parameter.copy_(rounded(copy) if parameter.dtype == torch.bfloat16 else copy)

    def state_dict(self) -> list[Tensor]:
        return [copy.detach() for _, copy in self._pairs]

    def load_state_dict(self, state: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for (_, copy), stored in zip(self._pairs, state, strict=True):
                copy.copy_(stored)


def rounded(copy: Tensor) -> Tensor:
    """fp32 to bf16, up or down by a threshold of each weight's own, which is always the same and evenly
    spread over the weights.

    Weights begin on bf16's grid. Rounded to nearest, none of them would leave its place before it has gone
    half a step of the grid; so, of those that have gone a hundredth of a step one in a hundred does, and
    their sum is right from the first update on. It is stochastic rounding without its noise: one that has not
    moved stays where it is.

    >>> rounded(torch.full((1000,), 1.0)).unique().tolist(), round(float(rounded(torch.full((1000,), 1.001)).float().mean()), 4)
    ([1.0], 1.001)
    """
    places = torch.arange(copy.numel(), dtype=torch.int32, device=copy.device).view(copy.shape)
    thresholds = (places * -1640531535 >> 16) & 0xFFFF  # the golden ratio's multiples, in 16 bits
    return ((copy.view(torch.int32) + thresholds) & -0x10000).view(torch.float32).bfloat16()


def build_optimizer(
    parameters: Iterable[Parameter],
    config: OptimizerConfig,
    total_steps: int,
    own_rates: Sequence[tuple[Sequence[Parameter], float]] = (),
) -> tuple[AdamW, LambdaLR]:
    """The optimizer and its scheduler; step the scheduler once after each step of the optimizer.

    Args:
        parameters: those to train, in an order that is the same when a run is resumed.
        total_steps: optimizer updates (not trips through the main loop) at which the schedule ends.
        own_rates: more of them, with a learning rate each; they follow the schedule, and are never decayed.

    Raises:
        ValueError: nothing to train.
    """
    trained = [p for p in parameters if p.requires_grad]
    matrices: dict[str, Any] = {
        "params": [p for p in trained if p.ndim >= 2],
        "weight_decay": config.weight_decay,
    }
    vectors: dict[str, Any] = {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0}
    groups = [group for group in (matrices, vectors) if group["params"]]
    if not groups:
        raise ValueError("no parameter requires a gradient")
    groups += [{"params": list(more), "lr": rate, "weight_decay": 0.0} for more, rate in own_rates]
    optimizer = AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.epsilon)
    return optimizer, LambdaLR(optimizer, learning_rate_factor(config, total_steps))


def learning_rate_factor(config: OptimizerConfig, total_steps: int) -> Callable[[int], float]:
    """update number (from 0) -> what ``learning_rate`` is multiplied with; the last update of ``total_steps``
    still learns.

    >>> factor = learning_rate_factor(OptimizerConfig(warmup_steps=2, schedule="linear"), total_steps=6)
    >>> [factor(step) for step in range(8)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    warmup, floor = config.warmup_steps, config.min_lr_ratio

    # A plain function: LambdaLR leaves it out of its state, so a resumed run follows its configuration.
    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        left = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}[
            config.schedule
        ]
        return floor + (1 - floor) * left

    return factor
