"""The divergences of a distillation, against probabilities."""

from __future__ import annotations

import pytest
import torch

from agent_peft.algorithms import DistillConfig
from agent_peft.algorithms.distillation import divergence


def distributions(vocabulary: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.randn(2, 5, vocabulary, generator=torch.Generator().manual_seed(0)).double() * 3
    return logits[0].log_softmax(-1), logits[1].log_softmax(-1)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("top_k", [None, 3, 7, 100])
def test_it_is_zero_for_equals_and_coarser_is_never_larger(beta, top_k):
    student, teacher = distributions()
    found, exact = divergence(student, teacher, beta, top_k), divergence(student, teacher, beta)
    assert (found > 0).all() and (found <= exact + 1e-12).all()
    assert torch.equal(found, exact) == (top_k is None or top_k >= 7)
    torch.testing.assert_close(divergence(teacher, teacher, beta, top_k), torch.zeros(5).double())


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_tokens_that_a_model_forbids_have_a_finite_gradient(beta):
    """Such as the padding of a vocabulary, whose logits some models set to -inf."""
    logits, teacher = torch.zeros(1, 4, requires_grad=True), torch.tensor([[0.1, 0.2, 0.3, -torch.inf]])
    with torch.no_grad():
        logits[0, 3] = -torch.inf
    found = divergence(logits.log_softmax(-1), teacher.log_softmax(-1), beta)
    found.sum().backward()
    assert 0 < float(found.detach()) < 1 and logits.grad is not None and logits.grad.isfinite().all()


def test_a_mixture_near_an_end_is_a_multiple_of_that_kl():
    """JSD_β / β -> KL(teacher ‖ π) for β -> 0, and JSD_β / (1 - β) -> KL(π ‖ teacher) for β -> 1."""
    student, teacher = distributions()
    for beta, end in ((1e-5, 0.0), (1 - 1e-5, 1.0)):
        scaled = divergence(student, teacher, beta) / min(beta, 1 - beta)
        torch.testing.assert_close(scaled, divergence(student, teacher, end), rtol=1e-2, atol=0)


def test_the_formula_names_the_divergence():
    assert DistillConfig().facts.formula == "mean over tokens of KL(π ‖ teacher)"
    config = DistillConfig(beta=0.5, top_k=20, advantage_coef=0.1)
    assert config.facts.formula == (
        "mean over tokens of JSD_0.5(teacher ‖ π) over the teacher's 20 likeliest tokens and the rest - "
        "0.1 ρ Â; Â = R - mean of the others of its group"
    )
