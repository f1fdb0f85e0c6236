"""MLflow: on files, a database or a server."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from agent_peft.configuration.trackers import MlflowConfig
from agent_peft.runs.trackers.base import COLUMNS, Row, TrackedRun, Tracker, mute
from agent_peft.types import AgentPeftError


class Mlflow(Tracker):
    """A run of MLflow. Its tables are JSON files among the run's artifacts."""

    def __init__(self, config: MlflowConfig) -> None:
        try:
            from mlflow import MlflowClient
            from mlflow.entities import Metric
        except ImportError as error:
            raise AgentPeftError(
                f"the tracker mlflow needs its package ({error}); pip install agent-peft[mlflow]"
            ) from error
        mute("urllib3.connectionpool")  # which tells of each try to reach a server
        self._client_class, self._metric, self._config = MlflowClient, Metric, config
        self._client: Any = None
        self._id = ""

    def open(self, run: TrackedRun) -> str | None:
        # a client and not MLflow's module: that has one current run for the whole process
        self._client = self._client_class(tracking_uri=self._config.uri)
        if run.id is not None:
            self._client.update_run(run.id, status="RUNNING")
            self._id = run.id
            return self._id
        experiment = self._client.get_experiment_by_name(self._config.experiment)
        number = (
            self._client.create_experiment(self._config.experiment)
            if experiment is None
            else experiment.experiment_id
        )
        self._id = str(self._client.create_run(number, run_name=run.name).info.run_id)
        self._client.log_dict(self._id, dict(run.config), "config.yaml")
        return self._id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        self._client.log_batch(self._id, [self._metric(name, x, now, step) for name, x in metrics.items()])

    def log_table(self, step: int, name: str, rows: Sequence[Row]) -> None:
        table = {"columns": list(COLUMNS), "data": [list(row) for row in rows]}
        self._client.log_dict(self._id, table, f"episodes/{name}_{step:06d}.json")

    def close(self, complete: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if complete else "FAILED")
