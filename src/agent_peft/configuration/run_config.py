"""The configuration of a run. Module ``loading`` says how a file becomes a ``TrainConfig``."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator

from agent_peft.algorithms import AlgorithmConfig, UncheckedAlgorithmConfig
from agent_peft.config import Config
from agent_peft.environments import AnyEnvironment
from agent_peft.policies.config import PolicyConfig
from agent_peft.policies.engine.base import EngineConfig
from agent_peft.policies.sampling import DISTRIBUTION, LIMITS
from agent_peft.ranks import RanksConfig
from agent_peft.rollout.evaluation import EvaluationConfig
from agent_peft.training.stage import StageConfig


class CheckpointConfig(Config):
    """When the run is saved. It is always saved at the end of a stage."""

    every: int = Field(default=1, ge=1, description="steps from one checkpoint to the next")
    keep_last: int = Field(
        default=2,
        ge=1,
        description="number of checkpoints to keep; one that holds a file named keep is never deleted",
    )


class TrainConfig(Config):
    """A complete run: each stage has all its keys."""

    run_dir: Annotated[Path, AfterValidator(Path.expanduser)] = Field(
        description="folder that the run writes to, relative to the current folder; an interrupted run "
        "continues there"
    )
    seed: int = Field(
        default=0, description="decides tasks, order, sampled tokens and the weights of a model from scratch"
    )
    threads: int | None = Field(
        default=None, ge=1, description="CPU threads of torch; null: one per core that this process may use"
    )
    policy: PolicyConfig = Field(description="the model that acts and is trained")
    environment: AnyEnvironment = Field(description="the tasks to train on")
    engine: EngineConfig = Field(
        default=EngineConfig(), description="how the sampler uses memory and threads"
    )
    evaluation: EvaluationConfig | None = Field(
        default=None, description="when the policy is measured, and on which tasks; null: never"
    )
    checkpoint: CheckpointConfig = Field(default=CheckpointConfig(), description="when the run is saved")
    ranks: RanksConfig = Field(default=RanksConfig(), description="how processes train together (torchrun)")
    stages: tuple[StageConfig, ...] = Field(
        description="the stages in their order; without this key the keys of one stage stand at the top"
    )

    @model_validator(mode="after")
    def _consistent(self) -> TrainConfig:
        if not self.stages:
            raise ValueError("stages: [] trains nothing; give at least one")
        for stage in self.stages:
            if self.policy.lora is None and stage.reference == "base":
                raise ValueError(
                    f"reference: base of stage {stage.name!r} is the policy with its adapter off; "
                    "set policy.lora, or reference: stage_start"
                )
        if self.evaluation is not None:  # its limits at the end of the run, also for `agent-peft evaluate`
            object.__setattr__(self, "evaluation", self.evaluation.following(self.stages[-1].sampling))
        return self

    def stage_at(self, steps: int) -> StageConfig:
        """The stage to which step number ``steps`` of the run belongs."""
        ends = accumulate(stage.steps for stage in self.stages)
        return next(
            (stage for stage, end in zip(self.stages, ends, strict=True) if steps <= end), self.stages[-1]
        )


def ineffective_keys(algorithm: AlgorithmConfig) -> dict[str, str]:
    """The keys of a stage that have no effect with this algorithm, each with the reason."""
    if isinstance(algorithm, UncheckedAlgorithmConfig):
        return {}
    reasons: dict[str, str] = {}
    if not algorithm.facts.on_policy:
        keys = ("group_size", "mask_cut_actions", *(f"sampling.{key}" for key in DISTRIBUTION))
        reasons |= dict.fromkeys(keys, "learns from demonstrations, in groups of one, and draws no tokens")
    if not algorithm.facts.needs_reference:
        reasons["reference"] = "measures no KL (kl_coef is 0)"
    return reasons


def resolved(config: TrainConfig) -> dict[str, Any]:
    """Every effective value, as YAML can hold it. ``read_config`` of it gives an equal configuration."""
    content = config.model_dump(mode="json")
    for stage, values in zip(config.stages, content["stages"], strict=True):
        for key in ineffective_keys(stage.algorithm):
            section, _, name = key.rpartition(".")
            del (values[section] if section else values)[name]
    if (
        config.evaluation is not None
        and len({tuple(getattr(stage.sampling, key) for key in LIMITS) for stage in config.stages}) > 1
    ):
        content["evaluation"]["sampling"] |= dict.fromkeys(config.evaluation.inherited)
    return content
