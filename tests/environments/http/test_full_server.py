"""More episodes than a server holds, and policies that are slow to answer."""

from __future__ import annotations

from typing import Any

import pytest

from agent_peft.environments import load_environment
from agent_peft.environments.http.guard import Limits
from agent_peft.policies.engine import load_sampler
from agent_peft.policies.engine.base import EngineConfig
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.rollout.collector import Collector
from agent_peft.rollout.rewards import RewardConfig
from agent_peft.types import StopReason


@pytest.mark.slow
def test_an_evaluation_of_more_episodes_than_the_server_holds(serving: Any, tiny_policy) -> None:
    host = serving(
        {"train": load_environment({"kind": "arithmetic", "digits": 2, "num_tasks": 150})},
        limits=Limits(episodes=16),
    )
    elsewhere = load_environment({"kind": "remote", "url": host.url, "patience": 0.0})
    engine = load_sampler(tiny_policy, EngineConfig(rows=4))
    collection = Collector(elsewhere, engine).collect(
        elsewhere.tasks, 1, SamplingConfig(max_new_tokens=3, max_tokens=40), RewardConfig(), 0
    )
    elsewhere.close()
    found = [t.stop_reason for group in collection.groups for t in group.trajectories]
    assert found == [StopReason.FINISHED] * 150
    assert collection.failures == 0
