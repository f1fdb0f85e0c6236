"""SFT and then GRPO with ``RLTrainingTool``, the second from the folder of the first: accuracy of each.

    python benchmarks/training_tool.py [--seeds 0 1 2] [--model smollm2-135m] [--runs runs/training_tool]
    [--tasks words] [--gsm8k FOLDER] [--output FILE]

The tasks are sums of one-digit numbers in words, of the program's own making: rows of questions and answers
in one file to learn from, and 200 others to measure on. No pair of numbers of the second file is in the
first. With ``--tasks gsm8k`` and ``--gsm8k``, the folder that ``agent-peft download gsm8k`` writes, the same
flow runs on GSM8K, and is measured on 100 problems of its test split.

Each model is measured by the tool's ``evaluate``, greedily. Prints a table with 95 % intervals, and writes
benchmarks/results/training_tool.json, where the rows of other tasks and seeds stay.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import time
from collections.abc import Sequence
from contextlib import chdir
from itertools import product
from pathlib import Path
from typing import Any

from measuring import RESULTS
from rich.console import Console
from rich.table import Table

from agent_peft import RLTrainingTool
from agent_peft.seeding import derive

DIGITS = ("two", "three", "four", "five", "six", "seven", "eight", "nine")
NAMES = ("Mia", "Ben", "Aisha", "Wei", "Olga", "Juan", "Kofi", "Lena")
THINGS = ("apples", "books", "coins", "stamps", "shells", "cards", "eggs", "keys")
SAYINGS = (
    "{name} has {a} {thing} and finds {b} more. How many {thing} has {name} now?",
    "There are {a} {thing} on the table and {b} in the box. How many {thing} are there?",
    "{name} buys {a} {thing} on Monday and {b} on Friday. How many {thing} is that?",
    "Of the {thing}, {a} are red and {b} are blue; no others are there. How many are there in all?",
)
HELD_OUT = {"words": 200, "gsm8k": 100}  # tasks
SETTINGS: dict[str, dict[str, Any]] = {
    "words": {"max_new_tokens": 16, "batch_size": 8},
    "gsm8k": {"max_new_tokens": 128, "batch_size": 8},
}
SFT: dict[str, dict[str, Any]] = {"words": {"max_samples": 64}, "gsm8k": {"max_samples": 96}}
GRPO: dict[str, dict[str, Any]] = {"words": {"max_samples": 160}, "gsm8k": {"max_samples": 32}}
MEASURED: dict[str, dict[str, Any]] = {
    "words": {"dataset": "sums_heldout.jsonl"},
    "gsm8k": {"dataset": "gsm8k", "split": "test"},
}
DATASETS = {"words": "sums.jsonl", "gsm8k": "gsm8k"}


def write_sums(folder: Path) -> None:
    """Write both files. A quarter of the pairs of numbers is held out, in either order."""
    draw = random.Random(derive(0, "sums in words"))
    pairs = [(a, b) for a in range(2, 10) for b in range(a, 10)]
    draw.shuffle(pairs)
    cut = len(pairs) // 4
    for name, own, number in (("sums_heldout", pairs[:cut], HELD_OUT["words"]), ("sums", pairs[cut:], 400)):
        rows = dict[str, str]()
        while len(rows) < number:
            a, b = draw.sample(draw.choice(own), 2)
            words = {"name": draw.choice(NAMES), "thing": draw.choice(THINGS)}
            question = draw.choice(SAYINGS).format(a=DIGITS[a - 2], b=DIGITS[b - 2], **words)
            rows[question] = f"{a} + {b} = {a + b}"
        lines = (
            json.dumps({"question": question, "answer": solution.split()[-1], "solution": solution})
            for question, solution in rows.items()
        )
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def ask(**parameters: Any) -> dict[str, Any]:
    """What the tool answers.

    Raises:
        RuntimeError: it answers with an error.
    """
    answer: dict[str, Any] = json.loads(RLTrainingTool().run(parameters))
    if answer["status"] != "success":
        raise RuntimeError(answer["message"])
    return answer


def flow(task: str, model: str, seed: int) -> dict[str, Any]:
    """Train in the current folder: base, SFT, GRPO, each measured."""
    begun = time.process_time()
    common = {**SETTINGS[task], "dataset": DATASETS[task], "seed": seed, "eval_samples": 0}
    folders = {"sft": f"{task}-sft-{seed}", "grpo": f"{task}-grpo-{seed}"}
    ask(algorithm="sft", model_name=model, output_dir=folders["sft"], **common, **SFT[task])
    ask(algorithm="grpo", model_name=folders["sft"], output_dir=folders["grpo"], **common, **GRPO[task])
    measured = {}
    for name, place in (("base", model), *folders.items()):
        limit = {"max_new_tokens": SETTINGS[task]["max_new_tokens"], "max_samples": HELD_OUT[task]}
        found = ask(action="evaluate", model_name=place, **limit, **MEASURED[task])
        measured[name] = {key: found[key] for key in ("accuracy", "low", "high", "tasks")}
    return {"task": task, "seed": seed, "measured": measured, "cpu_seconds": time.process_time() - begun}


def table_of(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(
        *("task", "seed", "base", "after SFT", "after GRPO", "CPU s"), title="accuracy in percent (95 %)"
    )
    for row in rows:
        shown = []
        for found in row["measured"].values():
            rate, low, high = (100 * found[key] for key in ("accuracy", "low", "high"))
            shown.append(f"{rate:.1f} ({low:.0f} to {high:.0f}) of {found['tasks']}")
        table.add_row(row["task"], str(row["seed"]), *shown, f"{row['cpu_seconds']:.0f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--runs", type=Path, default=Path("runs/training_tool"))
    parser.add_argument("--tasks", nargs="+", choices=list(DATASETS), default=["words"])
    parser.add_argument("--gsm8k", type=Path, help="the folder with train.jsonl and test.jsonl")
    parser.add_argument("--output", type=Path, default=RESULTS / "training_tool.json")
    given = parser.parse_args()
    given.runs.mkdir(parents=True, exist_ok=True)
    if given.gsm8k is not None:
        shutil.copytree(given.gsm8k, given.runs / "data" / "gsm8k", dirs_exist_ok=True)
    elif "gsm8k" in given.tasks:
        parser.error("--tasks gsm8k needs --gsm8k FOLDER")
    output = given.output.absolute()
    rows = json.loads(output.read_text())["rows"] if output.is_file() else []
    with chdir(given.runs):
        write_sums(Path())
        for task, seed in product(given.tasks, given.seeds):
            rows = [row for row in rows if (row["task"], row["seed"]) != (task, seed)]
            rows.append(flow(task, given.model, seed))
            rows.sort(key=lambda row: (list(DATASETS).index(row["task"]), row["seed"]))
            content = {"cores": os.cpu_count(), "model": given.model, "rows": rows}
            output.write_text(json.dumps(content, indent=1) + "\n")
    Console(width=140).print(table_of(rows))


if __name__ == "__main__":
    main()
