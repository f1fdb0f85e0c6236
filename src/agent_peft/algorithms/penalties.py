"""Estimates of the divergence between two policies, per token (Schulman, 2020,
http://joschu.net/blog/kl-approx.html). All (B, T).

Their properties hold for policies that give every token of the vocabulary some probability, and for tokens
drawn from the whole vocabulary. With top-p or top-k no drawn token shows what the other policy gives to the
tokens that were cut off, and none of the estimates is unbiased.
"""

from __future__ import annotations

from torch import Tensor


def k1(logprobs: Tensor, other: Tensor) -> Tensor:
    """-log r: unbiased for KL(π ‖ other), also negative. It is the KL in a reward (Ziegler et al., 2019,
    equation 2; REINFORCE++: Hu et al., 2025): its own gradient has a mean of 0, and the advantage gives it
    the right one.
    """
    return logprobs - other


def k2(logprobs: Tensor, other: Tensor) -> Tensor:
    """(log r)² / 2: biased as a value, but its gradient, (log π - log other) ∇log π, is unbiased for that
    of KL(π ‖ other).
    """
    return (other - logprobs).square() / 2


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

    ∇(ρ k3) = ρ (k3 + 1 - r) ∇log π = ρ (-log r) ∇log π, which is k2's gradient times ρ. So k2 and k3
    train the same, and the configuration offers no choice between them.
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
