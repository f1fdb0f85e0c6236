"""What a run is configured by. How a file becomes a ``TrainConfig``, and what it may leave out, is told in ``loading``."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SerializeAsAny, model_validator

from agent_peft.algorithms import Algorithm, AlgorithmConfig, build_algorithm
from agent_peft.batch import collate
from agent_peft.environments import ENVIRONMENTS
from agent_peft.environments.base import Environment, EnvironmentConfig
from agent_peft.policies.base import PolicyConfig
from agent_peft.policies.engine import EngineConfig
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.rollout.rewards import RewardConfig
from agent_peft.training.optimizer import OptimizerConfig
from agent_peft.types import AgentPeftError, Task, Trajectory, Turn


def environment_classes(kind: str) -> tuple[type[EnvironmentConfig], type[Environment]]:
    """The configuration's class and the environment's: those of our table, or of a user's own ``package.module:Class``.

    A user's class takes its configuration as first argument of ``__init__`` and annotates it with an ``EnvironmentConfig`` of its own,
    which has a field ``kind: str``.

    Raises:
        ValueError: there is no such class, or it is not of that form.
    """
    if kind in ENVIRONMENTS:
        return ENVIRONMENTS[kind]
    module_name, colon, class_name = kind.partition(":")
    if not colon:
        raise ValueError(f"there is no environment {kind!r}; name one of {', '.join(ENVIRONMENTS)}, or your own as package.module:Class")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"cannot import {kind!r} ({error})") from error
    if not (isinstance(found, type) and issubclass(found, Environment)):
        raise ValueError(f"{kind!r} is not a class derived from agent_peft.environments.base.Environment")
    hints = [hint for name, hint in get_type_hints(found.__init__).items() if name != "return"]
    config = hints[0] if hints else None
    if not (isinstance(config, type) and issubclass(config, EnvironmentConfig) and "kind" in config.model_fields):
        raise ValueError(f"{kind!r}: the first argument of __init__ must be annotated with an EnvironmentConfig that has a field kind: str")
    return config, found


def build_environment(config: EnvironmentConfig) -> Environment:
    """The environment that a configuration describes, with its tasks loaded."""
    kind: str = config.kind  # type: ignore[attr-defined]  # proven when it was resolved
    build: Any = environment_classes(kind)[1]
    environment: Environment = build(config)
    return environment


def _resolve_environment(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    kind = value.get("kind")
    if not isinstance(kind, str):
        raise ValueError(f"names no kind; give one of {', '.join(ENVIRONMENTS)}, or your own as package.module:Class")
    return environment_classes(kind)[0].model_validate_json(json.dumps(value, default=str), strict=True)


def _greedy(value: Any) -> Any:
    return {"temperature": 0.0, **value} if isinstance(value, Mapping) else value


def _user_folder(value: Any) -> Any:
    return Path(value).expanduser() if isinstance(value, str | Path) else value


AnyEnvironment = Annotated[SerializeAsAny[EnvironmentConfig], BeforeValidator(_resolve_environment)]


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class StageConfig(_Config):
    """A stretch of training with one algorithm. Supervised stages learn from demonstrations, in groups of one."""

    algorithm: AlgorithmConfig
    name: str = Field(default_factory=lambda before: before["algorithm"].kind, min_length=1, description="the algorithm's kind, if left out")
    steps: int = Field(ge=1, description="trips through the main loop")
    tasks_per_step: int = Field(default=8, ge=1)
    group_size: int = Field(
        default_factory=lambda before: 8 if build_algorithm(before["algorithm"]).on_policy else 1, ge=1, description="episodes of one task"
    )
    rewards: RewardConfig = RewardConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    sampling: SamplingConfig = SamplingConfig()
    microbatch_tokens: int = Field(default=4096, ge=1, description="tokens of one forward")
    task_order: Literal["shuffle", "sequential"] = "shuffle"
    drop_zero_variance: bool = Field(
        default_factory=lambda before: not build_algorithm(before["algorithm"]).learns_at_zero_advantage and before["group_size"] > 1,
        description="leave out groups whose trajectories all have one return",
    )

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
        kind, algorithm = self.algorithm.kind, self.build()
        if not algorithm.on_policy and self.group_size != 1:
            raise ValueError(f"group_size has no effect on {kind}, which learns from demonstrations in groups of one; leave it out")
        if self.drop_zero_variance and self.group_size == 1:
            raise ValueError("drop_zero_variance would leave out every group, for a group of one has no variance; leave it out")
        if algorithm.on_policy and self.sampling.temperature == 0:
            raise ValueError("sampling.temperature: 0 has no density to train on; set it above 0 (evaluation may use 0)")
        if algorithm.minibatches > self.tasks_per_step:
            raise ValueError(f"algorithm.minibatches: {algorithm.minibatches} is more than tasks_per_step: {self.tasks_per_step}")
        if algorithm.on_policy and self.group_size == 1:
            try:  # asked of the algorithm itself, so that none is known by name here
                algorithm.prepare(collate([Trajectory(Task("probe"), (Turn((0,), (0,), (0.0,)),), rewards=(0.0,))], groups=[0]))
            except AgentPeftError as error:
                raise ValueError(f"group_size: 1 is too small for {kind}, which compares the episodes of a task with each other") from error
        return self


class EvaluationConfig(_Config):
    """When the policy is measured, and on what. Nothing here touches training."""

    environment: AnyEnvironment
    at: tuple[Literal["start", "stages"], ...] = Field(default=("start", "stages"), description="before the first step, after each stage")
    every: int = Field(default=0, ge=0, description="steps; 0 is never in between")
    attempts: int = Field(default=1, ge=1, description="episodes of each task, for pass@k")
    num_tasks: int | None = Field(default=None, ge=1, description="the first ones; null takes all")
    sampling: Annotated[SamplingConfig, BeforeValidator(_greedy)] = SamplingConfig(temperature=0.0)

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

    run_dir: Annotated[Path, BeforeValidator(_user_folder)]
    seed: int = 0
    threads: int | None = Field(default=None, ge=1, description="of torch; null leaves that to torch")
    policy: PolicyConfig
    environment: AnyEnvironment
    engine: EngineConfig = EngineConfig()
    evaluation: EvaluationConfig | None = None
    checkpoint: CheckpointConfig = CheckpointConfig()
    stages: tuple[StageConfig, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _consistent(self) -> TrainConfig:
        names = [stage.name for stage in self.stages]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two stages are called {name!r}; give each a name of its own")
        for stage in self.stages:
            if self.policy.lora is None and stage.build().needs_reference:
                raise ValueError(f"stage {stage.name!r} needs a reference, the policy with its adapter off: set policy.lora, or kl_coef: 0")
        return self
