import pytest
import torch

from agent_peft.algorithms.advantages import (
    MovingAverageBaseline,
    group_centered,
    group_normalized,
    leave_one_out,
    mean_normalized,
    plain_return,
)
from agent_peft.types import AgentPeftError

RETURNS = torch.tensor([1.0, 5.0, 0.0, 7.0, 2.0])
GROUPS = torch.tensor([9, 4, 9, 4, 9])  # group 9: 1 0 2, group 4: 5 7
COMPARING = [leave_one_out, group_centered, group_normalized, mean_normalized]


def test_plain_return():
    assert plain_return(RETURNS, GROUPS) is RETURNS


def test_leave_one_out_by_hand():
    # 1 - (0+2)/2, 5 - 7, 0 - (1+2)/2, 7 - 5, 2 - (1+0)/2
    torch.testing.assert_close(leave_one_out(RETURNS, GROUPS), torch.tensor([0.0, -2.0, -1.5, 2.0, 1.5]))


def test_group_centered_by_hand():
    torch.testing.assert_close(group_centered(RETURNS, GROUPS), torch.tensor([0.0, -1.0, -1.0, 1.0, 1.0]))


def test_group_normalized_by_hand():
    # group 9: std sqrt((0 + 1 + 1) / 2) = 1; group 4: std sqrt((1 + 1) / 1) = 1.41421
    torch.testing.assert_close(
        group_normalized(RETURNS, GROUPS), torch.tensor([0.0, -0.7071, -1.0, 0.7071, 1.0]), atol=1e-4, rtol=0
    )
    torch.testing.assert_close(group_normalized(RETURNS, GROUPS, epsilon=1.0)[2], torch.tensor(-0.5))


def test_mean_normalized_by_hand():
    # group 9: mean 1, group 4: mean 6
    torch.testing.assert_close(
        mean_normalized(RETURNS, GROUPS), torch.tensor([0.0, -1 / 6, -1.0, 1 / 6, 1.0]), atol=1e-5, rtol=0
    )


def test_the_advantage_of_a_success_is_the_odds_against_it():
    """With one success among four its weight is 1 / p - 1 = 3, and without one nothing is learned."""
    returns, groups = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 0.0]), torch.tensor([0, 0, 0, 0, 1, 1])
    expected = torch.tensor([3.0, -1.0, -1.0, -1.0, 0.0, 0.0])
    torch.testing.assert_close(mean_normalized(returns, groups), expected, atol=1e-4, rtol=0)


def test_a_return_below_zero_is_no_rate_of_success():
    with pytest.raises(AgentPeftError, match=r"a return is -0.1.*set rewards.incorrect: 0"):
        mean_normalized(torch.tensor([1.0, -0.1]), torch.tensor([0, 0]))


@pytest.mark.parametrize("advantage", COMPARING)
@pytest.mark.parametrize("size", [2, 3, 7])
def test_a_group_without_variance_has_no_advantage_at_all(advantage, size):
    returns = torch.full((size,), 0.1)  # 0.1 is not exact: its sum in fp32 is not three times 0.1
    assert advantage(returns, torch.zeros(size, dtype=torch.int64)).tolist() == [0.0] * size


@pytest.mark.parametrize("advantage", COMPARING)
def test_advantages_of_a_group_sum_to_zero_and_ignore_other_groups(advantage):
    together = advantage(RETURNS, GROUPS)
    alone = advantage(RETURNS[GROUPS == 4], GROUPS[GROUPS == 4])
    torch.testing.assert_close(together[GROUPS == 4], alone)
    torch.testing.assert_close(together[GROUPS == 9].sum(), torch.tensor(0.0))
    assert together.dtype == torch.float32


@pytest.mark.parametrize("advantage", COMPARING)
def test_a_group_of_one_is_an_error_that_names_it(advantage):
    with pytest.raises(AgentPeftError, match="group 5 has one trajectory"):
        advantage(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([3, 5, 3]))


def test_the_moving_average_is_the_baseline_before_the_update():
    baseline = MovingAverageBaseline(momentum=0.9)
    assert baseline.subtract(torch.tensor([1.0, 0.0])).tolist() == [1.0, 0.0]
    assert baseline.value == pytest.approx(0.05)  # 0.9 * 0 + 0.1 * 0.5
    torch.testing.assert_close(baseline.subtract(torch.tensor([2.0, 4.0])), torch.tensor([1.95, 3.95]))
    assert baseline.value == pytest.approx(0.345)  # 0.9 * 0.05 + 0.1 * 3


def test_the_moving_average_is_over_all_ranks():
    shares = [torch.tensor([1.0]), torch.tensor([0.0, 0.0, 0.0])]
    total = torch.tensor([1.0, 4.0], dtype=torch.float64)
    values = []
    for share in shares:
        baseline = MovingAverageBaseline(momentum=0.5)
        baseline.subtract(share, sum_over_ranks=lambda _: total)
        values.append(baseline.value)
    assert values == [0.125, 0.125]
