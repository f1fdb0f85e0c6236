"""The evaluations of a run: when they are due, and their reports, in memory and on disk.

    evaluations/step_000020.json          the report: what was measured after 20 steps of the run, the numbers
    evaluations/step_000020.jsonl         a record of each episode, with its arrays next to it

The files are named by step. Names such as ``after grpo`` follow from the stages, whenever they are shown.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from agent_peft.configuration.run_config import TrainConfig
from agent_peft.environments.base import OUTCOMES, Environment
from agent_peft.files import MAX_JSONL_BYTES, read_bytes, write_atomic
from agent_peft.policies.engine.base import Sampler
from agent_peft.policies.policy import Policy
from agent_peft.policies.reference import put_back, reference_of
from agent_peft.ranks import Ranks
from agent_peft.rollout.evaluation import evaluate, settings_of, settings_of_replies
from agent_peft.rollout.replays import Replay, Replays, ReplayWindow, read_replays
from agent_peft.rollout.skill_matrix import SkillMatrix, skill_matrix
from agent_peft.rollout.statistics import EvaluationReport, other_settings
from agent_peft.rollout.task_order import BySkillConfig
from agent_peft.runs.best import Best, comparable, note_best, reason_to_end
from agent_peft.runs.observers import Observer
from agent_peft.runs.progress import Progress
from agent_peft.runs.reading import evaluation_name, evaluation_paths, read_lines, read_report
from agent_peft.runs.schedules import Schedules
from agent_peft.runs.trajectories import ARRAYS, LINES, write_episodes
from agent_peft.training.stage import StageConfig

logger = logging.getLogger(__name__)


@dataclass
class Evaluations:
    """Measures the policy when an evaluation is due. Each is made once and read back afterwards."""

    config: TrainConfig
    environment: Environment | None  # None where the run has no evaluation
    policy: Policy
    sampler: Sampler
    ranks: Ranks
    schedules: Schedules
    progress: Progress
    observers: Observer
    replays: Replays  # those of the run, which its stages add to
    by_step: dict[int, EvaluationReport] = field(default_factory=dict)  # without their episodes

    def __post_init__(self) -> None:
        of_pairs = self.environment is not None and "margin" in self.environment.measures
        # pairs are compared with the policy before the first step, which it still is
        self.reference = reference_of(self.policy.model) if of_pairs else None

    @cached_property
    def due(self) -> Mapping[int, str]:
        """The name of each evaluation, by the number of steps done when it is due."""
        return due_evaluations(self.config)

    @property
    def checkpoints(self) -> Path:
        return self.config.run_dir / "checkpoints"

    @property
    def reports(self) -> dict[str, EvaluationReport]:
        """The reports by name, in the order of the run."""
        return {str(report.name): report for _, report in sorted(self.by_step.items())}

    def path_of(self, step: int) -> Path:
        return self.config.run_dir / "evaluations" / f"step_{step:06d}.json"

    def catch_up(self, done: int, first: int = 0) -> None:
        """Make or read the evaluations that were due in the first ``done`` steps, from step ``first`` on.

        If a run was killed between a checkpoint and its evaluation, that evaluation is now made with the
        checkpoint's weights.
        """
        on_disk = self._read()
        missing: list[int] = []
        for steps in self.due:
            checkpoint = self.checkpoints / f"step_{steps:06d}"
            if steps > done:
                break
            if steps in on_disk or steps < first:
                continue
            if steps == 0:
                self.make(steps)
            elif checkpoint.is_dir():
                with put_back(self.policy.model):  # a first stage may have to start from the present weights
                    self.policy.load(checkpoint)
                    self.make(steps, read_replays(checkpoint))
            else:
                missing.append(steps)
        if missing:
            self._note_lost(missing, done)
        self.note_best()

    def make(self, done: int, replays: tuple[Replay, ...] | None = None) -> bool:
        """Make the evaluation that is due after ``done`` steps, if there is one. Returns whether there is.
        Without ``replays``, the successful episodes up to there, the run's present ones are shown.
        """
        if done not in self.due:
            return False
        assert self.config.evaluation is not None and self.environment is not None
        name, stage = self.due[done], self.config.stage_at(done)
        path = self.path_of(done)
        evaluation = self.config.evaluation.following(stage.sampling)
        tasks = len(self.environment.tasks[: evaluation.num_tasks])
        episodes = len(self.ranks.share(range(tasks))) * evaluation.attempts
        with self.progress.evaluation(name, tasks, episodes) as on_episode:
            report = evaluate(
                self.policy if evaluation.of_replies else self.sampler,
                self.environment,
                evaluation,
                self.config.seed,
                self.ranks,
                self.schedules.of(f"evaluation_{path.stem}"),
                stage.rewards,
                on_episode,
                ReplayWindow(self.replays.latest() if replays is None else replays, stage.replay_in_prompt),
                self.config.pairs,
                self.reference,
            )
        report = replace(report, name=name, step=done)
        self._keep(report)
        if self.ranks.is_main:
            write_evaluation(path, report)
            self.observers.on_evaluation(name, report)
            for metric in self._decisive(stage):
                if report.metric(metric) is None:
                    logger.warning(
                        "%s: no episode of the evaluation %r got a score, so it decides nothing", metric, name
                    )
        self.note_best()
        return True

    def repeat(self, done: int, end: int) -> None:
        """Copy the evaluation after ``done`` steps to the ``end`` of their stage, which has ended early: the
        policy is the same. If there is none, make it.
        """
        if end not in self.due:
            return
        if done not in self.by_step:
            self.make(end)
            return
        report = replace(self.by_step[done], name=self.due[end], step=end)
        if self.ranks.is_main:
            _copy_episodes(self.path_of(done), self.path_of(end), end)
            _write_report(self.path_of(end), report)
        self._keep(report)

    def matrices(self) -> dict[str, SkillMatrix]:
        """The skill matrix of each stage that takes one skill after another, by the stage's name."""
        tasks = () if self.environment is None else self.environment.tasks
        skills = {task.id: task.skills[0] for task in tasks if task.skills}
        return skill_matrices(self.config, self.reports.values(), skills)

    def saves(self, done: int, stage: StageConfig) -> bool:
        """Whether a checkpoint is needed after ``done`` steps, as an evaluation there decides something."""
        return done in self.due and bool(self._decisive(stage))

    def reason_to_end(self, stage: StageConfig, first: int) -> str | None:
        """Return why the evaluations so far end a stage that began with step ``first``, in words, or None."""
        until = stage.until
        if until is None or not until.of_evaluations:
            return None
        values = [pair for pair in comparable(until.metric, self.reports.values()) if pair[0] >= first]
        start = [value for step, value in values if step == first]
        return reason_to_end(
            until, start[0] if start else None, [value for step, value in values if step > first]
        )

    def note_best(self) -> Best | None:
        """Find the best checkpoint, on rank 0, if the run keeps it."""
        keep = self.config.checkpoint.keep_best
        if keep is None or not self.ranks.is_main:
            return None
        return note_best(self.checkpoints, keep, self.reports.values())

    def _keep(self, report: EvaluationReport) -> None:
        assert report.step is not None
        self.by_step[report.step] = replace(report, groups=())  # the episodes are on disk

    def _decisive(self, stage: StageConfig) -> list[str]:
        """The metrics of evaluations that decide which checkpoint is kept or when the stage ends."""
        keep, until = self.config.checkpoint.keep_best, stage.until
        return [one.metric for one in (keep, until) if one is not None and one.of_evaluations]

    def _read(self) -> set[int]:
        """Read the reports on disk, and return their steps. One line names those with other settings."""
        if self.environment is None:
            return set()
        paths = evaluation_paths(self.config.run_dir)

        def read() -> list[tuple[int, dict[str, Any]]]:
            return [(step, read_report(path).to_json()) for step, path in paths.items()]

        files = self.ranks.broadcast(read)
        others: dict[str, list[str]] = {}
        for step, content in files:
            report = replace(
                EvaluationReport.from_json(content),
                name=evaluation_name(_stages(self.config), step),
                step=step,
            )
            now = self._settings[self.config.stages.index(self.config.stage_at(step))]
            if changed := other_settings(report.settings, now):
                others.setdefault(", ".join(changed), []).append(str(report.name))
            else:
                self._keep(report)
        for keys, names in others.items():
            self.progress.note(
                f"measured with other settings ({keys}) and so left out of the comparison: {', '.join(names)}"
            )
        return {step for step, _ in files}

    def _note_lost(self, missing: Sequence[int], done: int) -> None:
        """Print which evaluations can no longer be made. The steps that ``until`` left out had none."""
        path = self.config.run_dir / "metrics.jsonl"

        def read() -> list[int]:
            return [line["step"] for line in read_lines(path)] if path.is_file() else []

        moments = {*self.ranks.broadcast(read), done}  # before each of these steps, one could be made
        names = [self.due[step] for step in missing if step in moments or self.due[step].startswith("after ")]
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            self.progress.note(f"skipped evaluations (checkpoints deleted): {', '.join(names[:5])}{more}")

    @cached_property
    def _settings(self) -> list[dict[str, Any]]:
        """What an evaluation of each stage would measure now."""
        evaluation, environment = self.config.evaluation, self.environment
        assert evaluation is not None and environment is not None
        if environment.measures != OUTCOMES:
            settings = settings_of_replies(evaluation, environment, self.config.pairs, self.reference)
            return [settings] * len(self.config.stages)
        return [
            settings_of(
                evaluation.following(stage.sampling),
                environment,
                self.config.seed,
                stage.rewards,
                stage.replay_in_prompt,
            )
            for stage in self.config.stages
        ]


def due_evaluations(config: TrainConfig) -> dict[int, str]:
    """Return the name of each evaluation, by the number of the run's steps done when it is due, in order."""
    evaluation, steps, done = config.evaluation, set[int](), 0
    if evaluation is None:
        return {}
    if "start" in evaluation.at:
        steps.add(0)
    if evaluation.every:
        end = sum(stage.steps for stage in config.stages)
        steps |= set(range(evaluation.every, end + 1, evaluation.every))
    for stage in config.stages:
        if "segments" in evaluation.at and isinstance(stage.task_order, BySkillConfig):
            steps |= set(range(done, done + stage.steps + 1, stage.task_order.steps))
        done += stage.steps
        if "stages" in evaluation.at:
            steps.add(done)
    return {step: evaluation_name(_stages(config), step) for step in sorted(steps)}


def _stages(config: TrainConfig) -> list[tuple[str, int]]:
    return [(stage.name, stage.steps) for stage in config.stages]


def write_evaluation(path: Path, report: EvaluationReport) -> None:
    """Write the episodes of a report, then the report ``path``, which marks the evaluation as done."""
    place = {} if report.step is None else {"step": report.step}
    if report.groups:  # recorded replies have none
        write_episodes(path.parent, path.stem, place, report.groups)
    _write_report(path, report)


def _write_report(path: Path, report: EvaluationReport) -> None:
    content = replace(report, name=None).to_json()
    write_atomic(path, json.dumps(content, indent=1) + "\n", unlinked=2)


def _copy_episodes(old: Path, new: Path, step: int) -> None:
    """Copy the episodes of the report ``old``, which may have none."""
    if (arrays := old.with_suffix(ARRAYS)).is_file():
        content = read_bytes(arrays, "the arrays of the trajectories", MAX_JSONL_BYTES, unlinked=2)
        write_atomic(new.with_suffix(ARRAYS), content, unlinked=2)
    if (lines := old.with_suffix(LINES)).is_file():
        text = "".join(json.dumps(record | {"step": step}) + "\n" for record in read_lines(lines))
        write_atomic(new.with_suffix(LINES), text, unlinked=2)


def skill_matrices(
    config: TrainConfig, reports: Iterable[EvaluationReport], skills: Mapping[str, str]
) -> dict[str, SkillMatrix]:
    """Return the matrix of each stage that takes one skill after another, by the stage's name, as far as
    there are evaluations before its first segment and after each next one. ``skills`` are the first skills of
    the tasks that were measured, by id, and ``config`` has its steps (``with_steps``).
    """
    of_step, first = {report.step: report for report in reports}, 0
    matrices = {}
    for stage in config.stages:
        order = stage.task_order
        if isinstance(order, BySkillConfig) and order.skills:
            rows = []
            for step in range(first, first + stage.steps + 1, order.steps):
                if step not in of_step:
                    break
                rows.append(of_step[step])
            segments = [order.skills[place % len(order.skills)] for place in range(len(rows) - 1)]
            matrix = skill_matrix(segments, rows, skills) if segments else None
            if matrix is not None:
                matrices[stage.name] = matrix
        first += stage.steps
    return matrices
