"""The orders of tasks: of a file, by skill, by difficulty and by success."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_peft.rollout.task_order import (
    BySkillConfig,
    BySuccessConfig,
    SkillOrder,
    SuccessOrder,
    TaskOrder,
    from_easy_to_difficult,
    length_of_trip,
    order_of,
    tasks_in_order,
)
from agent_peft.types import AgentPeftError, Group, Outcome, Task, Trajectory

TASKS = [Task(name) for name in ("a", "b", "c 1", "d")]


def test_a_file_gives_the_order_and_may_leave_out_and_repeat(tmp_path):
    path = tmp_path / "order.txt"
    path.write_text("c 1\na\n\n c 1 \nd")
    order = TaskOrder(tasks_in_order(TASKS, path), per_step=3, seed=0, shuffled=False)
    assert [[task.id for task in order.at(step)] for step in range(3)] == [
        ["c 1", "a", "c 1"],
        ["d", "c 1", "a"],
        ["c 1", "d", "c 1"],
    ]
    listed = tmp_path / "order.json"
    listed.write_text(json.dumps(["c 1", "a", "c 1", "d"]))
    assert tasks_in_order(TASKS, listed) == tasks_in_order(TASKS, path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("o.txt", "a\n\nc1\n", "o.txt: line 3: there is no task 'c1'; did you mean 'c 1'?"),
        ("o.txt", "zzzz", "o.txt: line 1: there is no task 'zzzz'; the first one is 'a'"),
        ("o.txt", "\n", "o.txt: names no task; give the ids of tasks, one in a line"),
        ("o.json", '["a", 1]', "o.json: must be a list of task ids, which are texts"),
        ("o.json", "a\nb", "o.json: is not JSON ("),
        ("o.json", '["a", "e"]', "o.json: item 1: there is no task 'e'; the first one is 'a'"),
        ("o.json", "[]", "o.json: names no task"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path, monkeypatch, name, text, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(AgentPeftError) as raised:
        tasks_in_order(TASKS, tmp_path / name)
    assert str(raised.value).replace(f"{tmp_path}/", "").startswith(message)


def test_no_such_file_is_one_line(tmp_path):
    with pytest.raises(AgentPeftError, match=r"o.txt: cannot be read .*give the path of a file of task ids"):
        tasks_in_order(TASKS, tmp_path / "o.txt")


# -- by skill ------------------------------------------------------------------------------------------------

SKILLED = [
    *(Task(f"i{number}", ("insert", "where")) for number in range(3)),
    *(Task(f"u{number}", ("update",)) for number in range(5)),
    Task("none"),
    Task("w", ("where",)),
]


def test_by_skill_goes_through_segments_of_one_skill_and_shuffles_each_pass():
    order = SkillOrder(SKILLED, 2, seed=0, skills=("update", "insert"), steps=3)
    ids = [[task.id for task in order.at(step)] for step in range(12)]
    assert [{name[0] for name in of_step} for of_step in ids] == 2 * (3 * [{"u"}] + 3 * [{"i"}])
    # in a new trip a skill goes on
    passes = [name for of_step in (*ids[:3], *ids[6:9]) for name in of_step]
    assert sorted(passes[:5]) == sorted(passes[5:10]) == [f"u{number}" for number in range(5)]
    assert passes[:5] != passes[5:10]
    other = SkillOrder(SKILLED, 2, seed=0, skills=("update", "insert"), steps=3)
    assert [[task.id for task in other.at(step)] for step in reversed(range(12))] == ids[::-1]
    another = SkillOrder(SKILLED, 2, seed=1, skills=("update", "insert"), steps=3)
    assert [[task.id for task in another.at(step)] for step in range(12)] != ids


def test_a_skill_that_comes_again_goes_on_with_its_other_tasks():
    order = SkillOrder(SKILLED, 2, seed=0, skills=("update", "insert", "update"), steps=1)
    ids = [task.id for step in (0, 2) for task in order.at(step)]
    assert len(set(ids)) == 4 and {name[0] for name in ids} == {"u"}


def test_the_skills_are_those_of_the_tasks_in_their_order():
    order = BySkillConfig(steps=2)
    assert order.settled(SKILLED).skills == ("insert", "update", "where"), "the first skill of each task"
    assert length_of_trip(order, SKILLED, 4) == 3 * 2 * 4
    assert BySkillConfig(steps=2, skills=("update",)).settled(SKILLED).skills == ("update",)


@pytest.mark.parametrize(
    ("skills", "tasks", "message"),
    [
        (("insrt",), SKILLED, "task_order.skills: 'insrt' is the first skill of no task; did you mean 'inse"),
        (("delete",), SKILLED, "is the first skill of no task; give one of insert, update, where"),
        (None, TASKS, "task_order: by_skill needs tasks with skills, and these have none"),
    ],
)
def test_a_skill_without_tasks_is_one_line(skills, tasks, message):
    with pytest.raises(AgentPeftError) as raised:
        length_of_trip(BySkillConfig(steps=1, skills=skills), tasks, 1)
    assert message in str(raised.value) and "\n" not in str(raised.value)


# -- by difficulty -------------------------------------------------------------------------------------------


def test_by_difficulty_is_fewest_skills_then_shortest_demonstration_then_the_tasks_own_order():
    tasks = [Task("a", ("x", "y")), Task("b", ("x",)), Task("c", ("y",)), Task("d", ("z",)), Task("e")]
    actions = {"a": ("1",), "b": ("12", "34"), "c": ("123",), "d": ("1234",), "e": None}
    order = order_of("by_difficulty", tasks, 5, 0, lambda task: actions[task.id])
    assert [task.id for task in order.at(0)] == [task.id for task in order.at(1)] == ["e", "c", "b", "d", "a"]


def test_tasks_of_one_difficulty_are_one_line():
    with pytest.raises(AgentPeftError, match="these tasks have neither; give a file with your own order"):
        from_easy_to_difficult(TASKS, lambda task: None)


# -- by success ----------------------------------------------------------------------------------------------


def group(task: Task, correct: int, of: int = 4) -> Group:
    outcomes = correct * [Outcome.CORRECT] + (of - correct) * [Outcome.INCORRECT]
    return Group(task, [Trajectory(task, (), outcome=outcome) for outcome in outcomes])


def drawn(order: SuccessOrder, correct: dict[str, int], steps: int) -> list[str]:
    """The tasks of some steps, each of whose groups of four has so many successes."""
    ids = []
    for step in range(steps):
        tasks = order.at(step)
        assert tasks == order.at(step), "asked twice, it gives the same"
        ids += [task.id for task in tasks]
        order.learn([group(task, correct[task.id]) for task in tasks])
    return ids


def test_by_success_leaves_out_the_too_easy_and_the_too_hard_for_some_trips():
    order = SuccessOrder(TASKS, 1, 0, BySuccessConfig(low=0.25, high=0.75, trips=2))
    plain = TaskOrder(TASKS, 4, 0)
    trips = [[task.id for task in plain.at(number)] for number in range(4)]
    ids = drawn(order, {"a": 0, "b": 1, "c 1": 3, "d": 4}, 12)
    kept = [[name for name in trip if name in ("b", "c 1")] for trip in trips]
    assert ids == [*trips[0], *kept[1], *kept[2], *trips[3]], "untried tasks come as with shuffle"


def test_by_success_tries_on_where_no_task_is_left():
    order = SuccessOrder(TASKS, 2, 0, BySuccessConfig(trips=3))
    ids = drawn(order, dict.fromkeys(("a", "b", "c 1", "d"), 0), 4)
    assert sorted(ids[:4]) == sorted(ids[4:]) == ["a", "b", "c 1", "d"]


def test_a_group_that_its_environment_lost_says_nothing():
    order, other = (SuccessOrder(TASKS, 4, 0, BySuccessConfig()) for _ in range(2))
    order.learn([Group(task, []) for task in TASKS])
    other.learn([group(task, 2) for task in TASKS])
    assert order.at(1) == other.at(1) == TaskOrder(TASKS, 4, 0).at(1)


@given(st.lists(st.integers(0, 4), min_size=4, max_size=4), st.integers(1, 3), st.integers(0, 5))
def test_by_success_goes_on_from_its_state(successes, per_step, steps):
    correct = dict(zip(("a", "b", "c 1", "d"), successes, strict=True))
    order, other = (SuccessOrder(TASKS, per_step, 3, BySuccessConfig()) for _ in range(2))
    drawn(order, correct, steps)
    other.load_state_dict(json.loads(json.dumps(order.state_dict())))
    assert drawn(other, correct, 5) == drawn(order, correct, 5)
