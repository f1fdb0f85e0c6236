"""What a run keeps of its steps: their metrics, trajectories and checkpoints."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from agent_peft.configuration.run_config import TrainConfig
from agent_peft.files import MEGABYTE, read_text, write_atomic
from agent_peft.out_of_memory import explain_oom
from agent_peft.runs.best import STATISTICS
from agent_peft.runs.checkpoint import POSITION, remove_old, save_checkpoint
from agent_peft.runs.evaluations import Evaluations
from agent_peft.runs.folder import STOPPED
from agent_peft.runs.observers import MetricsFile, RunStep, metrics_record
from agent_peft.runs.trajectories import keep_trajectories, write_trajectories
from agent_peft.training.trainer import Trainer
from agent_peft.types import Group


@dataclass(frozen=True)
class Recording:
    """Writes the files of a run's steps, on rank 0.

    A run without its files would be a silent loss, so their failure ends it, unlike an observer's.

    Attributes:
        evaluations: they decide on which checkpoint is the best, and need some of them.
        ranks: the number of ranks that train.
    """

    config: TrainConfig
    evaluations: Evaluations
    ranks: int

    @property
    def checkpoints(self) -> Path:
        return self.config.run_dir / "checkpoints"

    @property
    def trajectories(self) -> Path:
        return self.config.run_dir / "trajectories"

    def write_step(self, trainer: Trainer, step: RunStep, index: int, done: int) -> None:
        """Write a step's files, then the checkpoint that says it is done.

        Args:
            index: that of the stage.
            done: the steps of the run that are done with it.
        """
        MetricsFile(self.config.run_dir / "metrics.jsonl").on_step(step)
        keep_trajectories(self.trajectories, step, self.config.trajectories)
        every, last = self.config.checkpoint.every, trainer.step == trainer.stage.steps
        if last or trainer.step % every == 0 or self.evaluations.saves(done, trainer.stage):
            self._save(trainer, index, done, json.dumps(metrics_record(step), indent=1) + "\n")

    def write_early_end(self, trainer: Trainer, index: int, done: int, end: int) -> None:
        """Write the checkpoint at the ``end`` of a stage that has ended after ``done`` steps of the run."""
        before = self.checkpoints / f"step_{done:06d}" / STATISTICS
        statistics = read_text(before, "a JSON file", MEGABYTE, unlinked=3)
        self._save(trainer, index, end, statistics)

    def write_stop(self, trainer: Trainer, index: int, number: int, groups: list[Group]) -> Path:
        """Write the trajectories of a step whose update is not finite, and that it stopped the run there.
        Returns the path of the trajectories.
        """
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
        found = self.evaluations.note_best()
        return None if found is None else found.checkpoint
