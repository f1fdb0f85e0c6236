"""Curves of a run with matplotlib, which no other module imports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_peft.lookup import install, nearest, needed
from agent_peft.rollout.statistics import EvaluationReport
from agent_peft.types import AgentPeftError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
Line = Mapping[str, Any]
USUAL = ("success", "reward", "loss", "accuracy", "token_accuracy")
OF_EPISODES = ("success", "score")  # of the policy's own; a supervised step measures its demonstrations


def plot_run(
    folder: Path, lines: Sequence[Line], reports: Sequence[EvaluationReport], metrics: Sequence[str] = ()
) -> Figure:
    """Return a figure with a panel for each metric: its value in each step, and where evaluations measure it,
    their points with 95 % intervals. x is the number of steps done before. ``lines``: the records of
    ``metrics.jsonl``.
    """
    with needed(f"plots need matplotlib, which is not installed; {install('plot')}"):
        from matplotlib import pyplot
    known = list(dict.fromkeys(name for line in lines for name in line if name not in ("step", "stage")))
    known += [name for one in reports for name in one.measures if one.measure(name) and name not in known]
    for name in metrics:
        if name not in known:
            raise AgentPeftError(f"{folder}: has no metric {name!r}; {nearest(name, known)}")
    names = list(metrics) or [name for name in USUAL if name in known]
    if not names:
        raise AgentPeftError(f"{folder}: has no step and no evaluation to plot yet")
    figure, grid = pyplot.subplots(len(names), sharex=True, squeeze=False, figsize=(7, 2.4 * len(names)))
    for name, axes in zip(names, grid[:, 0], strict=True):
        _draw(axes, name, lines, reports)
    grid[-1, 0].set_xlabel("steps done")
    grid[-1, 0].xaxis.get_major_locator().set_params(integer=True)
    grid[0, 0].set_title(folder.name)
    figure.tight_layout()
    return figure


def _draw(axes: Axes, name: str, lines: Sequence[Line], reports: Sequence[EvaluationReport]) -> None:
    present = [line for line in lines if name in line and ("reward" in line or name not in OF_EPISODES)]
    for number, stage in enumerate(dict.fromkeys(line["stage"] for line in lines)):
        of_stage = [(line["step"], line[name]) for line in present if line["stage"] == stage]
        if of_stage:
            steps, values = zip(*of_stage, strict=True)
            axes.plot(steps, values, color=f"C{number}", linewidth=1, label=f"{stage}, each step")
    for before, after in pairwise(lines):
        if before["stage"] != after["stage"]:
            axes.axvline(after["step"], color="gray", linestyle=":", linewidth=1)
    points = [(one.step or 0, mean) for one in reports if (mean := one.measure(name)) is not None]
    if points:
        middle = [mean.value for _, mean in points]
        # where tasks do not show how much they differ, there is no interval
        low = [mean.value - (mean.value if mean.low is None else mean.low) for _, mean in points]
        high = [(mean.value if mean.high is None else mean.high) - mean.value for _, mean in points]
        done = [step for step, _ in points]
        style: dict[str, Any] = {"color": "black", "capsize": 3, "markersize": 4}
        axes.errorbar(done, middle, yerr=[low, high], fmt="o-", label="held out, 95 %", **style)
    axes.set_ylabel(name.replace("_", " "))
    axes.legend(fontsize="small")
