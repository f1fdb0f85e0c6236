"""The length of a stage, and the order in which it goes through the tasks."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_peft.ranks import checksum
from agent_peft.training.stage import MAX_STEPS, Stage, StageConfig
from agent_peft.types import AgentPeftError, Task


@pytest.mark.parametrize(
    ("epochs", "tasks", "per_step", "steps"),
    [(3, 10, 8, 4), (1, 16, 8, 2), (0.5, 16, 8, 1), (0.1, 30, 1, 3), (0.01, 5, 8, 1), (2, 3, 8, 1)],
)
def test_epochs_are_trips_through_the_tasks_rounded_up_to_steps(epochs, tasks, per_step, steps):
    stage = StageConfig(algorithm="rloo", epochs=epochs, tasks_per_step=per_step)
    settled = stage.with_steps([Task(str(number)) for number in range(tasks)])
    assert (settled.steps, settled.epochs, settled.updates) == (steps, None, steps)


@given(epochs=st.decimals("0.001", "50", places=3), tasks=st.integers(1, 300), per_step=st.integers(1, 40))
def test_each_task_comes_at_least_as_often_as_epochs_says_and_one_step_less_is_too_few(
    epochs, tasks, per_step
):
    stage = StageConfig(algorithm="rloo", epochs=float(epochs), tasks_per_step=per_step)
    steps = stage.with_steps([Task(str(number)) for number in range(tasks)]).steps
    assert (steps - 1) * per_step < Fraction(epochs) * tasks <= steps * per_step
    assert steps == math.ceil(Fraction(epochs) * tasks / per_step)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "Stage: steps is missing (number of steps: trips through the main loop; set this or epochs)"),
        ({"steps": 0}, "Stage.steps: must be greater than or equal to 1, got 0"),
        ({"steps": 2, "epochs": 1}, "Stage: steps and epochs both set the length of the stage; give one of"),
        ({"epochs": -1}, "Stage.epochs: must be greater than 0, got -1"),
        ({"epochs": math.nan}, "Stage.epochs: must be less than or equal to 1000000, got NaN"),
    ],
)
def test_one_of_steps_and_epochs(keys, message):
    with pytest.raises(AgentPeftError) as raised:
        Stage(algorithm="rloo", **keys)
    assert str(raised.value).startswith(message)


def test_more_steps_than_a_stage_may_have_are_one_line():
    stage = StageConfig(algorithm="rloo", epochs=MAX_STEPS, tasks_per_step=1)
    with pytest.raises(
        AgentPeftError, match=r"epochs: 1e\+06 of stage 'rloo' take 2,000,000 steps, and 1,000,"
    ):
        stage.with_steps([Task("a"), Task("b")])


def test_a_trainer_knows_its_steps_and_its_schedule_decays_over_them(make_trainer):
    optimizer = {"learning_rate": 0.01, "schedule": "linear"}
    trainer, same = (
        make_trainer("sft", tasks_per_step=4, optimizer=optimizer, **length)
        for length in ({"epochs": 1.2}, {"steps": 3})
    )
    assert trainer.stage.steps == 3, "1.2 × 10 tasks in steps of 4"
    assert [step.metrics for step in trainer] == [step.metrics for step in same]


def test_the_order_of_a_file(make_trainer, tmp_path):
    every = [task.id for task in make_trainer("sft").environment.tasks]
    order = [every[4], every[0], every[9], every[0]]
    (tmp_path / "order.txt").write_text("\n".join(order))
    keys = {"task_order": tmp_path / "order.txt", "tasks_per_step": 3}
    trainer = make_trainer("sft", **keys, epochs=1.5)
    assert trainer.stage.steps == 2, "1.5 × 4 tasks in steps of 3"
    drawn = [task.id for step in range(2) for task in trainer.source.order.at(step)]
    assert drawn == [*order, *order[:2]]


ACTING = ["reinforce", {"kind": "grpo", "update_epochs": 2, "minibatches": 2, "kl_coef": 0.1}, "ppo"]


@pytest.mark.parametrize("algorithm", ACTING, ids=["reinforce", "grpo", "ppo"])
def test_a_learning_rate_of_zero_acts_and_changes_no_weight(make_trainer, algorithm):
    trainer, learning = (
        make_trainer(algorithm, steps=2, optimizer={"learning_rate": rate}) for rate in (0, 0.01)
    )
    before = checksum(trainer.policy.model.parameters())
    steps = list(trainer)
    assert checksum(trainer.policy.model.parameters()) == before
    assert [step.metrics["updates_skipped"] for step in steps] == [1.0, 1.0]
    assert next(iter(learning)).collection.groups == steps[0].collection.groups
    assert next(iter(learning)).collection.groups != steps[1].collection.groups, "it has learned"


@pytest.mark.parametrize("key", ["incorrect", "invalid_action", "turn_limit", "timeout", "cut_action"])
def test_prices_below_0_are_refused_where_a_mean_return_divides(key):
    with pytest.raises(AgentPeftError, match=rf"maxrl divides .* and rewards\.{key} is below 0; set it to 0"):
        Stage(algorithm="maxrl", steps=1, rewards={"incorrect": 0.0, key: -0.05})
