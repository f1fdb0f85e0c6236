"""The parts of a loss by hand: surrogates, estimates of the KL, weightings."""

from __future__ import annotations

import math

import pytest
import torch

from agent_peft.algorithms.surrogates import (
    WEIGHTINGS,
    band,
    clipped,
    constant_length,
    k1,
    k3,
    ratio,
    reverse_kl,
    score_function,
    sequence_clipped,
    sequence_mean,
    sequence_sum,
    token_mean,
    truncated,
    turn_mean,
)

# every quadrant: ratio below, within and above the clip range, for each sign of the advantage
RATIO = torch.tensor([[0.5, 0.9, 1.0, 1.1, 2.0]]).repeat(2, 1)
ADVANTAGES = torch.tensor([[2.0], [-2.0]]).expand(2, 5)
SAMPLED = torch.tensor([[-1.0, -0.5, -2.0, -0.1, -3.0]]).repeat(2, 1)


def gradient(surrogate, logprobs, sampled=SAMPLED, advantages=ADVANTAGES):
    leaf = logprobs.clone().requires_grad_()
    loss, cut = surrogate(leaf, sampled, advantages, torch.ones_like(leaf, dtype=torch.bool))
    loss.sum().backward()
    return loss.detach(), leaf.grad, cut


def test_score_function_by_hand():
    logprobs = SAMPLED + RATIO.log()
    loss, grad, cut = gradient(score_function, logprobs)
    torch.testing.assert_close(loss, -ADVANTAGES * logprobs)
    torch.testing.assert_close(grad, -ADVANTAGES)
    assert not cut.any()


def test_ratio_by_hand():
    loss, grad, cut = gradient(ratio, SAMPLED + RATIO.log())
    torch.testing.assert_close(loss, -ADVANTAGES * RATIO)
    torch.testing.assert_close(grad, -ADVANTAGES * RATIO)  # d ρ / d log π = ρ
    assert not cut.any()


def test_clipped_by_hand():
    loss, grad, cut = gradient(clipped(0.2, 0.3), SAMPLED + RATIO.log())
    torch.testing.assert_close(
        loss, -torch.tensor([[1.0, 1.8, 2.0, 2.2, 2.6], [-1.6, -1.8, -2.0, -2.2, -4.0]])
    )
    torch.testing.assert_close(
        grad, -torch.tensor([[1.0, 1.8, 2.0, 2.2, 0.0], [0.0, -1.8, -2.0, -2.2, -4.0]])
    )
    assert cut.tolist() == [[False, False, False, False, True], [True, False, False, False, False]]


def test_dual_clip_by_hand():
    loss, grad, cut = gradient(clipped(0.2, 0.3, dual_clip=1.5), SAMPLED + RATIO.log())
    torch.testing.assert_close(
        loss, -torch.tensor([[1.0, 1.8, 2.0, 2.2, 2.6], [-1.6, -1.8, -2.0, -2.2, -3.0]])
    )
    torch.testing.assert_close(grad, -torch.tensor([[1.0, 1.8, 2.0, 2.2, 0.0], [0.0, -1.8, -2.0, -2.2, 0.0]]))
    assert cut.tolist() == [[False, False, False, False, True], [True, False, False, False, True]]


def test_truncated_by_hand():
    logprobs = SAMPLED + RATIO.log()
    loss, grad, cut = gradient(truncated(0.5), logprobs)
    weight = torch.tensor([[0.5, 0.9, 1.0, 1.1, 1.5]]).repeat(2, 1)
    torch.testing.assert_close(loss, -weight * ADVANTAGES * logprobs)
    torch.testing.assert_close(grad, -weight * ADVANTAGES)  # no token loses its gradient
    assert cut.tolist() == [[False] * 4 + [True]] * 2


def test_band_by_hand():
    loss, grad, cut = gradient(band(0.2, 0.5), SAMPLED + RATIO.log())
    weight = torch.tensor([[0.0, 0.9, 1.0, 1.1, 0.0]]).repeat(2, 1)
    torch.testing.assert_close(loss, -weight * ADVANTAGES)
    torch.testing.assert_close(grad, -weight * ADVANTAGES)
    assert cut.tolist() == [[True, False, False, False, True]] * 2


@pytest.mark.parametrize("surrogate", [ratio, clipped(0.2, 0.2, 3.0), truncated(1.0), band(0.5, 4.0)])
def test_on_policy_every_surrogate_has_the_score_functions_gradient(surrogate):
    _, grad, cut = gradient(surrogate, SAMPLED)
    assert torch.equal(grad, gradient(score_function, SAMPLED)[1])
    assert not cut.any()


def test_the_ratio_corrects_for_a_policy_that_has_moved():
    """Over all actions of a categorical, E_sampled[∇(-ρ Â)] is the gradient of -E_π[Â]."""
    reward = torch.tensor([1.0, -2.0, 0.5])
    sampled = torch.tensor([0.2, 0.5, 0.3])
    logits = torch.tensor([0.3, -0.4, 1.0], requires_grad=True)
    logprobs = logits.log_softmax(0)
    (exact,) = torch.autograd.grad(-(logprobs.exp() * reward).sum(), logits, retain_graph=True)
    loss, _ = ratio(logprobs, sampled.log(), reward, torch.ones(3, dtype=torch.bool))
    (estimated,) = torch.autograd.grad((sampled * loss).sum(), logits)
    torch.testing.assert_close(estimated, exact)


def test_the_ratio_of_a_sequence_by_hand():
    """GSPO, equations 5 to 7: s is the geometric mean of a trajectory's ratios, without off-mask tokens."""
    mask = torch.tensor([[True, False, True, True], [True, True, False, False], [False] * 4])
    log_rho = torch.tensor([[0.3, 9.0, 0.0, -0.6], [0.2, 0.4, 0.0, 0.0], [0.0] * 4])
    advantages = torch.tensor([[2.0], [-1.0], [1.0]]) * mask
    sampled = torch.full((3, 4), -1.0)
    leaf = (sampled + log_rho).requires_grad_()
    loss, cut = sequence_clipped(0.2, 0.25)(leaf, sampled, advantages, mask)
    first, second = math.exp(-0.1), math.exp(0.3)  # of 3 and of 2 tokens
    assert loss[0, 0].item() == pytest.approx(-2 * first)
    assert loss[1, 0].item() == pytest.approx(second), "too large, but the minimum keeps it where Â < 0"
    assert not cut.any() and torch.isfinite(loss).all()
    # sequence_mean: each trajectory's loss is s Â, and ∇s = s / |y| Σ_t ∇log π_t
    weights, _ = sequence_mean(mask)
    (weights * loss).sum().backward()
    expected = torch.tensor([[-2 * first / 3], [second / 2], [0.0]]) * mask
    torch.testing.assert_close(leaf.grad, expected)


def test_a_sequence_is_clipped_as_a_whole():
    mask = torch.ones(2, 2, dtype=torch.bool)
    sampled = torch.zeros(2, 2)
    leaf = torch.tensor([[0.8, -0.2], [-0.8, 0.2]]).requires_grad_()  # s = e^0.3 and e^-0.3
    loss, cut = sequence_clipped(0.2, 0.25)(leaf, sampled, torch.tensor([[1.0], [-1.0]]).expand(2, 2), mask)
    loss.sum().backward()
    torch.testing.assert_close(loss.detach(), torch.tensor([[-1.25] * 2, [0.8] * 2]))
    assert cut.all() and not leaf.grad.any()


LOGITS = torch.tensor([0.3, -0.4, 1.0, -1.2], dtype=torch.float64)
OTHER = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64).log()
SAMPLER = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64).log()


def gradient_of(expression):
    logits = LOGITS.clone().requires_grad_()
    (grad,) = torch.autograd.grad(expression(logits.log_softmax(0)), logits)
    return grad


def exact_kl(logprobs):
    return (logprobs.exp() * (logprobs - OTHER)).sum()


def expected(estimator, sampler=None):
    """The expectation over tokens of ``sampler``; its probabilities are no part of the graph, as sampling
    is not.
    """

    def expression(logprobs):
        probabilities = (logprobs if sampler is None else sampler).exp().detach()
        return (probabilities * estimator(logprobs)).sum()

    return expression


def test_values_by_hand():
    pi, other = torch.tensor(0.5).log(), torch.tensor(0.25).log()
    assert float(k3(pi, other)) == pytest.approx(0.193147, abs=1e-6)  # 0.5 - 1 + log 2


@pytest.mark.parametrize("estimator", [k1, k3])
def test_k1_and_k3_are_unbiased_values(estimator):
    logprobs = LOGITS.log_softmax(0)
    torch.testing.assert_close(expected(lambda lp: estimator(lp, OTHER))(logprobs), exact_kl(logprobs))


def test_k3_is_zero_for_equal_policies_and_never_negative():
    assert float(k3(OTHER, OTHER).abs().max()) == 0.0
    assert (k3(LOGITS.log_softmax(0), OTHER) > 0).all()


def test_reverse_kl_has_the_exact_gradient_on_policy():
    sampled = LOGITS.log_softmax(0)
    torch.testing.assert_close(
        gradient_of(expected(lambda lp: reverse_kl(lp, sampled, OTHER))), gradient_of(exact_kl)
    )


def test_reverse_kl_has_the_exact_value_and_gradient_off_policy():
    estimate = expected(lambda lp: reverse_kl(lp, SAMPLER, OTHER), SAMPLER)
    torch.testing.assert_close(estimate(LOGITS.log_softmax(0)), exact_kl(LOGITS.log_softmax(0)))
    torch.testing.assert_close(gradient_of(estimate), gradient_of(exact_kl))


def test_reverse_kl_and_k2_have_the_same_gradient_token_by_token():
    sampled = LOGITS.log_softmax(0)
    for token in range(4):
        ours = gradient_of(lambda lp, t=token: reverse_kl(lp, sampled, OTHER)[t])
        torch.testing.assert_close(ours, gradient_of(lambda lp, t=token: (OTHER - lp)[t].square() / 2))


def test_the_naive_gradients_are_those_of_something_else():
    """Why k1 and k3 are never differentiated as they are: this is what fails in many trainers."""
    assert float(gradient_of(expected(lambda lp: k1(lp, OTHER))).abs().max()) < 1e-12  # nothing at all
    forward_kl = gradient_of(lambda lp: (OTHER.exp() * (OTHER - lp)).sum())
    torch.testing.assert_close(gradient_of(expected(lambda lp: k3(lp, OTHER))), forward_kl)
    assert not torch.allclose(forward_kl, gradient_of(exact_kl), atol=1e-2)


MASK = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]]).bool()
LOSS = torch.tensor([[9.0, 1.0, 3.0, 9.0], [1.0, 2.0, 3.0, 2.0], [9.0, 9.0, 9.0, 9.0]])
ALL = [*WEIGHTINGS.values(), constant_length(5)]


def weighted(weighting, mask=MASK, loss=LOSS):
    weights, denominator = weighting(mask)
    return float((weights * loss).sum() / denominator)


@pytest.mark.parametrize(
    ("weighting", "expected"),
    [
        (token_mean, (1 + 3 + 1 + 2 + 3 + 2) / 6),
        (sequence_mean, (2.0 + 2.0) / 2),  # the trajectory without an action has no mean
        (sequence_sum, (4.0 + 8.0 + 0.0) / 3),
        (constant_length(5), (4.0 + 8.0 + 0.0) / 15),
    ],
)
def test_weightings_by_hand(weighting, expected):
    assert weighted(weighting) == pytest.approx(expected)


def test_turn_mean_by_hand():
    mask = torch.tensor([[1, 0, 1, 1, 0], [0, 1, 1, 1, 1], [0, 0, 0, 0, 0], [1, 0, 0, 0, 1]]).bool()
    loss = torch.tensor([[4.0, 9.0, 1.0, 3.0, 9.0], [9.0, 1.0, 2.0, 3.0, 2.0], [9.0] * 5, [5.0, 9, 9, 9, 7]])
    assert weighted(turn_mean, mask, loss) == pytest.approx((4.0 + 2.0 + 2.0 + 5.0 + 7.0) / 5)


@pytest.mark.parametrize("weighting", ALL)
def test_weights_are_zero_off_the_mask_and_the_denominator_is_a_scalar(weighting):
    weights, denominator = weighting(MASK)
    assert not weights[~MASK].any() and (weights[MASK] > 0).all()
    assert denominator.shape == () and weights.dtype == denominator.dtype == torch.float32


@pytest.mark.parametrize("weighting", ALL)
def test_ranks_only_sum(weighting):
    parts = [(weighting(MASK[rows]), LOSS[rows]) for rows in ([0, 2], [1])]
    denominator = sum(denominator for (_, denominator), _ in parts)
    total = sum((weights / denominator * loss).sum() for (weights, _), loss in parts)
    assert float(total) == pytest.approx(weighted(weighting), rel=1e-6)
