"""A small run to track."""

from __future__ import annotations

import pytest

from agent_peft.configuration.load import load_config


@pytest.fixture
def configure(tmp_path, policy_config):
    """``configure(name, **changes)``: four steps of a small run with evaluations, in that folder."""

    def configure(name, **changes):
        tasks = {"kind": "arithmetic", "digits": 1, "num_tasks": 4}
        return load_config(
            {
                "run_dir": str(tmp_path / name),
                "threads": 1,
                "policy": policy_config.model_dump(mode="json"),
                "environment": tasks,
                "evaluation": {"environment": {**tasks, "split": "heldout"}},
                "algorithm": "rloo",
                "steps": 4,
                "tasks_per_step": 2,
                "group_size": 2,
                "sampling": {"max_new_tokens": 3},
                **changes,
            }
        )

    return configure
