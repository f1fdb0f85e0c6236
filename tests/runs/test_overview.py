"""``agent-peft runs``: what the files of runs say at a glance."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest

from agent_peft.cli import run as command
from agent_peft.rollout.statistics import summarize
from agent_peft.runs.overview import find_runs, summarize_run
from agent_peft.types import Group, Task, Trajectory, Turn

REPORT = summarize([Group(Task("t"), [Trajectory(Task("t"), (Turn((1,), (2,), (-0.5,)),))])])


def make_run(
    folder: Path, steps: int, record: dict | None, success: Mapping[int, float] = MappingProxyType({})
) -> None:
    """The files of a run of 2 + 8 steps."""
    (folder / "evaluations").mkdir(parents=True)
    (folder / "config.yaml").write_text("stages: [{name: sft, steps: 2}, {name: grpo, steps: 8}]\n")
    lines = [{"step": step, "stage": "sft" if step < 2 else "grpo"} for step in range(steps)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    times = [{"step": step, "seconds": 100.0 if step == 0 else 3.0} for step in range(steps)]
    (folder / "timing.jsonl").write_text("".join(json.dumps(line) + "\n" for line in times) + '{"step": 9')
    for number, value in success.items():
        report = replace(REPORT, success=replace(REPORT.success, value=value)).to_json()
        (folder / "evaluations" / f"step_{number:06d}.json").write_text(json.dumps(report))
    if record is not None:
        (folder / "run.json").write_text(json.dumps(record))


@pytest.fixture
def runs(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    mine = {"pid": os.getpid(), "host": os.uname().nodename}
    birth = Path(f"/proc/{os.getpid()}/stat").read_text().rpartition(")")[2].split()[19]
    running = {"state": "running", "process": {**mine, "birth": birth}}
    make_run(Path("runs/a"), 5, running, {0: 0.1, 2: 0.5})
    make_run(Path("runs/deep/b"), 10, {"state": "done", "process": None}, {0: 0.2})
    make_run(Path("runs/c"), 3, {"state": "failed", "cause": "the disk is full"})
    make_run(Path("runs/old"), 10, None)
    make_run(Path("runs/a/checkpoints/inner"), 1, None)  # inside a run, nothing is searched
    Path("runs/not_a_run").mkdir()
    Path("runs/not_a_run/config.yaml").write_text("mine: 1\n")
    return Path("runs")


def test_a_summary_of_each_run(runs):
    found = {str(run): summarize_run(run) for run in find_runs(runs)}
    assert sorted(found) == ["runs/a", "runs/c", "runs/deep/b", "runs/old"]
    a = found["runs/a"]
    assert (a.state, a.stage, a.step, a.steps, a.best) == ("running", "grpo", 5, 10, ("after sft", 0.5))
    assert a.seconds_left == pytest.approx(5 * (100 + 4 * 3) / 5)
    assert (found["runs/c"].state, found["runs/c"].cause) == ("failed", "the disk is full")
    assert found["runs/deep/b"].seconds_left is None
    assert found["runs/old"].state == "unknown"


def test_the_command(runs, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    assert command(["runs"]) == 0
    out = capsys.readouterr().out
    assert "50.0% (after sft)" in out and "failed: the disk is full" in out and "5/10" in out
    assert command(["runs", "runs/deep", "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)["runs"]
    assert (one["run"], one["state"], one["best"]) == ("runs/deep/b", "done", ["base", 0.2])
    assert command(["runs", "nowhere"]) == 2
    assert "there is no such folder" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "[", "{}", "null", '{"state": 7, "process": 1, "from": 3}', "\0"])
def test_damaged_files_are_no_error(runs, capsys, content):
    for name in ("run.json", "config.yaml", "metrics.jsonl", "timing.jsonl", "evaluations/step_000000.json"):
        Path("runs/a", name).write_text(content + "\n")
    assert command(["runs"]) == 0
    assert "runs/a" in capsys.readouterr().out


def test_torch_is_not_loaded(runs):
    code = "import sys; from agent_peft.cli import run; run(['runs']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0
