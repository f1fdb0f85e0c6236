import pytest
import torch

from agent_peft.algorithms.weightings import (
    WEIGHTINGS,
    constant_length,
    sequence_mean,
    sequence_sum,
    token_mean,
    turn_mean,
)

MASK = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]]).bool()
LOSS = torch.tensor([[9.0, 1.0, 3.0, 9.0], [1.0, 2.0, 3.0, 2.0], [9.0, 9.0, 9.0, 9.0]])
ALL = [*WEIGHTINGS.values(), constant_length(5)]


def weighted(weighting, mask=MASK, loss=LOSS):
    weights, denominator = weighting(mask)
    return float((weights * loss).sum() / denominator)


def test_token_mean_by_hand():
    assert weighted(token_mean) == pytest.approx((1 + 3 + 1 + 2 + 3 + 2) / 6)


def test_sequence_mean_by_hand():
    assert weighted(sequence_mean) == pytest.approx(
        (2.0 + 2.0) / 2
    )  # the trajectory without an action has no mean


def test_turn_mean_by_hand():
    mask = torch.tensor([[1, 0, 1, 1, 0], [0, 1, 1, 1, 1], [0, 0, 0, 0, 0], [1, 0, 0, 0, 1]]).bool()
    loss = torch.tensor([[4.0, 9.0, 1.0, 3.0, 9.0], [9.0, 1.0, 2.0, 3.0, 2.0], [9.0] * 5, [5.0, 9, 9, 9, 7]])
    assert weighted(turn_mean, mask, loss) == pytest.approx((4.0 + 2.0 + 2.0 + 5.0 + 7.0) / 5)


def test_sequence_sum_by_hand():
    assert weighted(sequence_sum) == pytest.approx((4.0 + 8.0 + 0.0) / 3)


def test_constant_length_by_hand():
    assert weighted(constant_length(5)) == pytest.approx((4.0 + 8.0 + 0.0) / 15)


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
