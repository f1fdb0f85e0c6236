"""The progress of a run in a terminal: a bar for each stage, or one plain line for each step."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TaskID, TextColumn
from rich.progress import Progress as Bars

from agent_peft.printable import printable
from agent_peft.rollout.statistics import EvaluationReport
from agent_peft.runs.observers import Observer, RunStep

# metric -> format, in the order of the line
FORMATS_OF_DEMONSTRATIONS = {"loss": ".4f", "gradient_norm": ".3g"}
# no loss: on policy its value is about 0 whether the agent does well or badly
FORMATS_OF_EPISODES = {
    "reward": ".3f",
    "success": ".1%",
    "groups_with_signal": ".0%",
    "gradient_norm": ".3g",
}
FAULTS = (  # counts that are printed where they are not 0
    "infrastructure_failures",
    "crashed",
    "defects",
    "nonfinite_updates",
    "demonstrations_incorrect",
    "demonstrations_unsayable",
)


class Progress(Observer):
    """A live bar for each stage on a terminal, and one plain line for each step elsewhere.

    >>> import sys
    >>> with Progress(Console(file=sys.stdout)) as progress:
    ...     progress.start_stage("grpo", total=60, done=59)
    ...     progress.advance({"reward": 0.25, "success": 0.5}, tokens_per_second=1200.0)
    grpo 60/60  reward 0.250  success 50.0%  1200 tokens/s  0:00:00 left
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        self.live = self.console.is_terminal
        self._bars = Bars(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}", markup=False),
            console=self.console,
        )
        self._bar: TaskID | None = None
        self._name, self._total, self._done = "", 0, 0
        self._started, self._first = 0.0, 0

    def __enter__(self) -> Self:
        if self.live:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live:
            self._bars.stop()

    def start_stage(self, name: str, total: int, done: int = 0) -> None:
        """Begin a stage of ``total`` steps. ``done`` of them were made by an earlier process, and do not
        count for the estimate of the time left.
        """
        name = printable(name)
        self._name, self._total, self._done, self._first = name, total, done, done
        self._started = time.monotonic()
        if self.live:
            self._bar = self._bars.add_task(name, total=total, completed=done, numbers="")

    def on_step(self, step: RunStep) -> None:
        statistics, trajectories = step.collection.statistics, step.trajectories
        tokens = statistics.prefilled_naive + statistics.sampled or sum(len(t.tokens) for t in trajectories)
        self.advance(step.metrics, tokens / step.seconds, demonstrations=not statistics.sampled)

    def on_evaluation(self, name: str, report: EvaluationReport) -> None:
        self.note(f"{name}: {report.summary}")

    def advance(
        self, metrics: Mapping[str, float], tokens_per_second: float, demonstrations: bool = False
    ) -> None:
        """Count one step of the stage.

        Args:
            demonstrations: whether the step learned from demonstrations. Their rewards and outcomes say
                nothing about the policy and are not printed.

        Raises:
            RuntimeError: no stage was started, or all its steps are done.
        """
        if self._done >= self._total:
            raise RuntimeError(
                f"all {self._total} steps of stage {self._name!r} are done: start a stage before it advances"
            )
        self._done += 1
        numbers = self._numbers(metrics, tokens_per_second, demonstrations)
        if self._bar is not None:
            self._bars.update(self._bar, completed=self._done, numbers=numbers)
        else:
            self.note(f"{self._name} {self._done}/{self._total}  {numbers}")

    def note(self, text: str) -> None:
        """Print a line, above the bar where there is one."""
        self.console.print(printable(text), markup=False, highlight=False, soft_wrap=True)

    def _numbers(self, metrics: Mapping[str, float], tokens_per_second: float, demonstrations: bool) -> str:
        seconds = (time.monotonic() - self._started) / (self._done - self._first) * (self._total - self._done)
        formats = FORMATS_OF_DEMONSTRATIONS if demonstrations else FORMATS_OF_EPISODES
        formats = formats | {name: ".0f" for name in FAULTS if metrics.get(name)}
        numbers = [
            f"{name.replace('_', ' ')} {metrics[name]:{form}}"
            for name, form in formats.items()
            if name in metrics
        ]
        hours, rest = divmod(round(seconds), 3600)
        left = f"{hours}:{rest // 60:02d}:{rest % 60:02d} left"
        return "  ".join([*numbers, f"{tokens_per_second:.0f} tokens/s", left])
