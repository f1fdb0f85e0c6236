"""The trackers of a run: programs and services that show its numbers, such as TensorBoard. ``runs.trackers``
opens them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag, field_validator

from agent_peft.config import Config
from agent_peft.lookup import nearest

CUSTOM = "your own as package.module:Class"


class TrackerConfig(Config):
    """The base of trackers: what each of them gets."""

    kind: str
    trajectories: int = Field(
        default=4, ge=0, description="episodes in a table, each of another task; 0 makes no tables"
    )
    trajectories_every: int = Field(
        default=10,
        ge=1,
        description="the steps whose number is divisible by this get a table; each evaluation has one",
    )
    patience: float = Field(
        default=30.0, gt=0, description="seconds that the end of the run waits for the tracker"
    )


class TensorBoardConfig(TrackerConfig):
    """TensorBoard's event files, in ``RUN/trackers/tensorboard``."""

    kind: Literal["tensorboard"] = "tensorboard"


class WandbConfig(TrackerConfig):
    """Weights & Biases. The key of the account is that of ``wandb login`` or of WANDB_API_KEY."""

    kind: Literal["wandb"] = "wandb"
    project: str | None = Field(default=None, description="project; null is for W&B to decide")
    entity: str | None = Field(default=None, description="team or user; null is for W&B to decide")
    group: str | None = Field(default=None, description="runs of one group are shown together")
    mode: Literal["online", "offline"] | None = Field(
        default=None,
        description="offline writes to RUN/trackers/wandb for `wandb sync` later; null takes WANDB_MODE, or "
        "else online",
    )


class TrackioConfig(TrackerConfig):
    """Trackio: a local database that ``trackio show`` draws, or a Space of Hugging Face."""

    kind: Literal["trackio"] = "trackio"
    project: str = Field(default="agent-peft", description="project that the run belongs to")
    space: str | None = Field(default=None, description="Space as user/name; null keeps all on this machine")


class MlflowConfig(TrackerConfig):
    """MLflow, on files, a database or a server."""

    kind: Literal["mlflow"] = "mlflow"
    uri: str | None = Field(
        default=None,
        description="address of the server or the store, such as sqlite:///mlflow.db; null takes "
        "MLFLOW_TRACKING_URI, or else MLflow's own default",
    )
    experiment: str = Field(default="agent-peft", description="experiment; it is made if there is none")


class CustomTrackerConfig(TrackerConfig):
    """A tracker of the user's own. Its class gets all further keys as arguments by name."""

    model_config = ConfigDict(extra="allow")

    kind: str = Field(description=f"tensorboard, wandb, trackio, mlflow, or {CUSTOM}")

    @field_validator("kind")
    @classmethod
    def _known(cls, kind: str) -> str:
        if ":" not in kind:  # imported only when the run starts, so that no other command needs the code
            raise ValueError(f"there is no kind {kind!r}; {nearest(kind, KINDS.keys(), CUSTOM)}")
        return kind


KINDS: dict[str, type[TrackerConfig]] = {
    "tensorboard": TensorBoardConfig,
    "wandb": WandbConfig,
    "trackio": TrackioConfig,
    "mlflow": MlflowConfig,
}


def _tag(value: Any) -> str:
    kind = value.get("kind") if isinstance(value, Mapping) else getattr(value, "kind", None)
    return str(kind) if kind in KINDS else "custom"


def _expand(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


AnyTracker = Annotated[
    Annotated[
        Annotated[CustomTrackerConfig, Tag("custom")]  # first: it reports a kind that is in no row
        | Annotated[TensorBoardConfig, Tag("tensorboard")]
        | Annotated[WandbConfig, Tag("wandb")]
        | Annotated[TrackioConfig, Tag("trackio")]
        | Annotated[MlflowConfig, Tag("mlflow")],
        Discriminator(_tag),
    ],
    BeforeValidator(_expand),
]
