"""The progress of a run: a dashboard on a terminal, and plain lines with the time elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TaskID, TextColumn
from rich.progress import Progress as Bars
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from agent_peft.printable import printable
from agent_peft.rollout.statistics import EvaluationReport
from agent_peft.runs.observers import Observer, RunStart, RunStep
from agent_peft.training.step_metrics import headline
from agent_peft.types import Trajectory

TIME = "%m-%d %H:%M:%S"
CURVES = {  # metric -> format, in their order
    "reward": ".3f",
    "success": ".1%",
    "loss": ".4f",
    "surprisal": ".4f",
    "groups_with_signal": ".0%",
    "gradient_norm": ".3g",
}
KEPT = 400  # values of a curve, more than any terminal is wide
RECENT = 10  # steps that a warning looks back on
# metric, the mean that is too much, and the warning: the ranges of docs/metrics.md
LIMITS = (
    ("zero_variance_groups", 0.8, "{:.0%} of the groups are constant: one reward for all their episodes"),
    ("truncated", 0.1, "{:.0%} of the episodes are truncated by sampling.max_tokens"),
    ("cut_actions", 0.2, "{:.0%} of the actions are cut by a token limit"),
    ("approx_kl", 0.05, "the policy moves {:.2g} nats in a step: lower the learning rate"),
    ("clip_fraction", 0.3, "{:.0%} of the tokens are clipped: lower the learning rate"),
    ("mismatch", 0.05, "sampler and trainer differ by {:.2g} nats a token"),
)
COUNTS = {  # metric that is shown where it is not 0 -> what is counted
    "infrastructure_failures": "failures of an environment",
    "crashed": "episodes that crashed an environment",
    "defects": "exceptions of an environment's code",
    "nonfinite_updates": "updates that are not finite",
    "demonstrations_incorrect": "demonstrations that are not correct",
    "demonstrations_unsayable": "demonstrations that the policy cannot say",
}
BLOCKS = "▁▂▃▄▅▆▇█"
MESSAGE = 2000  # characters that are looked at; a line shows fewer


class Progress(Observer):
    """On a terminal, a live dashboard with bars for the stage and the evaluation. Elsewhere one plain line
    for each step, with the time and, if there are several stages, the step of the run; and each warning is a
    line, once in a stage.

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
        self._printed: set[str] = set()  # the warnings of the stage
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
        count for the estimate of the time left. ``first``: the number of the run's steps before the stage.
        ``steps``: of all stages; None takes those of this one.
        """
        name = printable(name)
        self._name, self._total, self._done, self._resumed = name, total, done, done
        self._first, self._steps = first, steps or total
        self._started = time.monotonic()
        self._begun = self._begun or self._started
        self._printed.clear()
        if self.live:
            bars = self._dashboard.bars
            if self._bar is not None:
                bars.remove_task(self._bar)  # of the stage before
            if self._steps != total and self._run_bar is None:
                self._run_bar = bars.add_task("run", total=self._steps, numbers="")
            if self._run_bar is not None:
                bars.update(self._run_bar, completed=first + done)
            self._bar = self._dashboard.start_stage(name, total, done)
        else:
            self._dashboard.forget()

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
        count = f"{len(self._due) - later}/{len(self._due)}  " if self._due else ""
        self._dashboard.evaluations = f"{count}{name}: {report.summary}"

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
        """Count one step of the stage."""
        self._done += 1
        self._made += 1
        self._dashboard.add(metrics, tokens_per_second)
        if self._bar is not None:
            self._show_time_left(self._bar)
        else:
            numbers = self._numbers(metrics, tokens_per_second)
            stage = f"{self._name} {self._done}/{self._total}"
            if self._steps != self._total:
                stage = f"{self._first + self._done}/{self._steps}  {stage}"
            self.note(f"{stage}  {numbers}")
            self._warn()

    def _warn(self) -> None:
        """Print what is wrong with the last steps: each warning once in a stage."""
        enough = min(RECENT, self._total - self._resumed)
        for name, text in self._dashboard.excesses().items():
            if name not in self._printed and len(self._dashboard.recent[name]) >= enough:
                self._printed.add(name)
                self.note(f"! {text}")

    def note(self, text: str) -> None:
        """Print a line, above the bars on a terminal, and with the time elsewhere."""
        line = printable(text) if self.live else f"{time.strftime(TIME)}  {printable(text)}"
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _show_time_left(self, bar: TaskID) -> None:
        """Move the bars. The time remaining is that of all stages, evaluations included."""
        done, bars = self._first + self._done, self._dashboard.bars
        each = (time.monotonic() - self._begun) / self._made
        remaining = f"{duration(each * (self._steps - done))} left"
        bars.update(bar, completed=self._done, numbers=remaining if self._run_bar is None else "")
        if self._run_bar is not None:
            bars.update(self._run_bar, completed=done, numbers=remaining)

    def _numbers(self, metrics: Mapping[str, float], tokens_per_second: float) -> str:
        each = (time.monotonic() - self._started) / (self._done - self._resumed)
        seconds = each * (self._total - self._done)
        faults = [f"{name.replace('_', ' ')} {metrics[name]:.0f}" for name in COUNTS if metrics.get(name)]
        speed = [f"{tokens_per_second:.0f} tokens/s", f"{duration(seconds)} left"]
        return "  ".join(filter(None, [headline(metrics), *faults, *speed]))


def duration(seconds: float) -> str:
    """
    >>> duration(7384.0)
    '2:03:04'
    """
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}"


class Dashboard:
    """The state of the display. A thread of rich draws it while the run changes it, so each change puts a new
    object in the place of the old one.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.bars = Bars(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}", markup=False),
            console=console,
            expand=True,
        )
        self.curves: dict[str, list[float]] = {}
        self.recent: dict[str, list[float]] = {}  # of ``LIMITS``, per step of the stage
        self.counts: dict[str, int] = {}  # over the steps of this process
        self.speed = 0.0  # tokens per second
        self.trajectory: Trajectory | None = None
        self.evaluations = ""

    def start_stage(self, name: str, total: int, done: int) -> TaskID:
        self.forget()
        return self.bars.add_task(name, total=total, completed=done, numbers="")

    def forget(self) -> None:
        """Begin again: curves of another stage are not comparable, and neither are its warnings."""
        self.curves, self.recent = {}, {}

    def add(self, metrics: Mapping[str, float], speed: float) -> None:
        """Add the numbers of a step. Demonstrations have no reward, and their limits are nobody's fault."""
        demonstrations = "reward" not in metrics
        # on policy the loss is about 0 whether the agent does well or badly, and with sft it is the surprisal
        left_out = ("groups_with_signal", "surprisal") if demonstrations else ("loss",)
        for name in CURVES:
            if name in metrics and name not in left_out:
                self.curves = {**self.curves, name: [*self.curves.get(name, ()), metrics[name]][-KEPT:]}
        for name, _, _ in LIMITS if not demonstrations else ():
            if name in metrics:
                self.recent[name] = [*self.recent.get(name, ()), metrics[name]][-RECENT:]
        for name in COUNTS:
            if count := int(metrics.get(name, 0)):
                self.counts = {**self.counts, name: self.counts.get(name, 0) + count}
        self.speed = speed

    def warnings(self) -> list[str]:
        """What is wrong with the last steps."""
        return [
            *(f"{count} {COUNTS[name]}" for name, count in self.counts.items()),
            *self.excesses().values(),
        ]

    def excesses(self) -> dict[str, str]:
        """The warnings of ``LIMITS``, by metric."""
        found = {}
        for name, limit, text in LIMITS:
            values = self.recent.get(name, [])
            if values and (mean := math.fsum(values) / len(values)) > limit:
                found[name] = text.format(mean)
        return found

    def __rich__(self) -> RenderableType:
        try:
            return self._draw()
        except Exception as error:  # the display must not end the run
            return Text(f"nothing can be shown ({type(error).__name__}: {printable(error, 200)})")

    def _draw(self) -> RenderableType:
        parts: list[RenderableType] = [self.bars.get_renderable()]
        used = len(self.bars.tasks) + 1
        if self.curves:
            parts.append(self._table())
            used += len(self.curves) + 1
        if self.evaluations:
            parts.append(self._line(f"evaluations {self.evaluations}"))
            used += 1
        warnings = self.warnings()
        used += len(warnings)
        if self.trajectory is not None:
            first, *messages = episode_lines(self.trajectory)
            room = self.console.height - used - 3  # without the rule, its first line, and that of the prompt
            if room > 0:
                parts += [Rule(style="dim"), self._line(first)]
                # the end of an episode matters more than its beginning
                parts += [self._line(message, "dim") for message in messages[-room:]]
        parts += [self._line(f"! {text}", "yellow") for text in warnings]
        return Group(*parts)

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
        table.add_column(no_wrap=True)
        width = max(self.console.width - 36, 8)
        for name, values in self.curves.items():
            form = CURVES[name]
            curve = Text(sparkline(values[-width:]), style="cyan")
            table.add_row(name.replace("_", " "), f"{values[-1]:{form}}", curve)
        table.add_row("tokens/s", f"{self.speed:.0f}")
        return table

    def _line(self, text: str, style: str = "") -> Text:
        """One line of text, which ends at the border."""
        return Text(printable(text, MESSAGE), style=style, no_wrap=True, overflow="ellipsis")


def episode_lines(trajectory: Trajectory) -> list[str]:
    """The lines that show an episode: what became of it, then each of its messages."""
    facts = f"{trajectory.outcome.value}, {trajectory.stop_reason.value}"
    first = f"last episode, {printable(trajectory.task.id, 60)}: {facts}, reward {trajectory.reward:.3f}"
    return [first, *(f"{message.role}: {message.text[:MESSAGE]}" for message in trajectory.messages)]


def sparkline(values: Sequence[float]) -> str:
    """A curve in characters, from the lowest of the values to the highest. One that is not finite is blank.

    >>> sparkline([0.0, 1.0, 2.0, 7.0]), sparkline([3.0, 3.0])
    ('▁▂▃█', '▁▁')
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return " " * len(values)
    low, span = min(finite), max(finite) - min(finite)

    def mark(value: float) -> str:
        if not math.isfinite(value):
            return " "
        return BLOCKS[round((value - low) / span * (len(BLOCKS) - 1)) if span > 0 else 0]

    return "".join(map(mark, values))
