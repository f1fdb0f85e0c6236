"""Six skills of DB Bench one after another: LoRA alone, replay in the prompt alone, and both.

    python benchmarks/streams.py [--seeds 0 1 2] [--conditions lora replay both] [--quick]
    [--model smollm2-135m] [--warm-up 8] [--steps 3] [--tasks-per-step 16] [--heldout 6] [--replays 4]
    [--runs runs/streams] [--output FILE] [key=value ...]

All conditions begin with the same few supervised steps over all skills, which teach the format of replies.
Then each skill has ``--steps`` steps of REINFORCE without a baseline, with one attempt at each task. ``lora``
trains the adapter; ``replay`` has a learning rate of 0 and shows the run's latest successes in the prompt;
``both`` does both. After each segment the policy is measured on ``--heldout`` tasks of each skill about other
entities and columns. The tasks are plain (``generate.plain``), so that a small model solves some of each
skill.

Finished runs are read, not repeated; a stopped one continues. The program prints the matrix of each run
and a table of the conditions, and writes benchmarks/results/streams.json. CPU seconds are those of the whole
process (start, training and evaluations). ``--quick`` takes a random model of nothing and one step of each
segment, to show that all of it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import string
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from smoke import RESULTS, parse

from agent_peft.configuration.yaml12 import dump
from agent_peft.rollout.skill_matrix import MEASURES, SkillMatrix
from agent_peft.rollout.statistics import Mean, mean_over_tasks
from agent_peft.runs.evaluations import skill_matrices
from agent_peft.runs.reading import RunRecord
from agent_peft.runs.targets import load_run

SKILLS = ("insert", "update", "delete", "where_single_condition", "order_by_single_column", "limit_only")
CONDITIONS = ("lora", "replay", "both")
TINY = {
    "kind": "scratch",
    "alphabet": string.printable,
    "device": "cpu",
    "architecture": {
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 4096,
    },
    "lora": {"rank": 2},
}


@dataclass(frozen=True)
class Sizes:
    """How much of everything."""

    model: str
    warm_up: int  # supervised steps of 8 demonstrations
    steps: int  # of each skill
    tasks_per_step: int
    heldout: int  # tasks of each skill
    replays: int
    max_new_tokens: int

    @classmethod
    def quick(cls) -> Sizes:
        return cls("", 1, 1, 2, 1, 2, 8)


@dataclass(frozen=True)
class Measured:
    """One run. Tokens are means over episodes: what the policy read, its prompts and observations, and what
    it wrote.
    """

    condition: str
    seed: int
    matrix: SkillMatrix
    training: Mapping[str, float]
    evaluation: Mapping[str, float]
    cost: Mapping[str, float]


def configuration(condition: str, seed: int, sizes: Sizes, run: Path) -> dict[str, Any]:
    """The run of one condition."""
    quick = not sizes.model
    tasks = 8 * sizes.warm_up + len(SKILLS) * sizes.steps * sizes.tasks_per_step

    def environment(number: int, split: str, seed: int) -> dict[str, Any]:
        of = {"num_tasks": number, "seed": seed, "split": split, "skills": list(SKILLS), "combined": 0}
        of |= {"plain": True, "max_answer_chars": 120}  # of varied tasks a small model solves too few
        return {"kind": "db_bench", "generate": of, "max_turns": 3}

    return {
        "run_dir": str(run),
        "seed": seed,
        "policy": TINY if quick else {"kind": "pretrained", "model": sizes.model, "lora": {"rank": 16}},
        "environment": environment(max(tasks, len(SKILLS)), "train", seed),
        "evaluation": {
            "environment": environment(sizes.heldout * len(SKILLS), "words", 1000),
            "at": ["segments"],
        },
        "engine": {"rows": 32},
        "sampling": {
            "max_new_tokens": sizes.max_new_tokens,
            "max_tokens": 4096 if quick else 768 + 512 * sizes.replays,  # replays may take half
            "stop": ["\n\n", "```\n"],
        },
        "stages": [
            {
                "algorithm": "sft",
                "steps": sizes.warm_up,
                "tasks_per_step": 8,
                "optimizer": {"learning_rate": 1e-3, "warmup_steps": 2},
            },
            {
                "algorithm": {"kind": "reinforce", "baseline_momentum": None},
                "name": "stream",
                "task_order": {"kind": "by_skill", "steps": sizes.steps, "skills": list(SKILLS)},
                "epochs": 1,
                "tasks_per_step": sizes.tasks_per_step,
                "group_size": 1,
                "replay_in_prompt": 0 if condition == "lora" else sizes.replays,
                "rewards": {"incorrect": 0.0, "turn_limit": -0.1, "invalid_action": -0.05},
                "optimizer": {"learning_rate": 0.0 if condition == "replay" else 3e-4},
            },
        ],
    }


def measure(condition: str, seed: int, sizes: Sizes, run: Path, overrides: Sequence[str]) -> Measured:
    """Train one run in its own process, or read it."""
    run.parent.mkdir(parents=True, exist_ok=True)
    file = run.with_suffix(".yaml")
    file.write_text(dump(configuration(condition, seed, sizes, run)))
    before, clock = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "-m", "agent_peft", "train", str(file), *overrides]
    if not (run / "cost.json").is_file():
        subprocess.run(command, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        cost = {"cpu_seconds": cpu, "seconds": time.perf_counter() - clock}
        (run / "cost.json").write_text(json.dumps(cost) + "\n")
    warm_up = load_run(run).stages[0].steps
    reports = [evaluation.report for evaluation in RunRecord(run).evaluations.values()]
    measured = [record for path in (run / "evaluations").glob("*.jsonl") for record in _lines(path)]
    acted = [
        record
        for path in (run / "trajectories").glob("*.jsonl")
        for record in _lines(path)
        if record["step"] >= warm_up
    ]
    skills = {record["task"]: record["skills"][0] for record in measured}
    timing = [line for line in _lines(run / "timing.jsonl") if line["step"] >= warm_up]
    cost = json.loads((run / "cost.json").read_text())
    cost["seconds_of_a_step"] = sum(line["seconds"] for line in timing) / len(timing)
    return Measured(
        condition,
        seed,
        skill_matrices(load_run(run), reports, skills)["stream"],
        _tokens(acted),
        _tokens(measured),
        cost,
    )


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _tokens(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    written = sum(record["num_action_tokens"] for record in records) / len(records)
    return {
        "read": sum(record["num_tokens"] for record in records) / len(records) - written,
        "written": written,
    }


def table_of(rows: Sequence[Measured]) -> Table:
    """A column for each condition: means over seeds, with Student's 95 % interval where there are several."""
    table = Table(title="one skill after another: means over seeds (95 %)", title_justify="left")
    conditions = list(dict.fromkeys(row.condition for row in rows))
    for name in ("", *conditions):
        table.add_column(name, justify="right" if name else "left")
    table.add_row("seeds", *(str(sum(row.condition == name for row in rows)) for name in conditions))

    def add(name: str, of: Any) -> None:
        means = (mean_over_tasks([of(row) for row in rows if row.condition == c]) for c in conditions)
        table.add_row(name, *(_text(mean) for mean in means))

    for name in MEASURES:
        add(name, lambda row, name=name: row.matrix.measures()[name].value)
    add("success before", lambda row: _success(row.matrix, 0))
    for part in ("training", "evaluation"):
        for what in ("read", "written"):
            name = f"tokens {what}, an episode of {part}"
            add(name, lambda row, part=part, what=what: getattr(row, part)[what])
    add("seconds of a step", lambda row: row.cost["seconds_of_a_step"])
    add("CPU seconds in all", lambda row: row.cost["cpu_seconds"])
    return table


def _text(mean: Mean) -> str:
    def short(value: float) -> str:
        return f"{value:.1f}" if abs(mean.value) > 5 else f"{value:.3f}"

    if mean.low is None or mean.high is None:
        return short(mean.value)
    return f"{short(mean.value)} ({short(mean.low)}…{short(mean.high)})"


def _success(matrix: SkillMatrix, row: int) -> float:
    return sum(matrix.rate(row, skill).value for skill in matrix.tasks) / len(matrix.tasks)


def to_json(row: Measured) -> dict[str, Any]:
    matrix = row.matrix
    return {
        "condition": row.condition,
        "seed": row.seed,
        "segments": list(matrix.segments),
        "tasks": {skill: len(tasks) for skill, tasks in matrix.tasks.items()},
        "matrix": [
            {skill: round(matrix.rate(place, skill).value, 4) for skill in matrix.tasks}
            for place in range(len(matrix.rows))
        ],
        "measures": {name: vars(mean) for name, mean in matrix.measures().items()},
        "tokens": {"training": row.training, "evaluation": row.evaluation},
        "cost": row.cost,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--conditions", nargs="+", choices=CONDITIONS, default=CONDITIONS)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--warm-up", type=int, default=8, help="supervised steps of 8 demonstrations")
    parser.add_argument("--steps", type=int, default=3, help="of each skill")
    parser.add_argument("--tasks-per-step", type=int, default=16)
    parser.add_argument("--heldout", type=int, default=6, help="tasks of each skill")
    parser.add_argument("--replays", type=int, default=4)
    parser.add_argument("--runs", type=Path, default=Path("runs/streams"))
    parser.add_argument("--output", type=Path, default=RESULTS / "streams.json")
    parser.add_argument("overrides", nargs="*")
    given = parse(parser, arguments, seeds=[0], overrides=["threads=1"])
    sizes = Sizes(
        given.model,
        given.warm_up,
        given.steps,
        given.tasks_per_step,
        given.heldout,
        given.replays,
        max_new_tokens=96,
    )
    console, rows = Console(width=180), list[Measured]()
    for seed in given.seeds:
        for condition in given.conditions:
            run = given.runs / f"{condition}-{seed}"
            rows.append(
                measure(condition, seed, Sizes.quick() if given.quick else sizes, run, given.overrides)
            )
            console.print(f"{condition}, seed {seed}", rows[-1].matrix.table())
            content = {
                "cores": os.cpu_count(),
                "sizes": vars(Sizes.quick() if given.quick else sizes),
                "overrides": given.overrides,
                "rows": [to_json(row) for row in rows],
            }
            given.output.parent.mkdir(parents=True, exist_ok=True)
            given.output.write_text(json.dumps(content, indent=1) + "\n")
    console.print(table_of(rows))


if __name__ == "__main__":
    main()
