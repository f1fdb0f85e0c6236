"""Compare the memory that `agent-peft explain` predicts with the peak resident size of a process that
loads a model, samples, evaluates or trains.

    python benchmarks/memory.py [--rows 16] [--max-tokens 512] [--microbatch-tokens 768] [--only lora]

Each point is a separate process. Episodes have the maximum length and a microbatch is full, as the prediction
assumes. The program prints a table and writes benchmarks/results/memory.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from measuring import command_line, show, table, tiny_model, write
from torch.optim import Optimizer

from agent_peft.batch import Batch, collate
from agent_peft.configuration.memory import MemoryModel, evaluation_memory, stage_memory
from agent_peft.hardware import process_memory, take_peak
from agent_peft.heap import restart_with_tight_heap
from agent_peft.policies.config import LoraSettings, PretrainedConfig
from agent_peft.policies.engine import load_sampler
from agent_peft.policies.engine.base import EngineConfig
from agent_peft.policies.engine.weights import suits
from agent_peft.policies.loading import load_policy
from agent_peft.policies.models.shape import shape_of
from agent_peft.policies.policy import Policy
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.rollout.evaluation import EvaluationConfig
from agent_peft.training.optimizer import build_optimizer
from agent_peft.training.stage import StageConfig
from agent_peft.types import Task, Trajectory, Turn

POINTS: dict[str, dict[str, Any]] = {
    "lora": {},
    "lora, checkpointing": {"activation_checkpointing": True},
    "lora, bfloat16": {"dtype": "bfloat16"},
    "lora, bfloat16, checkpointing": {"dtype": "bfloat16", "activation_checkpointing": True},
    "lora on q and v": {"lora": {"target_modules": ["q_proj", "v_proj"]}},
    "lora, padded": {"packing": False},
    "whole": {"lora": None},
    "whole, bfloat16": {"lora": None, "dtype": "bfloat16"},
    "whole, checkpointing": {"lora": None, "activation_checkpointing": True},
}


class Long:
    """A conversation that continues until its token limit. Each answer has one token."""

    def __init__(self, seed: int, prompt: Sequence[int]) -> None:
        self.seed, self.prompt = seed, prompt

    def act(self, action: Sequence[int], logprobs: Sequence[float], room: int) -> Sequence[int] | None:
        return [1] if room >= 2 else None


def make_batch(positions: int, depth: int, vocabulary: int) -> Batch:
    """Return a group whose trie has this many nodes. Half of each trajectory is the shared prompt."""
    prompt = depth // 2
    lengths, left = [], positions - prompt
    while left > 0:
        lengths.append(min(depth - prompt, left))
        left -= lengths[-1]
    drawn = torch.Generator().manual_seed(0)
    shared = tuple(torch.randint(vocabulary, (prompt,), generator=drawn).tolist())
    found = []
    for length in lengths:
        own = tuple(torch.randint(vocabulary, (length,), generator=drawn).tolist())
        found.append(Trajectory(Task("t"), (Turn(shared, own, (-1.0,) * length),)))
    return collate(found, [0] * len(found))


def sample(policy: Policy, sampling: SamplingConfig, engine: EngineConfig, tasks: int, siblings: int) -> None:
    """Roll out ``tasks`` prompts with ``siblings`` episodes each, next to gradients and AdamW's moments."""
    acting = load_sampler(policy, engine)
    prompts = [[10 + task, *range(20, 20 + sampling.max_tokens // 2)] for task in range(tasks)]
    conversations = [Long(seed, prompts[seed // siblings]) for seed in range(tasks * siblings)]
    acting.generate(conversations, sampling)


def learn(policy: Policy, stage: StageConfig, positions: int, updates: int) -> Optimizer:
    """Update by one microbatch each. Later updates run next to gradients and AdamW's moments."""
    optimizer = build_optimizer(policy.trainable_parameters(), stage.optimizer)
    vocabulary = policy.base.config.get_text_config().vocab_size
    batch = make_batch(positions, stage.sampling.max_tokens, vocabulary)
    for _ in range(updates):
        policy.forward(batch, stage.sampling).logprobs.sum().backward()
        optimizer.step()
    return optimizer


def measure(name: str, phase: str, settings: argparse.Namespace) -> dict[str, int]:
    """Measure one point in this process: predicted and measured bytes."""
    torch.set_num_threads(1)
    given = POINTS[name]
    lora = {} if "lora" not in given else {"lora": LoraSettings(**given["lora"]) if given["lora"] else None}
    config = PretrainedConfig(model=settings.model, device="cpu", **{"dtype": "float32", **given, **lora})
    stage = StageConfig.model_validate(
        {
            "algorithm": {"kind": "grpo"},
            "steps": 1,
            "tasks_per_step": max(1, settings.rows // 4),
            "group_size": 4,
            "sampling": {"max_tokens": settings.max_tokens, "max_new_tokens": 64},
            "microbatch_tokens": settings.microbatch_tokens,
        }
    )
    engine = EngineConfig(rows=settings.rows)
    shape = shape_of(config)
    assert shape is not None
    process = process_memory(torch.device("cpu"))
    policy = load_policy(config, 0)
    rank = None if config.lora is None else config.lora.rank
    model = MemoryModel(
        shape,
        policy.dtype.itemsize,
        rank,
        checkpoints=config.activation_checkpointing,
        packed=policy.packing,
        tiled=policy.tiled,
        reordered=suits(policy.base),
        process=process,
    )
    expected = stage_memory(model, stage, engine)
    tasks, siblings = stage.tasks_per_step, stage.group_size
    if phase == "evaluation":  # every row has its own prompt, and half of the episodes come later
        tasks, siblings = 2 * settings.rows, 1
        evaluation = EvaluationConfig(
            environment={"kind": "arithmetic"}, num_tasks=tasks, sampling=stage.sampling.model_dump()
        )
        expected = evaluation_memory(model, evaluation, engine)
    part = "sampling" if phase == "evaluation" else phase
    expected = replace(
        expected, **{other: () for other in ("loading", "sampling", "training") if other != part}
    )
    if phase == "training":
        take_peak(policy.device)
        learn(policy, stage, stage.microbatch_tokens, updates=4)
    elif phase != "loading":
        optimizer = learn(policy, stage, positions=settings.max_tokens // 2 + 1, updates=1)
        take_peak(policy.device)
        sample(policy, stage.sampling, engine, tasks, siblings)
        del optimizer  # until here it holds AdamW's moments
    return {"predicted": expected.peak, "measured": take_peak(policy.device) or 0}


def main() -> None:
    given = command_line(
        __doc__,
        quick={"rows": 4, "max_tokens": 64, "microbatch_tokens": 128, "only": "lora on q and v"},
        model="smollm2-135m",
        rows=16,
        max_tokens=512,
        microbatch_tokens=768,
        only=str,  # points whose name begins with this
        point={"nargs": 2, "help": "a name and a phase, of which the program measures this one alone"},
    )
    if given.point:
        print(json.dumps(measure(*given.point, given)))
        return
    model = tiny_model(given.results) if given.quick else given.model
    results = []
    for name in POINTS:
        if given.only and not name.startswith(given.only):
            continue
        for phase in ("loading", "sampling", "evaluation", "training"):
            if phase == "loading" and name != "lora, bfloat16":
                continue  # a file in the model's own dtype takes nothing more
            if phase in ("sampling", "evaluation") and "checkpointing" in name:
                continue  # it has no effect there
            command = [sys.executable, __file__, *sys.argv[1:], "--model", model, "--point", name, phase]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                sys.exit(done.stderr)
            results.append({"point": name, "phase": phase, **json.loads(done.stdout.splitlines()[-1])})
    rows = [
        (
            *(one["point"], one["phase"]),
            *(f"{one[key] / 1e6:.0f}" for key in ("predicted", "measured")),
            one["predicted"] / one["measured"],
        )
        for one in results
    ]
    columns = "point|phase|predicted|measured|predicted / measured"
    show(table(columns, rows, f"{given.model}, peak memory in MB"))
    if not given.only or given.quick:
        sizes = {key: vars(given)[key] for key in ("rows", "max_tokens", "microbatch_tokens")}
        write(given.results / "memory.json", {**sizes, "points": results})


if __name__ == "__main__":
    restart_with_tight_heap()  # as `agent-peft` does
    main()
