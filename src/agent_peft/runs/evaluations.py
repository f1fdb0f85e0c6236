"""The evaluations of a run: when they are due, and their reports, in memory and on disk."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from agent_peft.configuration.run_config import TrainConfig
from agent_peft.environments.base import Environment
from agent_peft.files import MEGABYTE, parse_json, read_text, write_atomic
from agent_peft.policies.engine.base import Sampler
from agent_peft.policies.policy import Policy
from agent_peft.policies.reference import put_back
from agent_peft.ranks import Ranks
from agent_peft.rollout.evaluation import evaluate
from agent_peft.rollout.statistics import EvaluationReport
from agent_peft.runs.observers import Observer
from agent_peft.runs.progress import Progress
from agent_peft.runs.schedules import Schedules
from agent_peft.types import AgentPeftError


@dataclass
class Evaluations:
    """Measures the policy on ``environment`` whenever an evaluation is due. Each evaluation is made once and
    read back afterwards.
    """

    config: TrainConfig
    environment: Environment | None  # None where the run has no evaluation
    policy: Policy
    sampler: Sampler
    ranks: Ranks
    schedules: Schedules
    progress: Progress
    observers: Observer
    reports: dict[str, EvaluationReport] = field(default_factory=dict)  # in the order of the run

    @cached_property
    def due(self) -> Mapping[int, str]:
        """The name of each evaluation, by the number of steps done when it is due."""
        return due_evaluations(self.config)

    def path_of(self, name: str) -> Path:
        return self.config.run_dir / "evaluations" / f"{name.replace(' ', '_')}.json"

    def paths_after(self, done: int) -> list[Path]:
        """The files of the evaluations that are due later than after ``done`` steps."""
        return [self.path_of(name) for steps, name in self.due.items() if steps > done]

    def catch_up(self, done: int) -> None:
        """Make or read the evaluations that were due in the first ``done`` steps.

        If a run was killed between a checkpoint and its evaluation, that evaluation is now made with the
        checkpoint's weights.
        """
        for steps, name in self.due.items():
            checkpoint = self.config.run_dir / "checkpoints" / f"step_{steps:06d}"
            if steps > done:
                break
            if steps == 0 or self.ranks.broadcast(self.path_of(name).is_file):
                self.make(steps)
            elif not checkpoint.is_dir():
                self.progress.note(f"the evaluation {name!r} and its checkpoint are gone: it is left out")
            else:
                with put_back(self.policy.model):  # a first stage may have to start from the present weights
                    self.policy.load(checkpoint)
                    self.make(steps)

    def make(self, done: int) -> bool:
        """Make the evaluation that is due after ``done`` steps, if there is one. Returns whether there is."""
        if done not in self.due:
            return False
        assert self.config.evaluation is not None and self.environment is not None
        name = self.due[done]
        path = self.path_of(name)
        report = self.ranks.broadcast(lambda: read_report(path).to_json() if path.is_file() else None)
        if report is not None:
            self.reports[name] = EvaluationReport.from_json(report)
            return True
        evaluation = self.config.evaluation.following(self.config.stage_at(done).sampling)
        self.progress.note(
            f"evaluating {name} on {len(self.environment.tasks[: evaluation.num_tasks])} tasks"
        )
        self.reports[name] = evaluate(
            self.sampler,
            self.environment,
            evaluation,
            self.config.seed,
            self.ranks,
            self.schedules.of(f"evaluation_{path.stem}"),
        )
        if self.ranks.is_main:
            write_atomic(path, json.dumps(self.reports[name].to_json(), indent=1) + "\n")
            self.observers.on_evaluation(name, self.reports[name])
        return True


def due_evaluations(config: TrainConfig) -> dict[int, str]:
    """Return the name of each evaluation, by the number of steps done when it is due, in order."""
    evaluation, due, done = config.evaluation, dict[int, str](), 0
    if evaluation is None:
        return due
    if "start" in evaluation.at:
        due[0] = "base"
    if evaluation.every:
        end = sum(stage.steps for stage in config.stages)
        due |= {step: f"step {step}" for step in range(evaluation.every, end + 1, evaluation.every)}
    for index, stage in enumerate(config.stages):
        done += stage.steps
        if "stages" in evaluation.at:
            due[done] = _name_after(config, index)
    return dict(sorted(due.items()))


def _name_after(config: TrainConfig, index: int) -> str:
    names = [stage.name.replace(" ", "_") for stage in config.stages]  # as they are in the names of files
    number = names[: index + 1].count(names[index])
    return f"after {config.stages[index].name}" + (f" ({number})" if number > 1 else "")


def read_report(path: Path) -> EvaluationReport:
    """Read the report of an evaluation.

    Raises:
        AgentPeftError: the file is damaged.
    """
    try:
        return EvaluationReport.from_json(parse_json(read_text(path, "a JSON file", 256 * MEGABYTE)))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise AgentPeftError(
            f"{path}: is damaged ({type(error).__name__}: {error}); remove it, and it is made again"
        ) from error
