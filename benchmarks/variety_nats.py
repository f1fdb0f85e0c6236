"""What the gold SQL costs a model, in nats, after so many demonstrations: on fresh tasks, on each held-out
split and on real ones. Part of ``variety.py --model``.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from agent_peft.batch import Batch, collate
from agent_peft.environments.db_bench import DBBench, DBBenchConfig, generate, generator
from agent_peft.policies.config import PretrainedConfig
from agent_peft.policies.policy import Policy, load_policy
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.rollout.demonstrations import demonstrate
from agent_peft.rollout.rewards import RewardConfig
from agent_peft.seeding import derive
from agent_peft.types import Trajectory

_BATCH = 8
_LEARNING_RATE = 6e-4
_LONGEST = 900  # tokens of a demonstration


def measure(
    model: str, demonstrations: Sequence[int], scored: int, real: Path
) -> dict[int, dict[str, float]]:
    """Mean nats of a gold SQL by set of tasks, for each number of demonstrations."""
    policy = load_policy(PretrainedConfig(model=model), 0)
    sets = {"fresh": _demonstrations(policy, generate(scored, 1))}
    held_out = [split for split in generator.SPLITS if split != "train"]
    sets |= {split: _demonstrations(policy, generate(scored, 1, split=split)) for split in held_out}
    if real.exists():
        entries = json.loads(real.read_text())
        order = sorted(entries, key=lambda name: derive(0, "variety", name))
        sets["real"] = _demonstrations(policy, {name: entries[name] for name in order[: 2 * scored]})[:scored]
    most = max(demonstrations)
    train = _demonstrations(policy, generate(max(most, 1), 0))
    optimizer = torch.optim.AdamW(policy.trainable_parameters(), lr=_LEARNING_RATE, weight_decay=0.0)
    table: dict[int, dict[str, float]] = {}
    for seen in range(0, most + 1, _BATCH):
        if any(number - _BATCH < seen <= number for number in demonstrations):
            table[seen] = {name: _nats(policy, trajectories) for name, trajectories in sets.items()}
            print(
                f"after {seen} demonstrations:", {name: round(nats, 2) for name, nats in table[seen].items()}
            )
        for group in optimizer.param_groups:
            group["lr"] = _LEARNING_RATE * max(1 - seen / (most + _BATCH), 0.1)
        batch = _batch(train[seen : seen + _BATCH])
        if batch is not None and seen < most:
            optimizer.zero_grad()
            logprobs = policy.forward(batch, SamplingConfig()).logprobs
            (-logprobs.sum() / batch.action_mask.sum()).backward()
            optimizer.step()
    return table


def _demonstrations(policy: Policy, entries: Mapping[str, Any]) -> list[Trajectory]:
    """Of the tasks that can be used."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tasks.json"
        path.write_text(json.dumps(entries))
        environment = DBBench(DBBenchConfig(tasks=path, max_observation_chars=1500))
    try:
        made = [demonstrate(environment, task, policy.chat, RewardConfig(), 0) for task in environment.tasks]
    finally:
        environment.close()
    return [trajectory for trajectory in made if len(trajectory.tokens) <= _LONGEST]


def _batch(trajectories: Sequence[Trajectory]) -> Batch | None:
    return collate(trajectories, list(range(len(trajectories)))) if trajectories else None


def _nats(policy: Policy, trajectories: Sequence[Trajectory]) -> float:
    """Of the first action, in which the SQL stands: mean over tasks."""
    total = 0.0
    for i in range(0, len(trajectories), _BATCH):
        some = trajectories[i : i + _BATCH]
        with torch.no_grad():
            logprobs = policy.forward(collate(some, list(range(len(some)))), SamplingConfig()).logprobs
        for row, trajectory in zip(logprobs, some, strict=True):
            first = trajectory.turns[0]
            begin = len(first.observation)
            total -= float(row[begin : begin + len(first.action)].sum())
    return total / len(trajectories)
