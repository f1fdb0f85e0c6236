"""A run directory that somebody else, or the disk, has changed: every command ends in one line, and
nothing that was whole is lost.
"""

from __future__ import annotations

import os
import random
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from agent_peft.cli import run
from agent_peft.configuration.load import read_config
from agent_peft.configuration.run_config import TrainConfig
from agent_peft.policies.forward.products import Library
from agent_peft.policies.precision import Precision
from agent_peft.runs import folder as folder_module
from agent_peft.runs import layout
from agent_peft.runs.branch import ORIGIN
from agent_peft.runs.folder import Lock, clear, open_run_dir, with_policy
from agent_peft.runs.history import LOG
from agent_peft.runs.run import train
from agent_peft.types import AgentPeftError
from tests.conftest import case
from tests.runs.conftest import Killed, killing

HELDOUT = {"kind": "arithmetic", "digits": 1, "num_tasks": 3, "split": "heldout"}


@pytest.fixture
def config(read, small) -> TrainConfig:
    evaluation = {"environment": HELDOUT, "sampling": {"max_new_tokens": 3}}
    stages = [{"algorithm": {"kind": "sft"}, "steps": 2, "tasks_per_step": 2}]
    return read({**small, "evaluation": evaluation, "stages": stages})


@pytest.fixture
def path(config, tmp_path) -> Path:
    return tmp_path / "c.yaml"


def test_a_run_keeps_the_dtype_that_it_began_in(config, monkeypatch):
    """``auto`` is measured, and a measurement may come out otherwise when the run continues."""

    def measured(dtype):
        monkeypatch.setattr(
            folder_module, "choose_precision", lambda policy, **_: Precision(dtype, "measured")
        )

    measured(torch.bfloat16)
    assert config.policy.dtype == "auto"
    train(config)
    assert read_config(config.run_dir / "config.yaml")[0].policy.dtype == "bfloat16"
    measured(torch.float32)
    train(config)
    assert read_config(config.run_dir / "config.yaml")[0].policy.dtype == "bfloat16"
    with pytest.raises(AgentPeftError, match=r"policy\.dtype differs"):
        train(with_policy(config, dtype="float32"))
    train(config, fresh=True)
    assert read_config(config.run_dir / "config.yaml")[0].policy.dtype == "float32"


def test_a_run_keeps_the_library_that_it_began_with(config, monkeypatch):
    """Its products differ in the last bits. Another one may be asked for, and that is in the history."""

    def library():
        return read_config(config.run_dir / "config.yaml")[0].policy.matmul

    def measured(name):
        monkeypatch.setattr(folder_module, "choose_library", lambda *_: Library(name, "measured"))

    config = with_policy(config, dtype="float32", matmul="auto")
    measured("onednn")
    train(config)
    measured("torch")
    train(config)
    assert library() == "onednn"
    train(with_policy(config, matmul="torch"))
    assert library() == "torch"
    assert "policy.matmul" in (config.run_dir / LOG).read_text()
    measured("onednn")
    train(config)
    assert library() == "torch"
    train(config, fresh=True)
    assert library() == "onednn"


# -- whose a folder is ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("fresh", [False, True], ids=["resumed", "fresh"])
@pytest.mark.parametrize(
    "name",
    [
        "notes.md",
        "checkpoints/step_000500/weights.bin",
        "evaluations/notes.json",
        "metrics.jsonl",
        "training.yaml",
        "data/rows.csv",
        "config.yaml",
        "run.json",
        "run.json/x",
        "output.txt.old",
        "start.sh",
        "out",
    ],
)
def test_a_folder_of_other_files_is_refused_before_anything_is_written(path, config, fresh, name):
    """Also one with a configuration of the user's that would do as one of a run."""
    (config.run_dir / name).parent.mkdir(parents=True)
    (config.run_dir / name).write_text(path.read_text() if name == "config.yaml" else '{"state": "done"}')
    before = {path: path.stat().st_mtime_ns for path in config.run_dir.rglob("*")}
    with pytest.raises(AgentPeftError, match="so it is not a run directory; set another run_dir") as raised:
        train(config, fresh=fresh)
    assert "--fresh" not in str(raised.value)
    assert {path: path.stat().st_mtime_ns for path in config.run_dir.rglob("*")} == before


def test_what_a_scheduler_or_a_disk_has_put_there_is_no_obstacle(config):
    config.run_dir.mkdir()
    for name in ("slurm-12.out", "slurm-12.err", ".nfs0001", ".gitkeep"):
        (config.run_dir / name).write_text("before")
    (config.run_dir / "lost+found").mkdir()
    train(config)
    (config.run_dir / "notes.md").write_text("mine")
    for fresh in (False, True):
        train(config, fresh=fresh)
    assert (config.run_dir / "notes.md").read_text() == "mine"
    assert (config.run_dir / "slurm-12.out").read_text() == "before"


@pytest.mark.parametrize("start", [case("new", fast=False), case("fresh", fast=True)])
def test_a_start_that_is_killed_at_any_moment_is_no_folder_of_others(config, tmp_path, monkeypatch, start):
    """``run.json`` is the first file and stays the last one, so what a kill leaves is recognized."""
    config = with_policy(config, dtype="float32")
    if start != "new":
        train(config)
        (config.run_dir / "notes.md").write_text("mine")
        shutil.copytree(config.run_dir, tmp_path / "before")
    moments, done = 0, False
    while not done:
        shutil.rmtree(config.run_dir, ignore_errors=True)
        if start != "new":
            shutil.copytree(tmp_path / "before", config.run_dir)
        left = [moments]
        with monkeypatch.context() as patch, ExitStack() as stack:
            for name in ("mkdir", "replace", "unlink", "rename", "rmdir"):
                patch.setattr(os, name, killing(getattr(os, name), left))
            try:
                open_run_dir(config, Lock(config.run_dir, stack), {}, fresh=start != "new")
                done = True
            except Killed:
                pass
        with ExitStack() as stack:
            open_run_dir(config, Lock(config.run_dir, stack), {})
        moments += 1
    assert moments > (20 if start != "new" else 3)


def test_the_files_of_a_run_have_one_list():
    assert set(folder_module.FOLDERS) == set(layout.FOLDERS)
    assert folder_module.STOPPED in layout.FILES and LOG in layout.FILES and ORIGIN in layout.FILES


def test_fresh_removes_only_what_a_run_wrote(config):
    train(config)
    for name in ("notes.md", "data/rows.csv", "evaluations.csv"):
        (config.run_dir / name).parent.mkdir(exist_ok=True)
        (config.run_dir / name).write_text("mine")
    clear(config.run_dir)
    left = sorted(path.name for path in config.run_dir.iterdir())
    assert left == [".lock", "data", "evaluations.csv", "notes.md", "run.json"]


def test_a_configuration_of_a_strangers_run_is_not_imported(config, tmp_path, monkeypatch):
    (tmp_path / "never_to_be_imported.py").write_text("raise AssertionError('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    train(config)
    written = config.run_dir / "config.yaml"
    written.write_text(written.read_text().replace("kind: arithmetic", "kind: never_to_be_imported:E", 1))
    with pytest.raises(AgentPeftError, match="another configuration"):
        train(config)
    train(config, fresh=True)


@pytest.mark.parametrize(
    "name",
    [
        "checkpoints",
        "evaluations",
        "trajectories",
        "metrics.jsonl",
        "timing.jsonl",
        "stopped.json",
        "config.yaml",
    ],
)
def test_links_are_not_followed(config, tmp_path, run_contents, name):
    train(config)
    place, elsewhere = config.run_dir / name, tmp_path / "elsewhere"
    if place.exists():
        place.rename(elsewhere)
    else:
        elsewhere.write_text('{"stage": 0, "step": 0}')
    place.symlink_to(elsewhere)
    before = run_contents(elsewhere) if elsewhere.is_dir() else elsewhere.read_bytes()
    with pytest.raises(AgentPeftError, match="is a link, which is not followed"):
        train(config)
    train(config, fresh=True)
    assert not place.is_symlink()
    assert (run_contents(elsewhere) if elsewhere.is_dir() else elsewhere.read_bytes()) == before


def test_links_at_the_places_of_what_is_half_removed_or_half_written(config, tmp_path):
    train(config)
    (tmp_path / "victims").mkdir()
    (tmp_path / "victims" / "a").write_text("precious")
    for name in (".gone-checkpoints", "checkpoints/.aside-step_000002"):
        (config.run_dir / name).symlink_to(tmp_path / "victims")
    (config.run_dir / ".config.yaml.aside").symlink_to(tmp_path / "victims" / "a")
    train(config, fresh=True)
    assert (tmp_path / "victims" / "a").read_text() == "precious"
    clear(config.run_dir)
    assert sorted(path.name for path in config.run_dir.iterdir()) == [".lock", "run.json"]


@pytest.mark.parametrize("make", ["file", "below a file", "broken link", "link to itself", "pipe"])
def test_what_cannot_be_a_run_directory(config, make):
    place = config.run_dir
    if make == "broken link":
        place.symlink_to("nowhere/x")
    elif make == "link to itself":
        place.symlink_to(place.name)
    elif make == "pipe":
        os.mkfifo(place)
    else:
        place.write_text("mine")
    changed = config.model_copy(update={"run_dir": place / "a"}) if make == "below a file" else config
    with pytest.raises(AgentPeftError, match="cannot be a run directory"):
        train(changed)


def test_a_lock_that_is_a_link_is_not_followed(config, tmp_path):
    config.run_dir.mkdir()
    (tmp_path / "victim").write_text("precious")
    (config.run_dir / ".lock").symlink_to(tmp_path / "victim")
    with pytest.raises(AgentPeftError, match="cannot be a run directory"):
        train(config)
    assert (tmp_path / "victim").read_text() == "precious"


# -- one process at a time -----------------------------------------------------------------------------------


def test_a_lock_whose_file_was_removed_is_taken_again(tmp_path):
    with ExitStack() as ours, ExitStack() as theirs:
        lock, other = Lock(tmp_path, ours), Lock(tmp_path, theirs)
        lock.acquire()
        (tmp_path / ".lock").unlink()
        lock.renew()
        lock.renew()
        with pytest.raises(AgentPeftError, match="another process is training there"):
            other.acquire()


def test_a_lock_that_another_process_took_meanwhile_is_told(tmp_path):
    with ExitStack() as ours, ExitStack() as theirs:
        lock, other = Lock(tmp_path, ours), Lock(tmp_path, theirs)
        lock.acquire()
        (tmp_path / ".lock").unlink()
        other.acquire()
        with pytest.raises(AgentPeftError, match="another process trains there; this one stops"):
            lock.renew()


def test_a_run_stops_before_it_writes_what_another_writes_too(config, monkeypatch):
    from agent_peft.runs import run as runs

    with ExitStack() as theirs:
        make = runs.Trainer

        def intruding(*arguments, **keywords):
            (config.run_dir / ".lock").unlink(missing_ok=True)
            Lock(config.run_dir, theirs).acquire()
            return make(*arguments, **keywords)

        monkeypatch.setattr(runs, "Trainer", intruding)
        with pytest.raises(AgentPeftError, match="this one stops"):
            train(config)
    assert (
        (config.run_dir / "metrics.jsonl").read_text() == ""
        if (config.run_dir / "metrics.jsonl").exists()
        else True
    )
    monkeypatch.setattr(runs, "Trainer", make)
    assert list(train(config)) == ["base", "after sft"]


# -- damage --------------------------------------------------------------------------------------------------

DAMAGES = {
    "empty": lambda path, _: path.write_bytes(b""),
    "cut": lambda path, dice: path.write_bytes(path.read_bytes()[: dice.randrange(path.stat().st_size)]),
    "flipped": lambda path, dice: _flip(path, dice),
    "noise": lambda path, dice: path.write_bytes(dice.randbytes(200)),
    "brackets": lambda path, _: path.write_text("[" * 5000),
    "other JSON": lambda path, dice: path.write_text(
        dice.choice(["1", "[]", "{}", '{"step": "x"}\n{}\n', '{"stage": 99, "steps": -1}', "null"])
    ),
    "a folder": lambda path, _: (path.unlink(), path.mkdir()),
    "a pipe": lambda path, _: (path.unlink(), os.mkfifo(path)),
    "a broken link": lambda path, _: (path.unlink(), path.symlink_to("nowhere")),
    "gone": lambda path, _: path.unlink(),
}


def _flip(path: Path, dice: random.Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(3):
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
    path.write_bytes(content)


def damaged_runs_end_in_one_line(path, config, capsys, run_contents, seed, each):
    """Each damage at ``each`` files, then each command: an exit code, at most one line of error, all other
    files as they were.
    """
    train(config)
    shutil.copytree(config.run_dir, whole := path.parent / "whole", symlinks=True)
    expected, dice = run_contents(whole), random.Random(seed)
    files = [name for name in expected if not name.endswith(("README.md", "keep"))]
    capsys.readouterr()
    for kind, damage in DAMAGES.items():
        for name in dice.sample(files, min(each, len(files))):
            shutil.rmtree(config.run_dir)
            shutil.copytree(whole, config.run_dir, symlinks=True)
            damage(config.run_dir / name, dice)
            for command in (["train", str(path)], ["evaluate", str(config.run_dir)]):
                code, said = run(command), capsys.readouterr().err
                case = f"{command[0]} with {name} {kind}: {said}"
                assert code in (0, 1, 2), case
                lines = [line for line in said.splitlines() if line.startswith("agent-peft: ")]
                assert len(lines) == (code != 0), case
                assert "Traceback" not in said and "unforeseen" not in said, case
                found = run_contents(config.run_dir)
                assert [
                    other for other in expected if other != name and found.get(other) != expected[other]
                ] == [], case


def test_damaged_runs_end_in_one_line(path, config, capsys, run_contents):
    damaged_runs_end_in_one_line(path, config, capsys, run_contents, seed=0, each=1)


@pytest.mark.slow
def test_all_damaged_runs_end_in_one_line(path, config, capsys, run_contents):
    damaged_runs_end_in_one_line(path, config, capsys, run_contents, seed=1, each=100)
