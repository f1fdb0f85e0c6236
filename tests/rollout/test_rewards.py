"""Facts are priced as configured, at the turn they belong to."""

import pytest
from pydantic import ValidationError

from agent_peft.rollout.rewards import RewardConfig, price
from agent_peft.types import Outcome, StopReason, Task, Trajectory, Turn

DB = RewardConfig(correct=1.0, incorrect=-0.1, timeout=-0.3)
OS = RewardConfig(correct=1.0, incorrect=-0.5, unknown=0.0, turn_limit=-0.7, token_limit=-0.9)


def trajectory(*valid, outcome=Outcome.INCORRECT, stop_reason=StopReason.FINISHED):
    turns = tuple(Turn((1,), (2,), (-0.5,), valid=v) for v in valid)
    return Trajectory(Task("t"), turns, outcome=outcome, stop_reason=stop_reason)


@pytest.mark.parametrize(
    ("config", "outcome", "stop_reason", "expected"),
    [
        (DB, Outcome.CORRECT, StopReason.FINISHED, 1.0),
        (DB, Outcome.INCORRECT, StopReason.FINISHED, -0.1),
        (DB, Outcome.UNKNOWN, StopReason.FINISHED, 0.0),
        (DB, Outcome.INCORRECT, StopReason.TIMEOUT, -0.3),
        (DB, Outcome.UNKNOWN, StopReason.TIMEOUT, -0.3),
        (DB, Outcome.CORRECT, StopReason.TIMEOUT, 1.0),  # correct is correct
        (DB, Outcome.INCORRECT, StopReason.TURN_LIMIT, -0.1),  # no price of its own
        (OS, Outcome.UNKNOWN, StopReason.TURN_LIMIT, -0.7),
        (OS, Outcome.INCORRECT, StopReason.TOKEN_LIMIT, -0.9),
        (RewardConfig(timeout=0.0), Outcome.INCORRECT, StopReason.TIMEOUT, 0.0),  # zero is a price, too
    ],
)
def test_the_end_is_priced(config, outcome, stop_reason, expected):
    assert price(trajectory(True, True, outcome=outcome, stop_reason=stop_reason), config).rewards == (0.0, expected)


def test_invalid_actions_are_priced_at_their_turn_and_add_to_the_end():
    config = RewardConfig(invalid_action=-0.25, incorrect=-0.5)
    priced = price(trajectory(False, True, False), config)
    assert priced.rewards == (-0.25, 0.0, -0.75)
    assert priced.reward == -1.0


def test_nothing_but_the_rewards_changes():
    before = trajectory(True, outcome=Outcome.CORRECT)
    after = price(before, DB)
    assert (after.task, after.turns, after.outcome, after.stop_reason) == (before.task, before.turns, before.outcome, before.stop_reason)
    assert before.rewards == ()


def test_an_infrastructure_failure_has_no_price():
    with pytest.raises(ValueError, match="infrastructure"):
        price(trajectory(True, stop_reason=StopReason.INFRASTRUCTURE), DB)


def test_someone_must_bear_the_price():
    with pytest.raises(ValueError, match="no turn"):
        price(trajectory(), DB)


@pytest.mark.parametrize("wrong", [{"corect": 1.0}, {"correct": float("inf")}, {"timeout": float("nan")}])
def test_a_wrong_price_list_is_refused(wrong):
    with pytest.raises(ValidationError):
        RewardConfig(**wrong)
