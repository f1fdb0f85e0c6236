"""What a stage of training is configured by."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from pydantic import Field, field_validator, model_validator

from agent_peft.algorithms import Algorithm, AlgorithmConfig, build_algorithm
from agent_peft.batch import collate
from agent_peft.config import Config
from agent_peft.policies.reference import ReferenceKind
from agent_peft.policies.sampling import DISTRIBUTION, SamplingConfig
from agent_peft.rollout.rewards import RewardConfig
from agent_peft.training.optimizer import OptimizerConfig
from agent_peft.training.step_metrics import metrics_of
from agent_peft.types import AgentPeftError, Task, Trajectory, Turn


def compares_within_groups(algorithm: Algorithm) -> bool:
    """Asked of the algorithm itself, so that none is known by name here: does it refuse a group of one? It
    is used up.
    """
    probe = collate([Trajectory(Task("probe"), (Turn((0,), (0,), (0.0,)),), rewards=(0.0,))], groups=[0])
    try:
        algorithm.prepare(replace(probe, values=probe.rewards))
    except AgentPeftError:
        return True
    return False


MOST_STEPS = 1_000_000
MOST_EPISODES = 1_000_000  # of a step: a group, or groups


class UntilConfig(Config):
    """What ends a stage before its last step: the mean of a metric over the last steps. Its step numbers
    then jump to the stage's end.
    """

    metric: str = Field(
        description="such as success, reward or surprisal (the model's; a supervised stage's others are the demonstrations')"
    )
    above: float | None = None
    below: float | None = None
    over: int = Field(default=4, ge=1, description="steps, of those that have the metric")

    @model_validator(mode="after")
    def _one_side(self) -> UntilConfig:
        if (self.above is None) == (self.below is None):
            raise ValueError("needs above or below, and not both")
        return self

    def is_reached(self, value: float) -> bool:
        return (self.above is not None and value > self.above) or (
            self.below is not None and value < self.below
        )


def _unknown_metric(name: str, known: Sequence[str]) -> str:
    if name.startswith("evaluation"):
        return f"until.metric: {name!r} is measured by evaluations, and until looks at the steps of its stage; give success, or surprisal"
    near = difflib.get_close_matches(name.lower(), known, 1)
    return f"until.metric: {name!r} is no metric of this stage; " + (
        f"did you mean {near[0]!r}?" if near else f"give one of {', '.join(known)}"
    )


class StageConfig(Config):
    """A stretch of training with one algorithm. Supervised stages learn from demonstrations, in groups of
    one.
    """

    algorithm: AlgorithmConfig
    name: str = Field(
        default_factory=lambda before: before["algorithm"].kind,
        min_length=1,
        description="default: the algorithm's kind",
    )
    steps: int = Field(ge=1, le=MOST_STEPS, description="trips through the main loop")
    until: UntilConfig | None = Field(default=None, description="ends the stage earlier")
    tasks_per_step: int = Field(default=8, ge=1, le=MOST_EPISODES)
    group_size: int = Field(
        default_factory=lambda before: 8 if build_algorithm(before["algorithm"]).on_policy else 1,
        ge=1,
        le=MOST_EPISODES,
        description="episodes of one task",
    )
    rewards: RewardConfig = RewardConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    sampling: SamplingConfig = SamplingConfig()
    microbatch_tokens: int = Field(
        default=768, ge=1, description="positions of one forward: time and memory, never the result"
    )
    reference: ReferenceKind = Field(
        default="stage_start",
        description="what kl_coef holds the policy at: stage_start is the policy as the stage began, base is it with its adapter off",
    )
    mask_cut_actions: bool = Field(
        default=False, description="do not train on actions that a limit on tokens ended; they are priced"
    )
    task_order: Literal["shuffle", "sequential"] = "shuffle"
    nonfinite: Literal["stop", "skip"] = Field(
        default="stop", description="an update whose loss or gradient is NaN or infinite"
    )

    @field_validator("name")
    @classmethod
    def _names_a_file(cls, name: str) -> str:
        if set(name) & set("/\\\0"):
            raise ValueError(
                f"{name!r} cannot be part of a file's name, and an evaluation's file is named by it; leave out / and \\"
            )
        return name

    def build(self) -> Algorithm:
        return build_algorithm(self.algorithm)

    @property
    def episodes_per_step(self) -> int:
        return self.tasks_per_step * self.group_size

    @property
    def updates(self) -> int:
        """Optimizer updates of the whole stage, if no step is without anything to learn from."""
        algorithm = self.build()
        return self.steps * algorithm.update_epochs * algorithm.minibatches

    @model_validator(mode="after")
    def _effective(self) -> StageConfig:
        kind, algorithm, sampling = self.algorithm.kind, self.build(), self.sampling
        if not algorithm.on_policy and self.group_size != 1:
            raise ValueError(
                f"group_size has no effect on {kind}, which learns from demonstrations in groups of one; leave it out"
            )
        if not algorithm.on_policy and self.mask_cut_actions:
            raise ValueError(
                f"mask_cut_actions has no effect on {kind}, which learns from demonstrations; leave it out"
            )
        if algorithm.on_policy and sampling.temperature == 0:
            raise ValueError(
                "sampling.temperature: 0 has no density to train on; set it above 0 (evaluation may use 0)"
            )
        if not algorithm.on_policy and (
            drawn := [key for key in DISTRIBUTION if getattr(sampling, key) != getattr(SamplingConfig(), key)]
        ):
            raise ValueError(
                f"sampling.{drawn[0]} has no effect on {kind}, which scores the whole distribution; leave it out"
            )
        if "reference" in self.model_fields_set and not algorithm.needs_reference:
            raise ValueError(f"reference has no effect on {kind} without a kl_coef; leave it out")
        if algorithm.needs_reference and sampling.truncates:
            key = "top_p" if sampling.top_p < 1 else "top_k"
            raise ValueError(
                f"sampling.{key} cuts off tokens that the reference gives probability to, so the KL cannot be measured on those that are "
                "drawn; leave top_p and top_k out, or set kl_coef: 0"
            )
        if self.until is not None and self.until.metric not in (known := metrics_of(algorithm)):
            raise ValueError(_unknown_metric(self.until.metric, known))
        if algorithm.minibatches > self.tasks_per_step:
            raise ValueError(
                f"algorithm.minibatches: {algorithm.minibatches} is more than tasks_per_step: {self.tasks_per_step}"
            )
        if self.group_size == 1 and compares_within_groups(algorithm):
            raise ValueError(
                f"group_size: 1 is too small for {kind}, which compares the episodes of a task with each other"
            )
        return self
