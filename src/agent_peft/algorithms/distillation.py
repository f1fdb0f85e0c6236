"""On-policy distillation: the policy samples, and at each of its tokens a teacher's distribution is the
target.

Agarwal et al. (2024, "GKD", https://arxiv.org/abs/2306.13649), Gu et al. (2024, "MiniLLM",
https://arxiv.org/abs/2306.08543), and Lu and Thinking Machines Lab (2025, "On-Policy Distillation").
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal

from pydantic import Field, model_validator

from agent_peft.algorithms.advantages import leave_one_out, plain_return
from agent_peft.algorithms.base import AlgorithmConfig, Metrics, SumOverRanks, one_rank, weighted_sums
from agent_peft.algorithms.parts import WEIGHTING
from agent_peft.algorithms.policy_gradient import (
    Minibatches,
    PolicyGradient,
    TurnDiscount,
    UpdateEpochs,
    WeightingKey,
    surrogate_and_penalties,
)
from agent_peft.algorithms.surrogates import WEIGHTINGS, ratio
from agent_peft.batch import Batch, PolicyOutput
from agent_peft.lazy_torch import Tensor, torch

FLOOR = -1e4  # nats: a token of probability 0, so that its difference to another one is a number


def kl(p: Tensor, q: Tensor) -> Tensor:
    """(n,) KL(p ‖ q) in nats of finite log-probabilities (n, V)."""
    return (p.exp() * (p - q)).sum(-1)


def divergence(student: Tensor, teacher: Tensor, beta: float = 1.0, top_k: int | None = None) -> Tensor:
    """(n,) nats between log-probabilities (n, V): the reverse KL(student ‖ teacher) with ``beta`` 1, the
    forward KL(teacher ‖ student) with 0, and between them the generalized Jensen-Shannon divergence
    β KL(teacher ‖ m) + (1 - β) KL(student ‖ m) with m = β teacher + (1 - β) student (Agarwal et al., 2024).

    Args:
        top_k: compare the teacher's likeliest tokens one by one, and all others as one outcome. So it is a
            divergence, too, and never larger.

    >>> import torch
    >>> student, teacher = torch.tensor([[0.5, 0.5, 0.0]]).log(), torch.tensor([[0.25, 0.5, 0.25]]).log()
    >>> [round(float(divergence(student, teacher, beta)), 4) for beta in (1.0, 0.5)]
    [0.3466, 0.1079]
    """
    if top_k is not None and top_k < teacher.shape[-1]:
        likeliest = teacher.topk(top_k).indices
        student, teacher = _coarse(student, likeliest), _coarse(teacher, likeliest)
    student, teacher = student.clamp(min=FLOOR), teacher.clamp(min=FLOOR)
    if beta == 1:
        return kl(student, teacher)
    if beta == 0:
        return kl(teacher, student)
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)


def _coarse(logp: Tensor, tokens: Tensor) -> Tensor:
    """(n, k + 1) log-probabilities of k tokens, and of all others together."""
    others = logp.scatter(-1, tokens, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([logp.gather(-1, tokens), others], -1)


class Distillation(PolicyGradient):
    """loss = Σ weights · (divergence(π, teacher) + c · surrogate(Â)), with rloo's Â and surrogate.

    The divergence is exact at each position: its gradient is that of the distribution over the whole
    vocabulary, and not of the sampled token. What a token does to the positions after it has no gradient.
    """

    def __init__(self, config: DistillConfig) -> None:
        compares = config.advantage_coef > 0
        penalty = f" - {config.advantage_coef:g} ρ Â; Â = R - mean of the others of its group"
        super().__init__(
            config.kind,
            leave_one_out if compares else plain_return,
            ratio,
            WEIGHTINGS[config.weighting],
            update_epochs=config.update_epochs,
            minibatches=config.minibatches,
            compares_groups=compares,
            turn_discount=config.turn_discount,
            formula=f"{WEIGHTING[config.weighting]} of {config.name}{penalty if compares else ''}",
            paper="Agarwal et al., 2024; Gu et al., 2024",
        )
        self.advantage_coef = config.advantage_coef
        self.divergence: Callable[[Tensor, Tensor], Tensor] = partial(
            divergence, beta=config.beta, top_k=config.top_k
        )
        self.learns_at_zero_advantage = True
        self.metrics = (*self.metrics, "divergence")

    def prepare(self, batch: Batch, sum_over_ranks: SumOverRanks = one_rank) -> Batch:
        """Every group with a sampled token has a signal, whatever its rewards."""
        batch = super().prepare(batch, sum_over_ranks) if self.advantage_coef else batch
        return replace(batch, signal=batch.action_mask.any(1))

    def loss(self, output: PolicyOutput, microbatch: Batch) -> tuple[Tensor, Metrics]:
        """Metrics: divergence (nats per token), and those of ``surrogate_and_penalties``."""
        if output.divergence is None:
            raise ValueError("distill needs the divergence to a teacher in the policy's output")
        per_token, metrics = surrogate_and_penalties(output, microbatch, self.surrogate, 0.0, 0.0)
        metrics["divergence"] = output.divergence.detach()
        per_token = output.divergence + (self.advantage_coef * per_token if self.advantage_coef else 0.0)
        return (microbatch.weights * per_token).sum(), weighted_sums(metrics, microbatch)


class DistillConfig(AlgorithmConfig):
    """On-policy distillation from the stage's ``teacher``. Rewards are measured, and not needed."""

    kind: Literal["distill"] = "distill"
    beta: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="1 is the reverse KL(π ‖ teacher), 0 the forward KL(teacher ‖ π), and a number between "
        "them the generalized Jensen-Shannon divergence, whose mixture has the teacher with this weight",
    )
    top_k: int | None = Field(
        default=None,
        ge=1,
        description="compare so many of the teacher's likeliest tokens one by one, and all others as one; "
        "null compares the whole vocabulary",
    )
    advantage_coef: float = Field(
        default=0.0, ge=0, description="c of a policy gradient that is added, with rloo's advantages"
    )
    turn_discount: TurnDiscount = None
    weighting: WeightingKey = "token_mean"
    update_epochs: UpdateEpochs = 1
    minibatches: Minibatches = 1

    def build(self) -> Distillation:
        return Distillation(self)

    @property
    def name(self) -> str:
        """The divergence, for ``explain``."""
        names = {1.0: "KL(π ‖ teacher)", 0.0: "KL(teacher ‖ π)"}
        top = "" if self.top_k is None else f" over the teacher's {self.top_k} likeliest tokens and the rest"
        return names.get(self.beta, f"JSD_{self.beta:g}(teacher ‖ π)") + top

    @model_validator(mode="after")
    def _effective(self) -> DistillConfig:
        if self.turn_discount is not None and not self.advantage_coef:
            raise ValueError("turn_discount has no effect with advantage_coef: 0; leave it out")
        return self
