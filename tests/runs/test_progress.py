"""The progress of a run: a line or a bar wherever it is watched, and all of it on 80 x 24."""

from __future__ import annotations

import fcntl
import io
import os
import re
import struct
import termios
import threading

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.live import Live

from agent_peft.configuration.load import load_config
from agent_peft.policies.engine.base import EngineStatistics
from agent_peft.rollout.collector import Collection
from agent_peft.rollout.statistics import summarize
from agent_peft.runs.observers import RunStart, RunStep
from agent_peft.runs.progress import Dashboard, Progress, sparkline
from agent_peft.runs.run import train
from agent_peft.training.stage import StageConfig
from agent_peft.training.step_metrics import SAMPLED
from agent_peft.types import Group, Message, Outcome, Task, Trajectory, Turn


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


# -- the dashboard --------------------------------------------------------------------------------

HOSTILE = "<script>\x1b[2J\x1b]0;title\x07\0\u202e[bold]rows[/bold]\r\n" + "x" * 1_000_000
GOOD = {"reward": 0.25, "success": 0.5, "groups_with_signal": 0.5, "gradient_norm": 0.01, "mismatch": 1e-6}
BAD = GOOD | {
    "zero_variance_groups": 0.9,
    "truncated": 0.5,
    "cut_actions": 0.5,
    "approx_kl": 0.5,
    "clip_fraction": 0.5,
    "mismatch": 0.5,
    "crashed": 2.0,
}


def console(**more):
    return Console(
        **{"file": io.StringIO(), "force_terminal": True, "width": 80, "height": 24, "record": True} | more
    )


def lines_of(dashboard):
    dashboard.console.print(dashboard)
    return dashboard.console.export_text().splitlines()


def episode(*contents, task="t"):
    messages = tuple(Message("user", content) for content in contents)
    turns = (Turn((1,), (2,), (0.0,)),)
    return Trajectory(Task(task), turns, messages, outcome=Outcome.CORRECT, rewards=(1.0,))


def test_all_of_a_run_fits_a_small_terminal():
    dashboard = Dashboard(console())
    dashboard.bars.add_task("run", total=80, numbers="0:01:00 left")
    dashboard.start_stage("a stage with quite a long name", 60, 2)
    dashboard.bars.add_task("evaluating step 20", total=400, numbers="episodes")
    for _ in range(100):
        dashboard.add(BAD, 1200.0)
    dashboard.evaluations = "3/5  step 20: success 50.0% (40–60) on 200 tasks " * 3
    dashboard.trajectory = episode(*[HOSTILE] * 50, task=HOSTILE)
    lines = lines_of(dashboard)
    assert len(lines) < 24 and max(map(cell_len, lines)) <= 80
    text = "\n".join(lines)
    assert "tokens/s" in text and "1200" in text and "reward" in text and "3/5  step 20" in text
    for warning in (
        "200 episodes that crashed an environment",
        "90% of the groups are constant",
        "50% of the episodes are truncated",
        "the policy moves 0.5 nats",
        "sampler and trainer differ by 0.5 nats",
    ):
        assert f"! {warning}" in text


def test_a_models_text_is_text():
    dashboard = Dashboard(console())
    dashboard.trajectory = episode("first", HOSTILE)
    lines = lines_of(dashboard)
    assert lines[-3] == "last episode, t: correct, finished, reward 1.000"
    assert lines[-2] == "user: first"
    assert lines[-1].startswith(r"user: <script>\x1b[2J\x1b]0;title\x07\x00\u202e[bold]rows[/bold]\r\nxxx")
    raw = dashboard.console.file.getvalue()
    assert "\x1b[2J" not in raw and "\x07" not in raw and "\u202e" not in raw


def test_a_terminal_without_unicode_gets_lines():
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with Progress(Console(file=out, force_terminal=True, width=80)) as progress:
        progress.start_stage("grpo", total=3)
        progress.advance({"reward": 0.25}, 50.0)
    out.seek(0)
    assert "grpo 1/3  reward 0.250  50 tokens/s" in out.read()


def test_a_sparkline_is_as_long_as_its_values():
    assert sparkline([1.0, float("nan"), 3.0, 2.0]) == "▁ █▅"
    assert sparkline([float("inf")]) == " " and sparkline([]) == ""


def test_no_warning_where_nothing_is_wrong():
    dashboard = Dashboard(console())
    dashboard.start_stage("grpo", 60, 0)
    dashboard.add(GOOD, 100.0)
    assert not dashboard.warnings()
    for _ in range(9):
        dashboard.add(GOOD | {"truncated": 0.0}, 100.0)
    dashboard.add(GOOD | {"truncated": 1.0}, 100.0)
    assert not dashboard.warnings(), "one step in ten"
    dashboard.add(GOOD | {"truncated": 1.0}, 100.0)
    assert dashboard.warnings() == ["20% of the episodes are truncated by sampling.max_tokens"]
    dashboard.start_stage("next", 60, 0)
    assert not dashboard.warnings() and not dashboard.curves


@pytest.mark.parametrize(
    "metric, value, warning",
    [
        ("zero_variance_groups", 0.9, "! 90% of the groups are constant: one reward for all their episodes"),
        ("truncated", 0.5, "! 50% of the episodes are truncated by sampling.max_tokens"),
        ("cut_actions", 0.5, "! 50% of the actions are cut by a token limit"),
        ("approx_kl", 0.5, "! the policy moves 0.5 nats in a step: lower the learning rate"),
        ("clip_fraction", 0.5, "! 50% of the tokens are clipped: lower the learning rate"),
        ("mismatch", 0.5, "! sampler and trainer differ by 0.5 nats a token"),
    ],
)
def test_a_file_has_each_warning_once_in_a_stage(metric, value, warning):
    """Where nobody sees a dashboard, what is wrong with the last ten steps is a line."""
    out = io.StringIO()
    with Progress(Console(file=out, width=200)) as progress:
        progress.start_stage("grpo", total=60)
        for _ in range(9):
            progress.advance(GOOD | {metric: value}, 50.0)
        assert "!" not in out.getvalue(), "nine steps"
        for _ in range(20):
            progress.advance(GOOD | {metric: value}, 50.0)
        assert out.getvalue().count(warning) == out.getvalue().count("!") == 1
        progress.start_stage("short", total=2)
        progress.advance(GOOD, 50.0)
        progress.advance(GOOD | {metric: value / 100}, 50.0)
        assert out.getvalue().count("!") == 1, "what an earlier stage did is not this one's"
        progress.start_stage("short and bad", total=2)
        for _ in range(2):
            progress.advance(GOOD | {metric: value}, 50.0)
        assert out.getvalue().count(warning) == 2, "all steps of a stage of two"


def test_demonstrations_show_their_loss():
    dashboard = Dashboard(console())
    taught = {name: value for name, value in BAD.items() if name not in SAMPLED}
    dashboard.add(taught | {"loss": 1.5, "surprisal": 1.5}, 10.0)
    assert list(dashboard.curves) == ["loss", "gradient_norm"]
    assert dashboard.warnings() == ["2 episodes that crashed an environment"]


def test_a_display_that_cannot_be_drawn_does_not_end_the_run():
    dashboard = Dashboard(console())
    dashboard.trajectory = object()
    with Live(dashboard, console=dashboard.console) as live:
        live.refresh()
    assert "nothing can be shown (AttributeError" in dashboard.console.export_text()


def test_the_bars_are_those_of_the_run_and_its_stage(policy_config):
    tasks = {"kind": "arithmetic", "digits": 1, "num_tasks": 6}
    stages = [{"algorithm": "sft", "steps": 2}, {"algorithm": "rloo", "steps": 8}]
    config = load_config(
        {
            "run_dir": "run",
            "policy": policy_config.model_dump(mode="json"),
            "environment": tasks,
            "stages": stages,
        }
    )
    view = console()
    with Progress(console()) as progress:
        progress.on_start(RunStart(config, evaluations=(0, 2, 10)))
        progress.start_stage("sft", total=2, first=0, steps=10)
        progress.start_stage("rloo", total=8, done=1, first=2, steps=10)
        report = summarize([Group(Task("t"), [episode("a")])])
        progress.on_evaluation("after sft", report)
        trajectory = episode("two and two")
        groups = [Group(trajectory.task, [trajectory])]
        collection = Collection(groups, statistics=EngineStatistics(0, 0, 5, 0))
        progress.on_step(RunStep(3, collection, dict(GOOD), config.stages[1], started=0.0))
        view.print(progress._dashboard)
        text = view.export_text()
    assert "4/10" in text and "2/8" in text and " left" in text and "sft" not in text.partition("reward")[0]
    assert "evaluations 1/3  after sft: success 100.0%" in text
    assert "user: two and two" in text


@pytest.mark.parametrize("kind", ["xterm", "dumb"])
def test_a_run_on_a_terminal(tmp_path, policy_config, monkeypatch, kind):
    """On a pseudo-terminal. One that cannot move its cursor gets lines."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    monkeypatch.setenv("TERM", kind)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    written = bytearray()

    def read() -> None:
        try:
            while piece := os.read(ours, 65536):
                written.extend(piece)
        except OSError:  # the other end is closed
            pass

    reader = threading.Thread(target=read)
    reader.start()
    tasks = {"kind": "arithmetic", "digits": 1, "num_tasks": 6}
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr("sys.stdout", terminal)
        train(
            load_config(
                {
                    "run_dir": str(tmp_path / "run"),
                    "threads": 1,
                    "policy": policy_config.model_dump(mode="json"),
                    "environment": tasks,
                    "evaluation": {"environment": tasks},
                    "algorithm": "rloo",
                    "steps": 3,
                    "tasks_per_step": 2,
                    "group_size": 2,
                    "sampling": {"max_new_tokens": 3},
                }
            )
        )
        monkeypatch.undo()
    reader.join(30)
    os.close(ours)
    text = written.decode()
    assert ("last episode" in text) == ("\x1b[" in text) == (kind == "xterm")
    assert ("rloo 3/3  reward" in text) == (kind == "dumb")
    assert "done: the adapter is in" in text and ("3/3" in text)
