"""What dropping constant groups and collecting others costs, and what it gives, on one-digit addition.

    python benchmarks/refill.py [--seeds 0 1 2] [--steps 20]

A model of one layer on one thread first sees eight steps of demonstrations. Then GRPO trains it on 12 groups
of 4 answers a step (temperature 1), without a refill, and with one and three rounds. Prints a table: the
groups of a step that have a signal, the tokens that are sampled, and the share of correct answers in the last
five steps, over all answers that were sampled.
"""

from __future__ import annotations

import argparse
from statistics import mean
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from smoke import parse

from agent_peft.environments.arithmetic import ALPHABET, Arithmetic, ArithmeticConfig
from agent_peft.policies.config import ScratchConfig
from agent_peft.policies.loading import load_policy
from agent_peft.training.stage import StageConfig
from agent_peft.training.trainer import Step, Trainer

ARCHITECTURE = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
}
ROWS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "refill: 1": {"refill": 1},
    "refill: 3": {"refill": 3},
}


def train(seed: int, steps: int, keys: dict[str, Any]) -> list[Step]:
    tasks = Arithmetic(ArithmeticConfig(digits=1, num_tasks=48))
    policy = load_policy(ScratchConfig(architecture=ARCHITECTURE, alphabet=ALPHABET, device="cpu"), seed)
    optimizer = {"learning_rate": 3e-3}
    general = {"tasks_per_step": 12, "optimizer": optimizer, "sampling": {"max_new_tokens": 3}}
    sft = StageConfig.model_validate({"algorithm": "sft", "steps": 8, **general})
    list(Trainer(policy, tasks, sft, seed=seed))
    grpo = {"algorithm": "grpo", "steps": steps, "group_size": 4, **general, **keys}
    return list(Trainer(policy, tasks, StageConfig.model_validate(grpo), seed=seed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=20)
    arguments = parse(parser, seeds=[0], steps=6)
    torch.set_num_threads(1)
    table = Table("", "groups with a signal", "tokens a step", "tokens per such group", "success at the end")
    for name, keys in ROWS.items():
        runs = [train(seed, arguments.steps, keys) for seed in arguments.seeds]
        steps = [step for run in runs for step in run]
        signal = mean(step.metrics["groups_with_signal"] * len(step.collection.kept) for step in steps)
        tokens = mean(step.collection.statistics.sampled for step in steps)
        ends = [mean(step.metrics["success"] for step in run[-5:]) for run in runs]
        each = ", ".join(f"{end:.0%}" for end in ends)
        table.add_row(
            name,
            f"{signal:.1f} of 12",
            f"{tokens:.0f}",
            f"{tokens / signal:.0f}",
            f"{mean(ends):.0%} ({each})",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
