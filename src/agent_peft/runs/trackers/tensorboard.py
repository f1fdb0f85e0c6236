"""TensorBoard: event files in the run directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agent_peft.configuration import yaml12
from agent_peft.configuration.trackers import TensorBoardConfig
from agent_peft.runs.trackers.base import COLUMNS, Row, TrackedRun, Tracker
from agent_peft.types import AgentPeftError


class TensorBoard(Tracker):
    """Event files in ``RUN/trackers/tensorboard``, which ``tensorboard --logdir`` finds below any folder."""

    def __init__(self, config: TensorBoardConfig) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise AgentPeftError(
                f"the tracker tensorboard needs its package ({error}); pip install agent-peft[tensorboard]"
            ) from error
        self._class: Any = SummaryWriter
        self._writer: Any = None

    def open(self, run: TrackedRun) -> str | None:
        self._writer = self._class(str(run.folder))
        if run.id is None:
            self._writer.add_text("config", verbatim(yaml12.dump(dict(run.config))), 0)
            self._writer.flush()
        return run.name

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # a kill then loses no step

    def log_table(self, step: int, name: str, rows: Sequence[Row]) -> None:
        for number, row in enumerate(rows):
            *facts, conversation = map(str, row)
            heading = "\n".join(f"{column}: {fact}" for column, fact in zip(COLUMNS, facts, strict=False))
            self._writer.add_text(f"{name}/episode_{number}", verbatim(f"{heading}\n\n{conversation}"), step)
        self._writer.flush()

    def close(self, complete: bool) -> None:
        self._writer.close()


def verbatim(text: str) -> str:
    r"""Markdown that shows a text as it is. TensorBoard shows texts as Markdown, and a block that is indented
    by four blanks has no other way to end than a line without them.

    >>> verbatim("a\n<b>")
    '    a\n    <b>'
    """
    return "\n".join(f"    {line}" for line in text.split("\n"))
