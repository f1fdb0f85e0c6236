import pytest
import torch

from agent_peft.algorithms.penalties import k2, k3, reverse_kl

LOGITS = torch.tensor([0.3, -0.4, 1.0, -1.2], dtype=torch.float64)
OTHER = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64).log()
SAMPLED = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64).log()


def k1(logprobs, other):
    """The estimator that is not offered: unbiased in value, and without any gradient."""
    return logprobs - other


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
    assert float(k2(pi, other)) == pytest.approx(0.240227, abs=1e-6)  # (log 2)² / 2
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
    estimate = expected(lambda lp: reverse_kl(lp, SAMPLED, OTHER), SAMPLED)
    torch.testing.assert_close(estimate(LOGITS.log_softmax(0)), exact_kl(LOGITS.log_softmax(0)))
    torch.testing.assert_close(gradient_of(estimate), gradient_of(exact_kl))


def test_reverse_kl_and_k2_have_the_same_gradient_token_by_token():
    sampled = LOGITS.log_softmax(0)
    for token in range(4):
        ours = gradient_of(lambda lp, t=token: reverse_kl(lp, sampled, OTHER)[t])
        torch.testing.assert_close(ours, gradient_of(lambda lp, t=token: k2(lp, OTHER)[t]))


def test_the_naive_gradients_are_those_of_something_else():
    """Why k1 and k3 are never differentiated as they are: this is what fails in many trainers."""
    assert float(gradient_of(expected(lambda lp: k1(lp, OTHER))).abs().max()) < 1e-12  # nothing at all
    forward_kl = gradient_of(lambda lp: (OTHER.exp() * (OTHER - lp)).sum())
    torch.testing.assert_close(gradient_of(expected(lambda lp: k3(lp, OTHER))), forward_kl)
    assert not torch.allclose(forward_kl, gradient_of(exact_kl), atol=1e-2)
