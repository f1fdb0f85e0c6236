"""A run and its directory: what is trained, evaluated and written, and how it resumes after a kill.

    config.yaml  metrics.jsonl  timing.jsonl  trajectories/step_*  checkpoints/step_*/
    evaluations/*  trackers/*

All files except timing.jsonl, run.json, log.txt and trackers/* depend on the configuration alone, and
config.yaml also on the folder: on a CPU, a run that is killed and started again writes the same bytes. With
several ranks, only rank 0 reads and writes the files, and broadcasts what they hold.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from rich.console import Console

from agent_peft.configuration.run_config import TrainConfig
from agent_peft.environments import load_environment
from agent_peft.environments.base import Environment
from agent_peft.environments.task_files.selection import warn_of_shared_tasks
from agent_peft.files import MEGABYTE, read_text, write_atomic
from agent_peft.hardware import explain_oom, set_threads
from agent_peft.output import lasting_output
from agent_peft.policies.engine import load_sampler
from agent_peft.policies.engine.base import Sampler
from agent_peft.policies.loading import load_policy
from agent_peft.policies.policy import Policy
from agent_peft.policies.thinking import check_thinking
from agent_peft.printable import Printable
from agent_peft.ranks import Ranks, join
from agent_peft.rollout.replays import Replays
from agent_peft.rollout.report_tables import tables
from agent_peft.rollout.statistics import EvaluationReport
from agent_peft.runs.best import STATISTICS
from agent_peft.runs.branch import keep_start, started
from agent_peft.runs.changes import changed_contents, note_on_schedule, refuse_contents
from agent_peft.runs.checkpoint import POSITION, Position, latest_checkpoint, remove_old, save_checkpoint
from agent_peft.runs.digests import Contents, contents_of, read_contents, template_of
from agent_peft.runs.evaluations import Evaluations
from agent_peft.runs.folder import (
    STOPPED,
    Lock,
    RunDir,
    measured_of_run,
    open_run_dir,
    with_policy,
    write_config,
)
from agent_peft.runs.history import History
from agent_peft.runs.journal import JournalSource, open_journal
from agent_peft.runs.observers import (
    Observer,
    RunStart,
    RunStep,
    SafeObservers,
    TimingFile,
    append_line,
    metrics_record,
)
from agent_peft.runs.progress import Progress
from agent_peft.runs.resume import find_position, forget_after, load_start, restore
from agent_peft.runs.schedules import Schedules
from agent_peft.runs.trackers import load_trackers
from agent_peft.runs.trajectories import keep_trajectories, write_trajectories
from agent_peft.seeding import derive
from agent_peft.training.step_metrics import Step
from agent_peft.training.trainer import NonFiniteError, Trainer
from agent_peft.types import AgentPeftError, Group, TrustError

logger = logging.getLogger(__name__)


def train(
    config: TrainConfig,
    *,
    fresh: bool = False,
    change: bool = False,
    begin: str | None = None,
    journal: str | None = None,
    observers: Sequence[Observer] = (),
) -> dict[str, EvaluationReport]:
    """Run the stages of a configuration, and resume from the newest checkpoint in its run directory.

    Args:
        fresh: remove an earlier run from the directory and start over.
        change: continue although ``config`` has other values of what is learned than the run had so far.
        begin: begin with this checkpoint of another run, ``RUN`` or ``RUN:step_000012``, and count on.
        journal: a run of the same configuration, whose episodes are learned from; none is sampled.
        observers: called after each step and evaluation, on rank 0. They cannot change the run: an exception
            of one becomes a warning.

    Returns:
        The evaluations by name, in the order of the run.

    Raises:
        TrustError: a check failed, such as a loss that is not finite.
    """
    trackers = load_trackers(config.trackers)
    with ExitStack() as stack:
        stack.enter_context(lasting_output())
        ranks = stack.enter_context(join(config.ranks, config.policy.device))
        if ranks.world_size > 1 and config.engine.kind == "vllm":
            raise AgentPeftError("engine.kind: each rank would start a vLLM; start one and take kind: server")
        set_threads(config.threads, neighbours=int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        # the other ranks print nothing, and have no bar, which would swallow their warnings
        console = Console() if ranks.is_main else Console(quiet=True, force_terminal=False)
        progress = Progress(console)
        progress.note(f"loading the tasks of {config.environment.kind}")
        environment = stack.enter_context(closing(load_environment(config.environment)))
        config = config.with_steps(environment.tasks)
        measured = partial(measured_of_run, config, fresh, begin or journal)
        config = with_policy(config, **ranks.broadcast(measured))
        heldout = None
        if config.evaluation is not None:
            heldout = stack.enter_context(closing(load_environment(config.evaluation.environment)))
        contents = ranks.broadcast(partial(contents_of, config, environment, heldout))
        journaled = None if journal is None else open_journal(journal, config, contents)
        lock = Lock(config.run_dir, stack)
        options: dict[str, Any] = {"fresh": fresh, "change": change, "begin": begin}
        opened = TypeAdapter(RunDir).validate_python(
            ranks.broadcast(lambda: asdict(open_run_dir(config, lock, contents, **options)))
        )
        history: History | None = None
        if ranks.is_main:
            origin = None if opened.origin is None else asdict(opened.origin)
            history = stack.enter_context(History(config.run_dir, origin))
        schedules = Schedules(config.run_dir, config.engine, ranks)
        stack.enter_context(progress)
        ranks.broadcast(partial(keep_start, config))
        progress.note("loading the model, and checking that training and sampling compute it alike")
        policy = load_policy(started(config), config.seed)
        ranks.assert_equal(policy.model.parameters(), "the weights of policy.model")
        sampler = stack.enter_context(closing(load_sampler(policy, config.engine)))
        for stage in config.stages:
            check_thinking(sampler.chat, stage.sampling.max_thinking_tokens)
        template = template_of(sampler.chat)
        if ranks.is_main:
            earlier_run = opened.origin and not opened.begun and Path(opened.origin.run)
            before = read_contents(earlier_run or config.run_dir)
            changed = changed_contents(before, template, config, 0)
            refuse_contents(config.run_dir, changed, change or not opened.begun)
            opened = replace(opened, changes=(*opened.changes, *changed))
            if heldout is not None and config.evaluation is not None:
                warn_of_shared_tasks(environment, heldout, config.evaluation.num_tasks)
        timing = TimingFile(config.run_dir / "timing.jsonl", policy.device)
        safe = SafeObservers((timing, progress, *trackers, *observers))
        if ranks.is_main:
            stack.callback(safe.on_end)
        replays = Replays(max(stage.replay_in_prompt for stage in config.stages))
        evaluations = Evaluations(
            config, heldout, policy, sampler, ranks, schedules, progress, observers=safe, replays=replays
        )
        return _Run(
            config=config,
            ranks=ranks,
            lock=lock,
            policy=policy,
            sampler=sampler,
            environment=environment,
            evaluations=evaluations,
            schedules=schedules,
            progress=progress,
            observers=safe,
            recording=Recording(config, evaluations, ranks.world_size),
            opened=opened,
            contents=contents | template,
            history=history,
            journal=journaled,
        ).go()


@dataclass(frozen=True)
class Recording:
    """Writes the files of a run's steps, on rank 0. A failure ends the run, unlike an observer's."""

    config: TrainConfig
    evaluations: Evaluations  # which decide on the best checkpoint, and need some of them
    ranks: int  # their number

    @property
    def checkpoints(self) -> Path:
        return self.config.run_dir / "checkpoints"

    @property
    def trajectories(self) -> Path:
        return self.config.run_dir / "trajectories"

    def write_step(self, trainer: Trainer, step: RunStep, index: int, done: int) -> None:
        """Write the files of a step of stage ``index``, the run's ``done``-th, then its checkpoint."""
        record = metrics_record(step)
        append_line(self.config.run_dir / "metrics.jsonl", record)
        keep_trajectories(self.trajectories, step, self.config.trajectories)
        every, last = self.config.checkpoint.every, trainer.step == trainer.stage.steps
        if last or trainer.step % every == 0 or self.evaluations.saves(done, trainer.stage):
            self._save(trainer, index, done, json.dumps(record, indent=1) + "\n")

    def write_early_end(self, trainer: Trainer, index: int, done: int, end: int) -> None:
        """Write the checkpoint at the ``end`` of a stage that has ended after ``done`` steps of the run."""
        before = self.checkpoints / f"step_{done:06d}" / STATISTICS
        statistics = read_text(before, "a JSON file", MEGABYTE, unlinked=3)
        self._save(trainer, index, end, statistics)

    def write_stop(self, trainer: Trainer, index: int, number: int, groups: list[Group]) -> Path:
        """Write the trajectories of a step whose update is not finite, and STOPPED. Returns their path."""
        name, sampled = trainer.stage.name, trainer.stage.samples
        path = write_trajectories(self.trajectories, number, name, groups, sampled=sampled)
        write_atomic(self.config.run_dir / STOPPED, json.dumps({"stage": index, "step": number}) + "\n")
        return path

    def remove_old(self) -> None:
        """Remove the checkpoints that need not be kept. The last evaluation may have found a better one."""
        best = self._best()
        remove_old(self.checkpoints, self.config.checkpoint.keep_last, () if best is None else (best,))

    def _save(self, trainer: Trainer, index: int, done: int, statistics: str) -> None:
        """Write the checkpoint after ``done`` steps of the run, with the metrics of the last one."""
        position = {"stage": index, "steps": done, "ranks": self.ranks}

        def write(folder: Path) -> None:
            trainer.save(folder)
            (folder / POSITION).write_text(json.dumps(position))
            (folder / STATISTICS).write_text(statistics)

        keep_last, last = self.config.checkpoint.keep_last, trainer.step == trainer.stage.steps
        with explain_oom("as a checkpoint was written", "lower policy.lora.rank, or close other programs"):
            save_checkpoint(self.checkpoints, done, write, keep_last, keep=last, best=self._best)

    def _best(self) -> str | None:
        best = self.evaluations.note_best()
        return None if best is None else best.checkpoint


@dataclass(kw_only=True)
class _Run:
    """One process's part in a run."""

    config: TrainConfig
    ranks: Ranks
    lock: Lock
    policy: Policy
    sampler: Sampler
    environment: Environment
    evaluations: Evaluations
    schedules: Schedules
    progress: Progress
    observers: Observer
    recording: Recording
    opened: RunDir
    contents: Contents
    history: History | None  # of rank 0
    journal: Path | None  # the trajectories of a run to learn from

    def go(self) -> dict[str, EvaluationReport]:
        position = self.position()
        self.log_start(position)
        if position.checkpoint is None:
            self.write_config()
        if self.ranks.is_main:
            self.observers.on_start(RunStart(self.config, position.steps, tuple(self.evaluations.due)))
        self.evaluations.catch_up(position.steps, self.opened.origin.steps if self.opened.origin else 0)
        first = 0  # the stage's first step, counted over the run
        for index, stage in enumerate(self.config.stages):
            if index >= position.stage:
                self.train_stage(index, first, position.checkpoint if index == position.stage else None)
            first += stage.steps
        if reports := self.evaluations.reports:
            self.progress.console.print(*map(Printable, tables(reports)))
            for matrix in self.evaluations.matrices().values():
                self.progress.console.print(Printable(matrix.table()))
        trained = "adapter" if self.policy.has_adapter else "model"
        if self.ranks.is_main:
            self.recording.remove_old()
        best = self.evaluations.note_best()
        end = "" if best is None else f"; the best by {best.metric} ({best.value:.4g}) is {best.checkpoint}"
        self.progress.note(f"done: the {trained} is in {latest_checkpoint(self.checkpoints)}{end}")
        return reports

    @property
    def checkpoints(self) -> Path:
        return self.config.run_dir / "checkpoints"

    def position(self) -> Position:
        """Return the position in the run directory, the same on all ranks. Later files are removed."""

        def find() -> dict[str, Any]:
            position = find_position(self.config, self.ranks.world_size)
            forget_after(self.config.run_dir, position.steps)
            return asdict(position)

        position = Position(**self.ranks.broadcast(find))
        if position.checkpoint is not None and not (self.checkpoints / position.checkpoint).is_dir():
            raise AgentPeftError(
                f"{self.checkpoints / position.checkpoint}: rank 0 sees this checkpoint, and rank "
                f"{self.ranks.rank} does not; share run_dir"
            )
        return position

    def log_start(self, position: Position) -> None:
        """Print where the run continues, and with which changes; rank 0 writes it into the history, too."""
        steps, done = sum(stage.steps for stage in self.config.stages), position.steps
        origin, changes = self.opened.origin, self.opened.changes
        if origin is not None and not self.opened.begun:
            self.progress.note(f"beginning after step {done} of {steps}, from {origin}")
        elif position.checkpoint is not None:
            self.progress.note(f"resuming after step {done} of {steps}")
        for text in (*(f"{change} from step {done}" for change in changes), *self.opened.messages):
            self.progress.note(text)
        if self.history is not None:
            self.history.add("resumed" if self.opened.begun else "started", done)
            for change in changes:
                self.history.add("changed", done, str(change), key=change.key, old=change.old, new=change.new)

    def write_config(self) -> None:
        if self.ranks.is_main:
            write_config(self.config, self.contents)

    def train_stage(self, index: int, first: int, checkpoint: str | None) -> None:
        """Train one stage to its end, from its start or from a checkpoint inside it."""
        stage, seed = self.config.stages[index], derive(self.config.seed, "stage", index)
        if checkpoint is not None and first and stage.copies_reference:
            load_start(self.policy, self.checkpoints / f"step_{first:06d}", stage.name)
        replays, source = self.evaluations.replays, None
        if self.journal is not None and stage.samples:
            tasks = {task.id: task for task in self.environment.tasks}
            source = JournalSource(self.journal, tasks, first, stage, self.sampler.chat, replays)
        trainer = Trainer(
            self.policy,
            self.environment,
            stage,
            self.sampler,
            seed,
            self.ranks,
            source=source,
            schedule_of=partial(self.schedules.of_step, first),
            replays=replays,
        )
        if checkpoint is not None:
            restore(trainer, self.checkpoints / checkpoint)
            self.write_config()
            self.warn_changed_schedule(trainer, index)
        steps = sum(stage.steps for stage in self.config.stages)
        self.progress.start_stage(stage.name, stage.steps, trainer.step, first, steps)
        self.end_early(trainer, index, first)
        started = time.perf_counter()
        for step in self.steps(trainer, index, first):
            done = first + trainer.step  # more than step.number + 1 where ``until`` ended the stage
            if self.ranks.is_main:
                self.lock.renew()
                facts = (first + step.number, step.collection, step.metrics, stage, started)
                run_step = RunStep(*facts, token_values=step.token_values)
                self.recording.write_step(trainer, run_step, index, done)
                self.observers.on_step(run_step)
            if self.evaluations.make(done):
                self.end_early(trainer, index, first)
            started = time.perf_counter()

    def warn_changed_schedule(self, trainer: Trainer, index: int) -> None:
        """Warn if the stage was prolonged, and its learning rates up to here were those of a shorter one."""
        key = f"stages.{index}.steps"
        before = next((change.old for change in self.opened.changes if change.key == key), None)
        note = None if before is None else note_on_schedule(trainer.stage, before, trainer.step)
        if note is not None and self.ranks.is_main:
            logger.warning("%s", note)

    def end_early(self, trainer: Trainer, index: int, first: int) -> None:
        """End the stage here if its evaluations so far decide so. The numbers of steps jump to its end, as
        with an ``until`` of steps, and the next stage starts with the present policy.

        The reports on disk decide, so a run that is killed here ends the stage when it resumes.
        """
        stage, done = trainer.stage, first + trainer.step
        reason = self.evaluations.reason_to_end(stage, first)
        if reason is None or trainer.step == stage.steps:
            return
        self.progress.note(f"{stage.name} ends after step {done}: {reason}")
        self.evaluations.repeat(done, first + stage.steps)
        trainer.step = stage.steps
        if self.ranks.is_main:
            self.recording.write_early_end(trainer, index, done, first + stage.steps)

    def steps(self, trainer: Trainer, index: int, first: int) -> Iterator[Step]:
        """Yield the trainer's steps. An update that is not finite ends the run, its trajectories on disk."""
        try:
            yield from trainer
        except NonFiniteError as error:
            number, groups = first + trainer.step, error.collection.groups
            path = self.ranks.broadcast(
                lambda: str(self.recording.write_stop(trainer, index, number, groups))
            )
            raise TrustError(f"stage {trainer.stage.name!r}: {error}, which are in {path}") from error
