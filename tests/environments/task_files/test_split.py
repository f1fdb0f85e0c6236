"""Parts of a file of tasks, the same words for every environment that reads one."""

from __future__ import annotations

import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from agent_peft.environments import load_environment
from agent_peft.environments.db_bench.config import DBBenchConfig
from agent_peft.environments.digests import shared_ids
from agent_peft.environments.task_commands import generate_tasks
from agent_peft.environments.task_files.selection import warn_of_shared_tasks
from agent_peft.environments.task_files.split import Portion
from agent_peft.types import AgentPeftError

KEYS = {"os_interaction": {"replay": False}}


@pytest.fixture(params=["db_bench", "os_interaction", "gsm8k", "questions"])
def environment(request, tmp_path):
    """Loads an environment of ten tasks from one file."""
    kind = request.param
    if kind in ("gsm8k", "questions"):
        path, mark = tmp_path / "tasks.jsonl", "#### " if kind == "gsm8k" else ""
        rows = [{"question": f"{number} + 1?", "answer": f"{mark}{number + 1}"} for number in range(10)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        path = tmp_path / "tasks.json"
        path.write_text(json.dumps(generate_tasks(kind, num_tasks=10, seed=3)))

    def load(**keys):
        return load_environment(kind, tasks=path, **KEYS.get(kind, {}), **keys)

    return load


def ids(environment) -> list[str]:
    environment.close()
    return [task.id for task in environment.tasks]


def test_two_parts_share_no_task_and_leave_none_out(environment):
    every = ids(environment())
    assert len(every) == 10
    first, rest = ids(environment(split="train[:75%]")), ids(environment(split="train[75%:]"))
    assert first + rest == every and (len(first), len(rest)) == (8, 2)
    assert ids(environment(split="train[2:5]")) == every[2:5]
    assert ids(environment(split="train[-3:]")) == every[-3:]
    assert ids(environment(split="train")) == every


def test_a_part_that_is_empty_and_a_split_that_a_file_lacks_are_one_line(environment):
    with pytest.raises(AgentPeftError, match=r"split: train\[10:\] holds none of its 10 tasks; give another"):
        environment(split="train[10:]")
    with pytest.raises(AgentPeftError, match="a file has no split 'test', its rows are called train; write"):
        environment(split="test[:50%]")
    with pytest.raises(AgentPeftError, match=r"'train\[:a\]' is not a split; write train\[:90%\]"):
        environment(split="train[:a]")


def test_tasks_of_training_that_are_evaluated_are_told_in_one_line(environment, caplog):
    training, rest = environment(split="train[:6]"), environment(split="train[6:]")
    both = environment(split="train[4:]")
    assert shared_ids(training, rest) == []
    assert shared_ids(training, both) == [task.id for task in both.tasks[:2]]
    with caplog.at_level(logging.WARNING):
        warn_of_shared_tasks(training, rest)
        assert not caplog.records
        warn_of_shared_tasks(training, both)
    (record,) = caplog.records
    assert "2 of its 6 tasks are" in record.getMessage() and "train[90%:]" in record.getMessage()
    for made in (training, rest, both):
        made.close()


def test_a_limit_counts_the_tasks_of_the_part(environment):
    assert ids(environment(split="train[5:]", limit=2)) == ids(environment())[5:7]
    assert ids(environment(limit=20)) == ids(environment())


def test_generated_tasks_have_their_own_split():
    with pytest.raises(
        AgentPeftError, match=r"split is for a file of tasks; of generated ones generate\.split"
    ):
        load_environment("db_bench", generate={"num_tasks": 3}, split="train[:1]")


@given(rows=st.integers(0, 60), cut=st.integers(0, 100), unit=st.sampled_from(["", "%"]))
def test_a_cut_makes_two_disjoint_parts_that_cover_all(rows, cut, unit):
    every = list(range(rows))
    parts = [Portion.parse(f"train[{text}]").of(every) for text in (f":{cut}{unit}", f"{cut}{unit}:")]
    assert [*parts[0], *parts[1]] == every


@given(rows=st.integers(0, 60), first=st.integers(-70, 70), last=st.integers(-70, 70))
def test_numbers_of_rows_slice_as_a_list_does(rows, first, last):
    every = list(range(rows))
    assert Portion.parse(f"train[{first}:{last}]").of(every) == every[first:last]


def test_percentages_are_rounded_as_the_datasets_library_does():
    """datasets: int(round(boundary * num_examples / 100.0)), and from the end where negative."""
    for rows in range(40):
        for percent in range(-100, 101):
            place = round(percent * rows / 100.0)
            expected = max(rows + place, 0) if place < 0 else place
            assert Portion.parse(f"train[{percent}%:]").of(range(rows)) == range(rows)[expected:]


@pytest.mark.parametrize(
    "split", ["", "[:10%]", "train[:101%]", "train[]", "train[1]", "a b", "train[:5.5%]"]
)
def test_other_forms_are_refused(split):
    with pytest.raises(ValueError, match="write train"):
        Portion.parse(split)


def test_a_wrong_split_names_its_key():
    with pytest.raises(ValidationError, match="split"):
        DBBenchConfig(tasks="x.json", split="train[:200%]")
