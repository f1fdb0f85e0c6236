"""The progress of a run: a dashboard on a terminal, and plain lines with the time elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.progress import TaskID

from agent_peft.printable import printable
from agent_peft.rollout.statistics import EvaluationReport
from agent_peft.runs.dashboard import Dashboard
from agent_peft.runs.observers import Observer, RunStart, RunStep
from agent_peft.training.step_metrics import headline

FAULTS = (  # counts that are printed where they are not 0
    "infrastructure_failures",
    "crashed",
    "defects",
    "nonfinite_updates",
    "demonstrations_incorrect",
    "demonstrations_unsayable",
)


TIME = "%m-%d %H:%M:%S"


class Progress(Observer):
    """On a terminal, a live dashboard with bars for the stage and the evaluation. Elsewhere one plain line
    for each step, with the time and, if there are several stages, the step of the run.

    >>> import io
    >>> with Progress(Console(file=io.StringIO(), width=200)) as progress:
    ...     progress.start_stage("grpo", total=60, done=59, first=6, steps=66)
    ...     progress.advance({"reward": 0.25, "success": 0.5}, tokens_per_second=1200.0)
    >>> _, _, line = progress.console.file.getvalue().split(" ", 2)  # behind the day and the time
    >>> line.strip()
    '66/66  grpo 60/60  reward 0.250  success 50.0%  1200 tokens/s  0:00:00 left'
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        # a dashboard needs a cursor that moves, and Unicode
        simple = self.console.is_dumb_terminal or self.console.options.ascii_only
        self.live = self.console.is_terminal and not simple
        self._dashboard = Dashboard(self.console)
        self._display = Live(self._dashboard, console=self.console)
        self._bar: TaskID | None = None
        self._run_bar: TaskID | None = None  # where there are several stages
        self._begun, self._made = 0.0, 0  # of this process: its first stage, and its steps
        self._due: tuple[int, ...] = ()  # the steps after which an evaluation is due
        self._name, self._total, self._done = "", 0, 0
        self._started, self._resumed = 0.0, 0
        self._first, self._steps = 0, 0  # of the run

    def __enter__(self) -> Self:
        if self.live:
            self._display.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live:
            self._display.stop()

    def start_stage(
        self, name: str, total: int, done: int = 0, first: int = 0, steps: int | None = None
    ) -> None:
        """Begin a stage of ``total`` steps. ``done`` of them were made by an earlier process, and do not
        count for the estimate of the time left.

        Args:
            first: the number of the run's steps before the stage.
            steps: of all stages; None takes those of this one.
        """
        name = printable(name)
        self._name, self._total, self._done, self._resumed = name, total, done, done
        self._first, self._steps = first, steps or total
        self._started = time.monotonic()
        self._begun = self._begun or self._started
        if self.live:
            bars = self._dashboard.bars
            if self._bar is not None:
                bars.remove_task(self._bar)  # of the stage before
            if self._steps != total and self._run_bar is None:
                self._run_bar = bars.add_task("run", total=self._steps, numbers="")
            if self._run_bar is not None:
                bars.update(self._run_bar, completed=first + done)
            self._bar = self._dashboard.start_stage(name, total, done)

    def on_start(self, run: RunStart) -> None:
        self._due = run.evaluations

    def on_step(self, step: RunStep) -> None:
        statistics, trajectories = step.collection.statistics, step.trajectories
        tokens = statistics.prefilled_naive + statistics.sampled or sum(len(t.tokens) for t in trajectories)
        self.advance(step.metrics, tokens / step.seconds)
        self._dashboard.trajectory = trajectories[-1] if trajectories else None

    def on_evaluation(self, name: str, report: EvaluationReport) -> None:
        self.note(f"{name}: {report.summary}")
        later = sum(step > (report.step or 0) for step in self._due)
        made = f"{len(self._due) - later}/{len(self._due)}  " if self._due else ""
        self._dashboard.evaluations = f"{made}{name}: {report.summary}"

    @contextmanager
    def evaluation(self, name: str, tasks: int, episodes: int) -> Iterator[Callable[[], None]]:
        """Show an evaluation while it is made. Its episodes call what this yields, from any thread."""
        label = printable(f"evaluating {name}")
        if not self.live:
            self.note(f"{label} on {tasks} tasks")
            yield lambda: None
            return
        bars = self._dashboard.bars
        bar = bars.add_task(label, total=episodes, numbers="episodes")
        try:
            yield lambda: bars.advance(bar)
        finally:
            bars.remove_task(bar)

    def advance(self, metrics: Mapping[str, float], tokens_per_second: float) -> None:
        """Count one step of the stage.

        Raises:
            RuntimeError: no stage was started, or all its steps are done.
        """
        if self._done >= self._total:
            raise RuntimeError(
                f"all {self._total} steps of stage {self._name!r} are done: start a stage before it advances"
            )
        self._done += 1
        self._made += 1
        if self._bar is not None:
            self._dashboard.add(metrics, tokens_per_second)
            self._show_time_left(self._bar)
        else:
            numbers = self._numbers(metrics, tokens_per_second)
            stage = f"{self._name} {self._done}/{self._total}"
            if self._steps != self._total:
                stage = f"{self._first + self._done}/{self._steps}  {stage}"
            self.note(f"{stage}  {numbers}")

    def note(self, text: str) -> None:
        """Print a line, above the bars on a terminal, and with the time elsewhere."""
        line = printable(text) if self.live else f"{time.strftime(TIME)}  {printable(text)}"
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _show_time_left(self, bar: TaskID) -> None:
        """Move the bars. The time left is that of all stages, evaluations included."""
        done, bars = self._first + self._done, self._dashboard.bars
        each = (time.monotonic() - self._begun) / self._made
        left = f"{duration(each * (self._steps - done))} left"
        bars.update(bar, completed=self._done, numbers=left if self._run_bar is None else "")
        if self._run_bar is not None:
            bars.update(self._run_bar, completed=done, numbers=left)

    def _numbers(self, metrics: Mapping[str, float], tokens_per_second: float) -> str:
        each = (time.monotonic() - self._started) / (self._done - self._resumed)
        seconds = each * (self._total - self._done)
        faults = [f"{name.replace('_', ' ')} {metrics[name]:.0f}" for name in FAULTS if metrics.get(name)]
        speed = [f"{tokens_per_second:.0f} tokens/s", f"{duration(seconds)} left"]
        return "  ".join(filter(None, [headline(metrics), *faults, *speed]))


def duration(seconds: float) -> str:
    """
    >>> duration(7384.0)
    '2:03:04'
    """
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}"
