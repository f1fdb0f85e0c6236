"""The size of trajectories that ``explain`` states, against real files."""

from __future__ import annotations

import pytest
import torch

from agent_peft.configuration.explain import step_bytes, trajectories_in_words
from agent_peft.configuration.load import load_config
from agent_peft.configuration.memory import in_words
from agent_peft.runs.trajectories import write_trajectories
from agent_peft.training.step_metrics import TokenValues
from agent_peft.types import Group, Message, Task, Trajectory, Turn


def test_real_files_are_about_as_large_as_is_stated(tmp_path):
    turns = (Turn(tuple(range(300)), tuple(range(200)), (-0.5,) * 200),)
    said = (Message("user", "four" * 300), Message("assistant", 'a "q"\n' * 133))
    task = Task("insert-0042", ("insert",))
    one = Trajectory(task, turns, said, rewards=(-0.1,), reward_terms={"outcome": -0.1}, seed=1 << 62)
    values = TokenValues(torch.rand(4000), torch.rand(4000))
    path = write_trajectories(tmp_path, 0, "grpo", [Group(task, [one] * 8)], values=values)
    size = path.stat().st_size + path.with_suffix(".safetensors").stat().st_size
    assert size <= step_bytes(8, 500) <= 1.15 * size


@pytest.mark.parametrize(
    ("keep", "kept"),
    [("all", (7, 3)), ({"every": 4}, (2, 1)), ({"last": 2}, (0, 2)), ({"every": 4, "last": 2}, (1, 1))],
    ids=str,
)
def test_what_stays_is_counted(policy_config, tmp_path, keep, kept):
    """Of ten steps; those of the second stage are the larger ones."""
    limits = {"tasks_per_step": 2, "sampling": {"max_tokens": 60}}
    config = load_config(
        {
            "run_dir": str(tmp_path),
            "policy": policy_config.model_dump(mode="json"),
            "environment": {"kind": "arithmetic"},
            "trajectories": keep,
            "stages": [
                {"algorithm": "sft", "steps": 7, **limits},
                {"algorithm": "grpo", "steps": 3, "group_size": 3, **limits},
            ],
        }
    )
    small, large = step_bytes(2, 60), step_bytes(6, 60)
    total = kept[0] * small + kept[1] * large
    told = f"at most about {in_words(large)} a step and {in_words(total)} in all, of {sum(kept)} steps ("
    assert trajectories_in_words(config).startswith(told)
