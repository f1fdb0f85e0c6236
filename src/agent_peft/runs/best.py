"""The best checkpoint of a run, and the end of a stage by evaluations. Both follow from the files of the run
alone, so a run that was killed decides as one that was not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from agent_peft.configuration.run_config import KeepBestConfig
from agent_peft.files import MEGABYTE, parse_json, read_text, write_atomic
from agent_peft.rollout.statistics import EvaluationReport, other_settings
from agent_peft.runs.checkpoint import POSITION, checkpoint_step, checkpoints
from agent_peft.training.until import UntilConfig
from agent_peft.types import AgentPeftError

BEST = "best.json"  # next to the checkpoints: the name of the best one
STATISTICS = "training_stats.json"  # in a checkpoint: the metrics of the last step before it


@dataclass(frozen=True)
class Best:
    """The best checkpoint, as ``checkpoints/best.json`` holds it."""

    checkpoint: str  # its name
    step: int
    metric: str
    mode: str
    value: float


def read_best(root: Path) -> Best | None:
    """Return the content of ``root/best.json``; None where there is no such file."""
    path = root / BEST
    if not path.is_file():
        return None
    try:
        return Best(**parse_json(read_text(path, "a JSON file", MEGABYTE, unlinked=2)))
    except (TypeError, ValueError) as error:
        raise AgentPeftError(
            f"{path}: is damaged ({error}); remove it, and `train` writes it again"
        ) from error


def note_best(root: Path, keep: KeepBestConfig, reports: Iterable[EvaluationReport]) -> Best | None:
    """Find the best of the checkpoints in ``root``, the first of equals, and write its name to ``best.json``.
    While no checkpoint has the metric, it is the one that the file names already.
    """
    present = {checkpoint_step(path): path for path in checkpoints(root)}
    values = (
        dict(comparable(keep.metric, reports)) if keep.of_evaluations else _of_steps(keep.metric, present)
    )
    sign = 1 if keep.mode == "max" else -1
    steps = [step for step in present if step in values]
    if not steps:
        before = read_best(root)
        return before if before is not None and before.step in present else None
    step = max(steps, key=lambda step: (sign * values[step], -step))
    best = Best(f"step_{step:06d}", step, keep.metric, keep.mode, values[step])
    text = json.dumps(asdict(best), indent=1) + "\n"
    if not (root / BEST).is_file() or read_text(root / BEST, "a JSON file", MEGABYTE, unlinked=2) != text:
        write_atomic(root / BEST, text, unlinked=2)
    return best


def comparable(metric: str, reports: Iterable[EvaluationReport]) -> list[tuple[int, float]]:
    """Return the run's step and the value of each report that has the metric and measured what the last one
    did, in their order. Rewards are comparable under the same prices only.
    """
    rows = [
        (report.step, value, report.settings)
        for report in reports
        if report.step is not None and (value := report.metric(metric)) is not None
    ]
    priced = metric == "evaluation.reward"
    return [
        (step, value)
        for step, value, settings in rows
        if not other_settings(settings, last := rows[-1][2])
        and (not priced or settings.get("rewards") == last.get("rewards"))
    ]


def _of_steps(metric: str, present: dict[int, Path]) -> dict[int, float]:
    """The values of a metric in the last step before each checkpoint, by the run's step. Only the stage of
    the newest checkpoint counts: a supervised stage measures its demonstrations.
    """
    stages = {step: _content(path / POSITION).get("stage") for step, path in present.items()}
    values = {step: _content(path / STATISTICS).get(metric) for step, path in present.items()}
    return {
        step: float(value)
        for step, value in values.items()
        if isinstance(value, int | float) and math.isfinite(value) and stages[step] == stages[max(stages)]
    }


def _content(path: Path) -> dict[str, object]:
    content = parse_json(read_text(path, "a JSON file", MEGABYTE, unlinked=3)) if path.is_file() else {}
    return content if isinstance(content, dict) else {}


def reason_to_end(until: UntilConfig, start: float | None, values: Sequence[float]) -> str | None:
    """Return why a stage ends, in words; None where it continues. ``start`` is the metric of the evaluation
    at the stage's start, if there is one, and ``values`` are those since.

    >>> reason_to_end(UntilConfig(metric="evaluation.success", patience=2), 0.5, [0.6, 0.6, 0.55])
    'evaluation.success has not improved in 2 evaluations'
    """
    latest = values[-until.over :]
    if len(latest) == until.over and until.is_reached(mean := math.fsum(latest) / until.over):
        side, bound = ("above", until.above) if until.above is not None else ("below", until.below)
        return f"{until.metric} is {mean:.3f}, {side} {bound:g}"
    if until.patience is None:
        return None
    sign = -1 if until.below is not None else 1
    signed = [sign * value for value in (*([] if start is None else [start]), *values)]
    if signed and len(signed) - 1 - signed.index(max(signed)) >= until.patience:
        return f"{until.metric} has not improved in {until.patience} evaluations"
    return None
