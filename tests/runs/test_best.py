"""The best checkpoint is kept, and evaluations end a stage; both are the same after a kill at any moment."""

from __future__ import annotations

import json

import pytest

from agent_peft.configuration.run_config import KeepBestConfig
from agent_peft.runs import checkpoint as checkpoints
from agent_peft.runs import evaluations
from agent_peft.runs import run as runs
from agent_peft.runs.best import Best, note_best, read_best, reason_to_end
from agent_peft.runs.run import train
from agent_peft.runs.targets import evaluate_target, merge_run
from agent_peft.training.until import UntilConfig
from agent_peft.types import AgentPeftError
from tests.runs.conftest import Killed, killing

TASKS = {"kind": "arithmetic", "digits": 1, "num_tasks": 6}


@pytest.fixture
def settings(small):
    """A stage that learns six answers by heart, and one that ruins the policy."""
    sft = {
        "algorithm": {"kind": "sft"},
        "tasks_per_step": 6,
        "optimizer": {"learning_rate": 0.01},
    }
    return {
        **small,
        "environment": TASKS,
        "evaluation": {"environment": TASKS, "every": 3, "at": [], "sampling": {"max_new_tokens": 3}},
        "checkpoint": {"keep_last": 1, "every": 5, "keep_best": {"metric": "evaluation.success"}},
        "stages": [
            {**sft, "name": "learn", "steps": 12},
            {**sft, "name": "ruin", "steps": 6, "optimizer": {"learning_rate": 1.0}},
        ],
    }


# -- which -------------------------------------------------------------------------------------------------


def test_the_best_checkpoint_is_kept_named_measured_and_merged(configure, tmp_path, capsys):
    config = configure()
    reports = train(config)
    values = {report.step: report.success.value for report in reports.values()}
    best = read_best(config.run_dir / "checkpoints")
    assert best is not None and best.value == max(values.values()) > values[18]
    assert best.step == min(step for step in values if values[step] == best.value) < 15
    assert best == Best(f"step_{best.step:06d}", best.step, "evaluation.success", "max", best.value)
    names = {path.name for path in (config.run_dir / "checkpoints").iterdir()}
    assert names == {best.checkpoint, "step_000012", "step_000018", "best.json"}
    assert f"step_000018; the best by evaluation.success ({best.value:.4g}) is {best.checkpoint}" in (
        capsys.readouterr().out
    )
    report = evaluate_target(config.run_dir, checkpoint="best")
    assert report == reports[f"step {best.step}"]
    assert (report.checkpoint, report.step, report.run) == (best.checkpoint, best.step, str(config.run_dir))
    merge_run(config.run_dir, tmp_path / "merged", "best")
    assert evaluate_target(tmp_path / "merged", config) == report


def test_without_keep_best_there_is_none(configure):
    config = configure(checkpoint={"keep_last": 1}, stages=[{"algorithm": {"kind": "sft"}, "steps": 1}])
    train(config)
    with pytest.raises(AgentPeftError, match=r"names no best checkpoint; set checkpoint\.keep_best"):
        evaluate_target(config.run_dir, checkpoint="best")


def folder_of(root, **checkpoints_by_step):
    """Checkpoints with these metrics of their last step: ``s3={"stage": 0, "loss": 1.0}``."""
    for name, statistics in checkpoints_by_step.items():
        folder = root / f"step_{int(name[1:]):06d}"
        folder.mkdir(parents=True)
        (folder / "position.json").write_text(json.dumps({"stage": statistics.pop("stage", 0)}))
        (folder / "training_stats.json").write_text(json.dumps(statistics))
    return root


def test_a_metric_of_steps_is_compared_within_the_newest_stage(tmp_path):
    root = folder_of(
        tmp_path / "checkpoints",
        s1={"stage": 0, "reward": 1.0},
        s2={"stage": 1, "reward": 0.25},
        s3={"stage": 1, "reward": 0.5},
        s4={"stage": 1, "reward": 0.5},
        s5={"stage": 1, "reward": "nan"},
    )
    assert note_best(root, KeepBestConfig(metric="reward"), ()).step == 3
    assert note_best(root, KeepBestConfig(metric="reward", mode="min"), ()).step == 2
    assert read_best(root).step == 2
    assert note_best(root, KeepBestConfig(metric="kl"), ()).step == 2, "no checkpoint has it: as before"
    (root / "best.json").write_text("{")
    with pytest.raises(AgentPeftError, match=r"best\.json: is damaged .*remove it"):
        read_best(root)


def test_the_best_by_a_metric_of_steps_is_kept(configure):
    keep = {"keep_last": 1, "keep_best": {"metric": "loss", "mode": "min"}}
    config = configure(checkpoint=keep, evaluation=None)
    train(config)
    records = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    losses = {record["step"] + 1: record["loss"] for record in records if record["stage"] == "ruin"}
    best = read_best(config.run_dir / "checkpoints")
    assert best.step == min(losses, key=losses.get) and best.value == losses[best.step]
    names = {path.name for path in (config.run_dir / "checkpoints").iterdir()}
    assert names == {best.checkpoint, "step_000012", "step_000018", "best.json"}


@pytest.mark.parametrize(
    ("keep", "told"),
    [
        (
            {"metric": "evaluation.succes"},
            r"'evaluation\.succes' is not a metric; did you mean 'evaluation\.success'",
        ),
        ({"metric": "ratio"}, "'ratio' is not a metric"),
        ({"metric": "loss", "mode": "low"}, "must be 'max' or 'min'"),
    ],
)
def test_a_wrong_metric_is_told_before_anything_runs(configure, keep, told):
    with pytest.raises(AgentPeftError, match=told):
        configure(checkpoint={"keep_best": keep})


def test_a_metric_of_evaluations_needs_evaluations(configure, settings):
    with pytest.raises(AgentPeftError, match=r"evaluation\.success needs evaluations"):
        configure(evaluation=None)
    stage = {**settings["stages"][0], "until": {"metric": "evaluation.success", "above": 0.5}}
    for evaluation in (None, {**settings["evaluation"], "every": 12}):
        with pytest.raises(AgentPeftError, match="no evaluation is due between the steps 0 and 12; set"):
            configure(evaluation=evaluation, checkpoint={}, stages=[stage])
    configure(evaluation={**settings["evaluation"], "every": 11}, stages=[stage])


# -- when a stage ends ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("until", "start", "values", "reason"),
    [
        ({"above": 0.5}, 0.9, [], None),  # the evaluation at the start ends nothing
        ({"above": 0.5}, None, [0.5], None),
        ({"above": 0.5}, None, [0.4, 0.6], "evaluation.success is 0.600, above 0.5"),
        ({"above": 0.5, "over": 2}, None, [0.6], None),
        ({"above": 0.5, "over": 2}, None, [0.1, 0.5, 0.6], "evaluation.success is 0.550, above 0.5"),
        ({"below": 0.5}, None, [0.4], "evaluation.success is 0.400, below 0.5"),
        ({"patience": 2}, None, [0.5, 0.4], None),
        ({"patience": 2}, None, [0.5, 0.4, 0.5], "evaluation.success has not improved in 2 evaluations"),
        ({"patience": 2}, None, [0.5, 0.4, 0.6], None),
        ({"patience": 2}, 0.7, [0.5, 0.6], "evaluation.success has not improved in 2 evaluations"),
        ({"patience": 2, "above": 0.9}, 0.7, [0.5, 0.95], "evaluation.success is 0.950, above 0.9"),
        ({"patience": 1, "below": 0.1}, 0.7, [0.6], None),
        ({"patience": 1, "below": 0.1}, 0.7, [0.8], "evaluation.success has not improved in 1 evaluations"),
    ],
)
def test_evaluations_end_a_stage(until, start, values, reason):
    until = UntilConfig(metric="evaluation.success", **until)
    assert reason_to_end(until, start, values) == reason


@pytest.fixture
def early(settings):
    """Stages that evaluations end early: one by a level, one by patience."""
    learn, ruin = settings["stages"]
    return {
        "evaluation": {**settings["evaluation"], "every": 3, "at": ["start", "stages"]},
        "checkpoint": {"keep_last": 1, "every": 2, "keep_best": {"metric": "evaluation.success"}},
        "stages": [
            {**learn, "until": {"metric": "evaluation.success", "above": 0.1}},
            {**ruin, "steps": 12, "until": {"metric": "evaluation.success", "patience": 2}},
        ],
    }


def made(config):
    lines = (config.run_dir / "metrics.jsonl").read_text().splitlines()
    return [(record["stage"], record["step"]) for record in map(json.loads, lines)]


def test_a_stage_ends_after_an_evaluation_and_the_next_one_follows(configure, early, capsys):
    config = configure(**early)
    reports = train(config)
    steps = made(config)
    learnt, ruined = [[n for stage, n in steps if stage == name] for name in ("learn", "ruin")]
    assert len(learnt) % 3 == 0 and len(learnt) < 12, "it ends after an evaluation, before its last step"
    assert ruined[0] == 12 and len(ruined) < 12
    last = f"step {len(learnt)}"
    assert (
        reports[last].success.value
        > 0.1
        >= max(report.success.value for report in reports.values() if report.step < len(learnt))
    )
    assert (reports["after learn"], reports["after learn"].step) == (reports[last], 12)
    said = capsys.readouterr().out
    assert f"learn ends after step {len(learnt)}: evaluation.success is " in said
    assert (
        f"ruin ends after step {ruined[-1] + 1}: evaluation.success has not improved in 2 evaluations" in said
    )
    assert said.count("evaluating after learn") == 0, "the same policy is not measured twice"
    episodes = (config.run_dir / "evaluations" / "step_000012.jsonl").read_text().splitlines()
    assert {json.loads(line)["step"] for line in episodes} == {12}
    assert evaluate_target(config.run_dir, checkpoint="step_000012") == reports["after learn"]
    assert train(config) == reports


@pytest.mark.slow
def test_a_run_that_is_killed_at_any_moment_ends_in_the_same_bytes(
    configure, early, tmp_path, monkeypatch, run_contents
):
    """Killed before each write of a checkpoint, of a report, and of the name of the best one, in turn."""
    whole = configure(**early, run_dir=str(tmp_path / "whole"))
    expected = train(whole)
    config = configure(**early)
    kills, left = 0, [0]

    with monkeypatch.context() as patched:
        patched.setattr(runs, "save_checkpoint", killing(checkpoints.save_checkpoint, left))
        patched.setattr(evaluations, "write_evaluation", killing(evaluations.write_evaluation, left))
        patched.setattr(evaluations, "_copy_episodes", killing(evaluations._copy_episodes, left))
        patched.setattr(evaluations, "note_best", killing(evaluations.note_best, left))
        while True:
            left[0] = 1 + kills % 3  # so that each place is met, and the run gets on
            try:
                found = train(config)
                break
            except Killed:
                kills += 1
            assert kills < 200
    assert kills > 5
    assert list(found) == list(expected) and found == expected
    ours, theirs = run_contents(config.run_dir), run_contents(whole.run_dir)
    for files in (ours, theirs):
        del files["config.yaml"]  # names its folder
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if ours[name] != theirs[name]] == []
