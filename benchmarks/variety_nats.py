"""What the gold SQL costs a model, in nats, at the checkpoints of a run: on fresh tasks, on each held-out
split and on real ones. Part of ``variety.py --run``.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from agent_peft.batch import collate
from agent_peft.environments.db_bench import DBBench, DBBenchConfig, generate, generator
from agent_peft.policies.loading import load_policy
from agent_peft.policies.policy import Policy
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.rollout.demonstrations import demonstrate
from agent_peft.rollout.rewards import RewardConfig
from agent_peft.runs.targets import load_run
from agent_peft.seeding import derive
from agent_peft.types import Trajectory

_BATCH = 8


def measure(run: Path, scored: int, real: Path, longest: int) -> dict[int, dict[str, float]]:
    """Mean nats of a gold SQL by set of tasks, at each checkpoint that the run has kept; at 0, without an
    adapter. Demonstrations have at most ``longest`` tokens.
    """
    config = load_run(run)
    policy = load_policy(config.policy, config.seed)
    sets = {"fresh": _demonstrations(policy, generate(scored, 1_000_001), longest)}
    held_out = [split for split in generator.SPLITS if split != "train"]
    sets |= {
        split: _demonstrations(policy, generate(scored, 1_000_001, split=split), longest)
        for split in held_out
    }
    if real.exists():
        entries = json.loads(real.read_text())
        order = sorted(entries, key=lambda name: derive(0, "variety", name))
        some = {name: entries[name] for name in order[: 2 * scored]}
        sets["real"] = _demonstrations(policy, some, longest)[:scored]
    table: dict[int, dict[str, float]] = {}
    checkpoints = sorted((run / "checkpoints").glob("step_*"))
    for step, folder in [(0, None), *((int(folder.name[5:]), folder) for folder in checkpoints)]:
        if folder is not None:
            policy.load(folder)
        table[step] = {name: _nats(policy, trajectories) for name, trajectories in sets.items()}
        print(f"step {step}:", {name: round(nats, 2) for name, nats in table[step].items()}, flush=True)
    return table


def _demonstrations(policy: Policy, entries: Mapping[str, Any], longest: int) -> list[Trajectory]:
    """Of the tasks that can be used."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tasks.json"
        path.write_text(json.dumps(entries))
        environment = DBBench(DBBenchConfig(tasks=path, max_observation_chars=1500))
    try:
        made = [demonstrate(environment, task, policy.chat, RewardConfig(), 0) for task in environment.tasks]
    finally:
        environment.close()
    return [trajectory for trajectory in made if len(trajectory.tokens) <= longest]


def _nats(policy: Policy, trajectories: list[Trajectory]) -> float:
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
