"""A tracker shows the numbers of a run elsewhere: on a server, in a database, in its files.

A run never waits for its trackers. Each has a thread and a bounded queue: the loop puts its numbers there,
and leaves them out where the queue is full. A tracker that fails costs a warning, and nothing that is learned
depends on it.
"""

from __future__ import annotations

import logging
import queue
import re
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent_peft.configuration.run_config import resolved
from agent_peft.configuration.trackers import TrackerConfig
from agent_peft.files import MEGABYTE, parse_json, read_text, write_json_atomic
from agent_peft.printable import printable
from agent_peft.rollout.statistics import EvaluationReport
from agent_peft.runs.layout import TRACKERS
from agent_peft.runs.observers import Observer, RunStart, RunStep
from agent_peft.types import Group

logger = logging.getLogger(__name__)

THREAD = "tracker"  # begins the name of a tracker's thread
QUEUE = 1024  # records that wait for a slow tracker
ELSEWHERE = {"trajectories", "trajectories_every", "patience", "mode"}  # keys that are not part of the place
TEXT = 20_000  # characters of a conversation in a table
COLUMNS = ("step", "task", "skills", "outcome", "stop reason", "reward", "tokens", "conversation")

_NOT_IN_NAMES = re.compile(r"[^\w. -]", re.ASCII)  # what some tracker refuses in the name of a metric
_PASSWORD = re.compile(r"(://[^/\s:@]*):\S*@")
_SECRET = re.compile(  # a part of an address's query, such as ?password=secret&sslmode=on
    r"([?&][^=&#\s]*(?:passw|pwd|secret|token|api_?key)[^=&#\s]*)=[^&#\s]+", re.IGNORECASE
)

Row = tuple[int, str, str, str, str, float, int, str]  # as COLUMNS names it


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is opened with.

    Attributes:
        name: of the run directory.
        folder: for the tracker's own files. It may not exist yet.
        config: every effective value of the configuration, as JSON values without passwords.
        id: what ``open`` returned when the run began; None if it begins now.
    """

    name: str
    folder: Path
    config: Mapping[str, Any]
    id: str | None = None


class Tracker:
    """The base class of trackers. Override ``open`` and ``log``; the other methods do nothing by default.

    All methods are called on one thread, which is not that of the run. They may wait and may raise: that
    costs numbers of this tracker, and nothing else.
    """

    def open(self, run: TrackedRun) -> str | None:
        """Begin to track a run, or continue where ``run.id`` is set. Returns the id to continue with."""
        raise NotImplementedError

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the numbers of a step, such as ``train/reward`` or ``evaluation/success``. Each kind of
        number comes in the order of the steps, and each step once.
        """
        raise NotImplementedError

    def log_table(self, step: int, name: str, rows: Sequence[Row]) -> None:
        """Record episodes under a name such as ``train``. ``COLUMNS`` names the columns. Control characters
        in texts are escaped already.
        """

    def close(self, complete: bool) -> None:
        """End the tracking. ``complete`` is False where an error has ended the run."""


@dataclass(frozen=True)
class _Record:
    """Numbers of one step, and a table of its episodes."""

    series: str  # train or evaluation
    step: int
    metrics: Mapping[str, float]
    rows: Sequence[Row] = ()


@dataclass
class _State:
    """What the run directory holds of a tracker, so that a resumed run continues there."""

    path: Path
    target: Mapping[str, Any]  # the keys of the place where the numbers go
    id: str | None = None
    last: dict[str, int] = field(default_factory=dict)  # the newest step that was sent, by series

    def read(self) -> None:
        """Read the file, unless it is absent, damaged, or of another target."""
        with suppress(Exception):
            content = parse_json(read_text(self.path, "a JSON file", MEGABYTE, unlinked=2))
            last = {str(series): int(step) for series, step in content["last"].items()}
            if content["target"] == self.target:
                self.id, self.last = None if content["id"] is None else str(content["id"]), last

    def write(self) -> None:
        write_json_atomic(self.path, {"id": self.id, "target": self.target, "last": self.last}, unlinked=2)


class TrackerThread(Observer):
    """Passes events to a tracker, on its own thread. ``name``: of its files in ``RUN/trackers``."""

    def __init__(self, tracker: Tracker, config: TrackerConfig, name: str) -> None:
        self.tracker, self.config, self.name = tracker, config, name
        self._queue: queue.Queue[_Record | bool] = queue.Queue(QUEUE)  # at last: whether the run is complete
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()  # of what follows
        self._accepted = self._sent = 0  # records
        self._failure = ""  # the first one
        self._dead = False  # it could not be opened, as a warning explains
        self._closed = False  # the run no longer waits, and logs nothing more

    def on_start(self, run: RunStart) -> None:
        folder = run.config.run_dir.absolute() / TRACKERS
        work = (run.config.run_dir.absolute().name, folder, without_passwords(resolved(run.config)))
        thread = threading.Thread(target=self._work, args=work, name=f"{THREAD} {self.name}", daemon=True)
        thread.start()
        self._thread = thread  # only now: at an interrupt before the start, on_end has nothing to wait for

    def on_step(self, step: RunStep) -> None:
        tables = self.config.trajectories and step.number % self.config.trajectories_every == 0
        rows = self._rows(step.number, step.collection.groups) if tables else ()
        metrics = {f"train/{_NOT_IN_NAMES.sub('_', name)}": float(x) for name, x in step.metrics.items()}
        self._put(_Record("train", step.number, metrics, rows))

    def on_evaluation(self, name: str, report: EvaluationReport) -> None:
        step = report.step or 0
        self._put(_Record("evaluation", step, evaluation_metrics(report), self._rows(step, report.groups)))

    def on_end(self) -> None:
        """Wait for the thread, up to ``patience``, and log once what was not sent."""
        if self._thread is None or self._dead:
            return
        # the run calls this while the error that ended it passes through
        complete, deadline = sys.exception() is None, time.monotonic() + self.config.patience
        with suppress(queue.Full):
            self._queue.put(complete, timeout=self.config.patience)
        self._thread.join(max(deadline - time.monotonic(), 0))
        with self._lock:
            self._closed = True
            unsent, of, late = self._accepted - self._sent, self._accepted, self._thread.is_alive()
        if (unsent or late) and not self._dead:
            cause = f"did not end within {self.config.patience:g} s" if late else "did not take all"
            logger.warning(
                "the tracker %s %s: %d of %d records of the run were not sent", self.name, cause, unsent, of
            )

    def _put(self, record: _Record) -> None:
        if self._thread is None or self._dead:
            return
        with self._lock:
            self._accepted += 1
        with suppress(queue.Full):
            self._queue.put_nowait(record)

    def _rows(self, step: int, groups: Sequence[Group]) -> list[Row]:
        first = [group for group in groups if group.trajectories][: self.config.trajectories]
        return [row_of(step, group) for group in first]

    # -- on the thread ---------------------------------------------------------------------------------------

    def _work(self, name: str, folder: Path, config: Mapping[str, Any]) -> None:
        try:
            target = without_passwords(self.config.model_dump(mode="json", exclude=ELSEWHERE))
            state = _State(folder / f"{self.name}.json", target)
            state.read()
            state.id = self.tracker.open(TrackedRun(name, folder / self.name, config, state.id))
            state.write()
        except Exception as error:
            self._dead = True
            self._tell(error, "cannot be opened", "nothing is sent to it")
            with suppress(queue.Empty):
                while True:  # what has come meanwhile need not stay in memory
                    self._queue.get_nowait()
            return
        while not isinstance(record := self._queue.get(), bool):
            try:
                self._send(record, state)
            except Exception as error:
                self._tell(error, "failed", "its further failures are counted")
        try:
            self.tracker.close(record)
        except Exception as error:
            self._tell(error, "failed at its end", "its last numbers may be lost")

    def _send(self, record: _Record, state: _State) -> None:
        # a resumed run makes again what came after its newest checkpoint, and the tracker has that already
        if record.step > state.last.get(record.series, -1):
            state.last[record.series] = record.step
            state.write()  # first: after a kill, no step is sent twice
            self.tracker.log(record.step, record.metrics)
            if record.rows:
                self.tracker.log_table(record.step, record.series, record.rows)
        with self._lock:
            self._sent += 1

    def _tell(self, error: Exception, fault: str, result: str) -> None:
        with self._lock:
            first = not self._failure and not self._closed
            self._failure = self._failure or f"{type(error).__name__}: {error}".rstrip(": ")
        if first:
            cause = printable(without_passwords(" ".join(self._failure.split())), 300)
            logger.warning(
                "the tracker %s %s (%s); the run continues, and %s", self.name, fault, cause, result
            )


def mute(logger: str) -> None:
    """Drop what a library logs on the threads of trackers: a tracker's failure is one warning of ours."""
    logging.getLogger(logger).addFilter(_is_elsewhere)


def _is_elsewhere(record: logging.LogRecord) -> bool:
    return not (record.threadName or "").startswith(THREAD)


def evaluation_metrics(report: EvaluationReport) -> dict[str, float]:
    """The numbers of an evaluation. Bounds of intervals end in ``_low`` and ``_high``."""
    metrics: dict[str, float] = {}
    for name in report.measures:
        if (measure := report.measure(name)) is not None:
            values = {"": measure.value, "_low": measure.low, "_high": measure.high}
            metrics |= {f"evaluation/{name}{end}": x for end, x in values.items() if x is not None}
    for skill, rate in report.by_skill.items() if len(report.by_skill) > 1 else ():
        metrics[f"evaluation/success/{_NOT_IN_NAMES.sub('_', skill)}"] = rate.value
    episodes = ("invalid_actions", "cut_actions", "mean_turns") if report.success is not None else ()
    for name in (*episodes, "mean_action_tokens"):
        metrics[f"evaluation/{name}"] = getattr(report, name)
    return {name: float(value) for name, value in metrics.items()}


def row_of(step: int, group: Group) -> Row:
    """The first episode of a group as a row of a table."""
    trajectory = group.trajectories[0]
    text = "\n\n".join(f"{message.role}: {message.text}" for message in trajectory.messages)
    return (
        step,
        printable(trajectory.task.id, 200),
        printable(", ".join(trajectory.task.skills), 200),
        trajectory.outcome.value,
        trajectory.stop_reason.value,
        float(trajectory.reward),
        trajectory.num_action_tokens,
        safe_lines(text),
    )


def without_passwords(content: Any) -> Any:
    """JSON values without the passwords of addresses, since trackers may be on other machines.

    >>> without_passwords({"database": "mysql://me:secret@host:3306", "seed": 0})
    {'database': 'mysql://me:***@host:3306', 'seed': 0}
    >>> without_passwords("http://host/api?user=me&password=secret&page=1")
    'http://host/api?user=me&password=***&page=1'
    """
    if isinstance(content, str):
        return _SECRET.sub(r"\1=***", _PASSWORD.sub(r"\1:***@", content))
    if isinstance(content, dict):
        return {key: without_passwords(value) for key, value in content.items()}
    return [without_passwords(value) for value in content] if isinstance(content, list) else content


def safe_lines(text: str) -> str:
    r"""A text with its lines, of at most ``TEXT`` characters. All other control characters are escaped.

    >>> safe_lines("SELECT 1;\r\n\x1b[31mred\0")
    'SELECT 1;\\r\n\\x1b[31mred\\x00'
    """
    whole = text if len(text) <= TEXT else text[: TEXT - 3] + "..."
    return "\n".join(map(printable, whole.split("\n")))
