"""A run with slow environments: what it writes of late answers, and what follows that repeats it bit for
bit.
"""

from __future__ import annotations

import json
import random
import shutil
import time
from pathlib import Path

import pytest

from agent_peft.configuration.load import read_config
from agent_peft.configuration.yaml12 import dump
from agent_peft.environments.arithmetic import Arithmetic
from agent_peft.policies.engine import schedule
from agent_peft.runs.run import train
from agent_peft.types import AgentPeftError


@pytest.fixture
def configure(tmp_path, policy_config):
    """``configure(name, **engine)``: four steps of RL whose episodes are more than the rows, and
    evaluations.
    """

    def configure(name, **engine):
        content = {
            "run_dir": str(tmp_path / name),
            "policy": policy_config.model_dump(mode="json"),
            "environment": {"kind": "arithmetic", "digits": 1, "num_tasks": 10},
            "engine": {"rows": 3, **engine},
            "checkpoint": {"keep_last": 9},
            "evaluation": {
                "environment": {"kind": "arithmetic", "digits": 1, "num_tasks": 9, "split": "heldout"}
            },
            "stages": [
                {
                    "algorithm": {"kind": "rloo"},
                    "steps": 4,
                    "tasks_per_step": 2,
                    "group_size": 4,
                    "rewards": {"invalid_action": -0.5},
                    "sampling": {"max_new_tokens": 4},
                    "optimizer": {"learning_rate": 0.02},
                }
            ],
        }
        path = tmp_path / "config.yaml"
        path.write_text(dump(content))
        return read_config(path)[0]

    return configure


@pytest.fixture
def slow(monkeypatch):
    """From when it is called on, episodes open after times that differ in each run, and nobody waits for them
    who could decode. A decode step of this model takes a millisecond, so each collection has late answers.
    """
    coin, episode = random.Random(), Arithmetic.episode

    def delayed(environment, task, seed):
        time.sleep(0.03 + coin.random() * 0.04)
        return episode(environment, task, seed)

    def begin():
        for name in ("PATIENCE", "FIRST_PATIENCE", "PATIENCE_SHARE"):
            monkeypatch.setattr(schedule, name, 0.0)
        monkeypatch.setattr(Arithmetic, "episode", delayed)

    return begin


def contents(folder: Path) -> dict[str, bytes]:
    """All that a run writes, but its times and its configuration, which names its directory."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    found = {str(path.relative_to(folder)): path.read_bytes() for path in files}
    return {
        name: content
        for name, content in found.items()
        if Path(name).name not in ("timing.jsonl", "run.json", "log.txt", ".lock", "config.yaml")
    }


@pytest.mark.slow
def test_a_run_that_follows_another_ones_schedule_writes_the_same_bytes(configure, slow, tmp_path):
    slow()
    train(configure("first"))
    written = {path.name for path in (tmp_path / "first" / "schedule").iterdir()}
    assert written == {
        *(f"step_{step:06d}.rank_0.json" for step in range(4)),
        "evaluation_step_000000.rank_0.json",
        "evaluation_step_000004.rank_0.json",
    }
    timing = [json.loads(line) for line in (tmp_path / "first" / "timing.jsonl").read_text().splitlines()]
    assert all(line["late_answers"] > 0 and line["waited"] > 0 for line in timing)
    train(configure("second", schedule=str(tmp_path / "first")))
    assert contents(tmp_path / "second") == contents(tmp_path / "first")


def test_a_step_that_is_done_again_follows_what_was_written_of_it(configure, slow, tmp_path):
    slow()
    config = configure("first")
    train(config)
    expected = contents(tmp_path / "first")
    for step in (3, 4):
        shutil.rmtree(tmp_path / "first" / "checkpoints" / f"step_{step:06d}")
    train(config)
    assert contents(tmp_path / "first") == expected


def test_a_run_with_fast_environments_writes_none_and_can_be_followed(configure, slow, tmp_path):
    train(configure("first"))
    assert not (tmp_path / "first" / "schedule").exists()
    slow()
    train(configure("second", schedule=str(tmp_path / "first")))
    assert contents(tmp_path / "second") == contents(tmp_path / "first")


def test_what_cannot_be_followed_is_one_line(configure, slow, tmp_path):
    slow()
    with pytest.raises(AgentPeftError, match=r"engine\.schedule: .*nowhere is not a run directory"):
        train(configure("second", schedule=str(tmp_path / "nowhere")))
    train(configure("first"))
    shutil.rmtree(tmp_path / "second", ignore_errors=True)
    with pytest.raises(AgentPeftError, match=r"was recorded with another engine\.rows \(3\); set that"):
        train(configure("second", schedule=str(tmp_path / "first"), rows=2))
    shutil.rmtree(tmp_path / "second")
    (tmp_path / "first" / "schedule" / "evaluation_step_000000.rank_0.json").write_text(
        '{"calls": [[[1, 2]]]}'
    )
    with pytest.raises(
        AgentPeftError, match=r"evaluation_step_000000\.rank_0\.json: is damaged .*; remove it"
    ) as raised:
        train(configure("second", schedule=str(tmp_path / "first")))
    assert "\n" not in str(raised.value)
