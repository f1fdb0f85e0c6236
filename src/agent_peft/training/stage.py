"""The configuration of a stage of training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from agent_peft.algorithms import AnyAlgorithm, UncheckedAlgorithmConfig
from agent_peft.config import Config, first_error
from agent_peft.environments.base import Environment
from agent_peft.lookup import nearest
from agent_peft.policies.engine.base import Sampler
from agent_peft.policies.reference import ReferenceKind
from agent_peft.policies.sampling import DISTRIBUTION, SamplingConfig
from agent_peft.ranks import Ranks
from agent_peft.rollout.collector import Collector, ScheduleOf
from agent_peft.rollout.demonstrations import DemonstrationCheck
from agent_peft.rollout.rewards import RewardConfig
from agent_peft.rollout.sources import Demonstrations, Rollouts, Source
from agent_peft.rollout.task_order import TaskOrder
from agent_peft.training.optimizer import OptimizerConfig
from agent_peft.training.step_metrics import metrics_of
from agent_peft.types import AgentPeftError

MAX_STEPS = 1_000_000
MAX_EPISODES = 1_000_000  # of a step: a group, or groups


class UntilConfig(Config):
    """Ends a stage before its last step, when the mean of a metric over the latest steps is high or low
    enough. The run's step numbers then jump to the end of the stage.
    """

    metric: str = Field(
        description="such as success, reward or surprisal; a supervised stage measures success and reward of "
        "its demonstrations, so use surprisal there"
    )
    above: float | None = Field(default=None, description="the stage ends when the mean is above this")
    below: float | None = Field(default=None, description="the stage ends when the mean is below this")
    over: int = Field(
        default=4, ge=1, description="how many of the latest steps that have the metric are averaged"
    )

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
        return (
            f"until.metric: {name!r} is measured by evaluations, and until looks at the steps of its stage; "
            "give success, or surprisal"
        )
    return f"until.metric: {name!r} is no metric of this stage; {nearest(name, known)}"


class StageConfig(Config):
    """A part of a run with one algorithm. Supervised stages learn from demonstrations, in groups of one."""

    algorithm: AnyAlgorithm = Field(description="how the policy learns from the episodes")
    name: str = Field(
        default_factory=lambda before: before["algorithm"].kind.rpartition(":")[2],
        min_length=1,
        description="name of the stage in metrics and files; default: the algorithm's kind",
    )
    steps: int = Field(ge=1, le=MAX_STEPS, description="number of steps: trips through the main loop")
    until: UntilConfig | None = Field(
        default=None, description="ends the stage before its last step; null never does"
    )
    tasks_per_step: int = Field(default=8, ge=1, le=MAX_EPISODES, description="number of tasks of one step")
    group_size: int = Field(
        default_factory=lambda before: 8 if before["algorithm"].facts.on_policy else 1,
        ge=1,
        le=MAX_EPISODES,
        description="episodes of each task; default: 8, or 1 if the stage learns from demonstrations",
    )
    rewards: RewardConfig = Field(default=RewardConfig(), description="what an episode is worth")
    optimizer: OptimizerConfig = Field(default=OptimizerConfig(), description="how weights are updated")
    sampling: SamplingConfig = Field(default=SamplingConfig(), description="how tokens are sampled")
    microbatch_tokens: int = Field(
        default=768,
        ge=1,
        description="maximum positions of one forward; changes time and memory, never the result",
    )
    reference: ReferenceKind = Field(
        default="stage_start",
        description="the policy that the KL is measured to: stage_start is the policy at the start of the "
        "stage, base is the policy with its adapter off",
    )
    mask_cut_actions: bool = Field(
        default=False, description="do not train on actions that a token limit ended; they still get rewards"
    )
    task_order: Literal["shuffle", "sequential"] = Field(
        default="shuffle", description="order of the tasks in each trip through them"
    )
    nonfinite: Literal["stop", "skip"] = Field(
        default="stop", description="what happens at an update whose loss or gradient is NaN or infinite"
    )

    @field_validator("name")
    @classmethod
    def _names_a_file(cls, name: str) -> str:
        if set(name) & set("/\\\0"):
            raise ValueError(
                f"{name!r} cannot be part of a file's name, and evaluations are files named after their "
                "stage; leave out / and \\"
            )
        return name

    @property
    def episodes_per_step(self) -> int:
        return self.tasks_per_step * self.group_size

    @property
    def updates(self) -> int:
        """The number of optimizer updates of the stage, if every step has something to learn from."""
        facts = self.algorithm.facts
        return self.steps * facts.update_epochs * facts.minibatches

    @model_validator(mode="after")
    def _effective(self) -> StageConfig:
        if isinstance(self.algorithm, UncheckedAlgorithmConfig):
            return self  # its facts are not known
        kind, algorithm, sampling = self.algorithm.kind, self.algorithm.facts, self.sampling
        if not algorithm.on_policy and self.group_size != 1:
            raise ValueError(
                f"group_size has no effect on {kind}, which learns from demonstrations in groups of one; "
                "leave it out"
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
                f"sampling.{drawn[0]} has no effect on {kind}, which scores the whole distribution; "
                "leave it out"
            )
        if "reference" in self.model_fields_set and not algorithm.needs_reference:
            raise ValueError(f"reference has no effect on {kind} without a kl_coef; leave it out")
        if algorithm.needs_reference and sampling.truncates:
            key = "top_p" if sampling.top_p < 1 else "top_k"
            raise ValueError(
                f"sampling.{key} cuts off tokens that the reference gives probability to, so the KL cannot "
                "be measured on those that are drawn; leave top_p and top_k out, or set kl_coef: 0"
            )
        if self.until is not None and self.until.metric not in (known := metrics_of(algorithm)):
            raise ValueError(_unknown_metric(self.until.metric, known))
        if algorithm.minibatches > self.tasks_per_step:
            raise ValueError(
                f"algorithm.minibatches: {algorithm.minibatches} is more than "
                f"tasks_per_step: {self.tasks_per_step}"
            )
        if self.group_size == 1 and algorithm.compares_groups:
            raise ValueError(
                f"group_size: 1 is too small for {kind}, which compares the episodes of a task with each "
                "other"
            )
        return self


class Stage(StageConfig):
    """A stage for ``Trainer``, from the keys and short forms of a YAML file.

    >>> Stage(algorithm="rloo", steps=50, optimizer={"learning_rate": 3e-4}).group_size
    8

    Raises:
        AgentPeftError: a key or a value is wrong; in one line.
    """

    def __init__(self, /, **keys: Any) -> None:
        try:
            super().__init__(**keys)
        except ValidationError as error:
            raise AgentPeftError(first_error(error, "stage", StageConfig)) from error


def source_of(
    stage: StageConfig,
    environment: Environment,
    sampler: Sampler,
    seed: int,
    ranks: Ranks,
    schedule_of: ScheduleOf | None = None,
) -> Source:
    """The source that a stage's algorithm learns from: episodes of the policy, or demonstrations."""
    order = TaskOrder(environment.tasks, stage.tasks_per_step, seed, stage.task_order == "shuffle")
    if stage.algorithm.facts.on_policy:
        collector = Collector(environment, sampler)
        settings = (stage.group_size, stage.sampling, stage.rewards)
        return Rollouts(collector, order, *settings, seed, ranks, schedule_of)
    check = DemonstrationCheck(sampler.chat, stage.sampling, warns=ranks.is_main)
    return Demonstrations(environment, order, sampler.chat, stage.rewards, seed, ranks, check)
