"""The dashboard of a terminal: all of a run on 80 x 24, whatever a model wrote."""

from __future__ import annotations

import fcntl
import io
import os
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
from agent_peft.runs.dashboard import Dashboard, sparkline
from agent_peft.runs.observers import RunStart, RunStep
from agent_peft.runs.progress import Progress
from agent_peft.runs.run import train
from agent_peft.training.step_metrics import SAMPLED
from agent_peft.types import Group, Message, Outcome, Task, Trajectory, Turn

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
