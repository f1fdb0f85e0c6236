"""A run and its directory: what is trained, evaluated, written down, and found again after a kill.

    config.yaml  metrics.jsonl  timing.jsonl  trajectories/step_*.jsonl  checkpoints/step_*/
    evaluations/*.json

All but timing.jsonl depends on the configuration alone: a run that is killed and started again writes the
same bytes (on a CPU). Several ranks go through it together; the first of them alone reads and writes the
files, and tells the others what stands there.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from agent_peft.configuration.run_config import TrainConfig
from agent_peft.environments import load_environment
from agent_peft.environments.base import Environment
from agent_peft.files import MEGABYTE, parse_json, read_text, write_atomic
from agent_peft.hardware import set_threads, take_peak
from agent_peft.out_of_memory import telling_out_of_memory
from agent_peft.policies import adapters
from agent_peft.policies.engine.local import Engine
from agent_peft.policies.policy import load_policy
from agent_peft.policies.reference import put_back
from agent_peft.printable import Printable
from agent_peft.ranks import join
from agent_peft.rollout.evaluation import evaluate
from agent_peft.rollout.statistics import EvaluationReport, skill_table, table
from agent_peft.runs.checkpoint import POSITION, clean, latest_checkpoint, save_checkpoint
from agent_peft.runs.folder import STOPPED, Lock, claim, dtype_of_run, settle_dtype
from agent_peft.runs.observers import JsonlTracker, Progress, write_trajectories
from agent_peft.runs.resume import forget_after, newest_whole, restore, steps_written
from agent_peft.runs.schedules import Schedules
from agent_peft.seeding import derive
from agent_peft.training.stage import StageConfig
from agent_peft.training.trainer import NonFiniteError, Step, Trainer
from agent_peft.types import AgentPeftError, TrustError

logger = logging.getLogger(__name__)


def train(config: TrainConfig, *, fresh: bool = False) -> dict[str, EvaluationReport]:
    """Run the stages, from wherever the run directory says they got to. Returns the evaluations by name,
    in order.
    """
    with ExitStack() as stack:
        return _Run(config, fresh, stack).go()


class _Run:
    def __init__(self, config: TrainConfig, fresh: bool, stack: ExitStack) -> None:
        self.folder = config.run_dir
        self.ranks = stack.enter_context(join(config.ranks, config.policy.device))
        self.stack, self.lock = stack, Lock(self.folder)
        set_threads(config.threads, neighbours=int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        self.config = config = settle_dtype(config, self.ranks.broadcast(lambda: dtype_of_run(config, fresh)))
        self.ranks.broadcast(lambda: claim(config, fresh, self.lock, stack))
        self.schedules = Schedules(self.folder, config.engine, self.ranks)
        # the others are silent, and have no bar, which would swallow their warnings
        self.console = Console() if self.ranks.leads else Console(quiet=True, force_terminal=False)
        self.progress = stack.enter_context(Progress(self.console))
        self.policy = load_policy(config.policy, config.seed)
        self.ranks.assert_equal(self.policy.model.parameters(), "the weights of policy.model")
        self.engine = Engine(self.policy, config.engine)
        self.environment = load_environment(config.environment)
        stack.callback(self.environment.close)
        self.heldout: Environment | None = None
        if config.evaluation is not None:
            self.heldout = load_environment(config.evaluation.environment)
            stack.callback(self.heldout.close)
        self.reports: dict[str, EvaluationReport] = {}

    def go(self) -> dict[str, EvaluationReport]:
        position = self.ranks.broadcast(self.find_position)
        checkpoint = self.folder / "checkpoints" / position["checkpoint"] if position["checkpoint"] else None
        if checkpoint is not None and not checkpoint.is_dir():
            raise AgentPeftError(
                f"{checkpoint}: the first rank sees this checkpoint and rank {self.ranks.rank} does not; share run_dir"
            )
        if checkpoint:
            self.progress.note(
                f"resuming after step {position['steps']} of {sum(s.steps for s in self.config.stages)}"
            )
        due = self.moments()
        self.recall(due, position["steps"])
        before = sum(s.steps for s in self.config.stages[: position["stage"]])
        for index, stage in enumerate(self.config.stages):
            if index < position["stage"]:
                continue
            if checkpoint is not None and index == position["stage"]:
                self.return_to_start(stage, before)
            trainer = Trainer(
                stage,
                self.policy,
                self.engine,
                self.environment,
                derive(self.config.seed, "stage", index),
                self.ranks,
            )
            trainer.schedule_of = partial(self.schedules.of_step, before)
            if checkpoint is not None and index == position["stage"]:
                restore(trainer, checkpoint)
            self.progress.start_stage(stage.name, stage.steps, trainer.step)
            clock = time.perf_counter()
            for step in self.steps(trainer, index, before):
                clock = self.record(trainer, step, index, before, clock)
                if (done := before + trainer.step) in due:
                    self.evaluate(due[done], done)
                    clock = time.perf_counter()
            before += stage.steps
        if self.reports:
            self.console.print(Printable(table(self.reports)), Printable(skill_table(self.reports)))
        trained = "adapter" if self.policy.has_adapter else "model"
        self.progress.note(f"done: the {trained} is in {latest_checkpoint(self.folder / 'checkpoints')}")
        return self.reports

    def return_to_start(self, stage: StageConfig, steps: int) -> None:
        """Give the model the weights that a stage began with, where its KL is measured to them: those after
        so many steps of the run, of which there is a checkpoint that is always kept. At 0 the policy is as it
        was loaded.

        Raises:
            AgentPeftError: the checkpoint is gone or damaged.
        """
        if not steps or not stage.build().needs_reference or stage.reference == "base":
            return
        start = self.folder / "checkpoints" / f"step_{steps:06d}"
        try:
            adapters.load(self.policy.model, start)
        except AgentPeftError as error:
            raise AgentPeftError(
                f"{start}: the KL of stage {stage.name!r} is measured to this checkpoint, and it cannot be read ({error}); put it back "
                "from a backup, or start over with --fresh"
            ) from error

    def find_position(self) -> dict[str, Any]:
        """How far the run directory is: its newest checkpoint, the stage and the steps done. What is newer
        is forgotten.
        """
        clean(self.folder / "checkpoints")
        checkpoint, position = newest_whole(self.folder / "checkpoints", self.config) or (
            None,
            {"stage": 0, "steps": 0},
        )
        wrote, here = position.get("ranks", 1), self.ranks.world
        if checkpoint and wrote != here and not self.config.ranks.allow_other_number:
            raise AgentPeftError(
                f"{self.folder}: {_ranks(wrote)} got this far, and now there {'is' if here == 1 else 'are'} {here}; start {_ranks(wrote)} "
                "(torchrun --nproc_per_node), or add ranks.allow_other_number=true: results are then equal but for rounding"
            )
        self.metrics, self.timing = (
            JsonlTracker(self.folder / "metrics.jsonl"),
            JsonlTracker(self.folder / "timing.jsonl"),
        )
        if not checkpoint and (made := steps_written(self.metrics.path)):
            logger.warning(
                "%s: holds metrics of %d steps and no checkpoint, so they are made again from the start",
                self.folder,
                made,
            )
        self.metrics.resume(position["steps"])
        self.timing.resume(position["steps"])
        later = [self.report_of(name) for steps, name in self.moments().items() if steps > position["steps"]]
        forget_after(self.folder, position["steps"], later)
        return {**position, "checkpoint": checkpoint.name if checkpoint else None}

    def steps(self, trainer: Trainer, stage: int, before: int) -> Iterator[Step]:
        """The trainer's steps. One whose update is not finite ends the run, its trajectories and the
        reason written down.
        """

        def write() -> str:
            path = write_trajectories(
                self.folder / "trajectories", before + trainer.step, error.collection.groups
            )
            write_atomic(
                self.folder / STOPPED, json.dumps({"stage": stage, "step": before + trainer.step}) + "\n"
            )
            return str(path)

        try:
            yield from trainer
        except NonFiniteError as failed:
            error = failed
            raise TrustError(
                f"stage {trainer.stage.name!r}: {error}, which are in {self.ranks.broadcast(write)}"
            ) from error

    def record(self, trainer: Trainer, step: Step, stage: int, before: int, clock: float) -> float:
        """Write a step down: what it did, then the checkpoint that says it was done. The other ranks go on
        meanwhile.
        """
        number, config = before + step.number, self.config
        done = before + trainer.step  # more than number + 1 where ``until`` ended the stage
        if not self.ranks.leads:
            return clock
        self.lock.renew(self.stack)
        record = self.metrics.log(number, {"stage": trainer.stage.name, **step.metrics})
        write_trajectories(self.folder / "trajectories", number, step.collection.groups)
        last = trainer.step == trainer.stage.steps
        if last or trainer.step % config.checkpoint.every == 0:

            def write(folder: Path) -> None:
                trainer.save(folder)
                (folder / POSITION).write_text(
                    json.dumps({"stage": stage, "steps": done, "ranks": self.ranks.world})
                )
                (folder / "training_stats.json").write_text(json.dumps(record, indent=1) + "\n")

            with telling_out_of_memory(
                "as a checkpoint was written", "lower policy.lora.rank, or close other programs"
            ):
                save_checkpoint(
                    self.folder / "checkpoints", done, write, config.checkpoint.keep_last, keep=last
                )
        now = time.perf_counter()
        statistics = step.collection.statistics
        read = sum(
            len(t.tokens) for group in step.collection.groups for t in group.trajectories
        )  # of demonstrations, which nobody sampled
        tokens = statistics.prefilled_naive + statistics.sampled or read
        peak = take_peak(self.policy.device)
        cost = {"seconds": now - clock, "sampled": statistics.sampled, "prefilled": statistics.prefilled}
        cost |= {"waited": statistics.waited, "late_answers": statistics.late}
        self.timing.log(number, cost if peak is None else {**cost, "peak_bytes": peak})
        self.progress.advance(
            step.metrics, tokens / (now - clock), demonstrations=not trainer.algorithm.on_policy
        )
        return now

    def moments(self) -> dict[int, str]:
        """Steps done -> the name of the evaluation that is due then, in order."""
        evaluation, due, before = self.config.evaluation, dict[int, str](), 0
        if evaluation is None:
            return due
        if "start" in evaluation.at:
            due[0] = "base"
        if evaluation.every:
            end = sum(stage.steps for stage in self.config.stages)
            due |= {step: f"step {step}" for step in range(evaluation.every, end + 1, evaluation.every)}
        for index, stage in enumerate(self.config.stages):
            before += stage.steps
            if "stages" in evaluation.at:
                due[before] = self.name_after(index)
        return dict(sorted(due.items()))

    def recall(self, due: Mapping[int, str], done: int) -> None:
        """The evaluations that were due in the first ``done`` steps: one that is not there (a kill came
        between a checkpoint and its evaluation) is made with the weights of its moment.
        """
        for steps, name in due.items():
            checkpoint = self.folder / "checkpoints" / f"step_{steps:06d}"
            if steps > done:
                break
            if steps and not self.ranks.broadcast(self.report_of(name).is_file):
                if not checkpoint.is_dir():
                    self.progress.note(
                        f"the evaluation {name!r} is gone, and so is its checkpoint: it is left out"
                    )
                    continue
                with put_back(
                    self.policy.model
                ):  # a first stage may have to begin with the weights that are there
                    self.policy.load(checkpoint)
                    self.evaluate(name, steps)
            else:
                self.evaluate(name, steps)

    def report_of(self, name: str) -> Path:
        return self.folder / "evaluations" / f"{name.replace(' ', '_')}.json"

    def name_after(self, index: int) -> str:
        names = [
            stage.name.replace(" ", "_") for stage in self.config.stages
        ]  # as they stand in the names of files
        again = names[: index + 1].count(names[index])
        return f"after {self.config.stages[index].name}" + (f" ({again})" if again > 1 else "")

    def evaluate(self, name: str, steps: int) -> None:
        """Evaluate on the held-out tasks after so many steps of the run, once: what was written down
        before is read.
        """
        assert self.config.evaluation is not None and self.heldout is not None
        path = self.report_of(name)
        if (
            written := self.ranks.broadcast(lambda: read_report(path).to_json() if path.is_file() else None)
        ) is not None:
            self.reports[name] = EvaluationReport.from_json(written)
            return
        self.progress.evaluating(name, len(self.heldout.tasks[: self.config.evaluation.num_tasks]))
        evaluation = self.config.evaluation.following(self.config.stage_at(steps).sampling)
        schedule = self.schedules.of(f"evaluation_{path.stem}")
        report = evaluate(self.engine, self.heldout, evaluation, self.config.seed, self.ranks, schedule)
        if self.ranks.leads:
            write_atomic(path, json.dumps(report.to_json(), indent=1) + "\n")
        self.reports[name] = report
        self.progress.note(f"{name}: {report.summary}")


def read_report(path: Path) -> EvaluationReport:
    """
    Raises:
        AgentPeftError: it is damaged.
    """
    try:
        return EvaluationReport.from_json(parse_json(read_text(path, "a JSON file", 256 * MEGABYTE)))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise AgentPeftError(
            f"{path}: is damaged ({type(error).__name__}: {error}); remove it, and it is made again"
        ) from error


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"
