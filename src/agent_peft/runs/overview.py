"""The runs below a folder at a glance: state, step, best evaluation, time left. Torch is not loaded."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.table import Table

from agent_peft.rollout.statistics import other_settings
from agent_peft.runs.history import state_of
from agent_peft.runs.layout import CONFIG, RECORD, check_run_files, read_record
from agent_peft.runs.reading import RunRecord, read_lines
from agent_peft.types import AgentPeftError

LATEST = 20  # steps whose mean time estimates the time left


@dataclass(frozen=True)
class RunSummary:
    """One run.

    Attributes:
        cause: why it failed, or the signal that interrupted it.
        step: the number of steps done, of ``steps`` (None where the configuration cannot be read).
        best: the name of the evaluation with the highest success (or the lowest loss of held-out replies)
            among those that measured what the latest one did, and that number.
        best_in_words: that number as the table shows it.
        seconds_left: an estimate while it is running.
    """

    run: str
    state: str
    cause: str | None
    stage: str | None
    step: int
    steps: int | None
    best: tuple[str, float] | None
    seconds_left: float | None
    best_in_words: str = ""


def find_runs(folder: Path) -> Iterator[Path]:
    """Yield the run directories in a folder and below it, by name. A run directory is not searched."""
    if not folder.is_dir():
        raise AgentPeftError(f"{folder}: there is no such folder (seen from {Path.cwd()}); name another")
    for place, folders, files in os.walk(folder):
        if CONFIG in files and (RECORD in files or "metrics.jsonl" in files or "checkpoints" in folders):
            yield Path(place)
            folders.clear()
        folders[:] = sorted(name for name in folders if not name.startswith("."))


def summarize_run(run: Path) -> RunSummary:
    """Summarize the files of a run. Those that cannot be read count as absent. A run with a link or a pipe
    among its files is ``damaged``, and nothing of it is read.
    """
    last: dict[str, Any]
    try:
        check_run_files(run)
    except AgentPeftError as error:
        return RunSummary(str(run), "damaged", str(error), None, 0, None, None, None)
    record, files = read_record(run), RunRecord(run)
    steps = sum(number for _, number in files.stages) or None
    origin, cause = record.get("from"), record.get("cause")
    first = origin.get("steps") if isinstance(origin, dict) else None
    last = next(
        iter(_last_lines(run / "metrics.jsonl", 1)), {"step": first - 1 if type(first) is int else -1}
    )
    done = last["step"] + 1
    state, seconds_left = state_of(record), None
    if state == "running" and steps is not None:
        seconds = [line["seconds"] for line in _last_lines(run / "timing.jsonl", LATEST) if "seconds" in line]
        seconds_left = (steps - done) * sum(seconds) / len(seconds) if seconds else None
    cause = None if cause is None else str(cause)
    best, in_words = _best(files)
    return RunSummary(str(run), state, cause, last.get("stage"), done, steps, best, seconds_left, in_words)


def overview(summaries: Sequence[RunSummary]) -> Table:
    """The table that ``agent-peft runs`` prints."""
    table = Table("run", "state", "stage", "step", "best evaluation", "time left")
    for one in summaries:
        state = one.state if one.cause is None else f"{one.state}: {one.cause[:60]}"
        best = "" if one.best is None else f"{one.best_in_words} ({one.best[0]})"
        remaining = "" if one.seconds_left is None else str(timedelta(seconds=round(one.seconds_left)))
        table.add_row(one.run, state, one.stage or "", f"{one.step}/{one.steps or '?'}", best, remaining)
    return table


def _best(run: RunRecord) -> tuple[tuple[str, float] | None, str]:
    """The best of the evaluations that measured what the latest one did, and its number in words."""
    reports = []
    for evaluation in run.evaluations.values():
        with suppress(AgentPeftError):
            reports.append(evaluation.report)
    comparable = [one for one in reports if not other_settings(one.settings, reports[-1].settings)]
    if not comparable:
        return None, ""
    of_replies = comparable[-1].success is None
    sign = -1 if of_replies else 1
    best = max(comparable, key=lambda one: sign * one.headline.value)
    value = best.headline.value
    return (str(best.name), value), f"loss {value:.3f}" if of_replies else f"{value:.1%}"


def _last_lines(path: Path, number: int) -> list[dict[str, Any]]:
    """The last records of a JSONL file of steps."""
    with suppress(AgentPeftError):
        return [record for record in read_lines(path)[-number:] if type(record.get("step")) is int]
    return []
