"""Run a configuration with several seeds: held-out success at the start and after each stage, with
intervals, curves and paired tests.

    python benchmarks/seeds.py configs/quickstart.yaml [--seeds 0 1 2] [--runs runs] [key=value ...]

Finished runs are read, not repeated. Prints a table and writes the configuration's entry of
benchmarks/results/recipes.json, with the curves and, for each step, the metrics of `TRAINING`. CPU seconds
are those of the whole process (start, training and evaluations), and are not known of a run that was stopped
and continued. They are stored next to the run, so that a later call can read them.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measuring import ROOT, command_line, show, table, write_rows

from agent_peft.rollout.statistics import Comparison, EvaluationReport, paired_test
from agent_peft.runs.reading import RunRecord, read_lines
from agent_peft.runs.targets import run_config

TRAINING = ("stage", "success", "reward", "surprisal", "explained_variance", "value_loss", "approx_kl")
TRAINING += ("clip_fraction", "epochs_done")


@dataclass(frozen=True)
class Cost:
    cpu_seconds: float | None  # None: the run was stopped and continued
    seconds: float | None  # likewise
    training_seconds: float


@dataclass(frozen=True)
class Measured:
    seed: int
    reports: dict[str, EvaluationReport]  # base, after the first stage, after the second …
    curve: dict[int, float]  # steps done -> held-out success
    cost: Cost
    steps: list[dict[str, float | str]]  # for each step, the metrics of `TRAINING` that its stage has


def train(config: Path, run: Path, overrides: Sequence[str]) -> Cost:
    """Train in a process, or continue a run that was stopped. A finished one is only read."""
    file, stopped = run / "cost.json", (run / "metrics.jsonl").is_file()
    if not file.is_file():
        before, clock = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        command = [sys.executable, "-m", "agent_peft", "train", str(config), f"run_dir={run}", *overrides]
        subprocess.run(command, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        times = {"cpu_seconds": cpu, "seconds": time.perf_counter() - clock}
        times = dict.fromkeys(times) if stopped else times
        spent = sum(step["seconds"] for step in read_lines(run / "timing.jsonl"))
        file.write_text(json.dumps({**times, "training_seconds": spent}) + "\n")
    return Cost(**json.loads(file.read_text()))


def measure(config: Path, seed: int, run: Path, overrides: Sequence[str]) -> Measured:
    cost = train(config, run, [f"seed={seed}", *overrides])
    names = ["base", *(f"after_{stage.name}" for stage in run_config(run).stages)]
    found = {name: evaluation.report for name, evaluation in RunRecord(run).evaluations.items()}
    curve = {
        int(name.removeprefix("step_")): report.success.value
        for name, report in found.items()
        if name.startswith("step_")
    }
    reports = {name: found[name] for name in names if name in found}
    steps = [{k: line[k] for k in TRAINING if k in line} for line in read_lines(run / "metrics.jsonl")]
    return Measured(seed, reports, dict(sorted(curve.items())), cost, steps)


def gain_of(row: Measured) -> Comparison:
    """What the last stage changed."""
    *_, before, after = row.reports.values()
    return paired_test(before, after)


def table_of(title: str, rows: list[Measured]) -> object:
    names = list(max((row.reports for row in rows), key=len))
    cells = []
    for row in rows:
        rates = [row.reports[n].success if n in row.reports else None for n in names]
        shown = [f"{rate.percent} of {rate.tasks}" if rate else "" for rate in rates]
        gain, cpu = gain_of(row), row.cost.cpu_seconds
        points = f"{100 * gain.difference:+.1f} ({100 * gain.low:+.1f} to {100 * gain.high:+.1f})"
        times = "" if cpu is None else f"{cpu:.0f}", f"{row.cost.training_seconds:.0f}"
        cells.append((row.seed, *shown, points, f"{gain.p:.2g}", *times))
    columns = "|".join(name.replace("_", " ") for name in names)
    return table(f"seed|{columns}|last stage's gain|p|CPU s|training s", cells, title)


def to_json(row: Measured) -> dict[str, Any]:
    rates = {name: report.success for name, report in row.reports.items()}
    return {
        "seed": row.seed,
        "success": {name: [rate.value, rate.low, rate.high, rate.tasks] for name, rate in rates.items()},
        "by_skill": {
            name: {skill: rate.value for skill, rate in report.by_skill.items()}
            for name, report in row.reports.items()
        },
        "gain": vars(gain_of(row)),  # of the last stage
        "curve": row.curve,
        "cost": vars(row.cost),
        "steps": row.steps,
    }


def main() -> None:
    small = ["stages.0.steps=2", "stages.1.steps=2", "evaluation.num_tasks=4"]
    given = command_line(
        __doc__,
        {"config": Path, "overrides": []},
        quick={"config": ROOT / "configs" / "adder_fast.yaml", "seeds": [0], "overrides": small},
        seeds=[0, 1, 2],
        runs=Path("runs"),
    )
    if given.config is None:
        sys.exit("name a configuration")
    name = given.config.stem
    runs = {seed: given.runs / f"{name}-{seed}" for seed in given.seeds}
    rows = [measure(given.config, seed, run, given.overrides) for seed, run in runs.items()]
    show(table_of(f"{name}: held-out success in percent (95 %)", rows))
    head = {"overrides": given.overrides, "cores": os.cpu_count()}
    write_rows(given.results / "recipes.json", name, head, [to_json(row) for row in rows])


if __name__ == "__main__":
    main()
