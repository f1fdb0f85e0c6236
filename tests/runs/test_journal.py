"""A run that learns from another one's episodes alone ends in the same weights."""

from __future__ import annotations

import json

import pytest

from agent_peft.rollout.collector import Collector
from agent_peft.runs.run import train
from agent_peft.types import AgentPeftError

RL = {
    "steps": 3,
    "tasks_per_step": 3,
    "group_size": 4,
    "rewards": {"invalid_action": -0.5, "correct": 2.0},
    "sampling": {"max_new_tokens": 3},
    "optimizer": {"learning_rate": 0.02},
}


@pytest.fixture
def settings(small):
    return {
        **small,
        "stages": [
            {
                "algorithm": {"kind": "sft"},
                "steps": 8,
                "tasks_per_step": 8,
                "optimizer": {"learning_rate": 0.02},
            },
            {"algorithm": {"kind": "grpo", "kl_coef": 0.1, "minibatches": 2}, **RL, "refill": 1, "lag": 1},
            {"algorithm": {"kind": "sft"}, "name": "own", "learn_from": "successes", **RL},
            {"algorithm": {"kind": "rloo"}, **RL},
        ],
    }


@pytest.mark.slow
def test_the_same_weights_without_a_sample(configure, monkeypatch, tmp_path):
    config = configure()
    train(config)
    monkeypatch.setattr(Collector, "collect", None)
    again = configure(run_dir=str(tmp_path / "again"), engine={"rows": 7})
    train(again, journal=str(config.run_dir))
    for name in ("adapter_model.safetensors", "trainer.pt"):
        files = [each.run_dir / "checkpoints" / "step_000017" / name for each in (config, again)]
        assert files[0].read_bytes() == files[1].read_bytes()
    ours, theirs = (
        [json.loads(line) for line in (each.run_dir / "metrics.jsonl").read_text().splitlines()]
        for each in (config, again)
    )
    assert ours == theirs and ours[-1]["mismatch"] < 1e-4


def test_another_run_is_refused(configure, tmp_path):
    stages = [{"algorithm": {"kind": "rloo"}, **RL, "steps": 2}]
    config = configure(stages=stages)
    train(config)
    there = {"run_dir": str(tmp_path / "again"), "stages": stages}
    with pytest.raises(AgentPeftError, match=r"another configuration \(seed differs\)"):
        train(configure(**there, seed=1), journal=str(config.run_dir))
    with pytest.raises(AgentPeftError, match="is not a run directory"):
        train(configure(**there), journal=str(tmp_path))
    assert not (tmp_path / "again").exists()
    (config.run_dir / "trajectories" / "step_000001.jsonl").unlink()
    with pytest.raises(AgentPeftError, match=r"step_000001.jsonl is not there; give a run that has finished"):
        train(configure(**there), journal=str(config.run_dir))
