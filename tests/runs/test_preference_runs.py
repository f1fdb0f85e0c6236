"""Runs with stages that learn from preferences: of a table, of their own environment and episodes. One
that was interrupted ends in the same bytes.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from agent_peft.cli import run as command_line
from agent_peft.configuration.load import read_config
from agent_peft.configuration.yaml12 import dump
from agent_peft.runs import run as runs
from agent_peft.runs.run import train
from agent_peft.types import AgentPeftError
from tests.conftest import case

ROWS = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": str(n)} for n in range(8)]
LEARN = {"learning_rate": 0.02}
STAGES = [
    {"algorithm": "rloo", "steps": 2, "tasks_per_step": 6, "group_size": 4, "optimizer": LEARN},
    {
        "algorithm": "dpo",
        "steps": 4,
        "tasks_per_step": 3,
        "episodes_of": {"run": "run"},
        "optimizer": LEARN,
    },
    {"algorithm": "kto", "steps": 3, "tasks_per_step": 3, "optimizer": LEARN},
]
REWARDS = {"incorrect": 0.0, "invalid_action": -0.5}  # a random policy is never right


@pytest.fixture
def settings(tmp_path, policy_config, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return {
        "run_dir": "run",
        "threads": 1,
        "policy": policy_config.model_dump(mode="json"),
        "environment": {"kind": "arithmetic", "digits": 1, "num_tasks": 10},
        "rewards": REWARDS,
        "sampling": {"max_new_tokens": 3},
        "checkpoint": {"every": 1, "keep_last": 99},
        "stages": STAGES,
    }


def write(content) -> Path:
    path = Path("c.yaml")
    path.write_text(dump(content))
    return path


def metrics() -> list[dict]:
    return [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "algorithm",
    [
        *(case(kind, fast=True) for kind in ("dpo", "kto")),
        *(case(kind, fast=False) for kind in ({"kind": "dpo", "loss": "ipo"}, "orpo", "simpo")),
    ],
    ids=str,
)
def test_train_on_a_table_of_pairs(settings, algorithm):
    """From the command line to the end."""
    settings = {key: value for key, value in settings.items() if key not in ("stages", "rewards", "sampling")}
    stage = {"algorithm": algorithm, "steps": 12, "tasks_per_step": 8, "optimizer": LEARN}
    pairs = {"environment": {"kind": "preferences", "tasks": "pairs.jsonl"}}
    assert command_line(["train", str(write({**settings, **stage, **pairs}))]) == 0
    lines = metrics()
    assert len(lines) == 12 and lines[-1]["margin"] > lines[0]["margin"]
    assert Path("run/checkpoints/step_000012/adapter_model.safetensors").is_file()


SLOW = pytest.mark.slow


# within the second stage, and before and within the third
@pytest.mark.parametrize("steps", [4, pytest.param(6, marks=SLOW), pytest.param(8, marks=SLOW)])
def test_an_interrupted_run_ends_in_the_same_bytes(settings, run_contents, monkeypatch, steps):
    train(read_config(write(settings))[0])
    whole = run_contents(Path("run"))
    lines = metrics()
    assert lines[2]["stage"] == "dpo" and lines[2]["margin"] == 0.0 != lines[3]["margin"]
    assert lines[2]["groups_tied"] < 12
    shutil.rmtree("run")

    class Killed(BaseException):
        pass

    collect, calls = runs.Trainer.update, []

    def update(self, *arguments):
        calls.append(self)
        if len(calls) > steps:
            raise Killed
        return collect(self, *arguments)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(runs.Trainer, "update", update)
        train(read_config(write(settings))[0])
    train(read_config(Path("c.yaml"))[0])
    again = run_contents(Path("run"))
    assert again.keys() == whole.keys()
    assert [name for name in whole if whole[name] != again[name]] == []


def test_episodes_that_the_run_removes_are_refused(settings):
    with pytest.raises(AgentPeftError, match="removes the episodes that stage 'dpo' learns from"):
        read_config(write({**settings, "trajectories": {"last": 3}}))


def test_explain_says_what_a_step_learns_from_and_the_formula(settings, capsys):
    file = write({**settings, "stages": [*STAGES, {"algorithm": "simpo", "steps": 1, "tasks_per_step": 2}]})
    assert command_line(["explain", str(file)]) == 0
    shown = capsys.readouterr().out
    for told in (
        "stage dpo\t4 steps of 3 pairs of run, 4 optimizer updates",
        "loss of dpo\tmean over pairs of -log σ(β h)",
        "Rafailov et al., 2023, equation 7",
        "reference of dpo\tthe policy as the stage began",
        "stage kto\t3 steps of the replies to 3 tasks (0.9 trips through the tasks), 3 optimizer updates",
        "Ethayarajh et al., 2024, equation 8",
        "stage simpo\t1 steps of 2 pairs",
        "Meng et al., 2024, equation 6",
    ):
        assert told in shown, shown
    assert "reference of simpo" not in shown
