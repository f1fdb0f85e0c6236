"""The output layer, for a chunk of predictors at a time: a tensor (B, T, V) never exists."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from agent_peft.policies.sampling import SamplingConfig, log_distribution

CHUNK = 256 * 49152  # logits that exist at once: 48 MiB in fp32


def logprobs_of_targets(
    head: nn.Module,
    plain: bool,
    logits: Callable[[Tensor], Tensor],
    states: Tensor,
    targets: Tensor,
    sampling: SamplingConfig,
    entropy: bool,
    within: Callable[[slice], AbstractContextManager[None]] = lambda _: nullcontext(),
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities (n,) in nats of targets (n,) under the sampling distribution, from hidden states
    (n, H). With ``entropy``, the entropies (n,) too.

    Args:
        head: the output layer. If it is a linear layer without bias that is not trained, the backward does
            not compute the logits again.
        plain: whether the head's output is the logits.
        logits: gives (n, V) logits of states (n, H): the head, and what follows it.
        within: gives the context in which the logits of a slice of the states are computed.
    """
    if not len(targets):
        empty = states.new_zeros(0, dtype=torch.float32)
        return empty, empty if entropy else None
    frozen = isinstance(head, nn.Linear) and head.bias is None and not head.weight.requires_grad
    if plain and frozen and not entropy:
        logp: Tensor = _Frozen.apply(states, head.weight, targets, sampling)  # type: ignore[no-untyped-call]
        return logp, None

    def score(states: Tensor, target: Tensor, places: slice) -> tuple[Tensor, Tensor]:
        with within(places):
            logp = log_distribution(logits(states), sampling, keep=target)
        taken = logp.gather(-1, target.unsqueeze(-1)).squeeze(-1)
        if not entropy:
            return taken, taken.detach()
        return taken, -(logp.exp() * logp.masked_fill(logp.isneginf(), 0.0)).sum(-1)

    pieces, size = [], _rows(states, head)
    one_piece = len(targets) <= size or not torch.is_grad_enabled()
    for start in range(0, len(targets), size):
        places = slice(start, start + size)
        inputs = states[places], targets[places], places
        # checkpointed: the backward computes these logits again instead of keeping them all
        pieces.append(score(*inputs) if one_piece else checkpoint(score, *inputs, use_reentrant=False))
    return torch.cat([p[0] for p in pieces]), torch.cat([p[1] for p in pieces]) if entropy else None


def _rows(states: Tensor, head: nn.Module) -> int:
    """The number of states whose logits fill a chunk."""
    vocabulary = getattr(head, "out_features", states.shape[-1])
    return max(1, CHUNK // int(vocabulary))


class _Frozen(torch.autograd.Function):
    """d log p(t) / d state = (W[t] - Σ_v p(v) W[v]) / temperature, computed in the forward, where p is at
    hand.
    """

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, targets: Tensor, sampling: SamplingConfig
    ) -> Tensor:
        taken, slopes = [], []
        size = max(1, CHUNK // len(weight))
        for piece, target in zip(torch.split(states, size), torch.split(targets, size), strict=True):
            logp = log_distribution(piece @ weight.T, sampling, keep=target)
            taken.append(logp.gather(-1, target.unsqueeze(-1)).squeeze(-1))
            if ctx.needs_input_grad[0]:
                # For a likely token W[t] and p(t) W[t] nearly cancel, so subtract before rounding.
                slope = logp.exp_().neg_()
                slope.scatter_add_(-1, target.unsqueeze(-1), torch.ones_like(slope[:, :1]))
                slopes.append(slope.to(weight.dtype) @ weight)
        if slopes:
            ctx.save_for_backward(torch.cat(slopes).div_(sampling.temperature or 1.0))
        return torch.cat(taken)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (slopes,) = ctx.saved_tensors
        return gradient.unsqueeze(-1).to(slopes.dtype) * slopes, None, None, None
