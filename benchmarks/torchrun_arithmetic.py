"""Compare two ranks with one on this machine's CPU, with the adder's REINFORCE from random weights and
replies of maximum length.

    python benchmarks/torchrun_arithmetic.py [--steps 6] [--rounds 2] [key=value ...]

The ways alternate for ``--rounds`` rounds, in separate processes. The program prints a table and writes
benchmarks/results/torchrun_arithmetic.json. A step's seconds are those of timing.jsonl: rollout, update and
writing, without the start. The first step of a run is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from agent_peft.configuration.yaml12 import dump
from agent_peft.environments.arithmetic import ALPHABET

HERE = Path(__file__).resolve().parent
WAYS = {"1 rank, 1 thread": (1, 1), "2 ranks, 1 thread each": (2, 1), "1 rank, 2 threads": (1, 2)}
CONFIG = {
    "policy": {
        "kind": "scratch",
        "alphabet": ALPHABET,
        "device": "cpu",
        "architecture": {
            "model_type": "llama",
            "hidden_size": 256,
            "intermediate_size": 1024,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "max_position_embeddings": 64,
        },
    },
    "environment": {"kind": "arithmetic", "digits": 3, "num_tasks": 2000},
    "engine": {"rows": 128},
    "algorithm": "reinforce",
    "tasks_per_step": 32,
    "group_size": 8,
    "sampling": {"max_new_tokens": 5},
    "optimizer": {"learning_rate": 1e-4},
    "microbatch_tokens": 4096,
}


def seconds(ranks: int, threads: int, steps: int, overrides: list[str]) -> list[float]:
    """Return the seconds of each step of one run, except the first."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        file = Path(folder) / "config.yaml"
        file.write_text(
            dump(
                {
                    **CONFIG,
                    "run_dir": str(run),
                    "threads": threads,
                    "steps": steps,
                    "checkpoint": {"every": steps},
                }
            )
        )
        torchrun = (
            ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
        )
        command = [sys.executable, *torchrun, "-m", "agent_peft", "train", str(file), *overrides]
        done = subprocess.run(
            command, env={**os.environ, "OMP_NUM_THREADS": str(threads)}, capture_output=True, text=True
        )
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        # the last step also writes the checkpoint
        return [json.loads(line)["seconds"] for line in (run / "timing.jsonl").read_text().splitlines()][1:-1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    if arguments.steps < 3:
        parser.error("--steps must be at least 3: the first and the last are not timed")
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(arguments.rounds):
        for way, (ranks, threads) in WAYS.items():
            found[way] += seconds(ranks, threads, arguments.steps, arguments.overrides)
    medians = {way: statistics.median(each) for way, each in found.items()}
    one = next(iter(medians.values()))
    table = Table(
        "",
        "median, s",
        "fastest",
        "slowest",
        "times as fast",
        title="seconds of a step of REINFORCE on 3-digit addition",
    )
    for way, each in found.items():
        table.add_row(
            way, f"{medians[way]:.2f}", f"{min(each):.2f}", f"{max(each):.2f}", f"{one / medians[way]:.2f}"
        )
    Console(width=120).print(table)
    content = {
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "overrides": arguments.overrides,
        "rows": [
            {"way": way, "median": medians[way], "speedup": one / medians[way], "seconds": each}
            for way, each in found.items()
        ],
    }
    output = HERE / "results" / "torchrun_arithmetic.json"
    output.parent.mkdir(exist_ok=True)
    output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
