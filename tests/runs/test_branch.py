"""``train --from``: a new run whose first step is the one that the other run would have made."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_peft.cli import run as command
from agent_peft.configuration.load import read_config
from agent_peft.configuration.run_config import TrainConfig
from agent_peft.configuration.yaml12 import dump
from agent_peft.runs import run as runs
from agent_peft.runs.branch import read_origin
from agent_peft.runs.run import train
from agent_peft.types import AgentPeftError
from tests.conftest import case

TASKS = {"kind": "arithmetic", "digits": 1, "num_tasks": 10}
HELDOUT = {**TASKS, "num_tasks": 3, "split": "heldout"}
RL = {
    "steps": 4,
    "tasks_per_step": 3,
    "group_size": 4,
    "rewards": {"invalid_action": -0.5},
    "sampling": {"max_new_tokens": 3},
    "optimizer": {"learning_rate": 0.02, "schedule": "linear"},
}
SFT = {"algorithm": {"kind": "sft"}, "steps": 2, "tasks_per_step": 2, "optimizer": {"learning_rate": 0.02}}
ALGORITHMS = {  # each has its own state: a baseline, a critic, a reference
    "reinforce": {"kind": "reinforce"},
    "ppo": {"kind": "ppo"},
    "kl": {"kind": "grpo", "kl_coef": 0.1},
}


@pytest.fixture
def configure(tmp_path, policy_config, monkeypatch) -> Callable[..., TrainConfig]:
    monkeypatch.chdir(tmp_path)

    def configure(*overrides: str, algorithm: str = "reinforce", **changes: Any) -> TrainConfig:
        settings = {
            "run_dir": "old",
            "policy": policy_config.model_dump(mode="json"),
            "environment": TASKS,
            "evaluation": {"environment": HELDOUT, "sampling": {"max_new_tokens": 3}, "every": 2},
            "checkpoint": {"keep_last": 9},
            "stages": [SFT, {"algorithm": ALGORITHMS[algorithm], **RL}],
            **changes,
        }
        (tmp_path / "c.yaml").write_text(dump(settings))
        return read_config(tmp_path / "c.yaml", overrides)[0]

    return configure


def lines(run: str) -> list[str]:
    return Path(run, "metrics.jsonl").read_text().splitlines()


@pytest.mark.parametrize("algorithm", [case(name, fast=name == "ppo") for name in ALGORITHMS])
def test_the_first_step_is_the_one_that_the_old_run_would_have_made(
    configure, run_contents, monkeypatch, algorithm
):
    train(configure(algorithm=algorithm))
    new = configure("run_dir=new", algorithm=algorithm)
    reports = train(new, begin="old:3")
    assert lines("new") == lines("old")[3:]
    assert list(reports) == ["step 4", "after " + new.stages[1].name], "earlier ones were not due"
    ours, theirs = run_contents(Path("new")), run_contents(Path("old"))
    assert {
        name: ours[name] for name in ours if "step_000006" in name and not name.startswith("checkpoints/best")
    } == {name: theirs[name] for name in theirs if "step_000006" in name}
    record = json.loads(Path("new", "run.json").read_text())
    assert record["from"]["run"] == str(Path("old").resolve())
    assert (record["from"]["checkpoint"], record["history"][0]["event"], record["history"][0]["step"]) == (
        "step_000003",
        "started",
        3,
    )
    # it stands on its own feet, also after a kill
    shutil.rmtree("old")
    shutil.rmtree("new/checkpoints/step_000006")
    shutil.rmtree("new/checkpoints/step_000005")
    before = lines("new")
    train(new)
    assert lines("new") == before
    assert Path("new/checkpoints/step_000003/keep").is_file()


def test_the_newest_checkpoint_is_the_default_and_another_configuration_may_follow(configure, capsys):
    train(configure())
    new = configure("run_dir=new", "stages.1.steps=6", "stages.1.optimizer.learning_rate=0.005")
    capsys.readouterr()
    train(new, begin="old")
    told = " ".join(capsys.readouterr().out.split())
    assert "beginning after step 6 of 8, from" in told
    assert "stages.1.optimizer.learning_rate 0.02 -> 0.005 from step 6" in told
    assert [json.loads(line)["step"] for line in lines("new")] == [6, 7]
    rates = [json.loads(line)["learning_rate"] for line in lines("new")]
    assert rates == pytest.approx([0.005 * 2 / 6, 0.005 / 6])


def test_the_same_command_goes_on_and_another_run_is_not_overwritten(configure, monkeypatch, run_contents):
    train(configure())
    new = configure("run_dir=new")
    record = runs.Recording.write_step

    def dies(self, trainer, step, *arguments):
        if step.number == 4:
            raise KeyboardInterrupt
        return record(self, trainer, step, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(runs.Recording, "write_step", dies)
        with pytest.raises(KeyboardInterrupt):
            train(new, begin="old:step_000003")
    train(new, begin="old:step_000003")
    assert lines("new") == lines("old")[3:]
    before = run_contents(Path("new"))
    with pytest.raises(
        AgentPeftError, match="new: holds a run already; set another run_dir for the one that"
    ):
        train(new, begin="old:2")
    with pytest.raises(AgentPeftError, match="old: holds a run already"):
        train(configure(), begin="new")
    assert run_contents(Path("new")) == before
    train(new, begin="old:2", fresh=True)
    assert lines("new") == lines("old")[2:]


def test_a_kill_as_the_checkpoint_is_copied(configure, monkeypatch):
    from agent_peft.runs import branch

    train(configure(algorithm="kl"))
    new = configure("run_dir=new", algorithm="kl")
    copy, left = shutil.copyfileobj, [5]

    def stops(*arguments):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return copy(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(branch.shutil, "copyfileobj", stops)
        with pytest.raises(KeyboardInterrupt):
            train(new, begin="old:3")
    assert read_origin(Path("new")) is not None
    train(new)  # it still begins where it was to begin
    assert lines("new") == lines("old")[3:]


def test_what_does_not_fit_is_one_line(configure, capsys):
    train(configure())
    with pytest.raises(AgentPeftError) as told:
        train(configure("run_dir=new", stages=[{"algorithm": {"kind": "rloo"}, **RL}]), begin="old:3")
    assert str(told.value).startswith("--from: old:step_000003 does not fit this configuration (")
    assert str(told.value).endswith("leave --from out and set policy.model=old:step_000003")
    for changes, begin, cause in (
        (["policy.lora.rank=2"], "old", r"policy\.lora\.rank belongs to the weights that were trained"),
        (["seed=1"], "old", "seed decides the weights"),
        ([], "old:99", r"old has no step_000099; there is: step_000001, "),
        ([], "nothing:1", "nothing is not a run directory"),
    ):
        with pytest.raises(AgentPeftError, match=cause):
            train(configure("run_dir=new", *changes), begin=begin)
    assert not Path("new", "config.yaml").exists()
    Path("old/checkpoints/step_000003/trainer.pt").write_bytes(b"")
    with pytest.raises(AgentPeftError, match=r"step_000003/trainer\.pt: is damaged"):
        train(configure("run_dir=new"), begin="old:3")
    capsys.readouterr()
    assert command(["train", "c.yaml", "run_dir=new", "--from", "old:2"]) == 0
    assert lines("new") == lines("old")[2:]
