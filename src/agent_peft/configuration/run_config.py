"""What a run is configured by. How a file becomes a ``TrainConfig``, and what it may leave out, is told in
``loading``.
"""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator

from agent_peft.config import Config
from agent_peft.environments import AnyEnvironment
from agent_peft.policies.config import PolicyConfig
from agent_peft.policies.engine.base import EngineConfig
from agent_peft.policies.sampling import DISTRIBUTION, LIMITS
from agent_peft.ranks import RanksConfig
from agent_peft.rollout.evaluation import EvaluationConfig
from agent_peft.training.stage import StageConfig


class CheckpointConfig(Config):
    """When the run is saved. The end of a stage always is."""

    every: int = Field(default=1, ge=1, description="steps")
    keep_last: int = Field(
        default=2, ge=1, description="how many stay; those that hold a file `keep` stay, too"
    )


class TrainConfig(Config):
    """A run, resolved: nothing is left to be inherited."""

    run_dir: Annotated[Path, AfterValidator(Path.expanduser)]
    seed: int = 0
    threads: int | None = Field(
        default=None, ge=1, description="of torch; null is one for each core this process may use"
    )
    policy: PolicyConfig
    environment: AnyEnvironment
    engine: EngineConfig = EngineConfig()
    evaluation: EvaluationConfig | None = None
    checkpoint: CheckpointConfig = CheckpointConfig()
    ranks: RanksConfig = RanksConfig()
    stages: tuple[StageConfig, ...]

    @model_validator(mode="after")
    def _consistent(self) -> TrainConfig:
        if not self.stages:
            raise ValueError("stages: [] trains nothing; give at least one")
        for stage in self.stages:
            if self.policy.lora is None and stage.reference == "base":
                raise ValueError(
                    f"reference: base of stage {stage.name!r} is the policy with its adapter off; set policy.lora, or stage_start"
                )
        if self.evaluation is not None:  # as it is at the end, and for a run that is evaluated afterwards
            object.__setattr__(self, "evaluation", self.evaluation.following(self.stages[-1].sampling))
        return self

    def stage_at(self, steps: int) -> StageConfig:
        """The stage that the run is in, or has just ended, after so many steps."""
        ends = accumulate(stage.steps for stage in self.stages)
        return next(
            (stage for stage, end in zip(self.stages, ends, strict=True) if steps <= end), self.stages[-1]
        )


# of no effect on a stage that learns from demonstrations
ROLLOUT_KEYS = ("group_size", "mask_cut_actions", *(f"sampling.{key}" for key in DISTRIBUTION))
REFERENCE_KEYS = ("reference",)  # of no effect without a penalty that is measured to it


def resolved(config: TrainConfig) -> dict[str, Any]:
    """Every effective value, fit for YAML: ``load_config`` of it gives an equal configuration."""
    content = config.model_dump(mode="json")
    for stage, written in zip(config.stages, content["stages"], strict=True):
        if not stage.build().on_policy:
            written["sampling"] = {key: written["sampling"][key] for key in LIMITS}
            del written["group_size"], written["mask_cut_actions"]
        if not stage.build().needs_reference:
            del written["reference"]
    if (
        config.evaluation is not None
        and len({tuple(getattr(stage.sampling, key) for key in LIMITS) for stage in config.stages}) > 1
    ):
        content["evaluation"]["sampling"] |= dict.fromkeys(config.evaluation.inherited)
    return content
