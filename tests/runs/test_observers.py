"""metrics.jsonl is the same to the byte after a kill, trajectories are readable, and progress is shown
everywhere.
"""

import io
import json

import pytest
from rich.console import Console

from agent_peft.runs.observers import JsonlTracker, Progress, TimingTracker, write_trajectories
from agent_peft.types import Group, Message, Outcome, StopReason, Task, Trajectory, Turn

METRICS = {"stage": "grpo", "reward": 0.1 + 0.2, "loss": 1e-17, "success": 0.5}


def test_a_line_per_step_that_reads_back_to_the_bit(tmp_path):
    tracker = JsonlTracker(tmp_path / "run" / "metrics.jsonl")
    tracker.log(0, METRICS)
    tracker.log(1, {"loss": float("nan"), "kl": float("-inf")})
    first, second = map(json.loads, tracker.path.read_text().splitlines())
    assert first == {"step": 0, **METRICS}
    assert next(iter(first)) == "step"
    assert second == {"step": 1, "loss": "nan", "kl": "-inf"}
    with pytest.raises(ValueError, match="step"):
        tracker.log(2, {"step": 2.0})


def test_killed_and_resumed_gives_the_same_bytes(tmp_path):
    def run(tracker, steps):
        for step in steps:
            tracker.log(step, {"reward": step / 7})

    whole = JsonlTracker(tmp_path / "whole.jsonl")
    run(whole, range(6))
    killed = JsonlTracker(tmp_path / "killed.jsonl")
    run(killed, range(5))  # the checkpoint is of step 3, and the kill tore the line of step 5
    with killed.path.open("a") as file:
        file.write('{"step": 5, "rew')
    again = JsonlTracker(killed.path)
    again.resume(3)
    assert len(again.path.read_text().splitlines()) == 3
    run(again, range(3, 6))
    assert again.path.read_bytes() == whole.path.read_bytes()
    again.resume(0)
    assert again.path.read_bytes() == b""


def test_a_torn_line_does_not_run_into_the_next(tmp_path):
    path = tmp_path / "timing.jsonl"
    path.write_text('{"step": 0}\n{"step": 1, "sec')
    TimingTracker(path).log(1, {"seconds": 2.5})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 0},
        {"step": 1, "seconds": 2.5},
    ]


def test_trajectories_for_people(tmp_path):
    task = Task("insert-7", skills=("insert", "where"))
    one = Trajectory(
        task,
        (Turn((1, 2), (3,), (-0.5,)), Turn((4,), (5, 6), (-0.1, -0.2))),
        (Message("user", "Zürich?"), Message("assistant", "a lone \ud800 surrogate")),
        Outcome.CORRECT,
        StopReason.FINISHED,
        (0.0, 1.0),
    )
    other = Trajectory(
        task, (Turn((1,), (2,), (-1.0,)),), (), Outcome.INCORRECT, StopReason.TURN_LIMIT, (-0.1,)
    )
    path = write_trajectories(
        tmp_path / "trajectories", 12, [Group(task, [one, other]), Group(Task("lost"), [])]
    )
    assert path == tmp_path / "trajectories" / "step_000012.jsonl"
    first, second = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    assert first == {
        "step": 12,
        "task": "insert-7",
        "skills": ["insert", "where"],
        "outcome": "correct",
        "stop_reason": "finished",
        "rewards": [0.0, 1.0],
        "tokens": 6,
        "action_tokens": 3,
        "cut_actions": 0,
        "messages": [
            {"role": "user", "content": "Zürich?"},
            {"role": "assistant", "content": "a lone \ud800 surrogate"},
        ],
    }
    assert (second["outcome"], second["stop_reason"], second["tokens"]) == ("incorrect", "turn_limit", 2)


def test_one_plain_line_per_step_where_there_is_no_terminal():
    out = io.StringIO()
    with Progress(Console(file=out, width=40)) as progress:
        progress.evaluating("base", 200)
        progress.start_stage("sft", total=2)
        progress.advance(
            {"loss": 1.25, "gradient_norm": 0.5, "success": 1.0, "reward": 1.0}, 99.6, demonstrations=True
        )
        progress.note("[checkpoint] written")
        progress.advance(
            {"loss": 1.0, "demonstrations_incorrect": 2.0, "other": 3.0}, 1200.0, demonstrations=True
        )
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
    lines = out.getvalue().splitlines()
    assert lines[0] == "evaluating base on 200 tasks"
    assert lines[1].startswith("sft 1/2  loss 1.2500  gradient norm 0.5  100 tokens/s  0:00:0"), (
        "what demonstrations earn is not told"
    )
    assert lines[2] == "[checkpoint] written"
    assert lines[3] == "sft 2/2  loss 1.0000  demonstrations incorrect 2  1200 tokens/s  0:00:00 left"
    told = "grpo 8/9  reward 0.250  success 50.0%  groups with signal 38%  gradient norm 0.0123  0 tokens/s  0:00:0"
    assert lines[4].startswith(told), "the loss says nothing on policy"
    assert lines[5] == "grpo 9/9  crashed 3  defects 1  0 tokens/s  0:00:00 left", (
        "what went wrong is shown where it did"
    )
    assert len(lines) == 6


def test_the_time_left_is_told_from_the_steps_of_this_run(monkeypatch):
    out, clock = io.StringIO(), iter((100.0, 130.0))
    monkeypatch.setattr("agent_peft.runs.observers.time.monotonic", lambda: next(clock))
    with Progress(Console(file=out)) as progress:
        progress.start_stage("grpo", total=251, done=10)
        progress.advance({}, 1.0)  # 30 seconds, and 240 steps to go
    assert out.getvalue() == "grpo 11/251  1 tokens/s  2:00:00 left\n"


def test_a_bar_on_a_terminal():
    out = io.StringIO()
    with Progress(Console(file=out, force_terminal=True, width=120)) as progress:
        progress.start_stage("grpo", total=3, done=1)
        progress.advance({"reward": 0.25}, 50.0)
        progress.note("checkpoint")
    shown = out.getvalue()
    assert "2/3" in shown and "reward 0.250" in shown and "50 tokens/s" in shown
    assert "checkpoint\n" in shown


def test_no_step_without_a_stage():
    with Progress(Console(file=io.StringIO())) as progress:
        with pytest.raises(RuntimeError, match="start a stage"):
            progress.advance({}, 1.0)
        progress.start_stage("sft", total=1)
        progress.advance({}, 1.0)
        with pytest.raises(RuntimeError, match="all are done"):
            progress.advance({}, 1.0)
