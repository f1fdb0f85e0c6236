"""Forgetting and transfer in a stream of skills, against numbers by hand."""

from __future__ import annotations

import io
import random

import pytest
from rich.console import Console

from agent_peft.rollout.skill_matrix import SkillMatrix, skill_matrix
from agent_peft.rollout.statistics import summarize
from agent_peft.types import Group, Outcome, Task, Trajectory

SKILLS = ("insert", "update", "delete")


def report(percents: dict[str, int]):
    """An evaluation with ten tasks of each skill, of which so many tenths are right."""
    groups = []
    for skill, percent in percents.items():
        for number in range(10):
            task = Task(f"{skill}-{number}", (skill, "other"))
            outcome = Outcome.CORRECT if number < percent // 10 else Outcome.INCORRECT
            groups.append(Group(task, [Trajectory(task, (), outcome=outcome)]))
    return summarize(groups)


ROWS = [  # before, and after each segment
    {"insert": 10, "update": 20, "delete": 0},
    {"insert": 80, "update": 30, "delete": 0},
    {"insert": 50, "update": 90, "delete": 10},
    {"insert": 60, "update": 70, "delete": 100},
]
SKILL_OF = {f"{skill}-{number}": skill for skill in SKILLS for number in range(10)}


def values(matrix: SkillMatrix) -> dict[str, float]:
    return {name: round(mean.value, 9) for name, mean in matrix.measures().items()}


def test_the_measures_of_a_stream_by_hand():
    matrix = skill_matrix(SKILLS, [report(row) for row in ROWS], SKILL_OF)
    assert matrix is not None
    assert [[round(100 * matrix.rate(row, skill).value) for skill in SKILLS] for row in range(4)] == [
        list(row.values()) for row in ROWS
    ]
    assert values(matrix) == {
        "average accuracy": pytest.approx((0.6 + 0.7 + 1.0) / 3),
        "backward transfer": pytest.approx(((0.6 - 0.8) + (0.7 - 0.9)) / 2),
        "forward transfer": pytest.approx(((0.3 - 0.2) + (0.1 - 0.0)) / 2),
        "forgetting": pytest.approx(((0.8 - 0.6) + (0.9 - 0.7)) / 2),
    }


def test_forgetting_takes_the_best_row_and_backward_transfer_the_own_segment():
    rows = [dict(ROWS[0]), dict(ROWS[1]), {**ROWS[2], "insert": 100}, dict(ROWS[3])]
    matrix = skill_matrix(SKILLS, [report(row) for row in rows], SKILL_OF)
    assert values(matrix)["forgetting"] == pytest.approx(((1.0 - 0.6) + (0.9 - 0.7)) / 2)
    assert values(matrix)["backward transfer"] == pytest.approx(-0.2)


def test_a_skill_in_several_segments_counts_from_its_first_and_its_last():
    rows = [*ROWS[:3], {"insert": 90, "update": 40}, {"insert": 70, "update": 60}]
    reports = [report(row) for row in rows]
    matrix = skill_matrix(("insert", "update", "insert", "update"), reports, SKILL_OF)
    assert list(matrix.tasks) == ["insert", "update"]
    measured = values(matrix)
    assert measured["backward transfer"] == pytest.approx(0.7 - 0.9), "of insert, after segment 3"
    assert measured["forward transfer"] == pytest.approx(0.3 - 0.2), "of update, before segment 2"


def test_a_single_segment_forgets_nothing_and_a_skill_without_heldout_tasks_is_told():
    matrix = skill_matrix(("insert", "unheard"), [report(row) for row in ROWS[:3]], SKILL_OF)
    assert list(matrix.measures()) == ["average accuracy", "backward transfer", "forgetting"]
    single = skill_matrix(("insert",), [report(row) for row in ROWS[:2]], SKILL_OF)
    assert list(single.measures()) == ["average accuracy"]
    assert skill_matrix(("unheard",), [report(row) for row in ROWS[:2]], SKILL_OF) is None
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(matrix.table())
    told = console.export_text()
    assert "2 unheard" in told and "unheard: no held-out task" in told and "50.0% (24–76)" in told


def test_the_intervals_hold_the_truth_nineteen_times_of_twenty():
    """Of policies whose success on two skills changes from .3 to .6 and from .5 to .3."""
    held, draw = {"backward transfer": 0, "average accuracy": 0}, random.Random(0)
    truth = {"backward transfer": 0.3, "average accuracy": 0.45}
    tasks = {"a": tuple(f"a{n}" for n in range(30)), "b": tuple(f"b{n}" for n in range(20))}
    ids = [task for of in tasks.values() for task in of]
    chances = [{"a": 0.3, "b": 0.5}, {"a": 0.3, "b": 0.5}, {"a": 0.6, "b": 0.3}]
    for _ in range(400):
        rows = tuple({task: float(draw.random() < row[task[0]]) for task in ids} for row in chances)
        measures = SkillMatrix(("a", "b"), tasks, rows).measures()
        for name in held:
            held[name] += measures[name].low <= truth[name] <= measures[name].high
    assert all(0.93 <= number / 400 <= 0.985 for number in held.values()), held


def test_an_interval_has_a_width_where_all_tasks_are_alike():
    for success in (0.0, 1.0):
        rows = tuple({"a": success, "b": success} for _ in range(3))
        for mean in SkillMatrix(("a", "b"), {"a": ("a",), "b": ("b",)}, rows).measures().values():
            assert mean.low is None or (mean.high - mean.low > 0.3 and mean.low <= mean.value <= mean.high)
