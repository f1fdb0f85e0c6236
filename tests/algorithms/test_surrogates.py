import pytest
import torch

from agent_peft.algorithms.surrogates import clipped, ratio, score_function

# every quadrant: ratio below, within and above the clip range, for each sign of the advantage
RATIO = torch.tensor([[0.5, 0.9, 1.0, 1.1, 2.0]]).repeat(2, 1)
ADVANTAGES = torch.tensor([[2.0], [-2.0]]).expand(2, 5)
SAMPLED = torch.tensor([[-1.0, -0.5, -2.0, -0.1, -3.0]]).repeat(2, 1)


def gradient(surrogate, logprobs, sampled=SAMPLED, advantages=ADVANTAGES):
    leaf = logprobs.clone().requires_grad_()
    loss, cut = surrogate(leaf, sampled, advantages)
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


@pytest.mark.parametrize("surrogate", [ratio, clipped(0.2, 0.2)])
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
    loss, _ = ratio(logprobs, sampled.log(), reward)
    (estimated,) = torch.autograd.grad((sampled * loss).sum(), logits)
    torch.testing.assert_close(estimated, exact)
