"""Write the trajectories of a long run, find one, and read all of them: bytes and seconds.

    python benchmarks/trajectories.py [--steps 780] [--episodes 64] [--step-seconds 21.9] [--folder DIR]

An episode has three turns and 400 tokens: a prompt of 200, actions of 40 and observations of 40, with text
of four characters per token. Each step is written as a run writes it: the arrays (tokens, mask,
log-probabilities of sampler and trainer, advantages), then the lines, each synced to the disk.
`--step-seconds` is the time of a whole step of training; the default is the quickstart's mean, 22 steps in
481 s on two cores (RESULTS.md). `show` runs in a process of its own, as a user starts it, for an episode of
the middle step; `--help` is the floor of any command. The program prints a table and writes
benchmarks/results/trajectories.json.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measuring import seconds, write
from rich.console import Console
from rich.table import Table

from agent_peft.configuration.disk import step_bytes
from agent_peft.runs.reading import load_run
from agent_peft.runs.trajectories import write_trajectories
from agent_peft.seeding import derive, generator
from agent_peft.training.token_values import TokenValues
from agent_peft.types import Group, Message, Outcome, Task, Trajectory, Turn

GROUP_SIZE, TURNS, PROMPT, REPLY = 8, 3, 200, 40
TOKENS = PROMPT + (2 * TURNS - 1) * REPLY
CHARACTERS = 4  # per token
WAYS = 8  # different steps, written in turn


def episode(task: Task, seed: int) -> Trajectory:
    draw = generator(0, "episode", seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(49_152) for _ in range(count))

    def text(count: int) -> str:
        return "".join(draw.choices("abcdefghijklmnopqrstuvwxyz    '\n", k=CHARACTERS * count))

    turns, messages = [], []
    for turn in range(TURNS):
        observed = REPLY if turn else PROMPT
        logprobs = torch.rand(REPLY, generator=torch.Generator().manual_seed(seed % 2**63)).log()
        turns.append(Turn(tokens(observed), tokens(REPLY), tuple(logprobs.tolist())))
        messages += [Message("user", text(observed)), Message("assistant", text(REPLY))]
    terms = {"outcome": -0.1, "invalid_action": -0.05}
    return Trajectory(
        task,
        tuple(turns),
        tuple(messages),
        Outcome.INCORRECT,
        rewards=(-0.05, 0.0, -0.1),
        reward_terms=terms,
        seed=seed,
    )


def groups_of(way: int, episodes: int) -> list[Group]:
    tasks = [Task(f"task-{way}-{number}", ("insert",)) for number in range(episodes // GROUP_SIZE)]
    return [
        Group(task, [episode(task, derive(way, task.id, n)) for n in range(GROUP_SIZE)]) for task in tasks
    ]


def command(rounds: int, *arguments: str) -> dict[str, float]:
    """Median seconds of a command in a process of its own, and of the CPU."""
    program = [sys.executable, "-m", "agent_peft", *arguments]
    took, cpu = [], []
    for _ in range(rounds):
        before = os.times()
        took.append(seconds(lambda: subprocess.run(program, check=True, capture_output=True)))
        after = os.times()
        cpu.append(
            after.children_user + after.children_system - before.children_user - before.children_system
        )
    return {"seconds": statistics.median(took), "cpu_seconds": statistics.median(cpu)}


def both(times: dict[str, float]) -> str:
    return f"{times['seconds']:.2f} s ({times['cpu_seconds']:.2f} s of a CPU)"


def measure(folder: Path, steps: int, episodes: int, rounds: int) -> dict[str, Any]:
    ways = [groups_of(way, episodes) for way in range(WAYS)]
    values = TokenValues(*torch.randn(2, episodes * TOKENS, generator=torch.Generator().manual_seed(0)))
    trajectories = folder / "trajectories"

    def write_step(step: int) -> None:
        write_trajectories(trajectories, step, "grpo", ways[step % WAYS], values=values)

    took = [seconds(partial(write_step, step)) for step in range(steps)]
    (folder / "config.yaml").write_text("{}\n")
    sizes = {
        suffix: sum(path.stat().st_size for path in trajectories.glob(f"*.{suffix}"))
        for suffix in ("jsonl", "safetensors")
    }
    middle = steps // 2
    find = ["show", str(folder), "--step", str(middle), "--attempt", "5"]
    find += ["--task", ways[middle % WAYS][-1].task.id]
    run = load_run(folder)
    return {
        "steps": steps,
        "trajectories": steps * episodes,
        "tokens_per_trajectory": TOKENS,
        "bytes": sizes,
        "expected_bytes": steps * step_bytes(episodes, TOKENS),
        "write_seconds": {
            "median": statistics.median(took),
            "p95": sorted(took)[int(0.95 * steps)],
            "max": max(took),
        },
        "show_one": command(rounds, *find),
        "show_newest": command(rounds, "show", str(folder)),
        "help": command(rounds, "--help"),
        "read_lines_seconds": seconds(lambda: [e.reward for e in run.trajectories]),
        "read_arrays_seconds": seconds(lambda: [e.tokens.sum() for e in run.trajectories]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=780)
    parser.add_argument("--episodes", type=int, default=64, help="of a step")
    parser.add_argument("--step-seconds", type=float, default=21.9, help="of a whole step of training")
    parser.add_argument("--rounds", type=int, default=5, help="of each command")
    parser.add_argument("--folder", type=Path, help="where the files are written to, and deleted again")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as temporary:
        result = measure(Path(temporary), arguments.steps, arguments.episodes, arguments.rounds)
    count, times = result["trajectories"], result["write_seconds"]
    result |= {
        "step_seconds": arguments.step_seconds,
        "share": times["median"] / arguments.step_seconds,
        "bytes_per_trajectory": {name: size / count for name, size in result["bytes"].items()},
    }
    table = Table(
        title=f"{count:,} trajectories of {TOKENS} tokens, {arguments.steps} steps", show_header=False
    )
    for name, size in result["bytes"].items():
        table.add_row(f"{name}", f"{size / 1e6:.1f} MB, {size / count:,.0f} bytes a trajectory")
    table.add_row("expected by explain", f"{result['expected_bytes'] / 1e6:.1f} MB")
    table.add_row(
        "writing a step", f"{times['median']:.4f} s (p95 {times['p95']:.4f}, largest {times['max']:.4f})"
    )
    table.add_row(f"share of a step of {arguments.step_seconds} s", f"{result['share']:.3%}")
    table.add_row("show one of the middle step", both(result["show_one"]))
    table.add_row("show the newest step's list", both(result["show_newest"]))
    table.add_row("--help", both(result["help"]))
    table.add_row("load_run, all lines", f"{result['read_lines_seconds']:.1f} s")
    table.add_row("load_run, all tokens", f"{result['read_arrays_seconds']:.1f} s")
    Console(width=110).print(table)
    write("trajectories", result)


if __name__ == "__main__":
    main()
