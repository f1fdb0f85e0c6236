from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from agent_peft.policies.sampling import SamplingConfig, draw, log_distribution, uniform

LOGITS = torch.tensor([0.3, -1.2, 2.0, 0.3, -4.0, 1.1])


def support(logits: torch.Tensor, **settings: float) -> list[int]:
    return torch.isfinite(log_distribution(logits, SamplingConfig(**settings))).nonzero().flatten().tolist()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 3},
        {"top_p": 0.8},
        {"top_k": 4, "top_p": 0.9, "temperature": 1.5},
    ],
)
def test_draw_inverts_the_distribution(settings):
    """Over an even grid of uniforms each token comes as often as it is likely, to one cell of the grid at
    either border.
    """
    sampling, cells = SamplingConfig(**settings), 20_000
    uniforms = (torch.arange(cells, dtype=torch.float64) + 0.5) / cells
    tokens, logprobs = draw(LOGITS.expand(cells, -1), uniforms, sampling)
    expected = log_distribution(LOGITS, sampling)
    frequencies = torch.bincount(tokens, minlength=len(LOGITS)) / cells
    assert torch.allclose(frequencies, expected.exp(), atol=1.5 / cells)
    assert torch.allclose(logprobs, expected[tokens], atol=1e-6)
    assert torch.equal(tokens, tokens.sort().values), "the inverse of a distribution function rises"


def test_log_distribution_is_the_definition():
    assert torch.allclose(
        log_distribution(LOGITS, SamplingConfig(temperature=0.7)), (LOGITS / 0.7).log_softmax(-1)
    )
    kept = torch.tensor([2, 5, 0])
    expected = torch.full_like(LOGITS, -torch.inf).scatter(0, kept, LOGITS[kept].log_softmax(-1))
    assert torch.allclose(log_distribution(LOGITS, SamplingConfig(top_k=3)), expected)
    assert log_distribution(LOGITS.bfloat16(), SamplingConfig()).dtype == torch.float32


def test_top_p_keeps_the_token_that_crosses_it():
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    assert [support(logits, top_p=p) for p in (0.1, 0.49, 0.51, 0.74, 0.76, 0.87, 0.88, 1.0)] == [
        [0],
        [0],
        [0, 1],
        [0, 1],
        [0, 1, 2],
        [0, 1, 2],
        [0, 1, 2, 3],
        [0, 1, 2, 3],
    ]


def test_a_tiny_top_p_keeps_the_most_likely_token():
    assert support(torch.tensor([0.1, 0.7, 0.2]).log(), top_p=5e-324) == [1]


def test_top_p_counts_within_top_k_and_after_temperature():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert support(logits, top_p=0.75, top_k=0) == [0, 1, 2]
    assert support(logits, top_p=0.75, top_k=3) == [0, 1]  # 0.4 + 0.3 of 0.9
    assert support(logits, top_p=0.75, temperature=0.3) == [0, 1]
    assert support(logits, top_k=9) == [0, 1, 2, 3]


def test_ties_keep_the_lower_tokens():
    assert support(torch.zeros(6), top_k=4) == [0, 1, 2, 3]
    assert support(torch.zeros(5000), top_k=700) == list(range(700))
    assert support(torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0]), top_k=3) == [0, 1, 3]
    assert support(torch.zeros(8), top_p=0.5) == [0, 1, 2, 3]


@settings(deadline=None)
@given(
    st.lists(st.integers(-20, 20), min_size=2, max_size=9),
    st.integers(0, 10),
    st.sampled_from([0.05, 0.3, 0.9, 1.0]),
    st.data(),
)
def test_any_distribution_sums_to_one_and_holds_its_mode(values, top_k, top_p, chosen):
    logits, sampling = torch.tensor(values) / 4, SamplingConfig(top_k=top_k, top_p=top_p)
    plain = log_distribution(logits, sampling)
    assert math.isclose(float(plain.exp().sum()), 1.0, rel_tol=1e-5)
    assert torch.isfinite(plain[logits.argmax()])
    token = torch.tensor(chosen.draw(st.integers(0, len(values) - 1)))
    kept = log_distribution(logits, sampling, keep=token)
    assert torch.isfinite(kept[token])
    inside = torch.isfinite(plain)
    if inside[token]:
        assert torch.equal(kept, plain)
    else:
        inside[token] = True
        assert torch.equal(torch.isfinite(kept), inside)
        assert math.isclose(float(kept.exp().sum()), 1.0, rel_tol=1e-5)


def test_a_kept_token_outside_the_support_has_a_finite_gradient():
    logits = LOGITS.clone().requires_grad_()
    log_distribution(logits, SamplingConfig(top_k=2), keep=torch.tensor(4))[4].backward()
    assert logits.grad is not None and torch.isfinite(logits.grad).all() and logits.grad[4] > 0.9


def test_keep_speaks_of_each_row_apart():
    rows = log_distribution(LOGITS.expand(2, -1), SamplingConfig(top_k=1), keep=torch.tensor([4, 1]))
    assert torch.isfinite(rows).nonzero().tolist() == [[0, 2], [0, 4], [1, 1], [1, 2]]


def test_temperature_zero_is_the_first_of_the_most_likely():
    logits = torch.tensor([[0.0, 3.0, 3.0], [5.0, 3.0, 3.0]])
    for u in (0.0, 0.5, 0.999):
        tokens, logprobs = draw(
            logits, torch.full((2,), u, dtype=torch.float64), SamplingConfig(temperature=0.0)
        )
        assert tokens.tolist() == [1, 0]
        assert torch.allclose(logprobs, logits.log_softmax(-1)[[0, 1], [1, 0]])


def test_the_borders_of_the_uniform_stay_inside_the_support():
    """u = 0 must not give a token of probability zero that stands first, nor the largest u one that stands
    last.
    """
    logits = torch.tensor([-9.0, 1.0, 2.0, 0.5, -9.0, -9.0])
    largest = 1.0 - 2.0**-53
    for sampling in (SamplingConfig(top_k=3), SamplingConfig(top_p=0.99), SamplingConfig(temperature=0.01)):
        tokens, logprobs = draw(
            logits.expand(2, -1), torch.tensor([0.0, largest], dtype=torch.float64), sampling
        )
        assert torch.isfinite(logprobs).all(), (sampling, tokens)
    for scale in torch.linspace(0.1, 3.0, 40):  # sums that rounding leaves a little over and under one
        _, logprobs = draw(
            (logits * scale)[None], torch.tensor([largest], dtype=torch.float64), SamplingConfig(top_k=3)
        )
        assert torch.isfinite(logprobs).all()


def test_a_row_does_not_depend_on_the_others():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(32, 50, generator=generator)
    uniforms = torch.rand(32, generator=generator, dtype=torch.float64)
    for sampling in (SamplingConfig(), SamplingConfig(top_p=0.8, top_k=20, temperature=0.9)):
        tokens, logprobs = draw(logits, uniforms, sampling)
        alone = [draw(logits[i : i + 1], uniforms[i : i + 1], sampling) for i in range(32)]
        assert torch.equal(tokens, torch.cat([token for token, _ in alone]))
        assert torch.equal(logprobs, torch.cat([logprob for _, logprob in alone]))
        order = torch.randperm(32, generator=generator)
        assert torch.equal(draw(logits[order], uniforms[order], sampling)[0], tokens[order])


def test_a_large_vocabulary_is_drawn_to_its_last_token():
    """In fp32 the sum of 200,000 equal probabilities is off by far more than one of them."""
    size = 200_000
    cells = torch.tensor([0, 1, size // 2, size - 2, size - 1])
    tokens, _ = draw(torch.zeros(len(cells), size), (cells.double() + 0.5) / size, SamplingConfig())
    assert (tokens - cells).abs().max() <= 1


def test_uniforms_are_even_and_named_by_seed_and_position():
    values = [uniform(seed, position) for seed in range(100) for position in range(100)]
    assert all(0.0 <= value < 1.0 for value in values) and len(set(values)) == 10_000
    counts = torch.bincount((torch.tensor(values) * 10).long(), minlength=10)
    assert (counts - 1000).abs().max() < 5 * math.sqrt(900)
    assert uniform(3, 4) == uniform(3, 4) != uniform(4, 3)


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -0.1}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_k": -1}, {"max_tokens": 1}, {"topp": 0.5}],
)
def test_what_makes_no_sense_is_refused(wrong):
    with pytest.raises(ValidationError):
        SamplingConfig(**wrong)


def test_min_p_keeps_tokens_by_their_share_of_the_likeliest_one():
    """0.5, 0.3, 0.15, 0.05: at 0.29 the bound is 0.145; top-p then adds up what is left, as in vLLM."""
    logits = torch.tensor([0.3, 0.05, 0.5, 0.15]).log()
    kept = log_distribution(logits, SamplingConfig(min_p=0.29)).exp()
    assert kept.tolist() == pytest.approx([0.3 / 0.95, 0.0, 0.5 / 0.95, 0.15 / 0.95])
    kept = log_distribution(logits, SamplingConfig(min_p=0.31, top_p=0.6)).exp()
    assert kept.tolist() == pytest.approx([0.0, 0.0, 1.0, 0.0])
    assert SamplingConfig(min_p=0.29).truncates
