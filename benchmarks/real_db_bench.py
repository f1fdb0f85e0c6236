"""Evaluate the adapters of a run on LifelongAgentBench's real DB Bench tasks: the base model and each stage,
SELECTs apart from changes, by classes of skills, and by what failed.

    python benchmarks/real_db_bench.py RUN [--tasks data/db_bench/entry_dict.json] [--split train[75%:]]
    [--limit N] [--at STEP ...] [--name ENTRY]
    python benchmarks/real_db_bench.py --fit smollm2-135m [--tasks ...]

Every run keeps the last checkpoint of each stage; ``--at`` names other checkpoints by their steps, and 0 is
the base model. The agent reads the prompts that it was trained with. The limits are those of this file:
``--fit`` needs no run, and prints the shares of tasks whose demonstrations fit several limits. The program
prints its tables after each checkpoint and writes an entry of
benchmarks/results/real_db_bench.json, whose name is the run's if no other is named.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measuring import ROOT, command_line, show, table, tiny_run

from agent_peft.configuration.run_config import TrainConfig
from agent_peft.environments import load_environment
from agent_peft.environments.db_bench import DBBenchConfig, generate
from agent_peft.environments.db_bench.grader import answer_is_correct
from agent_peft.environments.db_bench.tasks import read_entry
from agent_peft.policies.engine import load_sampler
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.rollout.evaluation import EvaluationConfig, evaluate
from agent_peft.rollout.intervals import Rate, rate_of
from agent_peft.rollout.report_tables import skill_table
from agent_peft.rollout.report_tables import table as success_table
from agent_peft.rollout.statistics import EvaluationReport
from agent_peft.runs.targets import open_run
from agent_peft.types import Outcome, StopReason, Task, Trajectory

REAL = ROOT / "data/db_bench/entry_dict.json"  # written by `agent-peft download db_bench`

# 99 % of the real tasks fit them together, with SmolLM2's tokenizer (`--fit`)
MAX_NEW_TOKENS, MAX_TOKENS, MAX_OBSERVATION_CHARS = 768, 2048, 1500

CHANGES = ("insert", "update", "delete")  # a change has its statement as the first skill, a SELECT never


def _is(skill: str, task: Task) -> bool:
    return task.skills[0] == skill


def _selects(task: Task, *clauses: str) -> bool:
    return task.skills[0] not in CHANGES and any(skill.startswith(clauses) for skill in task.skills)


CLASSES: Mapping[str, Callable[[Task], bool]] = {
    "SELECT": lambda task: task.skills[0] not in CHANGES,
    "change": lambda task: task.skills[0] in CHANGES,
    **{f"  {name.upper()}": partial(_is, name) for name in CHANGES},
    "SELECT with one condition": lambda task: _selects(task, "where_single"),
    "SELECT with several conditions": lambda task: _selects(task, "where_multiple", "where_nested"),
    "SELECT with GROUP BY": lambda task: _selects(task, "group_by"),
    "SELECT with HAVING": lambda task: _selects(task, "having"),
    "SELECT with ORDER BY": lambda task: _selects(task, "order_by"),
    "SELECT with LIMIT": lambda task: _selects(task, "limit"),
    "SELECT with a subquery": lambda task: _selects(task, "subquery"),
}


def class_rates(report: EvaluationReport) -> dict[str, Rate]:
    """Success by classes of skills; a SELECT counts in each class that it has a skill of."""
    tasks = {group.task.id: group.task for group in report.groups}
    rates = {"all": report.success}
    for name, belongs in CLASSES.items():
        known = [outcomes for task, outcomes in report.outcomes.items() if belongs(tasks[task])]
        if known:
            rates[name] = rate_of(
                (sum(outcome == Outcome.CORRECT for outcome in outcomes), len(outcomes)) for outcomes in known
            )
    return rates


ENDS = ("correct", "refused at last", "miscopied", "other rows", "other change", "no answer")


def end_of(trajectory: Trajectory) -> str:
    """How an episode ended, one of `ENDS`. ``refused at last``: the database refused the last statement, so
    that the answer came without a result, and was wrong. ``miscopied``: what the last statement returned
    would have been right, and the answer was not. ``no answer``: the turns or the tokens ran out.
    """
    if trajectory.outcome is Outcome.CORRECT:
        return "correct"
    if trajectory.stop_reason is not StopReason.FINISHED:
        return "no answer"
    read = [message.content for message in trajectory.messages if message.role != "assistant"]
    if read[-1].startswith("Error: "):
        return "refused at last"
    problem = read_entry(trajectory.task.id, trajectory.task.content)
    if problem.direct is None:
        return "other change"
    right = answer_is_correct(read[-1], problem.direct, problem.order)
    return "miscopied" if right else "other rows"


def ends(report: EvaluationReport) -> dict[str, int]:
    """How many episodes ended in each way."""
    counts = Counter(end_of(trajectory) for group in report.groups for trajectory in group.trajectories)
    return {end: counts[end] for end in ENDS}


def end_table(reports: Mapping[str, EvaluationReport]) -> object:
    columns = list(map(ends, reports.values()))
    rows = [(end, *(f"{column[end] / sum(column.values()):.1%}" for column in columns)) for end in ENDS]
    return table("|" + "|".join(reports), rows, "how episodes ended")


def class_table(reports: Mapping[str, EvaluationReport]) -> object:
    columns, rows = list(map(class_rates, reports.values())), []
    for name in columns[0]:
        rates = [column.get(name) for column in columns]
        counts = "/".join(sorted({str(rate.tasks) for rate in rates if rate}))
        rows.append((name, counts, *(rate.percent if rate else "" for rate in rates)))
    return table("|tasks|" + "|".join(reports), rows, "success by class (95 % interval)")


def evaluate_run(run: Path, keys: Mapping[str, Any], at: Sequence[int], output: Path, entry: str) -> None:
    config, policy = open_run(run, base=True)
    if config.threads:
        torch.set_num_threads(config.threads)
    limits = {"max_new_tokens": MAX_NEW_TOKENS, "max_tokens": MAX_TOKENS}
    sampling = SamplingConfig(temperature=0.0, **limits, stop=config.stages[-1].sampling.stop)
    evaluation = EvaluationConfig(environment=_environment(config, keys), sampling=sampling)
    reports: dict[str, EvaluationReport] = {}
    content: dict[str, Any] = {}
    with closing(load_environment(evaluation.environment)) as environment:
        for name, step in _moments(config, at).items():
            if step:
                policy.load(run / "checkpoints" / f"step_{step:06d}")
            sampler = load_sampler(policy, config.engine)
            report = reports[name] = evaluate(sampler, environment, evaluation, config.seed)
            classes = {key: asdict(rate) for key, rate in class_rates(report).items()}
            content[name] = {**report.to_json(), "ends": ends(report), "by_class": classes}
            # a long evaluation leaves what is done if it is interrupted, and others may have written
            known = json.loads(output.read_text()) if output.exists() else {}
            output.write_text(json.dumps({**known, entry: content}, indent=1) + "\n")
            one = {name: report}
            show(f"{name}: {report.summary}", class_table(one), end_table(one))
    show(success_table(reports), class_table(reports), end_table(reports), skill_table(reports))


def _environment(config: TrainConfig, keys: Mapping[str, Any]) -> DBBenchConfig:
    """The real tasks that ``keys`` name, asked in the form that the run was trained in."""
    own = {"generate": None, "skills": None, "variations": 0}
    changes = {**own, **keys, "max_observation_chars": MAX_OBSERVATION_CHARS}
    if not isinstance(config.environment, DBBenchConfig):
        raise SystemExit("this run was not trained on db_bench")
    return config.environment.model_copy(update=changes)


def _moments(config: TrainConfig, at: Sequence[int]) -> dict[str, int]:
    """What to evaluate: a name for each step, in order."""
    if at:
        return {f"step {step}" if step else "base": step for step in sorted(set(at))}
    moments, steps = {"base": 0}, 0
    for stage in config.stages:
        steps += stage.steps
        moments[f"after {stage.name}"] = steps
    return moments


@dataclass(frozen=True)
class Lengths:
    """Of one demonstration: the tokens of its longest reply, all its tokens, and the characters of its
    longest observation.
    """

    reply: int
    total: int
    observation: int


def lengths_of(model: str, tasks: Path, limit: int | None) -> list[Lengths]:
    """Of the usable tasks."""
    from transformers import AutoTokenizer

    from agent_peft.policies.models.bundled import resolve_model
    from agent_peft.policies.tokenization import ChatTokenizer
    from agent_peft.rollout.demonstrations import demonstrate
    from agent_peft.rollout.rewards import RewardConfig

    chat = ChatTokenizer(AutoTokenizer.from_pretrained(resolve_model(model)))

    def text(action: Sequence[int]) -> int:  # a limit need not have room for the end token
        return sum(token not in chat.end_of_turn for token in action)

    lengths = []
    config = DBBenchConfig(tasks=tasks, limit=limit, max_observation_chars=1_000_000)
    with closing(load_environment(config)) as environment:
        for task in environment.tasks:
            actions = environment.demonstration(task)
            if actions is None:  # a question of AgentBench whose SQL is wrong
                continue
            made = demonstrate(environment, task, chat, RewardConfig(), 0, actions)
            with closing(environment.episode(task, 0)) as episode:
                episode.start()
                observations = [episode.step(action).observation for action in actions]
            lengths.append(
                Lengths(
                    max(text(turn.action) for turn in made.turns),
                    len(made.tokens) - len(made.turns[-1].action) + text(made.turns[-1].action),
                    max(map(len, observations)),
                )
            )
    return lengths


def print_fit(lengths: Sequence[Lengths]) -> None:
    limits: Sequence[tuple[str, Sequence[int], Callable[[Lengths], int]]] = (
        ("max_new_tokens", (72, 160, 192, 256, 512, 640, 768, 1024), lambda one: one.reply),
        ("max_tokens", (768, 1024, 1536, 2048), lambda one: one.total),
        ("max_observation_chars", (400, 600, 1000, 1500, 2000), lambda one: one.observation),
    )
    rows = []
    for name, values, length in limits:
        for value in values:
            share = sum(length(one) <= value for one in lengths) / len(lengths)
            rows.append((name, value, f"{share:.1%}"))
        rows.append((name, "longest", max(map(length, lengths))))
    together = sum(
        one.reply <= MAX_NEW_TOKENS and one.total <= MAX_TOKENS and one.observation <= MAX_OBSERVATION_CHARS
        for one in lengths
    )
    ours = f"{MAX_NEW_TOKENS}, {MAX_TOKENS}, {MAX_OBSERVATION_CHARS}"
    rows.append(("all of this file", ours, f"{together / len(lengths):.1%}"))
    show(table("limit|value|fit", rows, f"share of {len(lengths)} tasks that fit"))


def main() -> None:
    given = command_line(
        __doc__,
        {"run": Path},
        quick={"run": tiny_run},
        tasks=REAL,
        split=str,  # the held-out part, where the run was trained on the other
        limit=int,
        at={"type": int, "nargs": "+", "default": [], "metavar": "STEP", "help": "0 is the base model"},
        name=str,
        fit=str,  # the model whose tokenizer counts
    )
    if given.quick:
        given.tasks = given.results / "entries.json"
        given.tasks.write_text(json.dumps(generate(2, 1)))
        print_fit(lengths_of(str(given.results / "tiny"), given.tasks, None))
    if given.fit:
        print_fit(lengths_of(given.fit, given.tasks, given.limit))
    elif given.run is None:
        sys.exit("name a run, or --fit MODEL")
    else:
        output = given.results / "real_db_bench.json"
        keys = {"tasks": given.tasks, "split": given.split, "limit": given.limit}
        evaluate_run(given.run, keys, given.at, output, given.name or given.run.name)


if __name__ == "__main__":
    main()
