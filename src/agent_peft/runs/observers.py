"""Observers receive a callback after each step and evaluation of a run. Its timing file, its progress and its
trackers are observers, and ``train(config, observers=[...])`` takes more of them.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_peft.configuration.run_config import TrainConfig
from agent_peft.files import open_regular
from agent_peft.hardware import take_peak
from agent_peft.lazy_torch import torch
from agent_peft.rollout.statistics import EvaluationReport
from agent_peft.training.stage import StageConfig
from agent_peft.training.step_metrics import Step

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunStep(Step):
    """A step of a run. Its ``number`` counts from 0 over all stages."""

    stage: StageConfig
    started: float  # time.perf_counter() when the step began

    @property
    def seconds(self) -> float:
        """The seconds since the step began, those of its checkpoint included."""
        return time.perf_counter() - self.started


@dataclass(frozen=True)
class RunStart:
    """A run that begins or continues."""

    config: TrainConfig
    done: int = 0  # steps
    evaluations: tuple[int, ...] = ()  # the steps after which one is due, over the whole run

    @property
    def steps(self) -> int:
        """The steps of all stages."""
        return sum(stage.steps for stage in self.config.stages)


class Observer:
    """The base class of observers. Override the methods that you need; each does nothing by default.

    With several ranks, only rank 0 calls observers. A run that was killed repeats the steps after its newest
    checkpoint, so ``on_step`` may be called again with a number that it has seen before.
    """

    def on_start(self, run: RunStart) -> None:
        """Called once, before everything else. ``run`` has ``config``, ``done``, ``steps`` and
        ``evaluations``.
        """

    def on_step(self, step: RunStep) -> None:
        """Called after each step, once its checkpoint is on disk. ``step`` has ``number``, ``metrics``,
        ``trajectories``, ``stage`` and ``seconds``.
        """

    def on_evaluation(self, name: str, report: EvaluationReport) -> None:
        """Called after each evaluation. ``name`` is ``base``, ``after STAGE`` or ``step 20``."""

    def on_end(self) -> None:
        """Called once when the run ends: it is complete, was interrupted or failed after its start."""


class SafeObservers(Observer):
    """Calls several observers. If one of them raises, one warning names it, and the run continues."""

    def __init__(self, observers: Iterable[Observer]) -> None:
        self._observers = list(observers)
        self._failed: set[int] = set()  # positions

    def on_start(self, run: RunStart) -> None:
        self._call("on_start", run)

    def on_step(self, step: RunStep) -> None:
        self._call("on_step", step)

    def on_evaluation(self, name: str, report: EvaluationReport) -> None:
        self._call("on_evaluation", name, report)

    def on_end(self) -> None:
        self._call("on_end")

    def _call(self, method: str, *arguments: Any) -> None:
        for position, observer in enumerate(self._observers):
            if method == "on_start" and not hasattr(observer, method):
                continue  # an object with the three other methods alone, as before on_start existed
            try:
                getattr(observer, method)(*arguments)
            except Exception as error:
                if position not in self._failed:
                    self._failed.add(position)
                    logger.warning(
                        "the observer %s failed in %s (%s: %s); the run continues, and its further "
                        "failures are not reported",
                        type(observer).__name__,
                        method,
                        type(error).__name__,
                        error,
                    )


class TimingFile(Observer):
    """``timing.jsonl``: the seconds, tokens and peak memory (in bytes) of each step."""

    def __init__(self, path: Path, device: torch.device) -> None:
        self.path, self.device = path, device

    def on_step(self, step: RunStep) -> None:
        statistics, peak = step.collection.statistics, take_peak(self.device)
        record = {
            "step": step.number,
            "seconds": step.seconds,
            "sampled": statistics.sampled,
            "prefilled": statistics.prefilled,
            "waited": statistics.waited,
            "late_answers": statistics.late,
        }
        append_line(self.path, record if peak is None else {**record, "peak_bytes": peak})


def metrics_record(step: RunStep) -> dict[str, float | str]:
    """Return a step's line of ``metrics.jsonl``, such as ``{"step": 12, "stage": "grpo", "reward": 0.5}``.
    Numbers that JSON lacks become strings: ``"nan"``.

    A resumed run writes the same bytes as one that was never killed. Numbers that differ between runs (times,
    speeds) therefore belong in ``TimingFile``. Raises `ValueError`: a metric is called ``step`` or ``stage``.
    """
    if taken := {"step", "stage"} & step.metrics.keys():
        raise ValueError(f"a metric cannot be called {min(taken)}: the line has a key of this name")
    metrics = {
        name: value if math.isfinite(value) else repr(float(value)) for name, value in step.metrics.items()
    }
    return {"step": step.number, "stage": step.stage.name, **metrics}


def append_line(path: Path, record: Mapping[str, float | str]) -> None:
    """Append a record as one line of JSON, and sync it. Numbers read back to the bit."""
    descriptor = open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    with open(descriptor, "w", encoding="utf-8", newline="\n") as file:
        file.write(json.dumps(record, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
