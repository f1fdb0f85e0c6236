"""A run directory that was copied to another folder, and to another user: all of it still works."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest

from agent_peft.cli import run as command
from agent_peft.configuration.load import read_config
from agent_peft.configuration.yaml12 import dump
from agent_peft.policies.loading import load_policy
from agent_peft.runs.run import train
from agent_peft.runs.targets import evaluate_target

TASKS = {"kind": "arithmetic", "digits": 1, "num_tasks": 4}


def settings(policy: dict[str, Any]) -> dict[str, Any]:
    sft = {
        "algorithm": {"kind": "sft"},
        "steps": 2,
        "tasks_per_step": 2,
        "optimizer": {"learning_rate": 0.02},
    }
    return {
        "run_dir": "run",
        "threads": 1,
        "policy": policy,
        "environment": TASKS,
        "evaluation": {"environment": TASKS, "sampling": {"max_new_tokens": 3}},
        "stages": [sft],
    }


@pytest.fixture
def home(tmp_path, policy_config, monkeypatch) -> Path:
    """Where a run on ``model``, a folder next to it, has ended."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.chdir(home)
    load_policy(policy_config.model_copy(update={"lora": None}), 0).save_merged(Path("model"))
    policy = {"kind": "pretrained", "model": "model", "device": "cpu", "lora": {"rank": 4, "alpha": 8}}
    Path("c.yaml").write_text(dump(settings(policy)))
    train(read_config("c.yaml")[0])
    return home


def test_every_command_takes_a_run_that_was_moved_away_from_its_model(home, tmp_path, monkeypatch, capsys):
    expected = evaluate_target("run").success
    shutil.move("run", tmp_path / "moved")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert evaluate_target("../moved").success == expected
    assert command(["merge", "../moved", "--output", "merged"]) == 0
    assert command(["train", "../moved/config.yaml", "stages.0.steps=3"]) == 0
    assert len(Path("../moved/metrics.jsonl").read_text().splitlines()) == 3
    assert command(["train", "../moved/config.yaml"]) == 0  # and once more, with the places of before
    shutil.move(home / "model", tmp_path / "elsewhere" / "there")
    capsys.readouterr()
    assert command(["evaluate", "../moved"]) == 2
    assert "add policy.model= with its place now" in capsys.readouterr().err
    assert command(["evaluate", "../moved", "policy.model=there"]) == 0
    assert command(["train", "../moved/config.yaml", "policy.model=there", "stages.0.steps=4"]) == 2
    assert "add --change" in capsys.readouterr().err
    assert (
        command(["train", "../moved/config.yaml", "policy.model=there", "stages.0.steps=4", "--change"]) == 0
    )
    assert command(["evaluate", "../moved"]) == 0


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can become another user")
def test_another_user_goes_on_with_a_copy(tmp_path, policy_config, monkeypatch, capsys):
    """In this process, as another user may not read the Python that runs here."""
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(dump(settings(policy_config.model_dump(mode="json"))))
    train(read_config("c.yaml")[0])
    commands = (
        ["train", "run/config.yaml", "stages.0.steps=3"],
        ["evaluate", "run"],
        ["merge", "run", "--output", "merged"],
        ["runs", "."],
    )
    place, nobody = Path(tempfile.mkdtemp(dir="/tmp")), 65534
    try:
        for name in ("of_root", "of_nobody"):
            shutil.copytree(tmp_path, place / name)
        for path in (place, *place.rglob("*")):
            os.chown(path, nobody, nobody)
        monkeypatch.chdir(place / "of_root")
        assert [command(arguments) for arguments in commands] == [0] * 4  # all is imported now
        capsys.readouterr()
        monkeypatch.chdir(place / "of_nobody")
        os.setegid(nobody)
        os.seteuid(nobody)
        try:
            codes = [command(arguments) for arguments in commands]
        finally:
            os.seteuid(0)
            os.setegid(0)
        assert codes == [0] * 4, capsys.readouterr().err
        assert "done" in capsys.readouterr().out
        assert Path("run/checkpoints/step_000003").stat().st_uid == nobody
    finally:
        shutil.rmtree(place)
