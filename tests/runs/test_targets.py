"""What is measured or merged once it is there: with the very settings that the command line says, or one
line.
"""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import pytest
import torch

from agent_peft.cli import run
from agent_peft.configuration import yaml12
from agent_peft.configuration.load import read_config
from agent_peft.configuration.run_config import TrainConfig
from agent_peft.configuration.yaml12 import dump
from agent_peft.policies.engine import load_sampler
from agent_peft.runs import targets
from agent_peft.runs.run import train
from agent_peft.runs.targets import evaluate_target, merge_run
from tests.conftest import case

TASKS = {"kind": "arithmetic", "digits": 1, "num_tasks": 6}


@pytest.fixture
def settings(tmp_path, policy_config, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return {
        "run_dir": "run",
        "threads": 1,
        "policy": policy_config.model_dump(mode="json"),
        "environment": TASKS,
        "evaluation": {"environment": TASKS, "sampling": {"max_new_tokens": 3}},
        "stages": [
            {
                "algorithm": {"kind": "sft"},
                "steps": 20,
                "tasks_per_step": 6,
                "optimizer": {"learning_rate": 0.02},
            }
        ],
    }


@pytest.fixture
def trained(settings):
    """``trained(steps, **changes)``: the configuration of a run that has ended, in the current folder."""

    def make(steps: int, **changes) -> TrainConfig:
        stages = [{**settings["stages"][0], "steps": steps}]
        Path("c.yaml").write_text(dump({**settings, "stages": stages, **changes}))
        config = read_config(Path("c.yaml"))[0]
        train(config)
        return config

    return make


@pytest.fixture
def refused(capsys):
    """``refused(*arguments)``: the one line that a command ends in."""

    def refused(*arguments: str) -> str:
        capsys.readouterr()
        assert run(arguments) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        return said.removeprefix("agent-peft: ").rstrip("\n")

    return refused


def test_overrides_reach_what_is_measured(trained, monkeypatch, capsys):
    trained(steps=1)
    made, threads = [], []

    def recording(policy, config):
        made.append((policy.dtype, config.rows))
        return load_sampler(policy, config)

    monkeypatch.setattr(targets, "load_sampler", recording)
    monkeypatch.setattr(targets, "set_threads", threads.append)
    overrides = ["engine.rows=2", "policy.dtype=bfloat16", "threads=3", "evaluation.num_tasks=5"]
    for command in (["evaluate", "run"], ["merge", "run", "--output", "merged", "--evaluate"]):
        capsys.readouterr()
        assert run([*command, "--json", *overrides]) == 0
        found = json.loads(capsys.readouterr().out)
        reports = [found] if command[0] == "evaluate" else [found["adapter"], found["merged"]]
        assert [report["success"]["tasks"] for report in reports] == [5] * len(reports)
    assert made == [(torch.bfloat16, 2)] * 3
    assert threads == [3] * 3


def test_a_report_that_cannot_be_written_is_shown(trained, capsys, monkeypatch):
    trained(steps=1)

    def full(place, report):
        raise OSError(errno.ENOSPC, "No space left on device", str(place))

    monkeypatch.setattr("agent_peft.runs.evaluations.write_evaluation", full)
    for arguments in ([], ["--json"]):
        capsys.readouterr()
        assert run(["evaluate", "run", "--output", "report", *arguments]) == 1
        shown = capsys.readouterr()
        assert "success" in shown.out and "No space left on device" in shown.err


def test_what_is_merged_is_read_in_the_runs_own_dtype(trained):
    config = trained(steps=1)
    merge_run(Path("run"), Path("plain"))
    rounded = config.model_copy(update={"policy": config.policy.model_copy(update={"dtype": "bfloat16"})})
    merge_run(Path("run"), Path("asked"), config=rounded)
    assert (Path("plain") / "model.safetensors").read_bytes() == (
        Path("asked") / "model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("optimizer.learning_rate=1", "optimizer.learning_rate has no effect on evaluate; leave it out"),
        (
            "environment.num_tasks=3",
            "environment.num_tasks has no effect on evaluate; set evaluation.environment.num_tasks, or leave "
            "it out",
        ),
        (
            "sampling.max_new_tokens=4",
            "sampling.max_new_tokens has no effect on evaluate; set evaluation.sampling.max_new_tokens",
        ),
        (
            "stages.0.sampling.max_new_tokens=4",
            "has no effect on evaluate; set evaluation.sampling.max_new_tokens, or leave it out",
        ),
        ("evaluation={at: [start], num_tasks: 3}", "evaluation.at.0 has no effect on evaluate; leave it out"),
        ("run_dir=elsewhere", "run_dir has no effect on evaluate; leave it out"),
        ("seed=3", "seed decides the weights of policy.kind: scratch, too"),
        ("optimizer.learning_rat=1", "unknown key; did you mean 'optimizer.learning_rate'?"),
    ],
)
def test_what_has_no_effect_on_an_evaluation_is_refused(settings, refused, override, told):
    Path("run").mkdir()
    (Path("run") / "config.yaml").write_text(dump(settings))
    assert told in refused("evaluate", "run", override)
    assert told in refused("merge", "run", "--output", "merged", "--evaluate", override)
    assert not Path("merged").exists()


def test_tasks_of_training_are_measured_where_there_is_no_evaluation(settings, refused):
    Path("run").mkdir()
    (Path("run") / "config.yaml").write_text(dump({**settings, "evaluation": None}))
    config = targets.load_target_config(Path("run"), None, ["environment.num_tasks=3"], None, None)
    assert config.evaluation.environment.num_tasks == 3
    (Path("run") / "config.yaml").write_text(
        dump({**settings, "evaluation": None, "environment": {"kind": "db_bench", "tasks": "a.json"}})
    )
    for name in ("a.json", "b.json"):
        Path(name).write_text("[]")
    assert "environment.tasks and --tasks both say" in refused(
        "evaluate", "run", "environment.tasks=b.json", "--tasks", "a.json"
    )
    twice = refused("evaluate", "run", "evaluation.environment.tasks=b.json", "--tasks", "a.json")
    assert "set the same key; give one of them" in twice
    assert "set the same key" in refused("evaluate", "run", "evaluation.attempts=3", "--attempts", "2")


def test_a_result_on_the_tasks_of_training_says_so(trained, settings, caplog):
    trained(steps=1, evaluation=None)
    evaluate_target(Path("run"))
    assert [
        record.getMessage() for record in caplog.records if "tasks of training" in record.getMessage()
    ] == ["run: measured on the tasks of training; --tasks or evaluation.environment gives held-out ones"]


@pytest.mark.slow
def test_before_and_after_of_an_adapter(trained, refused):
    """--base of an adapter is the model that its configuration describes; of a model there is none, and
    only a run has checkpoints.
    """
    config = trained(steps=20)
    adapter = Path("run/checkpoints/step_000020")
    after, before = evaluate_target(Path("run")), evaluate_target(Path("run"), base=True)
    assert after.outcomes != before.outcomes
    assert evaluate_target(adapter, config) == after
    assert evaluate_target(adapter, config, base=True) == before
    merge_run(Path("run"), Path("merged"))
    measure = ["--config", "c.yaml"]
    assert "is a model, and --base is what" in refused("evaluate", "merged", *measure, "--base")
    assert "is not a run directory, so it has no checkpoint x" in refused(
        "evaluate", "merged", *measure, "--checkpoint", "x"
    )
    assert "is not a run directory, so it has no checkpoint x" in refused(
        "evaluate", str(adapter), *measure, "--checkpoint", "x"
    )
    assert "leave --base or --checkpoint out" in refused(
        "evaluate", "run", "--base", "--checkpoint", "step_000020"
    )
    other = yaml12.plain(yaml12.parse(Path("c.yaml").read_text(), "c.yaml"))
    Path("m.yaml").write_text(dump({**other, "policy": {"kind": "pretrained", "model": "x"}}))
    assert "policy.model has no effect on evaluate" in refused(
        "evaluate", "merged", "--config", "m.yaml", "policy.model=y"
    )
    assert "is a run directory, which has a config.yaml of its own; leave --config out" in refused(
        "evaluate", "run", *measure
    )


@pytest.mark.parametrize(
    "lora",
    [
        case(None, fast=False, name="as it was trained"),
        case({"rank": 4}, fast=True, name="with another configuration"),
    ],
)
def test_a_checkpoint_of_all_parameters_is_measured_as_its_run(trained, settings, lora):
    """It has no tokenizer of its own: its configuration has one."""
    trained(steps=20, policy={**settings["policy"], "lora": None})
    Path("other.yaml").write_text(dump({**settings, "policy": {**settings["policy"], "lora": lora}}))
    other = read_config(Path("other.yaml"))[0]
    after = evaluate_target(Path("run"))
    assert after.outcomes != evaluate_target(Path("run"), base=True).outcomes
    assert evaluate_target(Path("run/checkpoints/step_000020"), other) == after


def test_what_is_not_there_is_told(settings, refused, tmp_path):
    Path("c.yaml").write_text(dump(settings))
    Path("empty").mkdir()
    assert refused("evaluate", "runs/nosuch") == (
        f"runs/nosuch: there is no run directory, adapter or model of this name (seen from {tmp_path})"
    )
    assert (
        "is no run directory (with a config.yaml), no adapter (adapter_config.json) and no model"
        in refused("evaluate", "empty")
    )
    assert "no adapter (adapter_config.json) and no model" in refused(
        "evaluate", "c.yaml", "--config", "c.yaml"
    )
    Path("run").mkdir()
    shutil.copy("c.yaml", "run/config.yaml")
    assert refused("evaluate", "run").startswith("run: has no checkpoint yet; train it first")
    assert (
        refused("evaluate", "run", "--checkpoint", "step_000009")
        == "run: no checkpoint step_000009; there is: none yet"
    )


# -- runs that were moved ------------------------------------------------------------------------------------


def test_a_moved_run_goes_on_where_it_is_and_never_elsewhere(trained, run_contents):
    trained(steps=1)
    shutil.move("run", "moved")
    before = run_contents(Path("moved"))
    assert run(["train", "moved/config.yaml"]) == 0
    assert not Path("run").exists()
    after = run_contents(Path("moved"))
    assert "run_dir: ./moved" in after.pop("config.yaml").decode()
    del before["config.yaml"]
    assert after == before
    shutil.copytree("moved", "copied")
    assert run(["train", "copied/config.yaml", "stages.0.steps=2"]) == 0
    assert len(Path("copied/metrics.jsonl").read_text().splitlines()) == 2
    assert run_contents(Path("moved")).keys() == {*before, "config.yaml"}, "the copy continues alone"


# -- starts that failed --------------------------------------------------------------------------------------


def test_a_start_that_failed_does_not_occupy_its_folder(settings, refused, tmp_path):
    (tmp_path / "bad.json").write_text('{"x": 1}')
    Path("c.yaml").write_text(dump({**settings, "environment": {"kind": "db_bench", "tasks": "bad.json"}}))
    assert "bad.json" in refused("train", "c.yaml")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "config.json").write_text('{"model_type": "llama"}')
    Path("c.yaml").write_text(dump({**settings, "policy": {"kind": "pretrained", "model": "bad"}}))
    refused("train", "c.yaml")
    assert (tmp_path / "run" / "config.yaml").is_file()
    assert json.loads((tmp_path / "run" / "run.json").read_text())["state"] == "failed"
    settings["stages"][0]["steps"] = 1
    Path("c.yaml").write_text(dump(settings))
    (tmp_path / "run" / "evaluations").mkdir()
    (tmp_path / "run" / "evaluations" / "step_000000.json").write_text("{}")  # of the start that failed
    assert run(["train", "c.yaml"]) == 0
    assert json.loads((tmp_path / "run" / "evaluations" / "step_000000.json").read_text())["success"]
    assert "holds a run of another configuration (seed differs)" in refused("train", "c.yaml", "seed=1")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert "another configuration (seed differs)" in refused("train", "c.yaml", "seed=1")  # metrics are there


@pytest.mark.parametrize("command", ["train", "explain"])
def test_a_device_that_is_not_here_is_one_line(settings, refused, command):
    Path("c.yaml").write_text(dump(settings))
    for device in ("tpu", "mps", "meta"):
        assert (
            f"policy.device: '{device}' is not a supported device; give auto, cpu, cuda or cuda:1"
            in refused(command, "c.yaml", f"policy.device={device}")
        )
    for device in ("cuda:99", *([] if torch.cuda.is_available() else ["cuda"])):
        assert f"policy.device: this machine has no {device}; torch can compute on" in refused(
            command, "c.yaml", f"policy.device={device}"
        )


def test_another_kind_on_the_command_line_tells_which_keys_it_drops(settings, caplog):
    Path("c.yaml").write_text(dump(settings))
    config = read_config(
        Path("c.yaml"), ["environment.kind=db_bench", "environment.generate={num_tasks: 3}"]
    )[0]
    assert config.environment.kind == "db_bench"
    assert [record.getMessage() for record in caplog.records] == [
        "command line: environment has another kind than in c.yaml; of its other keys there it drops digits, "
        "num_tasks"
    ]
    caplog.clear()
    read_config(
        Path("c.yaml"), ["environment.num_tasks=3", "environment.kind=arithmetic", "stages.0.steps=2"]
    )
    assert not caplog.records


def test_what_is_piped_is_not_broken_over_lines(settings, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    Path("c.yaml").write_text(
        dump(
            {
                **settings,
                "run_dir": "a-run-directory-with-a-name-that-is-longer-than-a-line-of-a-terminal-has-places",
            }
        )
    )
    assert run(["explain", "c.yaml"]) == 0
    shown = capsys.readouterr().out
    assert '"a-run-directory-with-a-name-that-is-longer-than-a-line-of-a-terminal-has-places"' in shown
