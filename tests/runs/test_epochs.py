"""A run whose stages are given in epochs is, file by file, the run with the steps that follow."""

from __future__ import annotations

import pytest

from agent_peft.configuration.load import load_config
from agent_peft.runs.run import train
from agent_peft.types import AgentPeftError


@pytest.fixture
def settings(tmp_path, policy_config):
    heldout = {"kind": "arithmetic", "digits": 1, "num_tasks": 4, "split": "heldout"}
    return {
        "run_dir": str(tmp_path / "run"),
        "threads": 1,
        "policy": policy_config.model_dump(mode="json"),
        "environment": {"kind": "arithmetic", "digits": 1, "num_tasks": 10},
        "evaluation": {"environment": heldout, "every": 2, "sampling": {"max_new_tokens": 3}},
        "optimizer": {"learning_rate": 0.02, "schedule": "linear", "warmup_steps": 1},
        "sampling": {"max_new_tokens": 3},
        "stages": [
            {"algorithm": "sft", "epochs": 1, "tasks_per_step": 4},  # 3 steps
            {"algorithm": "rloo", "epochs": 0.5, "tasks_per_step": 2, "group_size": 2},  # 3 steps
        ],
    }


def test_epochs_and_steps_write_the_same_bytes_also_after_a_stop(settings, run_contents, tmp_path):
    lengths = {"stages.0.steps": 3, "stages.1.steps": 3}
    train(load_config(settings, **lengths))
    expected = run_contents(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "other")

    class Stop:
        def on_step(self, step):
            if step.number == 3:
                raise KeyboardInterrupt

        def on_evaluation(self, name, report):
            pass

        def on_end(self):
            pass

    with pytest.raises(KeyboardInterrupt):
        train(load_config(settings), observers=[Stop()])
    train(load_config(settings))
    written = run_contents(tmp_path / "run")
    same = [name for name in expected if name.endswith(("metrics.jsonl", "config.yaml", ".safetensors"))]
    assert len(same) >= 4
    assert {name: written[name] for name in same} == {name: expected[name] for name in same}
    assert b"steps: 3" in written["config.yaml"] and b"epochs: null" in written["config.yaml"]
    assert sorted(written) == sorted(expected)


def test_a_wrong_order_ends_the_run_before_it_takes_its_directory(settings, tmp_path):
    (tmp_path / "order.txt").write_text("nothing\n")
    settings["stages"][1]["task_order"] = str(tmp_path / "order.txt")
    with pytest.raises(AgentPeftError, match="line 1: there is no task 'nothing'; the first one is '"):
        train(load_config(settings))
    assert not (tmp_path / "run").exists()
