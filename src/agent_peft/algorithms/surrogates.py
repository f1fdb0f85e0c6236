"""From log-probabilities and advantages to a per-token loss whose gradient is a policy gradient.

All tensors are (B, T). The mask is True at sampled tokens; off it the other three are zero.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Surrogate = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(logprobs, the sampler's logprobs, advantages, mask) -> (loss per token, bool: its gradient was clipped)"""


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


def clipped(clip_low: float, clip_high: float) -> Surrogate:
    """-min(ρ Â, clip(ρ, 1 - ε_low, 1 + ε_high) Â) (PPO: Schulman et al., 2017, equation 7; two ε as in
    DAPO: Yu et al., 2025).
    """

    def surrogate(
        logprobs: Tensor, sampled: Tensor, advantages: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        return _clip((logprobs - sampled).exp(), advantages, clip_low, clip_high)

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
