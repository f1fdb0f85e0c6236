"""Trackio: a local database, or a Space of Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agent_peft.configuration.trackers import TrackioConfig
from agent_peft.runs.trackers.base import COLUMNS, Row, TrackedRun, Tracker
from agent_peft.types import AgentPeftError


class Trackio(Tracker):
    """A run of Trackio. Its name is the id to continue with."""

    def __init__(self, config: TrackioConfig) -> None:
        try:
            import trackio
        except ImportError as error:
            raise AgentPeftError(
                f"the tracker trackio needs its package ({error}); pip install agent-peft[trackio]"
            ) from error
        self._trackio: Any = trackio
        self._config = config
        self._run: Any = None

    def open(self, run: TrackedRun) -> str | None:
        self._run = self._trackio.init(
            project=self._config.project,
            name=run.id or run.name,
            space_id=self._config.space,
            config=dict(run.config),
            resume="never" if run.id is None else "allow",  # another run may have this name
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        return str(self._run.name)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_table(self, step: int, name: str, rows: Sequence[Row]) -> None:
        table = self._trackio.Table(columns=list(COLUMNS), data=[list(row) for row in rows])
        self._run.log({f"{name}/episodes": table}, step=step)

    def close(self, complete: bool) -> None:
        self._run.finish()
