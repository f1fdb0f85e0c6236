"""The output layer, a chunk of predictors at a time: there is never a tensor of (B, T, V)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from agent_peft.policies.sampling import SamplingConfig, log_distribution

CHUNK = 256 * 49152  # logits that exist at once: 48 MiB in fp32


def chosen_logprobs(
    head: nn.Module,
    plain: bool,
    logits: Callable[[Tensor], Tensor],
    states: Tensor,
    targets: Tensor,
    sampling: SamplingConfig,
    entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities (n,) of targets (n,) given hidden states (n, H), under the sampling distribution;
    with them entropies (n,).

    Args:
        head: a linear layer without bias that is not trained gets its gradient without computing the logits
            again.
        plain: whether the model does nothing more with the head's output.
        logits: (n, V) of states (n, H): the head, and what the model does with its output.
    """
    if not len(targets):
        empty = states.new_zeros(0, dtype=torch.float32)
        return empty, empty if entropy else None
    frozen = isinstance(head, nn.Linear) and head.bias is None and not head.weight.requires_grad
    if plain and frozen and not entropy:
        found: Tensor = _Frozen.apply(states, head.weight, targets, sampling)  # type: ignore[no-untyped-call]
        return found, None

    def score(states: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        logp = log_distribution(logits(states), sampling, keep=chosen)
        taken = logp.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
        if not entropy:
            return taken, taken.detach()
        return taken, -(logp.exp() * logp.masked_fill(logp.isneginf(), 0.0)).sum(-1)

    pieces, size = [], _rows(states, head)
    for piece, chosen in zip(torch.split(states, size), torch.split(targets, size), strict=True):
        # checkpointed: the backward computes these logits again instead of keeping them all
        one_piece = len(targets) <= size or not torch.is_grad_enabled()
        pieces.append(
            score(piece, chosen) if one_piece else checkpoint(score, piece, chosen, use_reentrant=False)
        )
    return torch.cat([p[0] for p in pieces]), torch.cat([p[1] for p in pieces]) if entropy else None


def _rows(states: Tensor, head: nn.Module) -> int:
    """States of a chunk: as many as ``CHUNK`` logits are of. A layer with an adapter is no linear layer,
    but says what it gives, too.
    """
    vocabulary = getattr(head, "out_features", states.shape[-1])
    return max(1, CHUNK // int(vocabulary))


class _Frozen(torch.autograd.Function):
    """d log p(t) / d state = (W[t] - sum_v p(v) W[v]) / temperature, which the forward finds while it has
    p.
    """

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, targets: Tensor, sampling: SamplingConfig
    ) -> Tensor:
        taken, slopes = [], []
        size = max(1, CHUNK // len(weight))
        for piece, chosen in zip(torch.split(states, size), torch.split(targets, size), strict=True):
            logp = log_distribution(piece @ weight.T, sampling, keep=chosen)
            taken.append(logp.gather(-1, chosen.unsqueeze(-1)).squeeze(-1))
            if ctx.needs_input_grad[0]:
                # of a likely token W[t] and p(t) W[t] nearly cancel, so they are subtracted before any
                # rounding
                slope = logp.exp_().neg_()
                slope.scatter_add_(-1, chosen.unsqueeze(-1), torch.ones_like(slope[:, :1]))
                slopes.append(slope.to(weight.dtype) @ weight)
        if slopes:
            ctx.save_for_backward(torch.cat(slopes).div_(sampling.temperature or 1.0))
        return torch.cat(taken)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (slopes,) = ctx.saved_tensors
        return gradient.unsqueeze(-1).to(slopes.dtype) * slopes, None, None, None
