"""``run.json`` and ``log.txt``: they say what happened, and nothing that happens to them ends a run."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import agent_peft
from agent_peft.configuration.load import read_config
from agent_peft.configuration.run_config import TrainConfig
from agent_peft.configuration.yaml12 import dump
from agent_peft.runs import run as runs
from agent_peft.runs.history import History, state_of
from agent_peft.runs.run import train
from agent_peft.types import AgentPeftError


@pytest.fixture
def config(tmp_path, policy_config, monkeypatch) -> TrainConfig:
    monkeypatch.chdir(tmp_path)
    settings = {
        "run_dir": "run",
        "threads": 1,
        "policy": policy_config.model_dump(mode="json"),
        "environment": {"kind": "arithmetic", "digits": 1, "num_tasks": 10},
        "stages": [{"algorithm": {"kind": "sft"}, "steps": 2, "tasks_per_step": 2}],
    }
    Path("c.yaml").write_text(dump(settings))
    return read_config("c.yaml")[0]


def record() -> dict:
    return json.loads(Path("run/run.json").read_text())


def test_a_run_says_what_it_was_made_with(config):
    subprocess.run(["git", "init", "-q"], check=True)
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *identity, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
    train(config)
    found = record()
    assert (found["state"], found["process"]) == ("done", None)
    assert found["versions"].keys() == {"agent-peft", "torch", "transformers", "peft", "python"}
    assert found["versions"]["agent-peft"] == agent_peft.__version__
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    assert found["commit"] == head.stdout.strip()
    assert found["hardware"]["cores"] >= 1
    assert found["command"]
    assert [(event["event"], event["step"]) for event in found["history"]] == [("started", 0)]
    train(config)
    assert [(event["event"], event["step"]) for event in record()["history"]] == [
        ("started", 0),
        ("resumed", 2),
    ]
    train(config, fresh=True)
    assert [event["event"] for event in record()["history"]] == ["started"]


@pytest.mark.parametrize(
    ("error", "state", "cause"),
    [
        (KeyboardInterrupt(), "interrupted", "SIGINT"),
        (AgentPeftError("no such model; name another"), "failed", "no such model; name another"),
        (ValueError("a\nb"), "failed", "ValueError: a b"),
    ],
)
def test_the_end_of_a_run_is_written_down(config, monkeypatch, error, state, cause):
    def fails(*_, **__):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(runs, "Trainer", fails)
        with pytest.raises(type(error)):
            train(config)
    assert (record()["state"], record()["cause"]) == (state, cause)
    assert f"ERROR {state}: {cause}" in Path("run/log.txt").read_text()
    train(config)  # and then it is forgotten
    assert record()["state"] == "done"
    assert "cause" not in record()


def test_a_second_process_and_a_refusal_change_nothing(config):
    train(config)
    before = record(), Path("run/log.txt").read_text()
    with pytest.raises(AgentPeftError, match="seed"):
        train(config.model_copy(update={"seed": 1}))
    assert (record(), Path("run/log.txt").read_text()) == before


def test_the_log_has_every_warning_with_its_time_over_all_starts(config, monkeypatch):
    class Warning_:
        def on_step(self, step):
            logging.getLogger("somebody.else").warning("step %d\nis odd", step.number)

        def on_evaluation(self, name, report): ...

        def on_end(self): ...

    train(config, observers=[Warning_()])
    first = Path("run/log.txt").read_text()
    lines = [line.split(" ", 2) for line in first.splitlines()]
    assert [line[2] for line in lines if line[1] == "WARNING"] == ["step 0\\nis odd", "step 1\\nis odd"]
    assert all(line[0].endswith("+00:00") for line in lines)
    train(config)
    assert Path("run/log.txt").read_text().startswith(first)
    logging.getLogger("somebody.else").warning("after the run")
    assert "after the run" not in Path("run/log.txt").read_text()


@pytest.mark.parametrize("configured", [False, True])
def test_a_program_without_logging_sees_the_warnings_of_its_run(tmp_path, monkeypatch, capsys, configured):
    """As before and after the run: the log's handler must not be the only one. One that has set up logging
    sees what it has chosen.
    """
    own = [logging.NullHandler()] if configured else []
    monkeypatch.setattr(logging.getLogger(), "handlers", list(own))
    with History(tmp_path):
        logging.getLogger("agent_peft.runs.observers").warning("the observer failed")
    assert ("the observer failed" in capsys.readouterr().err) is not configured
    assert "the observer failed" in (tmp_path / "log.txt").read_text()
    assert logging.getLogger().handlers == own


@pytest.mark.parametrize("damage", ["gone", "a folder", "brackets", "other JSON"])
def test_no_damage_of_the_record_ends_a_run(config, damage, caplog):
    train(config)
    for name in ("run.json", "log.txt"):
        path = Path("run", name)
        path.unlink()
        if damage == "brackets":
            path.write_text("[" * 5000)
        elif damage == "other JSON":
            path.write_text('{"history": 3, "paths": [1], "process": 7}')
    if damage == "a folder":  # whose place is taken while the run continues
        with History(Path("run")) as history:
            for name in ("run.json", "log.txt"):
                Path("run", name).unlink(missing_ok=True)
                Path("run", name).mkdir()
            history.add("resumed", 1)
        assert {"run.json", "log.txt"} == {
            Path(record.getMessage().partition(":")[0]).name for record in caplog.records
        }
        return
    train(config)
    assert record()["history"][-1]["event"] in ("started", "resumed")


def test_the_state_of_a_dead_process_is_killed():
    with subprocess.Popen([sys.executable, "-c", "pass"]) as process:
        process.wait()
    mine = {"pid": os.getpid(), "host": os.uname().nodename, "birth": None}
    dead = {**mine, "pid": process.pid}
    assert state_of({"state": "running", "process": dead}) == "killed"
    assert state_of({"state": "running", "process": {**dead, "host": "elsewhere"}}) == "running"
    assert state_of({"state": "running", "process": {**mine, "birth": "1"}}) == "killed", "another process"


def test_a_signal_and_a_kill_are_told_apart(config, warm_process):
    """The run still ends as the signal says."""
    for number, state in ((signal.SIGTERM, "interrupted"), (signal.SIGKILL, "killed")):
        command = ["-m", "agent_peft", "train", "c.yaml", "stages.0.steps=100000", "--fresh"]
        with Path("output.txt").open("w") as output:
            process = warm_process.start(*command, folder=Path.cwd(), output=output)
        deadline = time.monotonic() + 120
        while not (Path("run/metrics.jsonl").exists() and Path("run/run.json").exists()):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        assert state_of(record()) == "running"
        process.send_signal(number)
        assert process.wait(60) == -number
        assert state_of(record()) == state
        Path("run/metrics.jsonl").unlink()
    Path("run/run.json").unlink()
