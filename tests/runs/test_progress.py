"""The progress of a run: a line or a bar wherever it is watched."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from agent_peft.rollout.collector import Collection
from agent_peft.runs.observers import RunStep
from agent_peft.runs.progress import Progress
from agent_peft.training.stage import StageConfig
from agent_peft.types import Group, Task, Trajectory, Turn


def untimed(text):
    """The lines, which begin with the day and the time of their printing."""
    for line in text.splitlines():
        assert re.match(r"\d\d-\d\d \d\d:\d\d:\d\d  ", line), line
    return [line[16:] for line in text.splitlines()]


def test_one_plain_line_per_step_where_there_is_no_terminal():
    out = io.StringIO()
    with Progress(Console(file=out, width=40)) as progress:
        progress.note("evaluating base on 200 tasks")
        progress.start_stage("sft", total=2)
        progress.advance({"loss": 1.25, "gradient_norm": 0.5}, 99.6)
        progress.note("[checkpoint] written")
        progress.advance({"loss": 1.0, "demonstrations_incorrect": 2.0, "other": 3.0}, 1200.0)
        progress.start_stage("grpo", total=9, done=7)
        progress.advance(
            {
                "loss": -1e-9,
                "reward": 0.25,
                "success": 0.5,
                "groups_with_signal": 0.375,
                "gradient_norm": 0.0123,
            },
            0.0,
        )
        progress.advance({"infrastructure_failures": 0.0, "crashed": 3.0, "defects": 1.0}, 0.0)
    lines = untimed(out.getvalue())
    assert lines[0] == "evaluating base on 200 tasks"
    assert lines[1].startswith("sft 1/2  loss 1.2500  gradient norm 0.5  100 tokens/s  0:00:0")
    assert lines[2] == "[checkpoint] written"
    assert lines[3] == "sft 2/2  loss 1.0000  demonstrations incorrect 2  1200 tokens/s  0:00:00 left"
    metrics = "reward 0.250  success 50.0%  groups with signal 38%  gradient norm 0.0123"
    assert lines[4].startswith(f"grpo 8/9  {metrics}  0 tokens/s  0:00:0"), "no loss on policy"
    assert lines[5] == "grpo 9/9  crashed 3  defects 1  0 tokens/s  0:00:00 left", (
        "what went wrong is shown where it did"
    )
    assert len(lines) == 6


def test_the_time_left_is_told_from_the_steps_of_this_run(monkeypatch):
    out, clock = io.StringIO(), iter((100.0, 130.0))
    monkeypatch.setattr("agent_peft.runs.progress.time.monotonic", lambda: next(clock))
    with Progress(Console(file=out)) as progress:
        progress.start_stage("grpo", total=251, done=10)
        progress.advance({}, 1.0)  # 30 seconds, and 240 steps to go
    assert untimed(out.getvalue()) == ["grpo 11/251  1 tokens/s  2:00:00 left"]


def test_the_step_of_the_run_is_told_where_there_are_several_stages():
    out = io.StringIO()
    with Progress(Console(file=out)) as progress:
        progress.start_stage("sft", total=6, first=0, steps=60)
        progress.advance({}, 1.0)
        progress.start_stage("grpo", total=54, done=5, first=6, steps=60)
        progress.advance({}, 1.0)
        progress.start_stage("alone", total=54, done=5, first=0, steps=54)
        progress.advance({}, 1.0)
    starts = [line.split("  1 tokens/s")[0] for line in untimed(out.getvalue())]
    assert starts == ["1/60  sft 1/6", "12/60  grpo 6/54", "alone 6/54"]


def test_an_evaluation_is_a_line_or_a_bar():
    plain, terminal = io.StringIO(), io.StringIO()
    with Progress(Console(file=plain)) as progress, progress.evaluation("base", 200, 400) as on_episode:
        on_episode()
    assert untimed(plain.getvalue()) == ["evaluating base on 200 tasks"]
    with Progress(Console(file=terminal, force_terminal=True, width=120)) as progress:
        with progress.evaluation("base", 200, 400) as on_episode:
            on_episode()
            on_episode()
            progress._display.refresh()
        shown = terminal.getvalue()
        assert "evaluating base" in shown and "  2/400" in shown
        assert not progress._dashboard.bars.tasks, "the bar goes when the evaluation is done"


def test_a_bar_on_a_terminal():
    out = io.StringIO()
    with Progress(Console(file=out, force_terminal=True, width=120)) as progress:
        progress.start_stage("grpo", total=3, done=1)
        progress.advance({"reward": 0.25}, 50.0)
        progress.note("checkpoint")
    shown = out.getvalue()
    assert "2/3" in shown and re.search(r"reward +0\.250", shown) and re.search(r"tokens/s +50", shown)
    assert "checkpoint\n" in shown


def test_no_step_without_a_stage():
    with Progress(Console(file=io.StringIO())) as progress:
        with pytest.raises(RuntimeError, match="start a stage"):
            progress.advance({}, 1.0)
        progress.start_stage("sft", total=1)
        progress.advance({}, 1.0)
        with pytest.raises(RuntimeError, match="all 1 steps of stage 'sft' are done"):
            progress.advance({}, 1.0)


def test_a_step_without_a_reward_learned_from_demonstrations():
    trajectory = Trajectory(Task("t"), (Turn((1, 2), (3,), (0.0,)),), rewards=(1.0,))
    stage = StageConfig.model_validate({"algorithm": {"kind": "sft"}, "steps": 2})
    out, metrics = io.StringIO(), {"loss": 1.5}
    with Progress(Console(file=out)) as progress:
        progress.start_stage("x", total=2)
        for earned in ({}, {"reward": 1.0}):
            collection = Collection([Group(trajectory.task, [trajectory])])
            progress.on_step(RunStep(0, collection, metrics | earned, stage, started=0.0))
    first, second = untimed(out.getvalue())
    assert first.startswith("x 1/2  loss 1.5000  ") and "reward" not in first
    assert second.startswith("x 2/2  reward 1.000  ") and "loss" not in second
