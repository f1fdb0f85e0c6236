"""Weights & Biases, online and offline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agent_peft.configuration.trackers import WandbConfig
from agent_peft.runs.trackers.base import COLUMNS, Row, TrackedRun, Tracker, mute
from agent_peft.types import AgentPeftError


class Wandb(Tracker):
    """A run of Weights & Biases."""

    def __init__(self, config: WandbConfig) -> None:
        try:
            import wandb
        except ImportError as error:
            raise AgentPeftError(
                f"the tracker wandb needs its package ({error}); pip install agent-peft[wandb]"
            ) from error
        mute("wandb")
        self._wandb: Any = wandb
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
        # W&B's own step only grows, and evaluations have steps of their own
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
