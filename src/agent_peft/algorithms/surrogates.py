"""From log-probabilities and advantages to a per-token loss whose gradient is a policy gradient. All
tensors (B, T).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Surrogate = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(logprobs, the sampler's logprobs, advantages) -> (loss per token, bool: the gradient was clipped away there)"""


def score_function(logprobs: Tensor, sampled: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """-Â log π: the REINFORCE gradient (Williams, 1992). Right only for actions of the very policy that is
    updated.

    The value means nothing: at an advantage of mean zero it hovers around zero however well the agent does.
    """
    return -advantages * logprobs, _nowhere(logprobs)


def ratio(logprobs: Tensor, sampled: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """-ρ Â with ρ = π / π_sampled: conservative policy iteration (Schulman et al., 2017, equation 6).

    Its gradient is the score function's where ρ = 1, and is corrected for a policy that has moved since the
    rollout.
    """
    return -advantages * (logprobs - sampled).exp(), _nowhere(logprobs)


def clipped(clip_low: float, clip_high: float) -> Surrogate:
    """-min(ρ Â, clip(ρ, 1 - ε_low, 1 + ε_high) Â) (PPO: Schulman et al., 2017, equation 7; two ε as in
    DAPO: Yu et al., 2025).
    """

    def surrogate(logprobs: Tensor, sampled: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        rho = (logprobs - sampled).exp()
        free = rho * advantages
        bounded = rho.clamp(1 - clip_low, 1 + clip_high) * advantages
        return -torch.minimum(free, bounded), bounded < free

    return surrogate


def _nowhere(like: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=torch.bool)
