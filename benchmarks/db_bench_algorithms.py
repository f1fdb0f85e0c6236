"""Algorithms on DB Bench with SmolLM2-135M, after the same demonstrations.

    python benchmarks/db_bench_algorithms.py [--seeds 0 1 2] [--kinds rloo grpo …] [--runs runs/algorithms]
    [key=value ...]

db_bench_algorithms.yaml has tasks, demonstrations and keys. For each seed, one run learns from the
demonstrations. Each algorithm then continues from its adapter with as many episodes as the others: six steps
of twelve tasks with eight attempts. reinforce does not compare attempts, so it has 96 tasks with one each.
ppo updates four times a step, so it has a quarter of the learning rate. dpo and kto take six rounds: a step
that only acts, and an update from its episodes. Each of these updates begins a new Adam, whose first step is
its largest, so they have half the rate. dpo has 48 tasks with two attempts in a round. kto has 96 tasks with
one; about one reply in four succeeds, so a success weighs four times as much as a failure.

Held-out success is of 200 tasks, greedy. Finished runs are read, not repeated; a stopped one continues.
Prints a table, and writes benchmarks/results/db_bench_algorithms.json, where the rows of other seeds and
kinds stay. CPU seconds are those of the whole process, with one evaluation.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measuring import command_line, show, table, tiny_model, write_rows
from seeds import measure

from agent_peft.configuration.yaml12 import dump, parse, plain
from agent_peft.rollout.intervals import mean_over_tasks
from agent_peft.rollout.statistics import Comparison, EvaluationReport, paired_test
from agent_peft.runs.reading import read_report

CONFIG = Path(__file__).with_suffix(".yaml")
KINDS = ("reinforce", "rloo", "grpo", "dapo", "ppo", "dpo", "kto", "rloo_by_turn")
STEPS = 6
NAME = "db_bench"  # of the experiment in the file


@dataclass(frozen=True)
class Trained:
    """A run that was measured once, at its end."""

    report: EvaluationReport
    success: list[float]  # of the episodes of each step that acted
    cpu_seconds: float | None


def stages_of_the_file() -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = plain(parse(CONFIG.read_text(), str(CONFIG)))["stages"]
    return content


def stages_of(kind: str, run: Path, steps: int = STEPS) -> list[dict[str, Any]]:
    """The stages of an algorithm after the demonstrations, in the run directory ``run``."""
    _, rloo = stages_of_the_file()
    if kind == "ppo":
        rloo["optimizer"] = rloo["optimizer"] | {"learning_rate": rloo["optimizer"]["learning_rate"] / 4}
    if kind == "reinforce":
        rloo |= {"tasks_per_step": rloo["tasks_per_step"] * rloo["group_size"], "group_size": 1}
    if kind not in ("dpo", "kto"):
        algorithm: Any = {"kind": "rloo", "turn_discount": 1.0} if kind == "rloo_by_turn" else kind
        return [{**rloo, "algorithm": algorithm, "steps": steps}]
    kto = kind == "kto"
    attempts = 1 if kto else 2
    wide = {"tasks_per_step": rloo["tasks_per_step"] * rloo["group_size"] // attempts, "group_size": attempts}
    act = {**rloo, **wide, "algorithm": "reinforce", "steps": 1, "optimizer": {"learning_rate": 0.0}}
    learn = {
        "algorithm": {"kind": kind, "desirable_weight": 4.0} if kto else kind,
        "steps": 1,
        "tasks_per_step": wide["tasks_per_step"] // attempts,
        "rewards": rloo["rewards"],
        "optimizer": {"learning_rate": rloo["optimizer"]["learning_rate"] / 2},
    }
    return [
        stage
        for number in range(1, steps + 1)
        for stage in (
            {**act, "name": f"act_{number}"},
            {
                **learn,
                "name": f"learn_{number}",
                "episodes_of": {"run": str(run), "stage": f"act_{number}"},
            },
        )
    ]


def train(
    run: Path, seed: int, stages: Sequence[dict[str, Any]], overrides: list[str], **keys: Any
) -> Trained:
    steps = sum(stage["steps"] for stage in stages)
    content = {"extends": str(CONFIG), "evaluation": {"at": [], "every": steps}, "stages": stages, **keys}
    run.parent.mkdir(parents=True, exist_ok=True)
    file = run.with_suffix(".yaml")
    file.write_text(dump(content))
    measured = measure(file, seed, run, overrides)
    (report,) = (run / "evaluations").glob("*.json")
    acted = [float(step["success"]) for step in measured.steps if "success" in step]
    return Trained(read_report(report), acted, measured.cost.cpu_seconds)


def to_json(kind: str, seed: int, before: Trained, after: Trained) -> dict[str, Any]:
    gain = paired_test(before.report, after.report)
    return {
        "kind": kind,
        "seed": seed,
        "tasks": after.report.success.tasks,
        "before": before.report.success.value,
        "after": after.report.success.value,
        "gain": vars(gain),
        "by_skill": {skill: rate.value for skill, rate in after.report.by_skill.items()},
        "own_success": after.success,
        "cpu_seconds": after.cpu_seconds,
    }


def table_of(rows: Sequence[dict[str, Any]]) -> object:
    """A line for each algorithm, with the mean of its seeds' gains and Student's 95 % interval."""
    before = {row["seed"]: row["before"] for row in rows}
    cells = [("(sft)", ", ".join(f"{100 * share:.1f}" for _, share in sorted(before.items())))]
    for kind in dict.fromkeys(row["kind"] for row in rows):
        own = sorted((row for row in rows if row["kind"] == kind), key=lambda row: row["seed"])
        gains = [Comparison(**row["gain"]) for row in own]
        mean = mean_over_tasks([100 * gain.difference for gain in gains])
        interval = "" if mean.low is None else f" ({mean.low:+.0f} to {mean.high:+.0f})"
        ends = [sum(row["own_success"][place] for row in own) / len(own) for place in (0, -1)]
        after = ", ".join(f"{100 * row['after']:.1f}" for row in own)
        each = ", ".join(f"{100 * gain.difference:+.1f} ({gain.p:.1g})" for gain in gains)
        cpu = ", ".join("?" if row["cpu_seconds"] is None else f"{row['cpu_seconds']:.0f}" for row in own)
        first, last = (f"{100 * end:.0f}" for end in ends)
        cells.append((kind, after, each, f"{mean.value:+.1f}{interval}", f"{first}, {last}", cpu))
    columns = "algorithm|after, each seed|gain, each seed (p)|mean gain (95 %)|own, first and last|CPU s"
    return table(columns, cells, "held-out success in percent after the same demonstrations")


def main() -> None:
    small = [f"{part}generate.num_tasks=4" for part in ("environment.", "evaluation.environment.")]
    small += ["sampling.max_new_tokens=4", "sampling.max_tokens=8192", "threads=1"]
    given = command_line(
        __doc__,
        {"overrides": []},
        quick={"seeds": [0], "kinds": ["rloo", "kto"], "overrides": [*small, "stages.0.tasks_per_step=4"]},
        seeds=[0, 1, 2],
        kinds={"nargs": "+", "choices": KINDS, "default": KINDS},
        runs=Path("runs/algorithms"),
    )
    demonstrations, _ = stages_of_the_file()
    start: dict[str, Any] = {}
    if given.quick:
        start["policy"] = {"model": tiny_model(given.results)}
        demonstrations["steps"] = 1
    file = given.results / "db_bench_algorithms.json"
    rows = json.loads(file.read_text())[NAME]["rows"] if file.is_file() else []
    for seed in given.seeds:
        taught = given.runs / f"sft-{seed}"
        before = train(taught, seed, [demonstrations], given.overrides, **start)
        for kind in given.kinds:
            run, policy = given.runs / f"{kind}-{seed}", {"model": str(taught)}
            stages = stages_of(kind, run, 1 if given.quick else STEPS)
            after = train(run, seed, stages, given.overrides, policy=policy)
            rows = [row for row in rows if (row["kind"], row["seed"]) != (kind, seed)]
            rows.append(to_json(kind, seed, before, after))
            rows.sort(key=lambda row: (KINDS.index(row["kind"]), row["seed"]))
            write_rows(file, NAME, {"cores": os.cpu_count(), "overrides": given.overrides}, rows)
    show(table_of(rows))


if __name__ == "__main__":
    main()
