import dataclasses

import pytest

from agent_peft.types import Outcome, StepResult, StopReason, Task, Trajectory, Turn

TRAJECTORY = Trajectory(
    Task("t"),
    turns=(Turn((1, 2), (3,), (-0.5,)), Turn((4,), (5, 6), (-0.1, -0.2), valid=False)),
    rewards=(0.25, -1.0),
)


def test_a_trajectory_flattens_turn_by_turn():
    assert TRAJECTORY.tokens == (1, 2, 3, 4, 5, 6)
    assert TRAJECTORY.action_mask == (False, False, True, False, True, True)
    assert TRAJECTORY.logprobs == (0.0, 0.0, -0.5, 0.0, -0.1, -0.2)


def test_a_trajectory_counts():
    assert TRAJECTORY.reward == -0.75
    assert TRAJECTORY.num_action_tokens == 3
    assert TRAJECTORY.num_invalid == 1


def test_a_turn_has_one_logprob_per_action_token():
    with pytest.raises(ValueError, match="2 action tokens but 1"):
        Turn((1,), (2, 3), (-0.1,))


@pytest.mark.parametrize(("done", "reason"), [(True, None), (False, StopReason.FINISHED)])
def test_a_stop_reason_comes_exactly_with_the_end(done, reason):
    with pytest.raises(ValueError, match="stop reason"):
        StepResult("", done=done, stop_reason=reason)


def test_an_episode_that_goes_on_has_no_outcome_yet():
    assert StepResult("next").outcome is Outcome.UNKNOWN


def test_the_record_cannot_be_rewritten():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TRAJECTORY.outcome = Outcome.CORRECT
