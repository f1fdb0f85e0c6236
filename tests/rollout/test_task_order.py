"""The orders of tasks: of a file, by skill, by difficulty and by success."""

from __future__ import annotations

import json

import pytest

from agent_peft.rollout.task_order import (
    BySkillConfig,
    SkillOrder,
    TaskOrder,
    length_of_trip,
    tasks_in_order,
)
from agent_peft.types import AgentPeftError, Task

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
    # in a new trip a skill continues
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
