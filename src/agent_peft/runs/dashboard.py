"""What a terminal shows of a run while it trains: how far it is, its curves, the last trajectory, warnings.
``Progress`` feeds it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TaskID, TextColumn
from rich.progress import Progress as Bars
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from agent_peft.printable import printable
from agent_peft.types import Trajectory

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
# metric, the mean that is too much, and what is said of it: the ranges of docs/metrics.md
LIMITS = (
    ("zero_variance_groups", 0.8, "{:.0%} of the groups are constant: one reward for all their episodes"),
    ("truncated", 0.1, "{:.0%} of the episodes are truncated by sampling.max_tokens"),
    ("cut_actions", 0.2, "{:.0%} of the actions are cut by a token limit"),
    ("approx_kl", 0.05, "the policy moves {:.2g} nats in a step: lower the learning rate"),
    ("clip_fraction", 0.3, "{:.0%} of the tokens are clipped: lower the learning rate"),
    ("mismatch", 0.05, "sampler and trainer differ by {:.2g} nats a token"),
)
COUNTS = {  # metric -> what is counted
    "infrastructure_failures": "failures of an environment",
    "crashed": "episodes that crashed an environment",
    "defects": "exceptions of an environment's code",
    "nonfinite_updates": "updates that are not finite",
    "demonstrations_incorrect": "demonstrations that are not correct",
    "demonstrations_unsayable": "demonstrations that the policy cannot say",
}
BLOCKS = "▁▂▃▄▅▆▇█"
MESSAGE = 2000  # characters that are looked at; a line shows fewer


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
        """Begin a stage: curves of another one are not comparable, and neither are its warnings."""
        self.curves, self.recent = {}, {}
        return self.bars.add_task(name, total=total, completed=done, numbers="")

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
        told = [f"{count} {COUNTS[name]}" for name, count in self.counts.items()]
        for name, limit, text in LIMITS:
            values = self.recent.get(name, [])
            if values and (mean := math.fsum(values) / len(values)) > limit:
                told.append(text.format(mean))
        return told

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
                # the end of an episode says more than its beginning
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
    return [first, *(f"{message.role}: {message.content[:MESSAGE]}" for message in trajectory.messages)]


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
