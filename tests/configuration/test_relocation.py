"""A run directory that lies elsewhere now: its paths lead where they led when the run was started."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from agent_peft.configuration.loading import read_config
from agent_peft.configuration.relocation import paths_of
from agent_peft.configuration.run_config import resolved
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
    (folder / "config.yaml").write_text(dump(resolved(config)))
    (folder / "run.json").write_text(json.dumps({"paths": paths_of(resolved(config))}))
    return folder


def test_where_the_paths_led_is_recorded(run):
    home = run.parents[1]
    assert json.loads((run / "run.json").read_text())["paths"] == {
        "policy.model": str(home / "model"),
        "environment.tasks": str(home / "tasks.json"),
        "stages.0.task_order": str(home / "order.txt"),
    }


def test_from_where_it_was_started_nothing_changes(run):
    config = read_config("runs/a/config.yaml")[0]
    assert (str(config.run_dir), config.policy.model) == ("runs/a", "model")
    assert str(config.environment.tasks) == "tasks.json"


@pytest.mark.parametrize("recorded", [True, False], ids=["run.json", "an earlier version"])
def test_a_run_that_was_moved_or_copied_and_is_seen_from_elsewhere(run, tmp_path, monkeypatch, recorded):
    home = run.parents[1]
    if recorded:
        shutil.move(run, tmp_path / "moved")
        run = tmp_path / "moved"
    else:
        (run / "run.json").unlink()
        (run / "checkpoints").mkdir()
    (tmp_path / "elsewhere" / "model").mkdir(parents=True)  # of the same name, and not meant
    monkeypatch.chdir(tmp_path / "elsewhere")
    config = read_config(run / "config.yaml")[0]
    assert config.run_dir == run
    assert config.policy.model == str(home / "model")
    assert config.environment.tasks == home / "tasks.json"
    assert config.stages[0].task_order == home / "order.txt"
    assert read_config(run / "config.yaml", ["policy.model=model"])[0].policy.model == "model"


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
    assert str(told.value) == (
        f"moved/config.yaml: policy.model 'model' was at {run.parents[1] / 'model'} when the run was "
        "started, and nothing is there; add policy.model= with its place now"
    )
    (run.parents[1] / "tasks.json").unlink()
    with pytest.raises(
        AgentPeftError, match=r"environment\.tasks: there is no file or folder '/.*/tasks\.json'"
    ):
        read_config("moved/config.yaml", ["policy.model=smollm2-135m"])


def test_a_file_called_config_yaml_that_is_no_runs_is_left_as_it_is(run):
    shutil.copy(run / "config.yaml", run.parents[1])
    assert str(read_config("config.yaml")[0].run_dir) == "runs/a"


def test_an_order_by_its_name_or_as_a_mapping_is_no_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    orders = [*ORDER_NAMES, {"kind": "by_skill", "steps": 2}, "order.txt"]
    for name in (*ORDER_NAMES, "order.txt"):
        (tmp_path / name).touch()
    stages = [{"task_order": order} for order in orders]
    assert paths_of({"stages": stages}) == {
        f"stages.{len(stages) - 1}.task_order": str(tmp_path / "order.txt")
    }


def test_a_key_that_is_gone_and_had_no_effect_does_not_make_a_run_unreadable(tmp_path):
    """An earlier version wrote ``replay: null`` into every run."""
    path = tmp_path / "run" / "config.yaml"
    (path.parent / "checkpoints").mkdir(parents=True)
    stage = {"algorithm": "sft", "steps": 1, "replay": None}
    content = {"policy": {"kind": "pretrained", "model": "m"}, "environment": {"kind": "arithmetic"}}
    path.write_text(dump({"run_dir": str(path.parent), **content, "stages": [stage]}))
    earlier = read_earlier(path.parent)
    assert earlier is not None and "replay" not in earlier.values["stages"][0]
    assert read_config(path, check_files=False)[0].stages[0].steps == 1
    path.write_text(
        dump({"run_dir": str(path.parent), **content, "stages": [stage | {"replay": {"share": 1}}]})
    )
    with pytest.raises(AgentPeftError, match="replay"):
        read_config(path, check_files=False)
