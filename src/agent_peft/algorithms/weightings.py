"""How much each token counts. (B, T) bool mask -> ((B, T) fp32 weights, scalar denominator), not yet divided.

The denominator is additive over ranks. Once the weights of a minibatch are divided by its sum, nothing but
sums is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from agent_peft.batch import turn_starts

Weighting = Callable[[Tensor], tuple[Tensor, Tensor]]


def token_mean(mask: Tensor) -> tuple[Tensor, Tensor]:
    """The mean over all tokens: long trajectories count for more (DAPO: Yu et al., 2025, equation 12)."""
    weights = mask.float()
    return weights, weights.sum()


def sequence_mean(mask: Tensor) -> tuple[Tensor, Tensor]:
    """The mean over trajectories of each one's mean (GRPO: Shao et al., 2024, equation 3). A trajectory
    without an action does not count.
    """
    tokens = mask.sum(dim=1, keepdim=True)
    return mask / tokens.clamp(min=1), (tokens > 0).sum().float()


def turn_mean(mask: Tensor) -> tuple[Tensor, Tensor]:
    """The mean over turns of each one's mean: a long answer counts for no more than the short query before
    it.

    >>> import torch
    >>> turn_mean(torch.tensor([[0, 1, 0, 1, 1]]).bool())
    (tensor([[0.0000, 1.0000, 0.0000, 0.5000, 0.5000]]), tensor(2.))
    """
    begins = turn_starts(mask)
    turns = begins.cumsum(dim=1)  # the number of each token's turn in its row, from 1
    tokens = mask.new_zeros(turns.shape[0], turns.shape[1] + 1, dtype=mask.float().dtype)
    tokens = tokens.scatter_add(1, turns, mask.float()).gather(1, turns)
    return mask / tokens.clamp(min=1), begins.sum().float()


def sequence_sum(mask: Tensor) -> tuple[Tensor, Tensor]:
    """The mean over trajectories of each one's sum: log π(trajectory) as REINFORCE defines it."""
    weights = mask.float()
    return weights, weights.new_tensor(len(mask))


def constant_length(length: int) -> Weighting:
    """``sequence_sum`` over a fixed ``length`` in tokens: no trajectory's length enters (Dr. GRPO: Liu et
    al., 2025, section 3.2).
    """

    def weighting(mask: Tensor) -> tuple[Tensor, Tensor]:
        weights, trajectories = sequence_sum(mask)
        return weights, trajectories * length

    return weighting


WeightingName = Literal["token_mean", "turn_mean", "sequence_mean", "sequence_sum"]
WEIGHTINGS: dict[WeightingName, Weighting] = {
    "token_mean": token_mean,
    "turn_mean": turn_mean,
    "sequence_mean": sequence_mean,
    "sequence_sum": sequence_sum,
}
