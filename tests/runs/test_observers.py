"""The observers of a run: its own files read back to the bit, and a user's observer that fails neither ends
the run nor changes its bytes.
"""

from __future__ import annotations

import json
import logging

import pytest
import torch

from agent_peft.configuration.load import load_config
from agent_peft.policies.engine.base import EngineStatistics
from agent_peft.rollout.collector import Collection
from agent_peft.runs import run as runs
from agent_peft.runs.observers import (
    Observer,
    RunStep,
    TimingFile,
    append_line,
    metrics_record,
)
from agent_peft.runs.resume import forget_after
from agent_peft.runs.run import train
from agent_peft.training.stage import StageConfig

STAGE = StageConfig.model_validate({"algorithm": {"kind": "grpo"}, "steps": 9})
METRICS = {"reward": 0.1 + 0.2, "loss": 1e-17, "success": 0.5}


def make_step(number, metrics, sampled=0):
    collection = Collection([], statistics=EngineStatistics(0, 0, sampled, 0))
    return RunStep(number, collection, metrics, stage=STAGE, started=0.0)


# -- the files of a run --------------------------------------------------------------------------------------


def test_a_line_per_step_that_reads_back_to_the_bit(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append_line(path, metrics_record(make_step(0, METRICS)))
    append_line(path, metrics_record(make_step(1, {"loss": float("nan"), "kl": float("-inf")})))
    first, second = map(json.loads, path.read_text().splitlines())
    assert first == {"step": 0, "stage": "grpo", **METRICS}
    assert next(iter(first)) == "step"
    assert second == {"step": 1, "stage": "grpo", "loss": "nan", "kl": "-inf"}
    for name in ("step", "stage"):
        with pytest.raises(ValueError, match=f"cannot be called {name}"):
            metrics_record(make_step(2, {name: 2.0}))


def test_killed_and_resumed_gives_the_same_bytes(tmp_path):
    def run(folder, steps):
        folder.mkdir(exist_ok=True)
        for step in steps:
            append_line(folder / "metrics.jsonl", {"step": step, "reward": step / 7})
        return folder / "metrics.jsonl"

    whole, killed = run(tmp_path / "whole", range(6)), run(tmp_path / "killed", range(5))
    with killed.open("a") as file:  # the checkpoint is of step 3, and the kill tore the line of step 5
        file.write('{"step": 5, "rew')
    forget_after(tmp_path / "killed", 3)
    assert len(killed.read_text().splitlines()) == 3
    run(tmp_path / "killed", range(3, 6))
    assert killed.read_bytes() == whole.read_bytes()
    forget_after(tmp_path / "killed", 0)
    assert killed.read_bytes() == b""


def test_a_torn_line_does_not_run_into_the_next(tmp_path):
    path = tmp_path / "timing.jsonl"
    path.write_text('{"step": 0}\n{"step": 1, "sec')
    forget_after(tmp_path, 2)
    TimingFile(path, torch.device("cpu")).on_step(make_step(1, {}, sampled=7))
    first, second = map(json.loads, path.read_text().splitlines())
    assert first == {"step": 0}
    assert second["step"] == 1 and second["seconds"] > 0 and second["sampled"] == 7


# -- a user's observers --------------------------------------------------------------------------------------


@pytest.fixture
def configure(tmp_path, policy_config):
    """``configure(name, **changes)``: two steps of a small run with evaluations, in a folder of that name."""

    def configure(name, **changes):
        tasks = {"kind": "arithmetic", "digits": 1, "num_tasks": 6}
        return load_config(
            {
                "run_dir": str(tmp_path / name),
                "threads": 1,
                "policy": policy_config.model_dump(mode="json"),
                "environment": tasks,
                "evaluation": {"environment": tasks},
                "algorithm": "rloo",
                "steps": 2,
                "tasks_per_step": 2,
                "group_size": 2,
                "sampling": {"max_new_tokens": 3},
                **changes,
            }
        )

    return configure


class Recording(Observer):
    def __init__(self):
        self.calls = []

    def on_step(self, step):
        self.calls.append((step.number, step.stage.name, len(step.trajectories)))
        assert step.seconds > 0

    def on_evaluation(self, name, report):
        self.calls.append((name, report.success.tasks))

    def on_end(self):
        self.calls.append("end")


def test_an_observer_is_told_of_steps_evaluations_and_the_end(configure):
    config, recording = configure("run"), Recording()
    train(config, observers=[recording])
    assert recording.calls == [("base", 6), (0, "rloo", 4), (1, "rloo", 4), ("after rloo", 6), "end"]

    again = Recording()
    train(config, observers=[again])
    assert again.calls == ["end"], "nothing was left to do"


def test_an_observer_is_told_first_where_the_run_stands(configure):
    class Starting(Recording):
        def on_start(self, run):
            self.calls.append((run.done, run.steps, run.evaluations, run.config.run_dir.name))

    first, longer = Starting(), Starting()
    train(configure("run"), observers=[first])
    assert first.calls[0] == (0, 2, (0, 2), "run")
    train(configure("run", steps=3), observers=[longer])
    assert longer.calls[0] == (2, 3, (0, 3), "run")


def test_an_observer_is_told_of_the_end_of_a_run_that_fails(configure):
    class Stopping(Recording):
        def on_step(self, step):
            super().on_step(step)
            raise KeyboardInterrupt

    stopping = Stopping()
    with pytest.raises(KeyboardInterrupt):
        train(configure("run"), observers=[stopping])
    assert stopping.calls == [("base", 6), (0, "rloo", 4), "end"]


def test_an_observer_that_fails_is_named_once_and_changes_no_byte(configure, run_contents, caplog):
    class Failing(Recording):
        def on_step(self, step):
            step.metrics.clear()
            raise OSError("no such host")

        def on_evaluation(self, name, report):
            raise ValueError("late")

        def on_end(self):
            super().on_end()
            raise ValueError("at the end")

    plain, watched, failing, second = configure("plain"), configure("watched"), Failing(), Recording()
    train(plain)
    with caplog.at_level(logging.WARNING):
        train(watched, observers=[failing, second])
    assert [message for message in caplog.messages if "observer" in message] == [
        "the observer Failing failed in on_evaluation (ValueError: late); the run continues, and its further "
        "failures are not reported"
    ]
    assert failing.calls == ["end"] and second.calls[-1] == "end" and len(second.calls) == 5
    ours, theirs = run_contents(plain.run_dir), run_contents(watched.run_dir)
    del ours["config.yaml"], theirs["config.yaml"]  # each names its folder
    assert ours == theirs


def test_a_metrics_file_that_cannot_be_written_ends_the_run(configure, monkeypatch):
    """It is part of the run, which would otherwise lose it in silence."""

    def full(path, record):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(runs, "append_line", full)
    with pytest.raises(OSError, match="No space left"):
        train(configure("run", evaluation=None))
