"""From log-probabilities and advantages to a loss: the surrogates, whose gradient is a policy gradient; the
KL divergence between two policies (Schulman, 2020, http://joschu.net/blog/kl-approx.html); and the weights of
the tokens.

All tensors are (B, T). The mask is True at sampled tokens; off it the others are zero. The properties of the
KL estimates hold for policies that give every token of the vocabulary some probability, and for tokens drawn
from the whole vocabulary. With top-p or top-k no drawn token shows what the other policy gives to the tokens
that were cut off, and none of the estimates is unbiased.

A weighting is (B, T) bool mask -> ((B, T) fp32 weights, scalar denominator), not yet divided. The denominator
is additive over ranks. Once the weights of a minibatch are divided by its sum, nothing but sums is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from agent_peft.batch import turn_starts
from agent_peft.lazy_torch import Tensor, torch

Clipped = tuple[Tensor, Tensor]  # the loss per token, and bool: its gradient was clipped
Surrogate = Callable[[Tensor, Tensor, Tensor, Tensor], Clipped]
"""(logprobs, the sampler's logprobs, advantages, mask) -> Clipped"""

SurrogateName = Literal["score_function", "ratio", "clipped", "sequence_clipped", "truncated", "band"]


def score_function(logprobs: Tensor, sampled: Tensor, advantages: Tensor, mask: Tensor) -> Clipped:
    """-Â log π: the REINFORCE gradient (Williams, 1992). It is right only for actions that were drawn from
    the policy that is updated.

    Its value means nothing: with advantages of mean zero it stays near zero, however well the agent does.
    """
    return -advantages * logprobs, torch.zeros_like(mask)


def ratio(logprobs: Tensor, sampled: Tensor, advantages: Tensor, mask: Tensor) -> Clipped:
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

    def surrogate(logprobs: Tensor, sampled: Tensor, advantages: Tensor, mask: Tensor) -> Clipped:
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

    def surrogate(logprobs: Tensor, sampled: Tensor, advantages: Tensor, mask: Tensor) -> Clipped:
        rho = (logprobs - sampled).exp().detach()
        return -rho.clamp(max=1 + clip_high) * advantages * logprobs, rho > 1 + clip_high

    return surrogate


def band(clip_low: float, clip_high: float) -> Surrogate:
    """-ρ Â where 1 - ε_low ≤ ρ ≤ 1 + ε_high, and 0 elsewhere: IcePop's mask (Ling Team, 2025, "Every step
    evolves"; as one ratio to the sampler: INTELLECT-3, Prime Intellect, 2025, equation 1).

    A token is left out on both sides of the band, whatever the sign of its advantage.
    """

    def surrogate(logprobs: Tensor, sampled: Tensor, advantages: Tensor, mask: Tensor) -> Clipped:
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

    def surrogate(logprobs: Tensor, sampled: Tensor, advantages: Tensor, mask: Tensor) -> Clipped:
        log_ratio = ((logprobs - sampled) * mask).sum(1, keepdim=True)
        rho = (log_ratio / mask.sum(1, keepdim=True).clamp(min=1)).exp().expand_as(logprobs)
        return _clip(rho, advantages, clip_low, clip_high)

    return surrogate


def _clip(rho: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Clipped:
    unclipped = rho * advantages
    bounded = rho.clamp(1 - clip_low, 1 + clip_high) * advantages
    return -torch.minimum(unclipped, bounded), bounded < unclipped


def k1(logprobs: Tensor, other: Tensor) -> Tensor:
    """-log r: unbiased for KL(π ‖ other), also negative. It is the KL in a reward (Ziegler et al., 2019,
    equation 2; REINFORCE++: Hu et al., 2025): its own gradient has a mean of 0, and the advantage gives it
    the right one.
    """
    return logprobs - other


def k3(logprobs: Tensor, other: Tensor) -> Tensor:
    """r - 1 - log r with r = other / π: unbiased for KL(π ‖ other) and never negative. A metric, not a loss.

    Its own gradient, (1 - r) ∇log π, is that of KL(other ‖ π): the derivative of an expectation also has a
    term for the policy that draws the tokens. ``reverse_kl`` has it.
    """
    log_r = other - logprobs
    return log_r.expm1() - log_r


def reverse_kl(logprobs: Tensor, sampled: Tensor, reference: Tensor) -> Tensor:
    """ρ k3 with ρ = π / π_sampled: unbiased for KL(π ‖ reference) in value *and* in gradient, also when π has
    moved since the rollout.

    ∇(ρ k3) = ρ (k3 + 1 - r) ∇log π = ρ (-log r) ∇log π, the gradient of k2 = (log r)² / 2, times ρ. So k2
    and k3 train the same, and the configuration offers no choice between them.
    """
    return (logprobs - sampled).exp() * k3(logprobs, reference)


def to_go(per_token: Tensor, mask: Tensor) -> Tensor:
    """Σ_{j ≥ t} of the sampled tokens' values (B, T): what a token and those after it add up to.

    >>> import torch
    >>> to_go(torch.tensor([[0.5, 0.0, -1.0]]), torch.tensor([[True, False, True]])).tolist()
    [[-0.5, 0.0, -1.0]]
    """
    sums = per_token.masked_fill(~mask, 0.0).double().flip(1).cumsum(1).flip(1)
    return sums.masked_fill(~mask, 0.0).to(per_token.dtype)


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
