"""Estimates of the divergence between two policies, per token (Schulman, 2020,
http://joschu.net/blog/kl-approx.html). All (B, T).

Their properties hold for policies that give every token of the vocabulary some probability, and for tokens
drawn from the whole vocabulary. With top-p or top-k no drawn token shows what the other policy gives to the
tokens that were cut off, and none of the estimates is unbiased.
"""

from __future__ import annotations

from torch import Tensor


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
