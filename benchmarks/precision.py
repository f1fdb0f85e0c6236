"""Compare bfloat16 with float32 on this machine: learning of all parameters at a small rate, and the time of
a step.

    python benchmarks/precision.py [--steps 40] [--rounds 3] [key=value ...]

Tasks, model and stages are those of configs/quickstart.yaml. First, with `lora: null`, it runs supervised
steps with a learning rate of 1e-5, whose updates are smaller than a step of bfloat16's grid. Then it runs
steps of the RLOO stage from the base model, alternating between the types. It prints tables and writes
benchmarks/results/precision.json.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from smoke import parse, tiny_model

from agent_peft.configuration.load import read_config
from agent_peft.environments import load_environment
from agent_peft.hardware import set_threads
from agent_peft.policies.engine import load_sampler
from agent_peft.policies.loading import load_policy
from agent_peft.training.trainer import Step, Trainer

HERE = Path(__file__).resolve().parent
CONFIG = HERE.parent / "configs" / "quickstart.yaml"
DTYPES = ("float32", "bfloat16")
QUICK = (
    *("environment.generate.num_tasks=8", "stages.0.tasks_per_step=2", "sampling.max_tokens=4096"),
    *("stages.1.tasks_per_step=2", "stages.1.sampling.max_new_tokens=4"),
)
ALL_PARAMETERS = (
    "policy.lora=null",
    "stages.0.optimizer.learning_rate=1e-5",
    "stages.0.optimizer.schedule=constant",
    "stages.0.tasks_per_step=4",
)


def steps_of(stage: int, dtype: str, overrides: Sequence[str]) -> Iterator[Step]:
    """Yield the steps of one stage from the base model."""
    config = read_config(CONFIG, ["evaluation=null", f"policy.dtype={dtype}", *overrides])[0]
    set_threads(config.threads)
    policy = load_policy(config.policy, config.seed)
    trainer = Trainer(
        policy,
        load_environment(config.environment),
        config.stages[stage],
        load_sampler(policy, config.engine),
        config.seed,
    )
    yield from trainer


def learning(steps: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the surprisal (nats per token) of each supervised step. All parameters are trained."""
    found = {}
    for dtype in DTYPES:
        begin = time.perf_counter()
        curve = [
            step.metrics["surprisal"]
            for step in steps_of(0, dtype, [*ALL_PARAMETERS, f"stages.0.steps={steps}", *overrides])
        ]
        found[dtype] = {"surprisal": curve, "seconds": time.perf_counter() - begin}
    return found


def stepping(rounds: int, overrides: Sequence[str]) -> list[dict[str, dict[str, float]]]:
    """Time rollout steps with their updates, alternating between the types, and measure their mismatch."""
    running = {dtype: steps_of(1, dtype, [f"stages.1.steps={rounds}", *overrides]) for dtype in DTYPES}
    found = []
    for _ in range(rounds):
        found.append({})
        for dtype, steps in running.items():
            begin = time.perf_counter()
            step = next(steps)
            seconds = time.perf_counter() - begin
            mismatch = {name: value for name, value in step.metrics.items() if name.startswith("mismatch")}
            found[-1][dtype] = {"seconds": seconds, "sampled": step.collection.statistics.sampled, **mismatch}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("overrides", nargs="*", help="overrides of the configuration, such as threads=2")
    arguments = parse(parser, steps=2, rounds=1)
    if arguments.quick:
        arguments.overrides = [*QUICK, f"policy.model={tiny_model(arguments.results)}", *arguments.overrides]
    found = {
        "all parameters": learning(arguments.steps, arguments.overrides),
        "steps": stepping(arguments.rounds, arguments.overrides),
    }
    curves = {dtype: found["all parameters"][dtype]["surprisal"] for dtype in DTYPES}
    tenth = max(1, arguments.steps // 8)
    fallen = {
        dtype: sum(curve[:tenth]) / tenth - sum(curve[-tenth:]) / tenth for dtype, curve in curves.items()
    }
    learnt = Table(
        "dtype",
        f"surprisal, first {tenth} steps",
        f"last {tenth}",
        "fallen by",
        "of float32's",
        title="all parameters, learning rate 1e-5",
    )
    for dtype, curve in curves.items():
        means = f"{sum(curve[:tenth]) / tenth:.3f}", f"{sum(curve[-tenth:]) / tenth:.3f}"
        learnt.add_row(dtype, *means, f"{fallen[dtype]:.3f}", f"{fallen[dtype] / fallen['float32']:.2f}")
    taken = Table(
        "step",
        "dtype",
        "seconds",
        "tokens sampled",
        "a second",
        "mismatch",
        "largest",
        "k3",
        title="RLOO steps, in turn",
    )
    for number, pair in enumerate(found["steps"]):
        for dtype, one in pair.items():
            rate = one["sampled"] / one["seconds"]
            off = [
                f"{one[name]:.2g}" if name in one else "-"
                for name in ("mismatch", "mismatch_max", "mismatch_k3")
            ]
            taken.add_row(
                str(number), dtype, f"{one['seconds']:.1f}", f"{one['sampled']:.0f}", f"{rate:.0f}", *off
            )
    ratios = [
        (p["bfloat16"]["sampled"] / p["bfloat16"]["seconds"])
        / (p["float32"]["sampled"] / p["float32"]["seconds"])
        for p in found["steps"]
    ]
    console = Console()
    console.print(
        learnt,
        taken,
        f"bfloat16 takes a token in 1/{median(ratios):.2f} of float32's time (median of {len(ratios)} pairs)",
    )
    content = {**found, "threads": torch.get_num_threads(), "torch": torch.__version__}
    (arguments.results / "precision.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
