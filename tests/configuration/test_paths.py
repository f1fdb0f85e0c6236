"""A run directory that lies elsewhere now: its paths lead where they led when the run was started."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from agent_peft.configuration.load import read_config
from agent_peft.configuration.paths import absolute
from agent_peft.configuration.yaml12 import dump
from agent_peft.rollout.task_order import ORDER_NAMES
from agent_peft.runs.changes import read_earlier
from agent_peft.types import AgentPeftError


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    """A run directory that was started in ``home``, with a model and a task file there."""
    home = tmp_path / "home"
    (home / "model").mkdir(parents=True)
    (home / "order.txt").write_text("")
    (home / "tasks.json").write_text("[]")
    monkeypatch.chdir(home)
    settings = {
        "run_dir": "runs/a",
        "policy": {"kind": "pretrained", "model": "model"},
        "environment": {"kind": "db_bench", "tasks": "tasks.json"},
        "stages": [{"algorithm": {"kind": "sft"}, "steps": 1, "task_order": "order.txt"}],
    }
    (home / "c.yaml").write_text(dump(settings))
    config = read_config("c.yaml", check_files=False)[0]
    folder = home / "runs" / "a"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump(absolute(config)))
    (folder / "run.json").write_text("{}")
    return folder


def test_paths_are_absolute_in_the_run_directory(run):
    home = run.parents[1]
    config = read_config("runs/a/config.yaml")[0]
    assert config.run_dir == Path("runs/a"), "as the user names it"
    assert config.policy.model == str(home / "model")
    assert config.environment.tasks == home / "tasks.json"
    assert config.stages[0].task_order == home / "order.txt"
    assert read_earlier(Path("runs/a")).changes(read_config("c.yaml", check_files=False)[0], 0) == []


@pytest.mark.parametrize("moved", [shutil.move, shutil.copytree])
def test_a_run_that_was_moved_or_copied_and_is_seen_from_elsewhere(run, tmp_path, monkeypatch, moved):
    home = run.parents[1]
    moved(run, tmp_path / "moved")
    run = tmp_path / "moved"
    (tmp_path / "elsewhere" / "model").mkdir(parents=True)  # of the same name, and not meant
    monkeypatch.chdir(tmp_path / "elsewhere")
    config = read_config(run / "config.yaml")[0]
    assert config.run_dir == run
    assert config.policy.model == str(home / "model")
    assert config.environment.tasks == home / "tasks.json"
    assert config.stages[0].task_order == home / "order.txt"
    assert read_config(run / "config.yaml", ["policy.model=model"])[0].policy.model == "model"


def test_files_of_the_run_itself_are_those_of_the_copy(run, tmp_path):
    (run / "schedule").mkdir()
    text = (run / "config.yaml").read_text().replace("schedule: null", f"schedule: {run / 'schedule'}")
    (run / "config.yaml").write_text(text)
    shutil.copytree(run, tmp_path / "copy")
    assert read_config(tmp_path / "copy" / "config.yaml")[0].engine.schedule == tmp_path / "copy" / "schedule"


def test_on_a_machine_that_has_the_same_folders_elsewhere(run, tmp_path, monkeypatch):
    shutil.move(run.parents[1], tmp_path / "other")
    monkeypatch.chdir(tmp_path)
    config = read_config("other/runs/a/config.yaml")[0]
    assert Path(config.policy.model) == tmp_path / "other" / "model"
    assert config.environment.tasks == tmp_path / "other" / "tasks.json"


def test_what_is_not_there_any_more_is_named_in_one_line(run, tmp_path, monkeypatch):
    shutil.move(run, tmp_path / "moved")
    shutil.rmtree(run.parents[1] / "model")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AgentPeftError) as told:
        read_config("moved/config.yaml")
    assert str(told.value).endswith(
        f"policy.model: there is no file or folder '{run.parents[1] / 'model'}' (add policy.model= with its "
        "place now)"
    )
    (run.parents[1] / "tasks.json").unlink()
    with pytest.raises(
        AgentPeftError, match=r"environment\.tasks: there is no file or folder '/.*/tasks\.json'"
    ):
        read_config("moved/config.yaml", ["policy.model=smollm2-135m"])


def test_a_file_called_config_yaml_that_is_no_runs_is_left_as_it_is(run):
    shutil.copy(run / "config.yaml", run.parents[1])
    assert read_config("config.yaml")[0].run_dir == run


def test_a_name_is_no_path(run, monkeypatch):
    """Also where a file or folder has that name."""
    for name in (*ORDER_NAMES, "smollm2-135m"):
        Path(name).touch()
    config = read_config("c.yaml", ["policy.model=smollm2-135m", "task_order=shuffle"], check_files=False)[0]
    content = absolute(config)
    assert content["policy"]["model"] == "smollm2-135m"
    assert content["stages"][0]["task_order"] == "shuffle"
