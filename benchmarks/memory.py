"""Memory that `agent-peft explain` predicts, against what a process really takes: its peak resident size as
it samples, and as it trains.

    python benchmarks/memory.py [--rows 16] [--max-tokens 512] [--microbatch-tokens 768] [--only lora]

Each point is a process of its own. What it has taken before the model is loaded (Python, torch, Transformers)
is subtracted. Episodes are as long, and a microbatch is as full, as they may be, which is what the prediction
assumes. Prints a table and writes benchmarks/results/memory.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from agent_peft.batch import Batch, collate
from agent_peft.configuration.memory import Learner, stage_memory
from agent_peft.hardware import take_peak
from agent_peft.policies.adapters import LoraSettings
from agent_peft.policies.config import PretrainedConfig
from agent_peft.policies.engine.base import EngineConfig
from agent_peft.policies.engine.local import Engine
from agent_peft.policies.models.shape import shape_of
from agent_peft.policies.policy import Policy, load_policy
from agent_peft.training.optimizer import build_optimizer
from agent_peft.training.stage import StageConfig
from agent_peft.types import Task, Trajectory, Turn

HERE = Path(__file__).resolve().parent
POINTS: dict[str, dict[str, Any]] = {
    "lora": {},
    "lora, checkpointing": {"activation_checkpointing": True},
    "lora, bfloat16": {"dtype": "bfloat16"},
    "lora on q and v": {"lora": {"target_modules": ["q_proj", "v_proj"]}},
    "lora, padded": {"packing": False},
    "whole": {"lora": None},
    "whole, bfloat16": {"lora": None, "dtype": "bfloat16"},
    "whole, checkpointing": {"lora": None, "activation_checkpointing": True},
}


class Long:
    """A conversation that goes on until there is no room: each answer is one token."""

    def __init__(self, seed: int, prompt: Sequence[int]) -> None:
        self.seed, self.prompt = seed, prompt

    def act(self, action: Sequence[int], logprobs: Sequence[float], room: int) -> Sequence[int] | None:
        return [1] if room >= 2 else None


def make_batch(positions: int, depth: int, vocabulary: int) -> Batch:
    """One group whose trie has so many nodes: half of each trajectory is the prompt that all share."""
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


def sample(policy: Policy, stage: StageConfig, engine: EngineConfig) -> int:
    """Peak bytes of one rollout."""
    acting = Engine(policy, engine)
    prompts = [
        [10 + group, *range(20, 20 + stage.sampling.max_tokens // 2)] for group in range(stage.tasks_per_step)
    ]
    conversations = [Long(seed, prompts[seed // stage.group_size]) for seed in range(stage.episodes_per_step)]
    take_peak(policy.device)
    acting.generate(conversations, stage.sampling)
    return take_peak(policy.device) or 0


def learn(policy: Policy, stage: StageConfig) -> int:
    """Peak bytes of two updates of one microbatch each: the second has gradients and AdamW's moments
    beside it.
    """
    optimizer, _ = build_optimizer(policy.trainable_parameters(), stage.optimizer, 2)
    batch = make_batch(
        stage.microbatch_tokens, stage.sampling.max_tokens, policy.base.config.get_text_config().vocab_size
    )
    policy._packing_proven = True  # the proof is of the first step alone
    take_peak(policy.device)
    for _ in range(2):
        policy.forward(batch, stage.sampling).logprobs.sum().backward()
        optimizer.step()
    return take_peak(policy.device) or 0


def measure(name: str, phase: str, settings: argparse.Namespace) -> dict[str, int]:
    """Of one point, in this process: bytes predicted and measured."""
    torch.set_num_threads(1)
    given = POINTS[name]
    lora = {} if "lora" not in given else {"lora": LoraSettings(**given["lora"]) if given["lora"] else None}
    config = PretrainedConfig(model="smollm2-135m", device="cpu", **{**given, **lora})
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
    take_peak(torch.device("cpu"))  # from here on
    before = take_peak(torch.device("cpu")) or 0
    policy = load_policy(config, 0)
    rank = None if config.lora is None else config.lora.rank
    learner = Learner(
        shape,
        policy.dtype.itemsize,
        rank,
        recomputes=config.activation_checkpointing,
        packed=policy.packing,
        tiled=policy.tiled,
        blocks=policy.blocks,
    )
    expected = stage_memory(learner, stage, engine)
    if phase == "sampling":
        # there is no optimizer yet: of what is always there, only the weights and the adapter
        held = sum(part.size for part in expected.held[:1]) + (learner.trained * 4 if rank is not None else 0)
        return {
            "predicted": held + sum(part.size for part in expected.sampling),
            "measured": sample(policy, stage, engine) - before,
        }
    predicted = sum(part.size for part in (*expected.held, *expected.training))
    return {"predicted": predicted, "measured": learn(policy, stage) - before}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--microbatch-tokens", type=int, default=768)
    parser.add_argument("--only", help="points whose name begins like this")
    parser.add_argument("--point", nargs=2, help=argparse.SUPPRESS)
    settings = parser.parse_args()
    if settings.point:
        print(json.dumps(measure(*settings.point, settings)))
        return
    results = []
    table = Table(
        "point",
        "phase",
        "predicted",
        "measured",
        "predicted / measured",
        title="SmolLM2-135M, peak memory in MB",
    )
    for name in POINTS:
        if settings.only and not name.startswith(settings.only):
            continue
        for phase in ("sampling", "training"):
            if phase == "sampling" and "checkpointing" in name:
                continue  # it does nothing there
            command = [sys.executable, __file__, *sys.argv[1:], "--point", name, phase]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                sys.exit(done.stderr)
            found = json.loads(done.stdout.splitlines()[-1])
            results.append({"point": name, "phase": phase, **found})
            megabytes = (f"{found[key] / 1e6:.0f}" for key in ("predicted", "measured"))
            table.add_row(name, phase, *megabytes, f"{found['predicted'] / found['measured']:.2f}")
    Console().print(table)
    if not settings.only:
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        content = {
            "rows": settings.rows,
            "max_tokens": settings.max_tokens,
            "microbatch_tokens": settings.microbatch_tokens,
            **versions,
        }
        (HERE / "results" / "memory.json").write_text(
            json.dumps({**content, "points": results}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
