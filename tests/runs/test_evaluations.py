"""The evaluations of a run: when they are due, what their files say, and what is shown next to what."""

from __future__ import annotations

import json
import re

import pytest

from agent_peft.cli import run
from agent_peft.runs.evaluations import due_evaluations
from agent_peft.runs.reading import read_report
from agent_peft.runs.run import train


@pytest.fixture
def settings(small):
    """Two supervised steps of tasks that are also measured, on one digit."""
    tasks = {"kind": "arithmetic", "digits": 1, "num_tasks": 6}
    return {
        **small,
        "environment": tasks,
        "evaluation": {"environment": tasks, "every": 1, "sampling": {"max_new_tokens": 3}},
        "checkpoint": {"keep_last": 9},
        "stages": [
            {
                "algorithm": {"kind": "sft"},
                "steps": 2,
                "tasks_per_step": 3,
                "rewards": {"invalid_action": -0.5},
                "optimizer": {"learning_rate": 0.05},
            }
        ],
    }


def longer(settings, steps=4):
    return [{**settings["stages"][0], "steps": steps}]


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# -- when --------------------------------------------------------------------------------------------------


def test_every_counts_the_steps_of_the_run(configure, settings):
    sft, rloo = {**settings["stages"][0], "steps": 6}, {"algorithm": {"kind": "rloo"}, "steps": 60}
    every = {**settings["evaluation"], "every": 25}
    due = due_evaluations(configure(stages=[sft, rloo], evaluation=every))
    assert due == {0: "base", 6: "after sft", 25: "step 25", 50: "step 50", 66: "after rloo"}


# -- what the files say --------------------------------------------------------------------------------------


def test_a_report_says_what_was_measured_and_its_episodes_lie_beside_it(configure):
    config = configure()
    reports = train(config)
    folder = config.run_dir / "evaluations"
    assert {p.name for p in folder.iterdir()} == {
        f"step_{step:06d}.{suffix}" for step in range(3) for suffix in ("json", "jsonl", "safetensors")
    }
    assert list(reports) == ["base", "step 1", "after sft"]
    for step, report in enumerate(reports.values()):
        path = folder / f"step_{step:06d}.json"
        content = json.loads(path.read_text())
        assert content["step"] == step and "name" not in content
        assert content["settings"]["tasks"] == 6 and content["settings"]["sampling"]["max_new_tokens"] == 3
        assert content["settings"]["rewards"]["invalid_action"] == -0.5
        records = lines(path.with_suffix(".jsonl"))
        assert [(r["step"], r["attempt"]) for r in records] == [(step, 0)] * 6
        assert [r["group"] for r in records] == list(range(6))
        assert {r["task"]: (r["outcome"],) for r in records} == report.outcomes
        assert len({r["seed"] for r in records}) == 6
        assert report.reward.value == pytest.approx(sum(sum(r["rewards"]) for r in records) / 6)
        assert not report.groups, "the episodes of all evaluations would fill the memory"


def test_attempts_at_a_task_are_told_apart(configure, settings):
    sampled = {**settings["evaluation"], "at": ["start"], "every": 0, "attempts": 3}
    config = configure(evaluation={**sampled, "sampling": {"temperature": 1.0, "max_new_tokens": 3}})
    train(config)
    records = lines(config.run_dir / "evaluations" / "step_000000.jsonl")
    assert [(r["group"], r["attempt"]) for r in records] == [(g, a) for g in range(6) for a in range(3)]
    assert len({r["seed"] for r in records}) == 18


def test_a_command_measures_a_checkpoint_and_keeps_the_episodes(configure, tmp_path, capsys):
    config = configure()
    reports = train(config)
    capsys.readouterr()
    target, output = str(config.run_dir), tmp_path / "measured"
    asked = ["evaluate", target, "--checkpoint", "step_000001", "--output", str(output), "--json"]
    assert run(asked) == 0
    said = capsys.readouterr()
    content = json.loads(said.out)
    assert (content["run"], content["checkpoint"], content["step"]) == (target, "step_000001", 1)
    assert content == json.loads((output / "evaluation.json").read_text())
    report = reports["step 1"]
    assert content["reward"]["value"] == report.reward.value and content["settings"] == report.settings
    ours, theirs = (
        path.read_bytes()
        for path in (output / "evaluation.jsonl", config.run_dir / "evaluations" / "step_000001.jsonl")
    )
    assert ours == theirs
    assert re.search(r"evaluating .*run on 6 tasks\n", said.err)
    assert run(asked) == 2
    assert "measured: exists and is not an empty folder" in capsys.readouterr().err
    assert run(["evaluate", target, "--base"]) == 0
    assert re.search(r"step +│ +0 ", capsys.readouterr().out)


# -- another step --------------------------------------------------------------------------------------------


def test_a_longer_stage_keeps_the_evaluation_of_its_old_end_as_that_of_a_step(
    configure, settings, tmp_path, run_contents
):
    short = configure()
    before = train(short)
    reports = train(configure(stages=longer(settings)))
    assert list(reports) == ["base", "step 1", "step 2", "step 3", "after sft"]
    assert [report.step for report in reports.values()] == [0, 1, 2, 3, 4]
    assert reports["step 2"] == before["after sft"]
    folder = short.run_dir / "evaluations"
    train(configure(stages=longer(settings), run_dir=str(tmp_path / "long")))
    ours, theirs = run_contents(folder), run_contents(tmp_path / "long" / "evaluations")
    assert ours == theirs, "it measured what the run measures that was long from the start"


# -- other settings ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "keys"),
    [
        ({"num_tasks": 4}, "tasks, tasks_digest"),
        ({"sampling": {"max_new_tokens": 2}}, "sampling"),
        (
            {"environment": {"kind": "arithmetic", "digits": 1, "num_tasks": 6, "split": "heldout"}},
            "environment_digest, tasks_digest",
        ),
    ],
    ids=["tasks", "sampling", "environment"],
)
def test_what_was_measured_otherwise_is_not_compared(configure, settings, capsys, change, keys):
    train(configure())
    capsys.readouterr()
    changed = configure(stages=longer(settings, 3), evaluation={**settings["evaluation"], **change})
    reports = train(changed)
    assert list(reports) == ["after sft"] and reports["after sft"].step == 3
    said = capsys.readouterr().out
    assert re.search(
        rf"measured with other settings \({keys}\) and so left out of the comparison: base, step 1, step 2",
        said,
    )
    assert read_report(changed.run_dir / "evaluations" / "step_000002.json").step == 2, "they stay on disk"


def test_an_evaluation_that_can_no_longer_be_made_is_told(configure, settings, capsys):
    train(configure(evaluation={**settings["evaluation"], "every": 0}, checkpoint={"keep_last": 1}))
    capsys.readouterr()
    reports = train(configure(checkpoint={"keep_last": 1}))
    assert list(reports) == ["base", "after sft"]
    assert "skipped evaluations (checkpoints deleted): step 1\n" in capsys.readouterr().out


def test_steps_that_until_left_out_are_not_missed(configure, settings, capsys):
    until = {"metric": "surprisal", "below": 100.0, "over": 1}
    config = configure(stages=[{**settings["stages"][0], "steps": 4, "until": until}])
    first = train(config)
    assert list(first) == ["base", "after sft"]
    capsys.readouterr()
    assert train(config) == first
    assert "skipped" not in capsys.readouterr().out
