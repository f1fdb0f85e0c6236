"""The services that show a run: TensorBoard, Weights & Biases, Trackio and MLflow. Each class imports its own
extra of the package.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from agent_peft.configuration import yaml12
from agent_peft.configuration.trackers import MlflowConfig, TensorBoardConfig, TrackioConfig, WandbConfig
from agent_peft.lookup import install
from agent_peft.runs.trackers.base import COLUMNS, Row, TrackedRun, Tracker, mute
from agent_peft.types import AgentPeftError


def _package(kind: str, module: str) -> Any:
    """Import what a tracker needs."""
    try:
        return import_module(module)
    except ImportError as error:
        raise AgentPeftError(f"the tracker {kind} needs its package ({error}); {install(kind)}") from error


class TensorBoard(Tracker):
    """Event files in ``RUN/trackers/tensorboard``, which ``tensorboard --logdir`` finds below any folder."""

    def __init__(self, config: TensorBoardConfig) -> None:
        self._class = _package("tensorboard", "torch.utils.tensorboard").SummaryWriter
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


class Wandb(Tracker):
    """A run of Weights & Biases."""

    def __init__(self, config: WandbConfig) -> None:
        self._wandb = _package("wandb", "wandb")
        mute("wandb")
        self._config = config
        self._run: Any = None

    def open(self, run: TrackedRun) -> str | None:
        run.folder.parent.mkdir(parents=True, exist_ok=True)
        config = self._config
        # the terminal stays that of the run: nothing of it is sent, and nothing is printed there
        settings = self._wandb.Settings(console="off", silent=True, init_timeout=config.patience)
        offline = config.mode == "offline"
        self._wandb.setup(settings=settings)
        self._run = self._wandb.init(
            project=config.project,
            entity=config.entity,
            group=config.group,
            mode=config.mode,
            dir=str(run.folder.parent),  # W&B adds its own folder `wandb`
            name=run.name,
            id=run.id,
            config=dict(run.config),
            resume=None if offline else "allow",  # offline it has no effect; `wandb sync` joins the parts
            allow_val_change=True,
            reinit="create_new",
            settings=settings,
        )
        # W&B's own step only grows, and evaluations have other steps
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        return str(self._run.id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, "step": step})

    def log_table(self, step: int, name: str, rows: Sequence[Row]) -> None:
        table = self._wandb.Table(columns=list(COLUMNS), data=[list(row) for row in rows])
        self._run.log({f"{name}/episodes": table, "step": step})

    def close(self, complete: bool) -> None:
        self._run.finish(exit_code=0 if complete else 1)


class Trackio(Tracker):
    """A run of Trackio. Its name is the id to continue with."""

    def __init__(self, config: TrackioConfig) -> None:
        self._trackio = _package("trackio", "trackio")
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


class Mlflow(Tracker):
    """A run of MLflow. Its tables are JSON files among the run's artifacts."""

    def __init__(self, config: MlflowConfig) -> None:
        self._client_class = _package("mlflow", "mlflow").MlflowClient
        self._metric, self._config = _package("mlflow", "mlflow.entities").Metric, config
        mute("urllib3.connectionpool")  # which logs each try to reach a server
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
