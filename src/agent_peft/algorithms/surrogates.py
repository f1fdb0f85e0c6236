"""From log-probabilities and advantages to a per-token loss whose gradient is a policy gradient.

All tensors are (B, T). The mask is True at sampled tokens; off it the other three are zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

Surrogate = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(logprobs, the sampler's logprobs, advantages, mask) -> (loss per token, bool: its gradient was clipped)"""

SurrogateName = Literal["score_function", "ratio", "clipped", "sequence_clipped", "truncated", "band"]


def score_function(
    logprobs: Tensor, sampled: Tensor, advantages: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """-Â log π: the REINFORCE gradient (Williams, 1992). It is right only for actions that were drawn from
    the policy that is updated.

    Its value says nothing: with advantages of mean zero it stays near zero, however well the agent does.
    """
    return -advantages * logprobs, torch.zeros_like(mask)


def ratio(logprobs: Tensor, sampled: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """-ρ Â with ρ = π / π_sampled: conservative policy iteration (Schulman et al., 2017, equation 6).

    Its gradient is the score function's where ρ = 1, and is corrected for a policy that has moved since the
    rollout.
    """
    return -advantages * (logprobs - sampled).exp(), torch.zeros_like(mask)


def clipped(clip_low: float, clip_high: float, dual_clip: float | None = None) -> Surrogate:
    """-min(ρ Â, clip(ρ, 1 - ε_low, 1 + ε_high) Â) (PPO: Schulman et al., 2017, equation 7; two ε as in
    DAPO: Yu et al., 2025).

    Args:
        dual_clip: c > 1. Where Â < 0 the objective is at least c Â, so that a token that has become much
            likelier has no gradient (dual clip: Ye et al., 2020). None sets no limit.
    """

    def surrogate(
        logprobs: Tensor, sampled: Tensor, advantages: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        loss, cut = _clip((logprobs - sampled).exp(), advantages, clip_low, clip_high)
        if dual_clip is None:
            return loss, cut
        most = -dual_clip * advantages  # where Â < 0, the most that a token may cost
        beyond = (advantages < 0) & (loss > most)
        return torch.where(beyond, most, loss), cut | beyond

    return surrogate


def truncated(clip_high: float) -> Surrogate:
    """-sg(min(ρ, 1 + ε_high)) Â log π, where sg stops the gradient: truncated importance sampling (Ionides,
    2008; for samplers that differ from the trainer: Yao et al., 2025). CISPO has the same surrogate
    (MiniMax-M1: Chen et al., 2025, equations 4 and 5, without a lower bound, as there).

    No token loses its gradient. That of a token with a large ρ is as if ρ were 1 + ε_high.
    """

    def surrogate(
        logprobs: Tensor, sampled: Tensor, advantages: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        rho = (logprobs - sampled).exp().detach()
        return -rho.clamp(max=1 + clip_high) * advantages * logprobs, rho > 1 + clip_high

    return surrogate


def band(clip_low: float, clip_high: float) -> Surrogate:
    """-ρ Â where 1 - ε_low ≤ ρ ≤ 1 + ε_high, and 0 elsewhere: IcePop's mask (Ling Team, 2025, "Every step
    evolves"; as one ratio to the sampler: INTELLECT-3, Prime Intellect, 2025, equation 1).

    A token is left out on both sides of the band, whatever the sign of its advantage.
    """

    def surrogate(
        logprobs: Tensor, sampled: Tensor, advantages: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        log_ratio = logprobs - sampled
        rho = log_ratio.detach().exp()
        outside = (rho < 1 - clip_low) | (rho > 1 + clip_high)
        # before exp, because the gradient of an infinite ratio would be NaN under a mask
        return -log_ratio.masked_fill(outside, -math.inf).exp() * advantages, outside

    return surrogate


def sequence_clipped(clip_low: float, clip_high: float) -> Surrogate:
    """``clipped`` with one ratio per trajectory, s = (π(y) / π_sampled(y))^(1/|y|), the geometric mean of its
    tokens' ρ (GSPO: Zheng et al., 2025, equations 5 to 7).

    Every token of a trajectory has the same loss, so ``sequence_mean`` gives the paper's objective.
    """

    def surrogate(
        logprobs: Tensor, sampled: Tensor, advantages: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        log_ratio = ((logprobs - sampled) * mask).sum(1, keepdim=True)
        rho = (log_ratio / mask.sum(1, keepdim=True).clamp(min=1)).exp().expand_as(logprobs)
        return _clip(rho, advantages, clip_low, clip_high)

    return surrogate


def _clip(rho: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    unclipped = rho * advantages
    bounded = rho.clamp(1 - clip_low, 1 + clip_high) * advantages
    return -torch.minimum(unclipped, bounded), bounded < unclipped
