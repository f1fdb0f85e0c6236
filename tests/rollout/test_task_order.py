"""The order of tasks from a file."""

from __future__ import annotations

import json

import pytest

from agent_peft.rollout.task_order import TaskOrder, tasks_in_order
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
