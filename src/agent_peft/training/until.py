"""When a stage ends before its last step."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field, model_validator

from agent_peft.config import Config
from agent_peft.lookup import nearest
from agent_peft.rollout.statistics import METRICS


class UntilConfig(Config):
    """Ends a stage before its last step: when the mean of a metric over the latest steps or evaluations is
    high or low enough, or when evaluations no longer improve. The run's step numbers then jump to the end of
    the stage.
    """

    metric: str = Field(
        description="such as success, reward or surprisal; a supervised stage measures success and reward of "
        "its demonstrations, so use surprisal there; evaluation.success, evaluation.score and "
        "evaluation.reward are those of the run's evaluations, evaluation.loss that of recorded replies"
    )
    above: float | None = Field(default=None, description="the stage ends when the mean is above this")
    below: float | None = Field(default=None, description="the stage ends when the mean is below this")
    over: int = Field(
        default_factory=lambda before: 1 if before["metric"] in METRICS else 4,
        ge=1,
        description="how many of the latest steps that have the metric, or of the latest evaluations, are "
        "averaged; default: 4 steps, or 1 evaluation",
    )
    patience: int | None = Field(
        default=None,
        ge=1,
        description="the stage ends when this many evaluations in a row are no better than the best before "
        "them, the one at the stage's start included; lower is better where below is given, else higher",
    )

    @property
    def of_evaluations(self) -> bool:
        """Whether evaluations of the run measure the metric, and not the steps of the stage."""
        return self.metric in METRICS

    @model_validator(mode="after")
    def _effective(self) -> UntilConfig:
        if self.above is not None and self.below is not None:
            raise ValueError("needs above or below, and not both")
        if self.above is None and self.below is None and self.patience is None:
            raise ValueError("needs above or below, or the patience of an evaluation's metric")
        if self.patience is not None and not self.of_evaluations:
            raise ValueError(f"patience counts evaluations; give one of {', '.join(METRICS)} as metric")
        if self.above is None and self.below is None and self.over != 1:
            raise ValueError("over has no effect without above or below; leave it out")
        return self

    def is_reached(self, value: float) -> bool:
        return (self.above is not None and value > self.above) or (
            self.below is not None and value < self.below
        )


def unknown_metric(name: str, known: Sequence[str]) -> str:
    if name.startswith("evaluation"):
        return f"until.metric: evaluations do not measure {name!r}; {nearest(name, METRICS)}"
    return f"until.metric: {name!r} is not a metric of this stage; {nearest(name, known)}"
