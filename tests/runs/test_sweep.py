"""``agent-peft sweep``: a run for each combination; killed and resumed, it ends in the same bytes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agent_peft.cli import run as command
from agent_peft.configuration.yaml12 import dump
from agent_peft.runs.history import state_of
from agent_peft.runs.layout import read_record
from agent_peft.runs.sweep import cell_name, plan
from agent_peft.types import AgentPeftError


@pytest.fixture
def config(tmp_path: Path, small: dict[str, object]) -> Path:
    held_out = {"kind": "arithmetic", "digits": 1, "num_tasks": 6, "split": "heldout"}
    stages = [{"algorithm": "sft", "steps": 12, "tasks_per_step": 4}]
    evaluation = {"environment": held_out, "sampling": {"max_new_tokens": 3}}
    (tmp_path / "c.yaml").write_text(
        dump({**small, "stages": stages, "evaluation": evaluation, "checkpoint": {"every": 2}})
    )
    return tmp_path / "c.yaml"


def test_a_run_for_each_combination(config: Path) -> None:
    cells = plan(config, ["optimizer.learning_rate=[1e-3, 2e-3]", "seeds=2", "steps=3"])
    names = [cell.folder.name for cell in cells]
    assert names == [f"learning_rate={rate},seed={seed}" for rate in (0.001, 0.002) for seed in (0, 1)]
    assert cells[1].overrides[:3] == ("steps=3", "optimizer.learning_rate=0.001", "seed=1")
    assert all(cell.folder.parent == config.parent / "run" for cell in cells)


def test_a_folder_for_all_is_set_once_for_each(config: Path, tmp_path: Path, caplog) -> None:
    cells = plan(config, ["seeds=2", f"run_dir={tmp_path / 'other'}"])
    assert [cell.folder.parent for cell in cells] == [tmp_path / "other"] * 2
    assert [sum(text.startswith("run_dir=") for text in cell.overrides) for cell in cells] == [1, 1]
    assert caplog.messages == []  # no override replaces another


def test_a_value_may_be_a_list_and_jobs_share_the_cores(config: Path) -> None:
    cells = plan(config, ["sampling.stop=[[a], [b, c]]", "stages.0.algorithm=[sft, reinforce]"], jobs=64)
    assert cells[1].overrides[:2] == ("threads=1", 'sampling.stop=["a"]')
    assert len({cell.folder for cell in cells}) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["steps=3"], "nothing varies"),
        (["seeds=0"], "write seeds=3"),
        (["seeds=2", "seed=[0,1]"], "list each value of seed once"),
        (["seed=[1,1]"], "list each value of seed once"),
        (["steps=[]"], "list each value of steps once"),
        (["run_dir=[a,b]"], "run_dir is one folder"),
        (["seeds=2", "stepz=3"], "stepz"),
        (["optimizer.learning_rate=[1e-3, fast]"], "learning_rate"),  # of the second run, before the first
    ],
)
def test_what_cannot_be_is_refused_before_a_run(config: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(AgentPeftError, match=message):
        plan(config, arguments)
    assert not (config.parent / "run").exists()


def test_a_run_is_not_a_folder_of_runs(config: Path) -> None:
    (config.parent / "run").mkdir()
    (config.parent / "run/config.yaml").write_text("{}")
    with pytest.raises(AgentPeftError, match="is a run; set run_dir"):
        plan(config, ["seeds=2"])


def test_names_of_folders() -> None:
    assert cell_name({"a.steps": 3, "b.steps": 4}) == "a.steps=3,b.steps=4"
    one, other = (cell_name({"policy.model": f"me/{name}"}) for name in ("x/y", "x_y"))
    assert one != other and "/" not in one and one.startswith("model=me_x_y-")


@pytest.mark.slow  # nine starts of a process with torch
def test_killed_and_resumed_it_ends_in_the_same_bytes(config: Path, run_contents) -> None:
    arguments = [sys.executable, "-m", "agent_peft", "sweep", str(config), "seeds=2", "--jobs", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    quiet = {"env": environment, "stdout": subprocess.PIPE, "text": True}
    whole = subprocess.run([*arguments, f"run_dir={config.parent}/whole"], check=True, **quiet)
    assert "held-out success, mean over seeds" in whole.stdout

    folders = [config.parent / f"run/seed={seed}" for seed in (0, 1)]
    process = subprocess.Popen(arguments, **quiet)
    with process:
        while not any(folder.joinpath("checkpoints/step_000002").is_dir() for folder in folders):
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 60
    while any(state_of(read_record(folder)) == "running" for folder in folders):
        assert time.monotonic() < deadline, "the runs outlived their sweep"
        time.sleep(0.05)
    subprocess.run(arguments, check=True, **quiet)
    for folder in folders:
        contents = run_contents(folder)
        other = run_contents(config.parent / "whole" / folder.name)
        for of_run in (contents, other):
            del of_run["train.out"], of_run["config.yaml"]  # its paths
        assert contents == other
    before = [(folder / "metrics.jsonl").stat().st_mtime_ns for folder in folders]
    subprocess.run(arguments, check=True, **quiet)
    assert before == [(folder / "metrics.jsonl").stat().st_mtime_ns for folder in folders]


@pytest.mark.slow  # three starts of a process with torch
def test_a_run_that_fails_does_not_end_the_others(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    blocked = config.parent / "run/seed=0"
    blocked.mkdir(parents=True)
    (blocked / "mine.txt").write_text("kept")
    assert command(["sweep", str(config), "seeds=2", "steps=1"]) == 1
    out, err = capfd.readouterr()
    assert f"{blocked}: exit code 2" in out and "1 of 2 runs failed" in err and "holds mine.txt" in err
    assert json.loads((config.parent / "run/seed=1/run.json").read_text())["state"] == "done"
