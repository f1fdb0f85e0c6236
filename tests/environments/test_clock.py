"""An episode's clock: what it counts, what its end costs, and tasks that do not fit in it. How it ends
episodes: test_conformance.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agent_peft.environments import clock, load_environment
from agent_peft.environments.clock import Clock
from agent_peft.environments.db_bench import DBBench, DBBenchConfig, DBBenchEpisode
from agent_peft.environments.db_bench.protocol import operation
from agent_peft.policies.engine import load_sampler
from agent_peft.policies.engine.base import EngineConfig
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.rollout.collector import Collector
from agent_peft.rollout.rewards import RewardConfig
from agent_peft.types import AgentPeftError, Message, Outcome, StepResult, StopReason, Task

ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT COUNT(*) FROM c"
PATIENT = {"kind": "db_bench", "statement_seconds": 600.0, "statement_steps": 10**15, "episode_seconds": 0.2}


def test_it_runs_only_while_the_environment_works(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([0.0, 0.6, 100.0, 100.3, 500.0, 500.2])
    monkeypatch.setattr(clock.time, "monotonic", lambda: next(moments))
    counted = Clock(1.0)
    found = []
    for _ in range(3):
        with counted.running():
            pass
        found.append((round(counted.left, 9), counted.ran_out))
    assert found == [(0.4, False), (0.1, False), (-0.1, True)]


def test_it_counts_where_the_environment_raises() -> None:
    counted = Clock(1e-9)
    with pytest.raises(KeyError), counted.running():
        raise KeyError
    assert counted.ran_out


class Dawdling(DBBench):
    """Every reply becomes a statement without end."""

    def episode(self, task: Task, seed: int) -> DBBenchEpisode:
        return DawdlingEpisode(self._problem(task), self.config, seed)


class DawdlingEpisode(DBBenchEpisode):
    def start(self) -> Sequence[Message]:
        super().start()
        return [Message("user", "1+1=")]

    def step(self, action: str) -> StepResult:
        return super().step(operation(ENDLESS))


def test_running_out_has_its_price(tiny_policy) -> None:
    environment = Dawdling(DBBenchConfig.model_validate({**PATIENT, "generate": {"num_tasks": 2}}))
    engine = load_sampler(tiny_policy, EngineConfig(rows=4))
    rewards = RewardConfig(incorrect=-0.1, timeout=-0.4)
    collection = Collector(environment, engine).collect(
        environment.tasks, 2, SamplingConfig(max_new_tokens=3, max_tokens=50), rewards, 0
    )
    environment.close()
    found = [t for group in collection.groups for t in group.trajectories]
    assert [(t.outcome, t.stop_reason, t.reward) for t in found] == [
        (Outcome.INCORRECT, StopReason.TIMEOUT, -0.4)
    ] * 4


def os_entry(gold: str) -> dict[str, Any]:
    commands = {"evaluation_command_item": "[ -d /srv/a ]", "ground_truth_command_item": gold}
    return {
        "instruction": "Make /srv/a.",
        "initialization_command_item": {"command_name": "bash", "script": ""},
        "evaluation_info": {
            name: {"command_name": "bash", "script": script} for name, script in commands.items()
        },
        "skill_list": ["mkdir"],
    }


def db_entry(sql: str, direct: list[list[int]]) -> dict[str, Any]:
    table = {"name": "t", "column_info_list": [{"name": "a", "type": "INT"}], "row_list": [[1]]}
    return {
        "instruction": "Ask.",
        "table_info": table,
        "answer_info": {"sql": sql, "direct": direct, "md5": None},
    }


@pytest.mark.parametrize(
    ("kind", "entry", "cause"),
    [
        (
            "os_interaction",
            os_entry("mkdir /srv/a"),
            "its ground truth takes longer than episode_seconds = 1e-06",
        ),
        (
            "db_bench",
            db_entry("SELECT a FROM t", [[1]]),
            "the gold SQL takes longer than episode_seconds = 1e-06",
        ),
    ],
)
def test_a_gold_that_takes_longer_is_rejected_with_the_cause(
    kind: str, entry: dict[str, Any], cause: str, tmp_path: Path, sandboxed: None
) -> None:
    (tmp_path / "tasks.json").write_text(json.dumps({"one": entry}))
    assert len(load_environment({"kind": kind, "tasks": tmp_path / "tasks.json"}).tasks) == 1
    with pytest.raises(AgentPeftError, match=f"no task can be used.*{cause}"):
        load_environment({"kind": kind, "tasks": tmp_path / "tasks.json", "episode_seconds": 1e-6})


def test_the_clock_is_the_servers_so_a_client_has_none() -> None:
    with pytest.raises(AgentPeftError, match="episode_seconds"):
        load_environment({"kind": "remote", "url": "http://127.0.0.1:9", "episode_seconds": 3.0})


@pytest.mark.parametrize("kind", ["db_bench", "os_interaction"])
@pytest.mark.parametrize("seconds", [0, -1.0, float("nan")])
def test_no_seconds_are_none(kind: str, seconds: float) -> None:
    with pytest.raises(AgentPeftError, match="episode_seconds"):
        load_environment({"kind": kind, "generate": {"num_tasks": 1}, "episode_seconds": seconds})
