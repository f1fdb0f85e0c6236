"""The evaluations of a run: when they are due, and their reports, in memory and on disk.

    evaluations/after_grpo.json          the report: what was measured, at which step of the run, the numbers
    evaluations/after_grpo.jsonl         a record of each episode, with its arrays next to it

A report belongs to the step that it names. If the configuration calls that step otherwise now, because a
stage has become longer, the files are renamed.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from agent_peft.configuration.run_config import TrainConfig
from agent_peft.environments.base import Environment
from agent_peft.files import MAX_JSONL_BYTES, MEGABYTE, parse_json, read_bytes, read_text, write_atomic
from agent_peft.policies.engine.base import Sampler
from agent_peft.policies.policy import Policy
from agent_peft.policies.reference import put_back
from agent_peft.ranks import Ranks
from agent_peft.rollout.evaluation import evaluate, settings_of
from agent_peft.rollout.replays import Replay, Replays, ReplayWindow, read_replays
from agent_peft.rollout.skill_matrix import SkillMatrix
from agent_peft.rollout.statistics import EvaluationReport, other_settings
from agent_peft.rollout.task_order import BySkillConfig
from agent_peft.runs.best import Best, comparable, note_best, reason_to_end
from agent_peft.runs.observers import Observer
from agent_peft.runs.progress import Progress
from agent_peft.runs.reading import read_lines
from agent_peft.runs.schedules import FOLDER as SCHEDULE
from agent_peft.runs.schedules import Schedules
from agent_peft.runs.streams import skill_matrices
from agent_peft.runs.trajectories import ARRAYS, LINES, write_episodes
from agent_peft.training.stage import StageConfig
from agent_peft.types import AgentPeftError

logger = logging.getLogger(__name__)

FOLDER = "evaluations"
_NAME = re.compile(r"base|step_(?P<step>\d+)|after_.+")  # of a report, without its suffix


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
    replays: Replays  # those of the run, which its stages add to
    reports: dict[str, EvaluationReport] = field(default_factory=dict)  # in the order of the run

    @cached_property
    def due(self) -> Mapping[int, str]:
        """The name of each evaluation, by the number of steps done when it is due."""
        return due_evaluations(self.config)

    @property
    def checkpoints(self) -> Path:
        return self.config.run_dir / "checkpoints"

    def path_of(self, name: str) -> Path:
        return _path(self.config, name)

    def paths_after(self, done: int) -> list[Path]:
        """The files of the evaluations that were made later than after ``done`` steps."""
        late = [path for path, report in _reports(self.config) if (report.step or 0) > done]
        return [path.with_suffix(suffix) for path in late for suffix in (".json", LINES, ARRAYS)]

    def catch_up(self, done: int, begun: int = 0) -> None:
        """Make or read the evaluations that were due in the first ``done`` steps, from step ``begun`` on.

        If a run was killed between a checkpoint and its evaluation, that evaluation is now made with the
        checkpoint's weights.
        """
        on_disk = self._read()
        lost: dict[int, str] = {}
        for steps, name in self.due.items():
            checkpoint = self.checkpoints / f"step_{steps:06d}"
            if steps > done:
                break
            if name in on_disk or steps < begun:
                continue
            if steps == 0:
                self.make(steps)
            elif checkpoint.is_dir():
                with put_back(self.policy.model):  # a first stage may have to start from the present weights
                    self.policy.load(checkpoint)
                    self.make(steps, read_replays(checkpoint))
            else:
                lost[steps] = name
        if lost:
            self._tell_lost(lost, done)
        self.reports = dict(sorted(self.reports.items(), key=lambda pair: pair[1].step or 0))
        self.note_best()

    def make(self, done: int, replays: tuple[Replay, ...] | None = None) -> bool:
        """Make the evaluation that is due after ``done`` steps, if there is one. Returns whether there is.

        Args:
            replays: the successful episodes of the run up to there; None takes those of the run now.
        """
        if done not in self.due:
            return False
        assert self.config.evaluation is not None and self.environment is not None
        name, stage = self.due[done], self.config.stage_at(done)
        path = self.path_of(name)
        evaluation = self.config.evaluation.following(stage.sampling)
        tasks = len(self.environment.tasks[: evaluation.num_tasks])
        episodes = len(self.ranks.share(range(tasks))) * evaluation.attempts
        with self.progress.evaluation(name, tasks, episodes) as on_episode:
            report = evaluate(
                self.sampler,
                self.environment,
                evaluation,
                self.config.seed,
                self.ranks,
                self.schedules.of(f"evaluation_{path.stem}"),
                stage.rewards,
                on_episode,
                ReplayWindow(self.replays.latest() if replays is None else replays, stage.replay_in_prompt),
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
        """Take the evaluation after ``done`` steps for the one that is due at the ``end`` of their stage: the
        stage has ended there, and the policy is the same. If there is none, make it.
        """
        name, before = self.due.get(end), self.due.get(done)
        if name is None:
            return
        if before not in self.reports:
            self.make(end)
            return
        report = replace(self.reports[before], name=name, step=end)
        if self.ranks.is_main:
            _copy(self.path_of(before), self.path_of(name), report)
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
        """Return why the evaluations so far end a stage, in words; None where it continues.

        Args:
            first: the run's step at the stage's start.
        """
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
        assert report.name is not None
        self.reports[report.name] = replace(report, groups=())  # the episodes are on disk

    def _decisive(self, stage: StageConfig) -> list[str]:
        """The metrics of evaluations that decide which checkpoint is kept or when the stage ends."""
        keep, until = self.config.checkpoint.keep_best, stage.until
        return [one.metric for one in (keep, until) if one is not None and one.of_evaluations]

    def _read(self) -> set[str]:
        """Read the reports that are on disk, and return their names. Those that measured with other settings
        than the present ones are not comparable, and one line tells which.
        """
        if self.environment is None:
            return set()
        files = self.ranks.broadcast(lambda: [report.to_json() for _, report in _reports(self.config)])
        others: dict[str, list[str]] = {}
        for report in map(EvaluationReport.from_json, files):
            changed = self._changed(report)
            if changed:
                others.setdefault(", ".join(changed), []).append(str(report.name))
            else:
                self._keep(report)
        for keys, names in others.items():
            self.progress.note(
                f"measured with other settings ({keys}) and so left out of the comparison: {', '.join(names)}"
            )
        return {str(content["name"]) for content in files}

    def _tell_lost(self, lost: Mapping[int, str], done: int) -> None:
        """Tell which evaluations of the first ``done`` steps can no longer be made. The steps that ``until``
        left out had none to make.
        """
        path = self.config.run_dir / "metrics.jsonl"

        def read() -> list[int]:
            return [line["step"] for line in read_lines(path)] if path.is_file() else []

        made = {*self.ranks.broadcast(read), done}  # there was a moment before each of them
        names = [name for step, name in lost.items() if step in made or name.startswith("after ")]
        if names:
            told = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            self.progress.note(f"these evaluations were not made, and their checkpoints are gone: {told}")

    def _changed(self, report: EvaluationReport) -> list[str]:
        """The settings in which a report differs from what would be measured at its step now."""
        stage = self.config.stage_at(report.step or 0)
        return other_settings(report.settings, self._settings[self.config.stages.index(stage)])

    @cached_property
    def _settings(self) -> list[dict[str, Any]]:
        """What an evaluation of each stage would measure now."""
        evaluation, environment = self.config.evaluation, self.environment
        assert evaluation is not None and environment is not None
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
    evaluation, due, done = config.evaluation, dict[int, str](), 0
    if evaluation is None:
        return due
    if "start" in evaluation.at:
        due[0] = "base"
    if evaluation.every:
        end = sum(stage.steps for stage in config.stages)
        due |= {step: f"step {step}" for step in range(evaluation.every, end + 1, evaluation.every)}
    for index, stage in enumerate(config.stages):
        if "segments" in evaluation.at and isinstance(stage.task_order, BySkillConfig):
            for step in range(done, done + stage.steps + 1, stage.task_order.steps):
                due.setdefault(step, f"step {step}" if step else "base")
        done += stage.steps
        if "stages" in evaluation.at:
            due[done] = _name_after(config, index)
    return dict(sorted(due.items()))


def _name_after(config: TrainConfig, index: int) -> str:
    names = [stage.name.replace(" ", "_") for stage in config.stages]  # as they are in the names of files
    number = names[: index + 1].count(names[index])
    return f"after {config.stages[index].name}" + (f" ({number})" if number > 1 else "")


def settle_names(config: TrainConfig) -> None:
    """Name the evaluations on disk as the configuration calls their steps now, and remove what is left of
    evaluations that were not made to their end.
    """
    folder, due = config.run_dir / FOLDER, due_evaluations(config)
    for path in folder.iterdir() if folder.is_dir() else ():
        unfinished = path.suffix in (LINES, ARRAYS) and not path.with_suffix(".json").exists()
        if unfinished and _NAME.fullmatch(path.stem):
            path.unlink()
    for path, report in reversed(list(_reports(config))):  # a later one first, as it may have to make room
        name = due.get(report.step or 0, "base" if not report.step else f"step {report.step}")
        new = _path(config, name)
        if new == path or (new.exists() and read_report(new).step != report.step):
            continue
        _copy(path, new, replace(report, name=name))
        for file in (config.run_dir / SCHEDULE).glob(f"evaluation_{path.stem}.rank_*.json"):
            file.rename(file.with_name(file.name.replace(path.stem, new.stem, 1)))
        for suffix in (".json", LINES, ARRAYS):
            path.with_suffix(suffix).unlink(missing_ok=True)


def _path(config: TrainConfig, name: str) -> Path:
    return config.run_dir / FOLDER / f"{name.replace(' ', '_')}.json"


def _reports(config: TrainConfig) -> Iterator[tuple[Path, EvaluationReport]]:
    """Yield the reports on disk in the order of their steps, each with its step and name. Those of an earlier
    version do not say their step: it is the one at which an evaluation of this name is due.
    """
    due = {_path(config, name).stem: step for step, name in due_evaluations(config).items()}
    named = {_path(config, name).stem: name for name in due_evaluations(config).values()}
    reports = []
    for path in (config.run_dir / FOLDER).glob("*.json"):
        if (match := _NAME.fullmatch(path.stem)) is None:
            continue
        report = read_report(path)
        if report.step is None:
            step = due.get(path.stem, 0 if path.stem == "base" else match["step"])
            if step is None:
                continue  # of a stage that is no longer there
            name = named.get(path.stem, path.stem.replace("_", " "))
            report = replace(report, step=int(step), name=name)
        reports.append((path, report))
    yield from sorted(reports, key=lambda pair: pair[1].step or 0)


def write_evaluation(path: Path, report: EvaluationReport) -> None:
    """Write a report, and next to it its episodes. The report comes last: it marks the evaluation as done.

    Args:
        path: of the report, ``FOLDER/NAME.json``.
    """
    write_episodes(path.parent, path.stem, _place(report), report.groups)
    write_atomic(path, json.dumps(report.to_json(), indent=1) + "\n", unlinked=2)


def _place(report: EvaluationReport) -> dict[str, Any]:
    """What each line says of the evaluation; outside a run there is nothing to say."""
    place = {"evaluation": report.name, "step": report.step}
    return {key: value for key, value in place.items() if value is not None}


def _copy(old: Path, new: Path, report: EvaluationReport) -> None:
    """Write ``report`` with the episodes of the report ``old``, which may have none."""
    if (arrays := old.with_suffix(ARRAYS)).is_file():
        content = read_bytes(arrays, "the arrays of the trajectories", MAX_JSONL_BYTES, unlinked=2)
        write_atomic(new.with_suffix(ARRAYS), content, unlinked=2)
    if (lines := old.with_suffix(LINES)).is_file():
        text = "".join(json.dumps(record | _place(report)) + "\n" for record in read_lines(lines))
        write_atomic(new.with_suffix(LINES), text, unlinked=2)
    write_atomic(new, json.dumps(report.to_json(), indent=1) + "\n", unlinked=2)


def read_report(path: Path) -> EvaluationReport:
    """Read the report of an evaluation."""
    try:
        text = read_text(path, "a JSON file", 256 * MEGABYTE, unlinked=2)
        return EvaluationReport.from_json(parse_json(text))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise AgentPeftError(
            f"{path}: is damaged ({type(error).__name__}: {error}); remove it, and it is made again"
        ) from error
