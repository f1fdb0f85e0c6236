"""What a run writes down and shows: metrics, trajectories, and a progress bar for whoever watches."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TaskID, TextColumn
from rich.progress import Progress as Bars

from agent_peft.files import write_atomic
from agent_peft.printable import printable
from agent_peft.runs.checkpoint import truncate_jsonl
from agent_peft.types import Group, Trajectory

LEARNT_FROM_DEMONSTRATIONS = {"loss": ".4f", "gradient_norm": ".3g"}
# no loss: on policy its value is arithmetic, about 0 however well or badly the agent does
LEARNT_FROM_EPISODES = {
    "reward": ".3f",
    "success": ".1%",
    "groups_with_signal": ".0%",
    "gradient_norm": ".3g",
}
TROUBLES = (  # counts, shown where there are any
    "infrastructure_failures",
    "crashed",
    "defects",
    "nonfinite_updates",
    "demonstrations_incorrect",
    "demonstrations_unsayable",
)


class JsonlTracker:
    """One line per step: ``{"step": 12, "reward": 0.5}``.

    A resumed run must leave the very bytes of one that was never killed, so nothing that differs from run to
    run (times, speeds) belongs into ``metrics.jsonl``: that goes to a ``TimingTracker``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        truncate_jsonl(
            path, lambda record: record["step"] >= 0
        )  # a line torn by a kill must not run into the next one

    def log(self, step: int, metrics: Mapping[str, float | str]) -> dict[str, float | str]:
        """Append one line, on the disk when this returns; give its record. Numbers are written so that they
        read back to the bit; JSON has no ``nan`` and ``inf``, so these become strings.

        Raises:
            ValueError: a metric is called ``step``.
        """
        if "step" in metrics:
            raise ValueError("a metric cannot be called step: the line's own number is")
        record: dict[str, float | str] = {"step": step} | {
            name: _jsonable(value) for name, value in metrics.items()
        }
        with open(self.path, "a", encoding="utf-8", newline="\n", opener=_no_link) as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        return record

    def resume(self, step: int) -> None:
        """Forget ``step`` and what came after it: those steps are about to be made again."""
        truncate_jsonl(self.path, lambda record: bool(record["step"] < step))


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


class TimingTracker(JsonlTracker):
    """Seconds and speeds, in a file of their own (``timing.jsonl``): these differ from run to run."""


def _jsonable(value: float | str) -> float | str:
    return value if isinstance(value, str) or math.isfinite(value) else repr(float(value))


def write_trajectories(folder: Path, step: int, groups: Sequence[Group]) -> Path:
    """``folder/step_000012.jsonl``: one line per trajectory, for people; whole or absent. Returns its
    path.
    """
    path = folder / f"step_{step:06d}.jsonl"
    lines = [
        json.dumps({"step": step, **trajectory_record(t)}) for group in groups for t in group.trajectories
    ]
    write_atomic(path, "".join(f"{line}\n" for line in lines))
    return path


def trajectory_record(trajectory: Trajectory) -> dict[str, Any]:
    """A trajectory as it is read by people: its text and its price. Tokens are only counted."""
    return {
        "task": trajectory.task.id,
        "skills": list(trajectory.task.skills),
        "outcome": trajectory.outcome.value,
        "stop_reason": trajectory.stop_reason.value,
        "rewards": list(trajectory.rewards),
        "tokens": len(trajectory.tokens),
        "action_tokens": trajectory.num_action_tokens,
        "cut_actions": trajectory.num_cut,
        "messages": [{"role": message.role, "content": message.content} for message in trajectory.messages],
    }


class Progress:
    """A live bar per stage on a terminal, and one plain line per step elsewhere.

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
        """A stage of ``total`` steps, ``done`` of which an earlier run made (the time left is told from
        this run's steps alone).
        """
        name = printable(name)
        self._name, self._total, self._done, self._first = name, total, done, done
        self._started = time.monotonic()
        if self.live:
            self._bar = self._bars.add_task(name, total=total, completed=done, numbers="")

    def advance(
        self, metrics: Mapping[str, float], tokens_per_second: float, demonstrations: bool = False
    ) -> None:
        """One step is done.

        Args:
            demonstrations: it learnt from these, so rewards and outcomes are theirs and say nothing of the
                model.

        Raises:
            RuntimeError: no stage was started, or all its steps are done.
        """
        if self._done >= self._total:
            raise RuntimeError(
                f"stage {self._name!r} has {self._total} steps, and all are done: start a stage before it advances"
            )
        self._done += 1
        numbers = self._numbers(metrics, tokens_per_second, demonstrations)
        if self._bar is not None:
            self._bars.update(self._bar, completed=self._done, numbers=numbers)
        else:
            self.note(f"{self._name} {self._done}/{self._total}  {numbers}")

    def note(self, text: str) -> None:
        """A line for the reader, above the bar where there is one."""
        self.console.print(printable(text), markup=False, highlight=False, soft_wrap=True)

    def evaluating(self, name: str, tasks: int) -> None:
        self.note(f"evaluating {name} on {tasks} tasks")

    def _numbers(self, metrics: Mapping[str, float], tokens_per_second: float, demonstrations: bool) -> str:
        seconds = (time.monotonic() - self._started) / (self._done - self._first) * (self._total - self._done)
        forms = LEARNT_FROM_DEMONSTRATIONS if demonstrations else LEARNT_FROM_EPISODES
        shown = [
            f"{name.replace('_', ' ')} {metrics[name]:{form}}"
            for name, form in forms.items()
            if name in metrics
        ]
        shown += [f"{name.replace('_', ' ')} {metrics[name]:.0f}" for name in TROUBLES if metrics.get(name)]
        hours, rest = divmod(round(seconds), 3600)
        return "  ".join(
            [*shown, f"{tokens_per_second:.0f} tokens/s", f"{hours}:{rest // 60:02d}:{rest % 60:02d} left"]
        )
