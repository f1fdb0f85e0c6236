"""A run and its directory: what is trained, evaluated and written, and how it resumes after a kill.

    config.yaml  metrics.jsonl  timing.jsonl  trajectories/step_*.jsonl  checkpoints/step_*/
    evaluations/*.json

All files except timing.jsonl depend on the configuration alone: on a CPU, a run that is killed and started
again writes the same bytes. With several ranks, only rank 0 reads and writes the files, and tells the others
what they hold.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from agent_peft.configuration.run_config import TrainConfig
from agent_peft.environments import load_environment
from agent_peft.environments.base import Environment
from agent_peft.files import write_atomic
from agent_peft.hardware import set_threads
from agent_peft.out_of_memory import telling_out_of_memory
from agent_peft.policies.engine import load_sampler
from agent_peft.policies.engine.base import Sampler
from agent_peft.policies.loading import load_policy
from agent_peft.policies.policy import Policy
from agent_peft.printable import Printable
from agent_peft.ranks import Ranks, join
from agent_peft.rollout.report_tables import skill_table, table
from agent_peft.rollout.statistics import EvaluationReport
from agent_peft.runs.checkpoint import POSITION, latest_checkpoint, save_checkpoint
from agent_peft.runs.evaluations import Evaluations
from agent_peft.runs.folder import STOPPED, claim, dtype_of_run, settle_dtype
from agent_peft.runs.lock import Lock
from agent_peft.runs.observers import (
    MetricsFile,
    Observer,
    RunStep,
    SafeObservers,
    TimingFile,
    TrajectoryFiles,
    metrics_record,
    write_trajectories,
)
from agent_peft.runs.progress import Progress
from agent_peft.runs.resume import Position, find_position, forget_after, load_start, restore
from agent_peft.runs.schedules import Schedules
from agent_peft.seeding import derive
from agent_peft.training.stage import StageConfig
from agent_peft.training.trainer import NonFiniteError, Step, Trainer
from agent_peft.types import AgentPeftError, TrustError


def train(
    config: TrainConfig, *, fresh: bool = False, observers: Sequence[Observer] = ()
) -> dict[str, EvaluationReport]:
    """Run the stages of a configuration, and resume where its run directory stands.

    Args:
        fresh: remove an earlier run from the directory and start over.
        observers: told of each step and evaluation, on rank 0. They cannot change the run: an exception of
            one becomes a warning.

    Returns:
        The evaluations by name, in the order of the run.

    Raises:
        AgentPeftError: the configuration does not fit this machine or the run directory.
        TrustError: a check failed, such as a loss that is not finite.
    """
    with ExitStack() as stack:
        ranks = stack.enter_context(join(config.ranks, config.policy.device))
        set_threads(config.threads, neighbours=int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        config = settle_dtype(config, ranks.broadcast(partial(dtype_of_run, config, fresh)))
        lock = Lock(config.run_dir, stack)
        ranks.broadcast(partial(claim, config, fresh, lock))
        schedules = Schedules(config.run_dir, config.engine, ranks)
        # the other ranks print nothing, and have no bar, which would swallow their warnings
        console = Console() if ranks.is_main else Console(quiet=True, force_terminal=False)
        progress = stack.enter_context(Progress(console))
        policy = load_policy(config.policy, config.seed)
        ranks.assert_equal(policy.model.parameters(), "the weights of policy.model")
        sampler = load_sampler(policy, config.engine)
        environment = stack.enter_context(closing(load_environment(config.environment)))
        heldout = None
        if config.evaluation is not None:
            heldout = stack.enter_context(closing(load_environment(config.evaluation.environment)))
        timing = TimingFile(config.run_dir / "timing.jsonl", policy.device)
        safe = SafeObservers((timing, progress, *observers))
        if ranks.is_main:
            stack.callback(safe.on_end)
        evaluations = Evaluations(
            config, heldout, policy, sampler, ranks, schedules, progress, observers=safe
        )
        run = _Run(config, ranks, lock, policy, sampler, environment, evaluations, schedules, progress, safe)
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

    def go(self) -> dict[str, EvaluationReport]:
        position = self.position()
        self.evaluations.catch_up(position.steps)
        first = 0  # the stage's first step, counted over the run
        for index, stage in enumerate(self.config.stages):
            if index >= position.stage:
                self.train_stage(index, first, position.checkpoint if index == position.stage else None)
            first += stage.steps
        if reports := self.evaluations.reports:
            self.progress.console.print(Printable(table(reports)), Printable(skill_table(reports)))
        trained = "adapter" if self.policy.has_adapter else "model"
        self.progress.note(f"done: the {trained} is in {latest_checkpoint(self.checkpoints)}")
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
        steps = sum(stage.steps for stage in self.config.stages)
        self.progress.note(f"resuming after step {position.steps} of {steps}")
        return position

    def train_stage(self, index: int, first: int, checkpoint: str | None) -> None:
        """Train one stage to its end, from its start or from a checkpoint inside it."""
        stage, seed = self.config.stages[index], derive(self.config.seed, "stage", index)
        if checkpoint is not None and first and _measures_kl_to_its_start(stage):
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
        )
        if checkpoint is not None:
            restore(trainer, self.checkpoints / checkpoint)
        self.progress.start_stage(stage.name, stage.steps, trainer.step)
        started = time.perf_counter()
        for step in self.steps(trainer, index, first):
            done = first + trainer.step  # more than step.number + 1 where ``until`` ended the stage
            if self.ranks.is_main:
                number = first + step.number
                self.record(
                    trainer, RunStep(number, step.collection, step.metrics, stage, started), index, done
                )
            self.evaluations.make(done)
            started = time.perf_counter()

    def steps(self, trainer: Trainer, index: int, first: int) -> Iterator[Step]:
        """The trainer's steps. If an update is not finite, the run ends, and its trajectories and position
        are on disk.
        """
        try:
            yield from trainer
        except NonFiniteError as error:
            number, groups = first + trainer.step, error.collection.groups

            def write() -> str:
                path = write_trajectories(self.config.run_dir / "trajectories", number, groups)
                position = json.dumps({"stage": index, "step": number})
                write_atomic(self.config.run_dir / STOPPED, position + "\n")
                return str(path)

            raise TrustError(
                f"stage {trainer.stage.name!r}: {error}, which are in {self.ranks.broadcast(write)}"
            ) from error

    def record(self, trainer: Trainer, step: RunStep, index: int, done: int) -> None:
        """Write a step's files, then the checkpoint that says it is done; then tell the observers.

        A run without its files would be a silent loss, so their failure ends it, unlike an observer's.
        """
        self.lock.renew()
        MetricsFile(self.config.run_dir / "metrics.jsonl").on_step(step)
        TrajectoryFiles(self.config.run_dir / "trajectories").on_step(step)
        last, settings = trainer.step == trainer.stage.steps, self.config.checkpoint
        if last or trainer.step % settings.every == 0:
            position = {"stage": index, "steps": done, "ranks": self.ranks.world_size}

            def write(folder: Path) -> None:
                trainer.save(folder)
                (folder / POSITION).write_text(json.dumps(position))
                (folder / "training_stats.json").write_text(json.dumps(metrics_record(step), indent=1) + "\n")

            with telling_out_of_memory(
                "as a checkpoint was written", "lower policy.lora.rank, or close other programs"
            ):
                save_checkpoint(self.checkpoints, done, write, settings.keep_last, keep=last)
        self.observers.on_step(step)


def _measures_kl_to_its_start(stage: StageConfig) -> bool:
    return stage.algorithm.facts.needs_reference and stage.reference != "base"
