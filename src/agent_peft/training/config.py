"""What a run is configured by. How a file becomes a ``TrainConfig``, and what it may leave out, is told in ``loading``."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SerializeAsAny, field_validator, model_validator

from agent_peft.algorithms import Algorithm, AlgorithmConfig, build_algorithm
from agent_peft.batch import collate
from agent_peft.environments import ENVIRONMENTS, own_class
from agent_peft.environments.base import EnvironmentConfig
from agent_peft.lookup import may_import
from agent_peft.policies.base import PolicyConfig
from agent_peft.policies.engine import EngineConfig
from agent_peft.policies.reference import ReferenceKind
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.rollout.rewards import RewardConfig
from agent_peft.training.distributed import RanksConfig
from agent_peft.training.optimizer import OptimizerConfig
from agent_peft.training.step_metrics import metrics_of
from agent_peft.types import AgentPeftError, Task, Trajectory, Turn


class OwnEnvironmentConfig(EnvironmentConfig):
    """Of a user's own environment, ``kind: "package.module:Class"``: the other keys are for the class to judge, when it is built."""

    model_config = ConfigDict(frozen=True, extra="allow")

    kind: str

    @field_validator("kind")
    @classmethod
    def _importable(cls, kind: str) -> str:
        if may_import(kind):
            own_class(kind)
        return kind


def environment_config_class(kind: object) -> type[EnvironmentConfig]:
    """The class that configures environments of this kind.

    Raises:
        ValueError: there is none.
    """
    if isinstance(kind, str) and ":" in kind:
        return OwnEnvironmentConfig
    if kind in ENVIRONMENTS:
        return ENVIRONMENTS[kind][0]
    kinds = f"{', '.join(ENVIRONMENTS)}, or your own as package.module:Class"
    near = difflib.get_close_matches(str(kind), ENVIRONMENTS, 1)
    advice = f"did you mean {near[0]!r}?" if near else f"give one of {kinds}"
    raise ValueError(f"names no kind; give one of {kinds}" if kind is None else f"there is no kind {kind!r}; {advice}")


def _resolve_environment(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    found = environment_config_class(value.get("kind"))
    return found.model_validate_json(json.dumps(value, default=str), strict=True)  # its mistakes keep their places within ours


LIMITS = ("max_new_tokens", "max_tokens", "stop")  # of an evaluation's sampling: where it sets none, those of the stage that it follows
DISTRIBUTION = ("temperature", "top_p", "top_k")  # how tokens are drawn: of no effect where demonstrations are scored


def _greedy(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    given = {key: inner for key, inner in value.items() if inner is not None or key not in LIMITS}
    return SamplingConfig.model_validate_json(json.dumps({"temperature": 0.0, **given}), strict=True)


def compares_within_groups(algorithm: Algorithm) -> bool:
    """Asked of the algorithm itself, so that none is known by name here: does it refuse a group of one? It is used up."""
    probe = collate([Trajectory(Task("probe"), (Turn((0,), (0,), (0.0,)),), rewards=(0.0,))], groups=[0])
    try:
        algorithm.prepare(replace(probe, values=probe.rewards))
    except AgentPeftError:
        return True
    return False


AnyEnvironment = Annotated[SerializeAsAny[EnvironmentConfig], BeforeValidator(_resolve_environment)]


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


MOST_STEPS = 1_000_000
MOST_EPISODES = 1_000_000  # of a step: a group, or groups


class UntilConfig(_Config):
    """What ends a stage before its last step: the mean of a metric over the last steps. Its step numbers then jump to the stage's end."""

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
        return (self.above is not None and value > self.above) or (self.below is not None and value < self.below)


def _unknown_metric(name: str, known: Sequence[str]) -> str:
    if name.startswith("evaluation"):
        return f"until.metric: {name!r} is measured by evaluations, and until looks at the steps of its stage; give success, or surprisal"
    near = difflib.get_close_matches(name.lower(), known, 1)
    return f"until.metric: {name!r} is no metric of this stage; " + (
        f"did you mean {near[0]!r}?" if near else f"give one of {', '.join(known)}"
    )


class StageConfig(_Config):
    """A stretch of training with one algorithm. Supervised stages learn from demonstrations, in groups of one."""

    algorithm: AlgorithmConfig
    name: str = Field(default_factory=lambda before: before["algorithm"].kind, min_length=1, description="default: the algorithm's kind")
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
    microbatch_tokens: int = Field(default=768, ge=1, description="positions of one forward: time and memory, never the result")
    reference: ReferenceKind = Field(
        default="stage_start",
        description="what kl_coef holds the policy at: stage_start is the policy as the stage began, base is it with its adapter off",
    )
    mask_cut_actions: bool = Field(default=False, description="do not train on actions that a limit on tokens ended; they are priced")
    task_order: Literal["shuffle", "sequential"] = "shuffle"
    nonfinite: Literal["stop", "skip"] = Field(default="stop", description="an update whose loss or gradient is NaN or infinite")

    @field_validator("name")
    @classmethod
    def _names_a_file(cls, name: str) -> str:
        if set(name) & set("/\\\0"):
            raise ValueError(f"{name!r} cannot be part of a file's name, and an evaluation's file is named by it; leave out / and \\")
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
            raise ValueError(f"group_size has no effect on {kind}, which learns from demonstrations in groups of one; leave it out")
        if not algorithm.on_policy and self.mask_cut_actions:
            raise ValueError(f"mask_cut_actions has no effect on {kind}, which learns from demonstrations; leave it out")
        if algorithm.on_policy and sampling.temperature == 0:
            raise ValueError("sampling.temperature: 0 has no density to train on; set it above 0 (evaluation may use 0)")
        if not algorithm.on_policy and (drawn := [key for key in DISTRIBUTION if getattr(sampling, key) != getattr(SamplingConfig(), key)]):
            raise ValueError(f"sampling.{drawn[0]} has no effect on {kind}, which scores the whole distribution; leave it out")
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
            raise ValueError(f"algorithm.minibatches: {algorithm.minibatches} is more than tasks_per_step: {self.tasks_per_step}")
        if self.group_size == 1 and compares_within_groups(algorithm):
            raise ValueError(f"group_size: 1 is too small for {kind}, which compares the episodes of a task with each other")
        return self


class EvaluationConfig(_Config):
    """When the policy is measured, and on what. Nothing here touches training."""

    environment: AnyEnvironment
    at: tuple[Literal["start", "stages"], ...] = Field(default=("start", "stages"), description="before the first step, after each stage")
    every: int = Field(default=0, ge=0, description="steps of the run, those of earlier stages included; 0 is never in between")
    attempts: int = Field(default=1, ge=1, description="episodes of each task, for pass@k")
    num_tasks: int | None = Field(default=None, ge=1, description="the first ones; null takes all")
    sampling: Annotated[SamplingConfig, BeforeValidator(_greedy)] = Field(
        default=SamplingConfig(temperature=0.0),
        description="limits and stop strings that are not set, or null, are those of the stage that it follows; at the start, of the first",
    )

    @property
    def inherited(self) -> tuple[str, ...]:
        """The keys of its sampling that a stage decides."""
        return tuple(key for key in LIMITS if key not in self.sampling.model_fields_set)

    def following(self, stage: StageConfig) -> EvaluationConfig:
        """As it is when it follows ``stage``."""
        limits = {key: getattr(stage.sampling, key) for key in self.inherited}
        own = self.sampling.model_fields_set  # it still sets what it set
        sampling = SamplingConfig.model_construct(_fields_set=set(own), **{**dict(self.sampling), **limits})
        found = self.model_copy()
        object.__setattr__(found, "sampling", sampling)
        return found

    @model_validator(mode="after")
    def _effective(self) -> EvaluationConfig:
        if not self.at and not self.every:
            raise ValueError("at: [] and every: 0 never evaluate; set one of them, or evaluation: null")
        if len(set(self.at)) < len(self.at):
            raise ValueError("at names the same moment twice")
        if self.attempts > 1 and self.sampling.temperature == 0:
            raise ValueError(f"attempts: {self.attempts} has no effect at sampling.temperature: 0, where all attempts are alike; raise it")
        return self


class CheckpointConfig(_Config):
    """When the run is saved. The end of a stage always is."""

    every: int = Field(default=1, ge=1, description="steps")
    keep_last: int = Field(default=2, ge=1, description="how many stay; those that hold a file `keep` stay, too")


class TrainConfig(_Config):
    """A run, resolved: nothing is left to be inherited."""

    run_dir: Annotated[Path, AfterValidator(Path.expanduser)]
    seed: int = 0
    threads: int | None = Field(default=None, ge=1, description="of torch; null is one for each core this process may use")
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
            object.__setattr__(self, "evaluation", self.evaluation.following(self.stages[-1]))
        return self

    def stage_at(self, steps: int) -> StageConfig:
        """The stage that the run is in, or has just ended, after so many steps."""
        ends = accumulate(stage.steps for stage in self.stages)
        return next((stage for stage, end in zip(self.stages, ends, strict=True) if steps <= end), self.stages[-1])


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
    if config.evaluation is not None and len({tuple(getattr(stage.sampling, key) for key in LIMITS) for stage in config.stages}) > 1:
        content["evaluation"]["sampling"] |= dict.fromkeys(config.evaluation.inherited)
    return content
