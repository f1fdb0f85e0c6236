"""The policy measured on held-out tasks."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from agent_peft.config import Config
from agent_peft.environments import AnyEnvironment
from agent_peft.environments.base import Environment
from agent_peft.policies.engine.local import Engine
from agent_peft.policies.sampling import LIMITS, SamplingConfig
from agent_peft.ranks import ALONE, Ranks
from agent_peft.rollout.collector import CollectionSchedule, Collector
from agent_peft.rollout.gathering import gather_collection
from agent_peft.rollout.rewards import RewardConfig
from agent_peft.rollout.statistics import EvaluationReport, summarize
from agent_peft.seeding import derive

logger = logging.getLogger(__name__)


def _greedy(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    given = {key: inner for key, inner in value.items() if inner is not None or key not in LIMITS}
    return SamplingConfig.model_validate_json(json.dumps({"temperature": 0.0, **given}), strict=True)


class EvaluationConfig(Config):
    """When the policy is measured, and on what. Nothing here touches training."""

    environment: AnyEnvironment
    at: tuple[Literal["start", "stages"], ...] = Field(
        default=("start", "stages"), description="before the first step, after each stage"
    )
    every: int = Field(
        default=0,
        ge=0,
        description="steps of the run, those of earlier stages included; 0 is never in between",
    )
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

    def following(self, stage: SamplingConfig) -> EvaluationConfig:
        """As it is when it follows a stage that samples so."""
        limits = {key: getattr(stage, key) for key in self.inherited}
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
            raise ValueError(
                f"attempts: {self.attempts} has no effect at sampling.temperature: 0, where all attempts are alike; raise it"
            )
        return self


def evaluate(
    engine: Engine,
    environment: Environment,
    evaluation: EvaluationConfig,
    seed: int,
    ranks: Ranks = ALONE,
    schedule: CollectionSchedule | None = None,
) -> EvaluationReport:
    """``attempts`` episodes of each task; those whose environment failed before the agent had acted are
    left out.
    """
    tasks = environment.tasks[: evaluation.num_tasks]
    seed, positions = derive(seed, "evaluation"), ranks.share(range(len(tasks)))
    acting = (tasks, evaluation.attempts, evaluation.sampling, RewardConfig(), seed, positions)
    mine = Collector(environment, engine).collect(*acting, schedule.followed if schedule else None)
    if schedule is not None:
        schedule.write(mine.schedule)
    collection = gather_collection(ranks, mine, tasks)
    report = summarize(
        collection.groups,
        len(tasks) * evaluation.attempts - sum(len(group.trajectories) for group in collection.groups),
    )
    if (collection.failures or collection.defects) and ranks.leads:
        found = collection.failures, report.infrastructure_failures, collection.crashed, collection.defects
        logger.warning(
            "the environment failed %d times: %d episodes are left out, %d count as crashed by the agent; %d defects",
            *found,
        )
    return report
