"""``agent-peft compare``: means over seeds, intervals, paired tests, and seeds that collapsed."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from agent_peft.cli import run as command
from agent_peft.rollout.statistics import summarize
from agent_peft.runs.comparison import compare_runs, differences, holm
from agent_peft.runs.evaluations import write_evaluation
from agent_peft.types import AgentPeftError, Group, Outcome, Task, Trajectory

TASKS = 40


def write_run(folder: Path, rate: float, seed: int, successes: Sequence[int], first: int = 0) -> None:
    """A run of 2 + 4 steps with evaluations after 0, 2 and 6, as far as ``successes`` (of 40 tasks) go."""
    folder.mkdir(parents=True)
    stages = [
        {"name": name, "steps": steps, "optimizer": {"learning_rate": rate}}
        for name, steps in (("sft", 2), ("rloo", 4))
    ]
    content = {"run_dir": str(folder), "seed": seed, "stages": stages}
    (folder / "config.yaml").write_text(json.dumps(content))
    (folder / "run.json").write_text('{"state": "done"}')
    tasks = [Task(f"t{number}") for number in range(first, first + TASKS)]
    for step, number in zip((0, 2, 6), successes, strict=False):
        outcomes = [Outcome.CORRECT if place < number else Outcome.INCORRECT for place in range(TASKS)]
        groups = [
            Group(task, [Trajectory(task, (), outcome=o)]) for task, o in zip(tasks, outcomes, strict=True)
        ]
        write_evaluation(folder / f"evaluations/step_{step:06d}.json", replace(summarize(groups), step=step))


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    for seed, successes in enumerate(((0, 20, 24), (0, 18, 1), (0, 19, 22))):
        write_run(tmp_path / "s" / f"fast-{seed}", 1e-3, seed, successes)
    for seed, successes in enumerate(((0, 24, 30), (0, 22, 32), (0, 23, 28))):
        write_run(tmp_path / "s" / f"slow-{seed}", 5e-4, seed, successes)
    return tmp_path / "s"


def test_means_over_seeds_by_what_differs(sweep: Path) -> None:
    fast, slow = compare_runs([sweep]).groups
    assert (fast.name, slow.name) == ("learning_rate=0.001", "learning_rate=0.0005")
    assert fast.values("success") == [24 / 40, 1 / 40, 22 / 40]
    mean = slow.mean("success")
    assert mean is not None and mean.low is not None and mean.high is not None
    # Student: 0.75 ± 4.303 * 0.05 / sqrt(3)
    assert (mean.value, mean.tasks) == (0.75, 3)
    assert (mean.low, mean.high) == pytest.approx((0.75 - 0.1242, 0.75 + 0.1242), abs=1e-4)
    wide = fast.mean("success")
    assert wide is not None and (wide.low, wide.high)[0] == 0.0, "a rate is not below 0"


def test_the_paired_test_takes_each_task_once(sweep: Path) -> None:
    comparison = compare_runs([sweep])
    test = comparison.pairs[0, 1]
    assert comparison.best == 1
    assert test.difference == pytest.approx(0.75 - 47 / 120)
    # 32 tasks changed, all in one direction, and a task counts once, whatever its seeds: 2 / 2^m
    assert 2 / 2**32 <= test.p <= 2 / 2**25
    back = comparison.pairs[1, 0]
    assert (back.difference, back.low, back.high) == (-test.difference, -test.high, -test.low)


def test_a_seed_that_collapsed_is_named(sweep: Path) -> None:
    (line,) = compare_runs([sweep]).warnings
    assert line.startswith(f"{sweep}/fast-1: collapsed to 2.5% after rloo; after sft it was 45.0% (p ")
    assert not compare_runs([*sweep.glob("slow-*")]).warnings


def test_a_seed_that_never_rose_is_named_by_its_siblings(tmp_path: Path) -> None:
    for seed, last in enumerate((20, 19, 1)):
        write_run(tmp_path / f"{seed}", 1e-3, seed, (0, 0, last))
    (line,) = compare_runs([tmp_path]).warnings
    assert f"{tmp_path}/2: collapsed to 2.5% after rloo; the median of 3 seeds is 47.5%" in line


def test_runs_without_an_end_are_left_out_and_other_tasks_are_not_tested(tmp_path: Path) -> None:
    write_run(tmp_path / "a", 1e-3, 0, (0, 20, 24))
    write_run(tmp_path / "b", 1e-3, 1, (0, 20))
    write_run(tmp_path / "c", 5e-4, 0, (0, 20, 24), first=7)
    comparison = compare_runs([tmp_path])
    assert [len(group.measured) for group in comparison.groups] == [1, 1] and not comparison.pairs
    assert f"{tmp_path}/b: has no evaluation at its end, after step 6, and is left out" in comparison.warnings
    assert any("different tasks cannot be paired" in line for line in comparison.warnings)
    with pytest.raises(AgentPeftError, match=r"b: has no evaluation at its end.* with --evaluation"):
        compare_runs([tmp_path / "b"])
    assert compare_runs([tmp_path / "b"], "after_sft").groups[0].values("success") == [0.5]
    with pytest.raises(AgentPeftError, match="different tasks"):
        write_run(tmp_path / "d", 5e-4, 1, (0, 20, 24))
        compare_runs([tmp_path / "c", tmp_path / "d"])


def test_runs_of_one_seed_count_once(sweep: Path) -> None:
    write_run(sweep / "z", 5e-4, 1, (0, 22, 32))
    fast, slow = compare_runs([sweep]).groups
    assert (len(fast.measured), slow.values("success")) == (3, [30 / 40, 32 / 40, 28 / 40])
    write_run(sweep / "zz", 5e-4, 3, (0, 22, 32))
    assert len(compare_runs([sweep]).groups[1].measured) == 4
    assert any("has the seed 1 of" in line and "left out" in line for line in compare_runs([sweep]).warnings)


def test_the_command(
    sweep: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)  # pytest-xdist sets it
    assert command(["compare", str(sweep)]) == 0
    out, err = capsys.readouterr()
    (row,) = (line for line in out.splitlines() if "=0.001 " in line)
    assert "60.0 2.5 55.0" in row and "39.2% (0–" in row and "-35.8 (" in row
    assert "collapsed" in err
    assert command(["compare", str(sweep), "--csv"]) == 0
    fast, slow = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert (fast["learning_rate"], fast["seeds"], slow["success"]) == ("0.001", "3", "0.75")
    assert float(fast["difference"]) == pytest.approx(47 / 120 - 0.75) and slow["difference"] == ""
    assert command(["compare", str(sweep), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert [len(group["runs"]) for group in content["groups"]] == [3, 3]
    assert content["pairs"][0]["one"] == "learning_rate=0.001" and len(content["warnings"]) == 1
    assert command(["compare", str(sweep), "--json", "--csv"]) == 2
    assert command(["compare", str(sweep.parent / "nowhere")]) == 2


def test_keys_that_follow_from_a_kind_are_not_listed() -> None:
    one = {"stages.0.algorithm.kind": "grpo", "stages.0.algorithm.clip_low": "0.2", "a.rate": "1"}
    other = {"stages.0.algorithm.kind": "rloo", "a.rate": "1"}
    assert differences([one, other]) == [{"algorithm": "grpo"}, {"algorithm": "rloo"}]
    third = {**one, "stages.0.algorithm.clip_low": "0.3"}
    assert differences([one, third, other])[1] == {"algorithm": "grpo", "clip_low": "0.3"}


def test_holm_bounds_the_chance_of_a_false_alarm() -> None:
    assert holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert holm([0.6, 0.9]) == [1.0, 1.0] and holm([]) == []


def test_torch_is_not_loaded(sweep: Path) -> None:
    program = (
        "import sys; from agent_peft.cli import run; assert run(['compare', sys.argv[1]]) == 0; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, str(sweep)], check=True, capture_output=True)
