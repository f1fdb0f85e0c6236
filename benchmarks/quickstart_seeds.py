"""The quickstart over several seeds: held-out success before SFT, after SFT and after RL, with intervals and paired tests.

    python benchmarks/quickstart_seeds.py [--seeds 0 1 2] [--runs runs] [key=value …]

Runs that are finished already are read, not repeated. Prints a table and writes benchmarks/results/quickstart_seeds.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from agent_peft.rollout.evaluation import EvaluationReport, paired_test

HERE = Path(__file__).resolve().parent
NAMES = ("base", "after_sft", "after_rloo")


def measure(seed: int, runs: Path, overrides: list[str]) -> dict[str, object]:
    run = runs / f"quickstart-{seed}"
    command = [sys.executable, "-m", "agent_peft", "train", str(HERE.parent / "configs/quickstart.yaml"), f"seed={seed}", f"run_dir={run}"]
    subprocess.run([*command, *overrides], check=True)
    found = [run / "evaluations" / f"{name}.json" for name in NAMES]
    reports = {path.stem: EvaluationReport.from_json(json.loads(path.read_text())) for path in found if path.is_file()}
    steps = [json.loads(line) for line in (run / "timing.jsonl").read_text().splitlines()]
    gain = paired_test(reports["after_sft"], reports["after_rloo"])
    return {
        "seed": seed,
        "success": {name: [r.success.value, r.success.low, r.success.high, r.success.tasks] for name, r in reports.items()},
        "by_skill": {name: {skill: rate.value for skill, rate in r.by_skill.items()} for name, r in reports.items()},
        "rl_minus_sft": [gain.difference, gain.low, gain.high, gain.p],
        "training_seconds": sum(step["seconds"] for step in steps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    rows = [measure(seed, arguments.runs, arguments.overrides) for seed in arguments.seeds]
    table = Table("seed", *(name.replace("_", " ") for name in NAMES), "RL - SFT (95 %)", "p", "training, s", title="held-out success")
    for row in rows:
        cells = [row["success"].get(name) for name in NAMES]  # type: ignore[attr-defined]
        difference, low, high, p = row["rl_minus_sft"]  # type: ignore[misc]
        shown = ["-" if c is None else f"{100 * c[0]:.1f} ({100 * c[1]:.1f} to {100 * c[2]:.1f}) of {c[3]}" for c in cells]
        seconds = row["training_seconds"]
        table.add_row(
            str(row["seed"]), *shown, f"{100 * difference:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})", f"{p:.2g}", f"{seconds:.0f}"
        )
    Console(width=160).print(table)
    output = HERE / "results" / "quickstart_seeds.json"
    output.parent.mkdir(exist_ok=True)
    output.write_text(json.dumps({"machine": platform.processor() or platform.machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
