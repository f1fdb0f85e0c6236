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

import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from measuring import RESULTS, TINY, command_line, show, table, write
from seeds import train

from agent_peft.configuration.yaml12 import dump
from agent_peft.rollout.intervals import Mean, mean_over_tasks
from agent_peft.rollout.skill_matrix import MEASURES, SkillMatrix
from agent_peft.runs.evaluations import skill_matrices
from agent_peft.runs.reading import RunRecord, read_lines
from agent_peft.runs.targets import run_config

SKILLS = ("insert", "update", "delete", "where_single_condition", "order_by_single_column", "limit_only")
CONDITIONS = ("lora", "replay", "both")


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
    tiny = {"kind": "scratch", "alphabet": string.printable, "device": "cpu", "lora": {"rank": 2}}
    tiny["architecture"] = TINY
    tasks = 8 * sizes.warm_up + len(SKILLS) * sizes.steps * sizes.tasks_per_step

    def environment(number: int, split: str, seed: int) -> dict[str, Any]:
        of = {"num_tasks": number, "seed": seed, "split": split, "skills": list(SKILLS), "combined": 0}
        of |= {"plain": True, "max_answer_chars": 120}  # of varied tasks a small model solves too few
        return {"kind": "db_bench", "generate": of, "max_turns": 3}

    return {
        "run_dir": str(run),
        "seed": seed,
        "policy": tiny if quick else {"kind": "pretrained", "model": sizes.model, "lora": {"rank": 16}},
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
    cost = asdict(train(file, run, overrides))
    warm_up = run_config(run).stages[0].steps
    reports = [evaluation.report for evaluation in RunRecord(run).evaluations.values()]
    measured = [record for path in (run / "evaluations").glob("*.jsonl") for record in read_lines(path)]
    acted = [line for path in (run / "trajectories").glob("*.jsonl") for line in read_lines(path)]
    acted, timing = (
        [line for line in lines if line["step"] >= warm_up]
        for lines in (acted, read_lines(run / "timing.jsonl"))
    )
    skills = {record["task"]: record["skills"][0] for record in measured}
    cost["seconds_of_a_step"] = sum(line["seconds"] for line in timing) / len(timing)
    matrix = skill_matrices(run_config(run), reports, skills)["stream"]
    return Measured(condition, seed, matrix, _tokens(acted), _tokens(measured), cost)


def _tokens(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    written = sum(record["num_action_tokens"] for record in records) / len(records)
    return {
        "read": sum(record["num_tokens"] for record in records) / len(records) - written,
        "written": written,
    }


def table_of(rows: Sequence[Measured]) -> object:
    """A column for each condition: means over seeds, with Student's 95 % interval where there are several."""
    conditions = list(dict.fromkeys(row.condition for row in rows))
    of: dict[str, Callable[[Measured], float]] = {
        name: lambda row, name=name: row.matrix.measures()[name].value for name in MEASURES
    }
    of["success before"] = lambda row: _success(row.matrix, 0)
    for part in ("training", "evaluation"):
        for what in ("read", "written"):
            of[f"tokens {what}, an episode of {part}"] = lambda row, a=part, b=what: getattr(row, a)[b]
    of["seconds of a step"] = lambda row: row.cost["seconds_of_a_step"]
    if all(row.cost["cpu_seconds"] is not None for row in rows):
        of["CPU seconds in all"] = lambda row: row.cost["cpu_seconds"]
    counts = [sum(row.condition == condition for row in rows) for condition in conditions]
    cells = [("seeds", *counts)]
    for name, value in of.items():
        means = (mean_over_tasks([value(row) for row in rows if row.condition == c]) for c in conditions)
        cells.append((name, *map(_text, means)))
    return table("|" + "|".join(conditions), cells, "one skill after another: means over seeds (95 %)")


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


def main() -> None:
    given = command_line(
        __doc__,
        {"overrides": []},
        quick={"seeds": [0], "overrides": ["threads=1"]},
        seeds=[0, 1, 2],
        conditions={"nargs": "+", "choices": CONDITIONS, "default": CONDITIONS},
        model="smollm2-135m",
        warm_up=8,  # supervised steps of 8 demonstrations
        steps=3,  # of each skill
        tasks_per_step=16,
        heldout=6,  # tasks of each skill
        replays=4,
        runs=Path("runs/streams"),
        output=RESULTS / "streams.json",
    )
    names = ("model", "warm_up", "steps", "tasks_per_step", "heldout", "replays")
    sizes = Sizes(*(vars(given)[name] for name in names), max_new_tokens=96)
    sizes = Sizes.quick() if given.quick else sizes
    rows = list[Measured]()
    for seed in given.seeds:
        for condition in given.conditions:
            run = given.runs / f"{condition}-{seed}"
            rows.append(measure(condition, seed, sizes, run, given.overrides))
            show(f"{condition}, seed {seed}", rows[-1].matrix.table())
            content = {
                "sizes": vars(sizes),
                "overrides": given.overrides,
                "rows": [to_json(row) for row in rows],
            }
            write(given.output, content)
    show(table_of(rows))


if __name__ == "__main__":
    main()
