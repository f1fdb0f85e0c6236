"""The evaluation of a policy on the tasks of an environment."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from agent_peft.algorithms.base import AlgorithmConfig
from agent_peft.algorithms.preference import DpoConfig
from agent_peft.config import Config, validated
from agent_peft.environments import ENVIRONMENTS, AnyEnvironment
from agent_peft.environments.base import OUTCOMES, Environment, EnvironmentConfig
from agent_peft.environments.contract import refuse_class
from agent_peft.environments.digests import digest, digests_of, shown_before
from agent_peft.lookup import nearest
from agent_peft.policies.engine import load_sampler
from agent_peft.policies.engine.base import Sampler
from agent_peft.policies.sampling import LIMITS, SamplingConfig
from agent_peft.ranks import ALONE, Ranks
from agent_peft.rollout.collector import CollectionSchedule, Collector, gather_collection
from agent_peft.rollout.replays import ReplayWindow
from agent_peft.rollout.rewards import RewardConfig
from agent_peft.rollout.statistics import EvaluationReport, summarize
from agent_peft.seeding import derive
from agent_peft.types import AgentPeftError

if TYPE_CHECKING:
    from agent_peft.policies.policy import Policy
    from agent_peft.policies.reference import Reference

logger = logging.getLogger(__name__)

FEW_TASKS = 30  # of an evaluation, whose interval is wide below it
SAMPLED = {"attempts", "sampling"}  # those without an effect on recorded replies
MEASURES = ("attempts", "num_tasks", "sampling")  # the keys that a single evaluation has
# keys of environments for the place of the tasks; the tasks have their own digest
PLACES = {"tasks", "url", "token", "examples_from"}


def _greedy(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    given = {key: inner for key, inner in value.items() if inner is not None or key not in LIMITS}
    return SamplingConfig.model_validate_json(json.dumps({"temperature": 0.0, **given}), strict=True)


class EvaluationConfig(Config):
    """When a run measures its policy, and on which tasks. No key here changes training."""

    environment: AnyEnvironment = Field(description="the tasks to measure on, best not those of training")
    at: tuple[Literal["start", "stages", "segments"], ...] = Field(
        default=("start", "stages"),
        description="start: before the first step; stages: after each stage; segments: before the first "
        "skill of a stage with task_order.kind: by_skill, and after each of its segments",
    )
    every: int = Field(
        default=0,
        ge=0,
        description="also after each so many steps of the run, counted over all stages; 0 adds no evaluation",
    )
    attempts: int = Field(default=1, ge=1, description="episodes of each task, for pass@k")
    num_tasks: int | None = Field(
        default=None, ge=1, description="how many tasks, from the first on; null takes all"
    )
    sampling: Annotated[SamplingConfig, BeforeValidator(_greedy)] = Field(
        default=SamplingConfig(temperature=0.0),
        description="how tokens are drawn, greedily by default; limits and stop strings that are not set, or "
        "null, are those of the stage that the evaluation follows (at the start, those of the first)",
    )

    @property
    def inherited(self) -> tuple[str, ...]:
        """The keys of ``sampling`` that a stage decides."""
        return tuple(key for key in LIMITS if key not in self.sampling.model_fields_set)

    def following(self, stage: SamplingConfig) -> EvaluationConfig:
        """Return the evaluation after a stage that samples so: with the stage's limits where it has none."""
        if self.of_replies:
            return self
        limits = {key: getattr(stage, key) for key in self.inherited}
        fields_set = set(self.sampling.model_fields_set)  # inherited limits do not count as set
        sampling = SamplingConfig.model_construct(_fields_set=fields_set, **{**dict(self.sampling), **limits})
        return self.model_copy(update={"sampling": sampling})

    @model_validator(mode="after")
    def _effective(self) -> EvaluationConfig:
        if not self.at and not self.every:
            raise ValueError("at: [] and every: 0 never evaluate; set one of them, or evaluation: null")
        if len(set(self.at)) < len(self.at):
            raise ValueError("at names the same moment twice")
        if self.of_replies and (keys := SAMPLED & self.model_fields_set):
            raise ValueError(
                f"{min(keys)} has no effect with environment.kind: {self.environment.kind}, whose recorded "
                "replies are measured without sampling; remove it"
            )
        if self.attempts > 1 and self.sampling.temperature == 0:
            raise ValueError(
                f"attempts: {self.attempts} has no effect at sampling.temperature: 0, where all attempts are "
                "alike; raise it"
            )
        if getattr(self.environment, "label", None) is not None and self.of_replies:
            raise ValueError(
                "environment.label makes rows of one reply, and an evaluation measures pairs; give a table "
                "of chosen and rejected replies"
            )
        return self

    @property
    def measures(self) -> tuple[str, ...]:
        """What is measured, as far as the environment is built in."""
        kind = self.environment.kind
        return ENVIRONMENTS[kind].measures if kind in ENVIRONMENTS else OUTCOMES

    @property
    def of_replies(self) -> bool:
        """Whether recorded replies are measured, and no episode is sampled."""
        return self.measures != OUTCOMES


def evaluate(
    policy: Policy | Sampler,
    environment: Environment,
    evaluation: EvaluationConfig | Mapping[str, Any] | None = None,
    seed: int = 0,
    ranks: Ranks = ALONE,
    schedule: CollectionSchedule | None = None,
    rewards: RewardConfig | Mapping[str, Any] | None = None,
    on_episode: Callable[[], None] | None = None,
    replays: ReplayWindow | None = None,
    pairs: AlgorithmConfig | None = None,
    reference: Reference | None = None,
) -> EvaluationReport:
    """Measure a policy on an environment: ``attempts`` episodes of each task, greedy by default. The report
    has the episodes in ``groups``. Of ``chat`` and ``preferences`` it measures the recorded replies.

    Episodes whose environment failed before the agent had acted are left out, and counted.

    Args:
        policy: a policy, for which a sampler is made, or a sampler. Recorded replies need a policy.
        evaluation: the settings, or a mapping with the keys ``attempts``, ``num_tasks`` and ``sampling``,
            such as ``{"attempts": 4, "sampling": {"temperature": 1.0}}``.
        seed: decides the episodes and, at a temperature above 0, the tokens.
        schedule: a recorded schedule of late answers to follow, and the file for a new one.
        rewards: what an episode is worth, as in a stage; None takes the defaults.
        on_episode: called at the end of each episode of this rank, from any thread.
        replays: earlier episodes to show before each task.
        pairs: the algorithm whose loss the pairs of ``preferences`` have; None takes dpo.
        reference: what that loss compares the policy with; None takes the policy with its adapter off, or
            nothing where it has no adapter.
    """
    refuse_class(environment)
    from agent_peft.policies.policy import Policy

    settings = _settings(evaluation)
    prices = validated(RewardConfig, rewards, "rewards")
    tasks = environment.tasks[: settings.num_tasks]
    if environment.measures != OUTCOMES:
        if not isinstance(policy, Policy):
            raise AgentPeftError("recorded replies are measured without sampling; give the policy itself")
        if isinstance(evaluation, Mapping) and (keys := SAMPLED & evaluation.keys()):
            raise AgentPeftError(
                f"evaluation.{min(keys)} has no effect on recorded replies, which are measured without "
                "sampling; remove it"
            )
        return _evaluate_replies(policy, environment, settings, ranks, prices, on_episode, pairs, reference)
    sampler = load_sampler(policy) if isinstance(policy, Policy) else policy
    if ranks.is_main:
        _check_number(len(tasks))
    collection = Collector(environment, sampler, on_episode).collect(
        tasks,
        settings.attempts,
        settings.sampling,
        prices,
        derive(seed, "evaluation"),
        positions=ranks.share(range(len(tasks))),
        schedule=schedule.followed if schedule else None,
        replays=replays,
    )
    if schedule is not None:
        schedule.write(collection.schedule)
    collection = gather_collection(ranks, collection, tasks)
    lost = len(tasks) * settings.attempts - sum(len(group.trajectories) for group in collection.groups)
    shown = 0 if replays is None else replays.number
    report = replace(
        summarize(collection.groups, lost), settings=settings_of(settings, environment, seed, prices, shown)
    )
    if (collection.failures or collection.defects) and ranks.is_main:
        logger.warning(
            "the environment failed %d times: %d episodes are left out, %d count as crashed by the agent; "
            "%d defects",
            collection.failures,
            report.infrastructure_failures,
            collection.crashed,
            collection.defects,
        )
    return report


def _evaluate_replies(
    policy: Policy,
    environment: Environment,
    settings: EvaluationConfig,
    ranks: Ranks,
    prices: RewardConfig,
    on_task: Callable[[], None] | None,
    pairs: AlgorithmConfig | None,
    reference: Reference | None,
) -> EvaluationReport:
    from agent_peft.policies.reference import Reference
    from agent_peft.rollout.likelihood import Likelihood

    if reference is None and policy.has_adapter:
        reference = Reference(None)
    algorithm = (pairs or DpoConfig()).build() if "margin" in environment.measures else None
    measured = Likelihood(policy, environment, prices, algorithm, reference, on_task)
    report = measured.report(environment.tasks[: settings.num_tasks], ranks)
    return replace(report, settings=settings_of_replies(settings, environment, pairs, reference))


@cache  # so that it warns once
def _check_number(tasks: int) -> None:
    if tasks < FEW_TASKS:
        logger.warning(
            "an evaluation on %d tasks is uncertain: a success of 50%% may be %.0f points off (95%%); "
            "measure on %d or more",
            tasks,
            100 * 0.98 / math.sqrt(tasks),  # 1.96 standard errors
            FEW_TASKS,
        )


def settings_of(
    evaluation: EvaluationConfig,
    environment: Environment,
    seed: int,
    rewards: RewardConfig,
    replay_in_prompt: int = 0,
) -> dict[str, Any]:
    """Return what decides the result of an evaluation, except the policy and the episodes that the prompt
    shows, as JSON values.
    """
    tasks = environment.tasks[: evaluation.num_tasks]
    return {
        "tasks": len(tasks),
        "attempts": evaluation.attempts,
        "seed": seed,
        "sampling": evaluation.sampling.model_dump(mode="json"),
        "environment_digest": digest([_keys(environment), shown_before(environment)]),
        "tasks_digest": digests_of(tasks)["order"],
        "rewards": rewards.model_dump(mode="json"),
        "replay_in_prompt": replay_in_prompt,
    }


def settings_of_replies(
    evaluation: EvaluationConfig,
    environment: Environment,
    pairs: AlgorithmConfig | None,
    reference: Reference | None,
) -> dict[str, Any]:
    """``settings_of`` for recorded replies."""
    tasks = environment.tasks[: evaluation.num_tasks]
    settings = {
        "tasks": len(tasks),
        "environment_digest": digest([_keys(environment), shown_before(environment)]),
        "tasks_digest": digests_of(tasks)["order"],
    }
    if "margin" not in environment.measures:
        return settings
    pairs = pairs or DpoConfig()
    compared = pairs.facts.needs_reference and reference is not None
    return settings | {"loss": pairs.model_dump(mode="json"), "reference": "start" if compared else "none"}


def _keys(environment: Environment) -> Any:
    """The keys that decide how an environment asks and grades, wherever its tasks come from."""
    keys = getattr(environment, "config", None)
    return keys.model_dump(mode="json", exclude=PLACES) if isinstance(keys, BaseModel) else keys


def _settings(evaluation: EvaluationConfig | Mapping[str, Any] | None) -> EvaluationConfig:
    if isinstance(evaluation, EvaluationConfig):
        return evaluation
    given = dict(evaluation or {})
    if others := sorted(given.keys() - set(MEASURES)):
        raise AgentPeftError(f"evaluation.{others[0]} has no effect here; {nearest(others[0], MEASURES)}")
    # the environment is another argument, and is not validated here
    return validated(EvaluationConfig, {**given, "environment": EnvironmentConfig()}, "evaluation")
