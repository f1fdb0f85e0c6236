"""A run and its directory: what is trained, evaluated and written, and how it resumes after a kill.

    config.yaml  metrics.jsonl  timing.jsonl  trajectories/step_*  checkpoints/step_*/
    evaluations/*  trackers/*

All files except timing.jsonl, run.json, log.txt and trackers/* depend on the configuration alone, and
config.yaml also on the folder: on a CPU, a run that is killed and started again writes the same bytes. With
several ranks, only rank 0 reads and writes the files, and tells the others what they hold.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from agent_peft.configuration.run_config import TrainConfig
from agent_peft.environments import load_environment
from agent_peft.environments.base import Environment
from agent_peft.environments.task_files.selection import warn_of_shared_tasks
from agent_peft.hardware import set_threads
from agent_peft.output import lasting_output
from agent_peft.policies.engine import load_sampler
from agent_peft.policies.engine.base import Sampler
from agent_peft.policies.loading import load_policy
from agent_peft.policies.policy import Policy
from agent_peft.printable import Printable
from agent_peft.ranks import Ranks, join
from agent_peft.rollout.replays import Replays
from agent_peft.rollout.report_tables import skill_table, table
from agent_peft.rollout.statistics import EvaluationReport
from agent_peft.runs.changes import changed_contents, note_on_schedule, refuse_contents
from agent_peft.runs.checkpoint import Position, latest_checkpoint
from agent_peft.runs.digests import Contents, contents_of, read_contents, template_of
from agent_peft.runs.evaluations import Evaluations, settle_names
from agent_peft.runs.folder import Claim, claim, dtype_of_run, settle, settle_dtype
from agent_peft.runs.history import History
from agent_peft.runs.lock import Lock
from agent_peft.runs.observers import (
    Observer,
    RunStart,
    RunStep,
    SafeObservers,
    TimingFile,
)
from agent_peft.runs.progress import Progress
from agent_peft.runs.recording import Recording
from agent_peft.runs.resume import (
    find_position,
    forget_after,
    load_start,
    measures_kl_to_its_start,
    restore,
)
from agent_peft.runs.schedules import Schedules
from agent_peft.runs.start import keep_start, started
from agent_peft.runs.trackers import load_trackers
from agent_peft.seeding import derive
from agent_peft.training.trainer import NonFiniteError, Step, Trainer
from agent_peft.types import AgentPeftError, TrustError

logger = logging.getLogger(__name__)


def train(
    config: TrainConfig,
    *,
    fresh: bool = False,
    change: bool = False,
    begin: str | None = None,
    observers: Sequence[Observer] = (),
) -> dict[str, EvaluationReport]:
    """Run the stages of a configuration, and resume where its run directory stands.

    Args:
        fresh: remove an earlier run from the directory and start over.
        change: continue although ``config`` has other values of what is learned than the run had so far.
        begin: begin with this checkpoint of another run, ``RUN`` or ``RUN:step_000012``, with its adapter,
            optimizer and algorithm state, and count on from there.
        observers: told of each step and evaluation, on rank 0. They cannot change the run: an exception of
            one becomes a warning.

    Returns:
        The evaluations by name, in the order of the run.

    Raises:
        AgentPeftError: the configuration does not fit this machine or the run directory.
        TrustError: a check failed, such as a loss that is not finite.
    """
    trackers = load_trackers(config.trackers)
    with ExitStack() as stack:
        stack.enter_context(lasting_output())
        ranks = stack.enter_context(join(config.ranks, config.policy.device))
        set_threads(config.threads, neighbours=int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        environment = stack.enter_context(closing(load_environment(config.environment)))
        config = config.with_steps(environment.tasks)
        config = settle_dtype(config, ranks.broadcast(partial(dtype_of_run, config, fresh, begin)))
        heldout = None
        if config.evaluation is not None:
            heldout = stack.enter_context(closing(load_environment(config.evaluation.environment)))
        contents = ranks.broadcast(partial(contents_of, config, environment, heldout))
        lock = Lock(config.run_dir, stack)
        options: dict[str, Any] = {"fresh": fresh, "change": change, "begin": begin}
        claimed = Claim.from_json(ranks.broadcast(lambda: asdict(claim(config, lock, contents, **options))))
        history: History | None = None  # of rank 0
        if ranks.is_main:
            origin = None if claimed.origin is None else asdict(claimed.origin)
            history = stack.enter_context(History(config.run_dir, origin))
        ranks.broadcast(partial(settle_names, config))
        schedules = Schedules(config.run_dir, config.engine, ranks)
        # the other ranks print nothing, and have no bar, which would swallow their warnings
        console = Console() if ranks.is_main else Console(quiet=True, force_terminal=False)
        progress = stack.enter_context(Progress(console))
        ranks.broadcast(partial(keep_start, config))
        policy = load_policy(started(config), config.seed)
        ranks.assert_equal(policy.model.parameters(), "the weights of policy.model")
        sampler = load_sampler(policy, config.engine)
        contents |= template_of(sampler.chat)
        if ranks.is_main:
            origin_run = claimed.origin and not claimed.begun and Path(claimed.origin.run)
            known = read_contents(origin_run or config.run_dir)
            edited = changed_contents(known, template_of(sampler.chat), config, 0)
            refuse_contents(config.run_dir, edited, change or not claimed.begun)
            claimed = replace(claimed, changes=(*claimed.changes, *edited))
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
        run = _Run(
            config,
            ranks,
            lock,
            policy,
            sampler,
            environment,
            evaluations,
            schedules,
            progress,
            safe,
            Recording(config, evaluations, ranks.world_size),
            claimed,
            contents,
            history,
        )
        return run.go()


@dataclass
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
    claimed: Claim
    contents: Contents
    history: History | None  # of rank 0

    def go(self) -> dict[str, EvaluationReport]:
        position = self.position()
        self.tell_of_start(position)
        if position.checkpoint is None:
            self.settle()
        if self.ranks.is_main:
            self.observers.on_start(RunStart(self.config, position.steps, tuple(self.evaluations.due)))
        begun = 0 if self.claimed.origin is None else self.claimed.origin.steps
        self.evaluations.catch_up(position.steps, begun)
        first = 0  # the stage's first step, counted over the run
        for index, stage in enumerate(self.config.stages):
            if index >= position.stage:
                self.train_stage(index, first, position.checkpoint if index == position.stage else None)
            first += stage.steps
        if reports := self.evaluations.reports:
            self.progress.console.print(Printable(table(reports)), Printable(skill_table(reports)))
            for matrix in self.evaluations.matrices().values():
                self.progress.console.print(Printable(matrix.table()))
        trained = "adapter" if self.policy.has_adapter else "model"
        if self.ranks.is_main:
            self.recording.remove_old()
        best = self.evaluations.note_best()
        told = "" if best is None else f"; the best by {best.metric} ({best.value:.4g}) is {best.checkpoint}"
        self.progress.note(f"done: the {trained} is in {latest_checkpoint(self.checkpoints)}{told}")
        return reports

    @property
    def checkpoints(self) -> Path:
        return self.config.run_dir / "checkpoints"

    def position(self) -> Position:
        """The position that the run directory holds, the same on all ranks. Later files are removed.

        Raises:
            AgentPeftError: this rank does not see the checkpoint.
        """

        def find() -> dict[str, object]:
            position = find_position(self.config, self.ranks.world_size)
            forget_after(self.config.run_dir, position.steps, self.evaluations.paths_after(position.steps))
            return asdict(position)

        position = Position(**self.ranks.broadcast(find))  # type: ignore[arg-type]
        if position.checkpoint is None:
            return position
        checkpoint = self.checkpoints / position.checkpoint
        if not checkpoint.is_dir():
            raise AgentPeftError(
                f"{checkpoint}: rank 0 sees this checkpoint, and rank {self.ranks.rank} does not; "
                "share run_dir"
            )
        return position

    def tell_of_start(self, position: Position) -> None:
        """Say where the run continues, and with which changes; on rank 0 write it into the history, too."""
        steps, done = sum(stage.steps for stage in self.config.stages), position.steps
        origin, changes = self.claimed.origin, self.claimed.changes
        if origin is not None and not self.claimed.begun:
            self.progress.note(f"beginning after step {done} of {steps}, from {origin}")
        elif position.checkpoint is not None:
            self.progress.note(f"resuming after step {done} of {steps}")
        for text in (*(f"{change} from step {done}" for change in changes), *self.claimed.notes):
            self.progress.note(text)
        if self.history is not None:
            self.history.add("resumed" if self.claimed.begun else "started", done)
            for change in changes:
                self.history.add("changed", done, str(change), key=change.key, old=change.old, new=change.new)

    def settle(self) -> None:
        if self.ranks.is_main:
            settle(self.config, self.contents)

    def train_stage(self, index: int, first: int, checkpoint: str | None) -> None:
        """Train one stage to its end, from its start or from a checkpoint inside it."""
        stage, seed = self.config.stages[index], derive(self.config.seed, "stage", index)
        if checkpoint is not None and first and measures_kl_to_its_start(stage):
            load_start(self.policy, self.checkpoints / f"step_{first:06d}", stage.name)
        schedule_of = partial(self.schedules.of_step, first)
        trainer = Trainer(
            self.policy,
            self.environment,
            stage,
            self.sampler,
            seed,
            self.ranks,
            schedule_of=schedule_of,
            replays=self.evaluations.replays,
        )
        if checkpoint is not None:
            restore(trainer, self.checkpoints / checkpoint)
            self.settle()
            self.tell_of_schedule(trainer, index)
        steps = sum(stage.steps for stage in self.config.stages)
        self.progress.start_stage(stage.name, stage.steps, trainer.step, first, steps)
        self.end_early(trainer, index, first)
        started = time.perf_counter()
        for step in self.steps(trainer, index, first):
            done = first + trainer.step  # more than step.number + 1 where ``until`` ended the stage
            if self.ranks.is_main:
                self.lock.renew()
                facts = (first + step.number, step.collection, step.metrics, stage, started)
                made = RunStep(*facts, token_values=step.token_values)
                self.recording.write_step(trainer, made, index, done)
                self.observers.on_step(made)
            if self.evaluations.make(done):
                self.end_early(trainer, index, first)
            started = time.perf_counter()

    def tell_of_schedule(self, trainer: Trainer, index: int) -> None:
        """Warn if the stage was prolonged, and its learning rates up to here were those of a shorter one."""
        key = f"stages.{index}.steps"
        before = next((change.old for change in self.claimed.changes if change.key == key), None)
        note = None if before is None else note_on_schedule(trainer.stage, before, trainer.step)
        if note is not None and self.ranks.is_main:
            logger.warning("%s", note)

    def end_early(self, trainer: Trainer, index: int, first: int) -> None:
        """End the stage here if its evaluations so far say so. The numbers of steps jump to its end, as with
        an ``until`` of steps, and the next stage starts with the present policy.

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
        """The trainer's steps. If an update is not finite, the run ends, and its trajectories and position
        are on disk.
        """
        try:
            yield from trainer
        except NonFiniteError as error:
            number, groups = first + trainer.step, error.collection.groups
            path = self.ranks.broadcast(
                lambda: str(self.recording.write_stop(trainer, index, number, groups))
            )
            raise TrustError(f"stage {trainer.stage.name!r}: {error}, which are in {path}") from error
