"""Resuming a run whose newest checkpoint is damaged or gone, or whose disk was full."""

from __future__ import annotations

import io
import json
import resource
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from agent_peft.cli import run
from agent_peft.runs import run as runs
from agent_peft.runs.observers import append_line
from agent_peft.runs.reading import load_run
from agent_peft.runs.run import train
from agent_peft.training import state_file
from agent_peft.types import AgentPeftError, InfrastructureError
from tests.runs.conftest import Killed, killing

HELDOUT = {"kind": "arithmetic", "digits": 1, "num_tasks": 3, "split": "heldout"}


@pytest.fixture
def settings(small):
    return {
        **small,
        "evaluation": {"environment": HELDOUT, "sampling": {"max_new_tokens": 3}, "every": 1},
        "stages": [
            {
                "algorithm": {"kind": "sft"},
                "steps": 2,
                "tasks_per_step": 2,
                "optimizer": {"learning_rate": 0.02},
            },
            {
                "algorithm": {"kind": "reinforce"},
                "steps": 3,
                "tasks_per_step": 2,
                "group_size": 4,
                "rewards": {"invalid_action": -0.5},
                "sampling": {"max_new_tokens": 3},
            },
        ],
    }


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGES = {  # the file that the error names, and the damage
    "trainer.pt cut": ("trainer.pt", lambda folder: cut(folder / "trainer.pt")),
    "trainer.pt gone": ("trainer.pt", lambda folder: (folder / "trainer.pt").unlink()),
    "position empty": ("position.json", lambda folder: (folder / "position.json").write_text("")),
    "position of another run": (
        "position.json",
        lambda folder: (folder / "position.json").write_text('{"stage": 7, "steps": 5, "ranks": 1}'),
    ),
    "adapter cut": ("adapter_model.safetensors", lambda folder: cut(folder / "adapter_model.safetensors")),
    "adapter gone": ("", lambda folder: (folder / "adapter_model.safetensors").unlink()),
    "adapter's settings cut": ("adapter_config.json", lambda folder: cut(folder / "adapter_config.json")),
    "adapter's settings gone": ("", lambda folder: (folder / "adapter_config.json").unlink()),
}


def test_a_damaged_checkpoint_is_an_error_that_names_its_file(configure, run_contents, tmp_path):
    """Nothing is changed. Without that checkpoint, the run resumes from the one before, to the same bytes."""
    config = configure(evaluation=None)
    train(config)
    before, root = run_contents(config.run_dir), config.run_dir / "checkpoints"
    shutil.copytree(config.run_dir, tmp_path / "sound")
    for name, (file, damage) in DAMAGES.items():
        shutil.rmtree(config.run_dir)
        shutil.copytree(tmp_path / "sound", config.run_dir)
        damage(root / "step_000005")
        damaged = run_contents(config.run_dir)
        with pytest.raises(AgentPeftError) as raised:
            train(config)
        assert str(raised.value).startswith(f"{root / 'step_000005' / file}: is damaged ("), name
        assert "put it back from a backup, or move step_000005 elsewhere" in str(raised.value), name
        assert run_contents(config.run_dir) == damaged, name
    shutil.rmtree(root / "step_000005")
    train(config)
    assert run_contents(config.run_dir) == before


def repeated(contents):
    """Without the schedules, which a slow machine decides. An episode of one turn does not depend on them."""
    return {name: content for name, content in contents.items() if not name.startswith("schedule")}


def test_what_was_sampled_ahead_is_kept(configure, run_contents, monkeypatch, tmp_path):
    """Killed after each step in turn, before its checkpoint, which is written after every second one."""
    stage = {
        "algorithm": {"kind": "grpo"},
        "steps": 5,
        "lag": 2,
        "tasks_per_step": 2,
        "group_size": 4,
        "rewards": {"invalid_action": -0.5},
        "sampling": {"max_new_tokens": 3},
    }
    config = configure(evaluation=None, stages=[stage], checkpoint={"every": 2, "keep_last": 5})
    train(config)
    expected, ahead = repeated(run_contents(config.run_dir)), "checkpoints/step_000002/pending.jsonl"
    episodes = load_run(config.run_dir).trajectories
    assert [episodes.of_step(n)[0].version for n in range(5)] == [0, 0, 0, 1, 2]
    assert ahead in expected and "checkpoints/step_000005/pending.jsonl" not in expected
    for steps in (1, 3):
        shutil.rmtree(config.run_dir)
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(runs, "keep_trajectories", killing(runs.keep_trajectories, [steps]))
            train(config)
        train(config)
        assert repeated(run_contents(config.run_dir)) == expected
    for name in ("step_000004", "step_000005"):
        shutil.rmtree(config.run_dir / "checkpoints" / name)
    (config.run_dir / ahead).write_bytes(b"".join((config.run_dir / ahead).read_bytes().splitlines(True)[:2]))
    with pytest.raises(AgentPeftError, match=r"step_000002: is damaged.*has 1 of 2 lines"):
        train(config)


def test_what_was_written_after_the_newest_checkpoint_is_removed(configure, monkeypatch):
    config = configure()
    train(config)
    shutil.rmtree(config.run_dir / "checkpoints" / "step_000005")

    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "Trainer", stop)
    with pytest.raises(KeyboardInterrupt):
        train(config)
    for name in ("metrics.jsonl", "timing.jsonl"):
        lines = (config.run_dir / name).read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [0, 1, 2, 3]
    assert sorted(path.name for path in (config.run_dir / "trajectories").iterdir()) == [
        f"step_{step:06d}.{kind}" for step in range(4) for kind in ("jsonl", "safetensors")
    ]
    kept = {path.stem for path in (config.run_dir / "evaluations").iterdir()}
    assert kept == {f"step_{step:06d}" for step in range(5)}


def test_deleted_checkpoints_are_told(configure, run_contents, caplog):
    config = configure()
    train(config)
    before = run_contents(config.run_dir)
    shutil.rmtree(config.run_dir / "checkpoints")
    train(config)
    assert [record.getMessage() for record in caplog.records] == [
        f"{config.run_dir}: holds metrics of 5 steps and no checkpoint, so they are made again from the start"
    ]
    assert run_contents(config.run_dir) == before


def test_a_state_saved_on_another_device_is_read(tmp_path, monkeypatch):
    """As a GPU's tensors are tagged, on a machine without one."""
    with monkeypatch.context() as patched:
        patched.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        state_file.save_state({"optimizer": torch.arange(3.0)}, tmp_path / "trainer.pt")
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="CUDA"):
            torch.load(io.BytesIO((tmp_path / "trainer.pt").read_bytes()), weights_only=True)
    for mapped in (False, True):
        loaded = state_file.load_state(tmp_path / "trainer.pt", mapped=mapped)["optimizer"]
        assert (loaded.device.type, loaded.tolist()) == ("cpu", [0.0, 1.0, 2.0])


@contextmanager
def full_disk(size: int):
    """No file of this process grows beyond ``size`` bytes: the operating system says no, as it does where
    there is no room.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "trainer.pt"])
def test_a_full_disk_ends_in_one_line_and_loses_nothing(configure, run_contents, monkeypatch, tmp_path, name):
    whole = configure(run_dir=str(tmp_path / "whole"))
    train(whole)
    config = configure()
    save = runs.Trainer.save

    def full(trainer, folder):
        if folder.name != ".aside-step_000003":
            return save(trainer, folder)
        if name == "trainer.pt":
            trainer.policy.save(folder)
            trainer.policy.save = lambda _: None
        with full_disk(100):
            return save(trainer, folder)

    monkeypatch.setattr(runs.Trainer, "save", full)
    with pytest.raises(
        InfrastructureError,
        match=r"no checkpoint can be written \(.*MB are free there\).*run the same command again",
    ):
        train(config)
    assert [path.name for path in sorted((config.run_dir / "checkpoints").iterdir())] == [
        "step_000001",
        "step_000002",
    ]
    monkeypatch.setattr(runs.Trainer, "save", save)
    train(config)
    ours, theirs = run_contents(config.run_dir), run_contents(whole.run_dir)
    del ours["config.yaml"], theirs["config.yaml"]
    assert ours == theirs


def test_a_full_disk_under_the_metrics_is_one_line(configure, capsys, monkeypatch, tmp_path):
    configure()

    def full(path, record):
        with full_disk(10):
            append_line(path, record)

    monkeypatch.setattr(runs, "append_line", full)
    assert run(["train", str(tmp_path / "c.yaml")]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert (
        "File too large; nothing that was whole is lost: mend that, then run the same command again" in said
    )
