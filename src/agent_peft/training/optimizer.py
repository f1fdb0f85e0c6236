"""AdamW, the schedule of its learning rate, and fp32 master weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, model_validator

from agent_peft.config import Config
from agent_peft.lazy_torch import Tensor, torch

Schedule = Literal["constant", "linear", "cosine"]


class OptimizerConfig(Config):
    """AdamW (Loshchilov and Hutter, 2019). A LoRA adapter needs about ten times the learning rate of full
    fine-tuning.
    """

    learning_rate: float = Field(
        default=2e-4,
        ge=0,
        le=1,
        description="learning rate after the warm-up; an update moves each weight by about this much; 0 "
        "makes no update, so that the policy only acts and is measured",
    )
    weight_decay: float = Field(
        default=0.0, ge=0, description="weight decay of matrices; vectors (norms, biases) are never decayed"
    )
    betas: tuple[float, float] = Field(
        default=(0.9, 0.99), description="decay rates of the averages of the gradient and of its square"
    )
    epsilon: float = Field(default=1e-8, gt=0, description="added to the root of the squared average")
    max_grad_norm: float = Field(
        default=1.0,
        gt=0,
        description="a gradient with a larger 2-norm is scaled down to it; .inf never scales",
    )
    warmup_steps: int = Field(
        default=0,
        ge=0,
        description="first optimizer updates of the stage, in which the rate grows to learning_rate",
    )
    schedule: Schedule = Field(
        default="constant",
        description="course of the learning rate after the warm-up; it ends with the last step of the stage, "
        "however many updates the steps make",
    )
    min_lr_ratio: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="learning rate at the end of the stage, as a fraction of learning_rate",
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
    """The parameters that the optimizer updates: fp32 copies of those that are trained in 16 bits, and the
    others themselves.

    A bf16 number has 8 significant bits, so an update of less than a 500th of a weight would always be
    rounded away. In the copy such updates add up (Micikevicius et al. 2018, "Mixed precision training", 3.1).
    Gradients are summed over microbatches in fp32, too. The model acts with the copy after rounding, which
    ``rounded`` does in a way that shows small updates of many weights at once.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self.parameters: list[torch.nn.Parameter] = []
        self._pairs: list[tuple[torch.nn.Parameter, torch.nn.Parameter]] = []  # in 16 bits, its copy
        for parameter in parameters:
            if parameter.dtype == torch.float32:
                self.parameters.append(parameter)
                continue
            copy = torch.nn.Parameter(parameter.detach().float())
            self.parameters.append(copy)
            self._pairs.append((parameter, copy))

    def take_gradients(self) -> None:
        """Add the gradients of a backward to those of the copies."""
        for parameter, copy in self._pairs:
            if (gradient := parameter.grad) is not None:
                copy.grad = gradient.float() if copy.grad is None else copy.grad.add_(gradient)
                parameter.grad = None

    def drop_gradients(self) -> None:
        """Drop gradients that were not taken, such as those of a backward that ran out of memory half-way."""
        for parameter, _ in self._pairs:
            parameter.grad = None

    def publish(self) -> None:
        """Round the copies into the parameters. Call it after each step of the optimizer."""
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
    """fp32 to bf16, up or down by a threshold for each weight. The threshold of a weight is constant, and the
    thresholds are evenly spread over the weights.

    Weights begin on the grid of bf16. With rounding to nearest, a weight would stay in place until it had
    moved half a step of the grid. Here, of the weights that have moved a hundredth of a step, one in a
    hundred changes, so their sum is right from the first update on. This is stochastic rounding without
    noise: a weight that has not moved does not change.

    >>> rounded(torch.full((1000,), 1.0)).unique().tolist()
    [1.0]
    >>> round(float(rounded(torch.full((1000,), 1.001)).float().mean()), 4)
    1.001
    """
    places = torch.arange(copy.numel(), dtype=torch.int32, device=copy.device).view(copy.shape)
    thresholds = (places * -1640531535 >> 16) & 0xFFFF  # multiples of the golden ratio, in 16 bits
    return ((copy.view(torch.int32) + thresholds) & -0x10000).view(torch.float32).bfloat16()


def build_optimizer(
    parameters: Iterable[torch.nn.Parameter],
    config: OptimizerConfig,
    separate_rates: Sequence[tuple[Sequence[torch.nn.Parameter], float]] = (),
) -> torch.optim.AdamW:
    """The optimizer. Call ``set_rate`` before each of its steps.

    Args:
        parameters: those to train, in an order that is the same when a run is resumed.
        separate_rates: more parameters, each list with its learning rate. They follow the schedule and are
            never decayed.
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
    groups += [{"params": list(more), "lr": rate, "weight_decay": 0.0} for more, rate in separate_rates]
    optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.epsilon)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]  # torch's name for the rate without a schedule
    return optimizer


def restore_optimizer(optimizer: torch.optim.AdamW, state: Mapping[str, Any]) -> None:
    """Load the moments of a state. The rates and the decay stay those of the present configuration, which
    may have changed since.
    """
    configured = [
        {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
    optimizer.load_state_dict(dict(state))
    for group, settings in zip(optimizer.param_groups, configured, strict=True):
        group.update(settings)


def set_rate(optimizer: torch.optim.AdamW, factor: float) -> None:
    """Set the learning rate of each group of parameters to ``factor`` times its configured one."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor


def learning_rate_factor(config: OptimizerConfig, total: int, number: int, made: int | None = None) -> float:
    """The factor of ``learning_rate`` for a stage's update ``number`` (from 0) of ``total``.

    Args:
        total: the updates of the stage, if none is skipped and no epoch is left out.
        number: the updates before this one, those that were skipped or left out included. So the schedule
            ends where the stage ends.
        made: those of them that were made, which the warm-up counts; by default all.

    >>> config = OptimizerConfig(warmup_steps=2, schedule="linear")
    >>> [learning_rate_factor(config, 6, number) for number in range(8)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    >>> learning_rate_factor(config, 6, number=2, made=0)
    0.5
    """
    warmup, floor = config.warmup_steps, config.min_lr_ratio
    progress = min(max(0, number - warmup) / max(1, total - warmup), 1.0)
    remaining = {
        "constant": 1.0,
        "linear": 1 - progress,
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
    }[config.schedule]
    warmth = min(((number if made is None else made) + 1) / max(1, warmup), 1.0)
    return min(warmth, floor + (1 - floor) * remaining)
