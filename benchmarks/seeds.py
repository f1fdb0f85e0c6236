"""Run a configuration with several seeds: held-out success at the start and after each stage, with
intervals, curves and paired tests.

    python benchmarks/seeds.py configs/quickstart.yaml [--seeds 0 1 2] [--runs runs] [key=value ...]

Finished runs are read, not repeated. The program prints a table and writes benchmarks/results/NAME.json with
the curves and, for each step, the metrics of `TRAINING`. CPU seconds are those of the whole process (start,
training and evaluations), and are not known of a run that was stopped and continued. They are stored next to
the run, so that a later call can read them.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from smoke import parse

from agent_peft.rollout.statistics import Comparison, EvaluationReport, paired_test
from agent_peft.runs.reading import RunRecord
from agent_peft.runs.targets import load_run

HERE = Path(__file__).resolve().parent
TRAINING = (
    "stage",
    "success",
    "reward",
    "explained_variance",
    "value_loss",
    "approx_kl",
    "clip_fraction",
    "surprisal",
    "epochs_done",
)


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


def measure(config: Path, seed: int, run: Path, overrides: list[str]) -> Measured:
    before, clock = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "-m", "agent_peft", "train", str(config), f"seed={seed}", f"run_dir={run}"]
    was_there, begun = (run / "cost.json").is_file(), (run / "metrics.jsonl").is_file()
    subprocess.run([*command, *overrides], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if not was_there:
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        steps = [json.loads(line) for line in (run / "timing.jsonl").read_text().splitlines()]
        cost = {
            "cpu_seconds": None if begun else cpu,
            "seconds": None if begun else time.perf_counter() - clock,
            "training_seconds": sum(s["seconds"] for s in steps),
        }
        (run / "cost.json").write_text(json.dumps(cost) + "\n")
    names = ["base", *(f"after_{stage.name}" for stage in load_run(run).stages)]
    found = {name: evaluation.report for name, evaluation in RunRecord(run).evaluations.items()}
    curve = {
        int(name.removeprefix("step_")): report.success.value
        for name, report in found.items()
        if name.startswith("step_")
    }
    reports = {name: found[name] for name in names if name in found}
    written = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [{name: record[name] for name in TRAINING if name in record} for record in written]
    return Measured(
        seed, reports, dict(sorted(curve.items())), Cost(**json.loads((run / "cost.json").read_text())), steps
    )


def gain_of(row: Measured) -> Comparison:
    """What the last stage changed."""
    *_, before, after = row.reports.values()
    return paired_test(before, after)


def show(title: str, rows: list[Measured]) -> Table:
    names = list(max((row.reports for row in rows), key=len))
    table = Table(
        "seed",
        *(n.replace("_", " ") for n in names),
        "last stage's gain",
        "p",
        "CPU s",
        "training s",
        title=title,
    )
    for row in rows:
        rates = [row.reports[n].success if n in row.reports else None for n in names]
        shown = [
            f"{100 * r.value:.1f} ({100 * r.low:.1f} to {100 * r.high:.1f}) of {r.tasks}" if r else ""
            for r in rates
        ]
        gain = gain_of(row)
        table.add_row(
            str(row.seed),
            *shown,
            f"{100 * gain.difference:+.1f} ({100 * gain.low:+.1f} to {100 * gain.high:+.1f})",
            f"{gain.p:.2g}",
            "" if row.cost.cpu_seconds is None else f"{row.cost.cpu_seconds:.0f}",
            f"{row.cost.training_seconds:.0f}",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path, nargs="?")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("overrides", nargs="*")
    small = ["stages.0.steps=2", "stages.1.steps=2", "evaluation.num_tasks=4"]
    quick = {"config": HERE.parent / "configs" / "adder_fast.yaml", "seeds": [0], "overrides": small}
    arguments = parse(parser, **quick)
    if arguments.config is None:
        parser.error("name a configuration")
    name = arguments.config.stem
    rows = [
        measure(arguments.config, seed, arguments.runs / f"{name}-{seed}", arguments.overrides)
        for seed in arguments.seeds
    ]
    Console(width=180).print(show(f"{name}: held-out success in percent (95 %)", rows))
    described = [
        {
            "seed": row.seed,
            "success": {
                n: [r.success.value, r.success.low, r.success.high, r.success.tasks]
                for n, r in row.reports.items()
            },
            "by_skill": {
                n: {skill: rate.value for skill, rate in r.by_skill.items()} for n, r in row.reports.items()
            },
            "gain": vars(gain_of(row)),  # of the last stage
            "curve": row.curve,
            "cost": vars(row.cost),
            "steps": row.steps,
        }
        for row in rows
    ]
    head = json.dumps({"config": name, "overrides": arguments.overrides, "cores": os.cpu_count()})
    lines = ",\n".join(json.dumps(row) for row in described)  # one line per seed
    arguments.results.mkdir(exist_ok=True)
    (arguments.results / f"{name}.json").write_text(f'{head[:-1]}, "rows": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
