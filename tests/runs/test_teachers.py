"""Runs that distill: they resume to the same bytes, and a teacher that has changed is refused."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from agent_peft.runs.run import train
from agent_peft.types import AgentPeftError

DISTILL: dict[str, Any] = {
    "algorithm": {"kind": "distill"},
    "steps": 3,
    "tasks_per_step": 2,
    "sampling": {"max_new_tokens": 3},
}


@pytest.fixture
def settings(small):
    learnt = {"steps": 2, "tasks_per_step": 2, "optimizer": {"learning_rate": 0.02}}
    stages = [
        {"algorithm": {"kind": "sft"}, **learnt},
        {**DISTILL, "teacher": {"prompt": "{solution}={task}"}},
    ]
    return {**small, "stages": stages}


def test_a_run_resumes_with_its_first_teacher(configure, run_contents):
    """The teacher of the second stage is the policy as that stage began, also after two of its steps."""
    config = configure()
    train(config)
    whole = run_contents(config.run_dir)
    shutil.rmtree(config.run_dir / "checkpoints" / "step_000005")
    train(config)
    assert run_contents(config.run_dir) == whole


def test_a_teacher_that_has_changed_is_refused(configure, settings, policy_config, tmp_path):
    """A run that trains on has another newest checkpoint, of the same size."""
    learnt, all_weights = settings["stages"][0], policy_config.model_copy(update={"lora": None})
    whole = {"run_dir": str(tmp_path / "teacher"), "policy": all_weights.model_dump(mode="json")}
    train(configure(**whole, stages=[learnt]))
    stage = {**DISTILL, "teacher": {"model": whole["run_dir"]}}
    train(configure(stages=[stage]))
    train(configure(stages=[{**stage, "steps": 4}]))  # the teacher is the same
    train(configure(**whole, stages=[{**learnt, "steps": 3}]))
    with pytest.raises(AgentPeftError, match=r"stages\.0\.teacher"):
        train(configure(stages=[{**stage, "steps": 5}]))
