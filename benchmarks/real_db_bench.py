"""Evaluate the adapters of a run on LifelongAgentBench's real DB Bench tasks: the base model and each stage,
by skill.

    python benchmarks/real_db_bench.py RUN [--tasks data/lifelong_agent_bench/db_bench/entry_dict.json]
    [--limit N]

Every run keeps the last checkpoint of each stage. The program prints the tables and writes
benchmarks/results/real_db_bench.json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from rich.console import Console

from agent_peft.environments import load_environment
from agent_peft.environments.db_bench import DBBenchConfig
from agent_peft.policies.engine import load_sampler
from agent_peft.policies.loading import load_policy
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.rollout.evaluation import EvaluationConfig, evaluate
from agent_peft.rollout.report_tables import skill_table, table
from agent_peft.runs.targets import load_run

HERE = Path(__file__).resolve().parent
REAL = HERE.parent / "data/db_bench/entry_dict.json"  # written by `agent-peft download db_bench`


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--tasks", type=Path, default=REAL)
    parser.add_argument("--limit", type=int, default=None)
    arguments = parser.parse_args()
    config = load_run(arguments.run)
    if config.threads:
        torch.set_num_threads(config.threads)
    policy = load_policy(config.policy, config.seed)
    # real results are longer than generated ones
    environment = DBBenchConfig(tasks=arguments.tasks, limit=arguments.limit, max_observation_chars=1000)
    sampling = SamplingConfig(
        temperature=0.0, max_new_tokens=160, max_tokens=1536, stop=config.stages[-1].sampling.stop
    )
    evaluation = EvaluationConfig(environment=environment, sampling=sampling)
    tasks = load_environment(environment)
    reports = {"base": evaluate(load_sampler(policy, config.engine), tasks, evaluation, config.seed)}
    steps = 0
    for stage in config.stages:
        steps += stage.steps
        policy.load(arguments.run / "checkpoints" / f"step_{steps:06d}")
        reports[f"after {stage.name}"] = evaluate(
            load_sampler(policy, config.engine), tasks, evaluation, config.seed
        )
        Console().print(f"after {stage.name}: {reports[f'after {stage.name}'].summary}")
    Console(width=140).print(table(reports), skill_table(reports))
    output = HERE / "results" / "real_db_bench.json"
    output.parent.mkdir(exist_ok=True)
    output.write_text(
        json.dumps({name: report.to_json() for name, report in reports.items()}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
