"""The configuration of a run. Module ``load`` makes a ``TrainConfig`` of a file."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from agent_peft.algorithms import UncheckedAlgorithmConfig
from agent_peft.algorithms.base import AlgorithmConfig
from agent_peft.config import FIXED, FREE, Config, first_error
from agent_peft.configuration.trackers import AnyTracker
from agent_peft.environments import ENVIRONMENTS, AnyEnvironment
from agent_peft.environments.base import OUTCOMES
from agent_peft.lookup import nearest
from agent_peft.policies.config import PolicyConfig
from agent_peft.policies.engine.base import AnyEngine, EngineConfig
from agent_peft.policies.sampling import LIMITS
from agent_peft.ranks import RanksConfig
from agent_peft.rollout.evaluation import SAMPLED, EvaluationConfig
from agent_peft.rollout.statistics import METRICS
from agent_peft.rollout.task_order import BySkillConfig
from agent_peft.training.stage import DROPOUT_UNDER_LAG, StageConfig, unused_keys
from agent_peft.types import AgentPeftError, Task


class KeepBestConfig(Config):
    """The checkpoint that is kept because it is the best. Evaluations are compared over the whole run, steps
    within their stage; of equals the first is the best.
    """

    metric: str = Field(
        description="evaluation.success, evaluation.score or evaluation.reward (of recorded replies "
        "evaluation.loss and others), or a metric of the steps"
    )
    mode: Literal["max", "min"] = Field(default="max", description="whether high or low values are good")

    @property
    def of_evaluations(self) -> bool:
        """Whether evaluations of the run measure the metric, and not its steps."""
        return self.metric in METRICS


class CheckpointConfig(Config):
    """When the run is saved. It is always saved at the end of a stage."""

    every: int = Field(default=1, ge=1, description="steps from one checkpoint to the next")
    keep_last: int = Field(
        default=2,
        ge=1,
        description="number of checkpoints to keep; one that holds a file named keep is never deleted",
    )
    keep_best: KeepBestConfig | None = Field(
        default=None,
        description="also keep the best checkpoint, which checkpoints/best.json names; by an evaluation's "
        "metric, the run is then saved at each evaluation; null keeps none",
    )


class TrajectoriesConfig(Config):
    """The steps whose trajectories stay on disk. The text ``all`` is short for the defaults."""

    every: int = Field(default=1, ge=1, description="the steps whose number is divisible by this are written")
    last: int | None = Field(
        default=None, ge=1, description="only so many of them stay, the newest ones; null keeps all"
    )


def _all(value: Any) -> Any:
    return {} if value == "all" else value


class TrainConfig(Config):
    """A complete run: each stage has all its keys."""

    run_dir: Annotated[Path, AfterValidator(Path.expanduser)] = Field(
        description="folder that the run writes to, relative to the current folder; an interrupted run "
        "continues there",
        json_schema_extra=FREE,
    )
    seed: int = Field(
        default=0, description="decides tasks, order, sampled tokens and the weights of a model from scratch"
    )
    threads: int | None = Field(
        default=None,
        ge=1,
        description="CPU threads of torch; null: one per core that this process may use",
        json_schema_extra=FREE,
    )
    policy: PolicyConfig = Field(description="the model that acts and is trained", json_schema_extra=FIXED)
    environment: AnyEnvironment = Field(description="the tasks to train on")
    engine: AnyEngine = Field(
        default=EngineConfig(),
        description="where tokens are sampled, and how the sampler uses memory and threads",
        json_schema_extra=FREE,
    )
    evaluation: EvaluationConfig | None = Field(
        default=None,
        description="when the policy is measured, and on which tasks; null: never",
        json_schema_extra=FREE,
    )
    checkpoint: CheckpointConfig = Field(
        default=CheckpointConfig(), description="when the run is saved", json_schema_extra=FREE
    )
    trajectories: Annotated[TrajectoriesConfig, BeforeValidator(_all)] = Field(
        default=TrajectoriesConfig(),
        description="the steps whose trajectories stay on disk: all, or fewer",
        json_schema_extra=FREE,
    )
    trackers: tuple[AnyTracker, ...] = Field(
        default=(),
        description="programs and services that show the run's numbers while it trains",
        json_schema_extra=FREE,
    )
    ranks: RanksConfig = Field(
        default=RanksConfig(), description="how processes train together (torchrun)", json_schema_extra=FREE
    )
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
            if self.policy.lora is not None and self.policy.lora.dropout and stage.lag:
                raise ValueError(f"{DROPOUT_UNDER_LAG} of stage {stage.name!r}")
        if (
            self.evaluation is not None
            and "segments" in self.evaluation.at
            and not any(isinstance(stage.task_order, BySkillConfig) for stage in self.stages)
        ):
            raise ValueError(
                "evaluation.at: segments are those of a stage with task_order.kind: by_skill, and there is "
                "none; leave it out"
            )
        self._check_graded()
        self._check_best()
        for number, stage in enumerate(self.stages):
            if stage.episodes_of is None or stage.episodes_of.run.resolve() != self.run_dir.resolve():
                continue
            earlier = [one.name for one in self.stages[:number] if one.samples]
            if not earlier or stage.episodes_of.stage not in (None, *earlier):
                asked = "" if stage.episodes_of.stage is None else f" as {stage.episodes_of.stage!r}"
                there = f"they are {', '.join(earlier)}" if earlier else "put one before it"
                raise ValueError(
                    f"episodes_of of stage {stage.name!r} takes the episodes of this run, and no "
                    f"earlier stage samples any{asked}; {there}"
                )
            if self.trajectories.last is not None:
                raise ValueError(
                    f"trajectories.last removes the episodes that stage {stage.name!r} learns from "
                    "(episodes_of); set trajectories.last: null"
                )
        first = 0
        for stage in self.stages:
            if stage.epochs is not None:  # checked as soon as ``with_steps`` knows the steps
                break
            if stage.until is not None and stage.until.of_evaluations:
                self._check_evaluations(stage, first)
            first += stage.steps
        if self.evaluation is not None:  # its limits at the end of the run, also for `agent-peft evaluate`
            object.__setattr__(self, "evaluation", self.evaluation.following(self.stages[-1].sampling))
        return self

    def _check_graded(self) -> None:
        """Check that the built-in environments grade outcomes where these are rewarded, and have pairs where
        these are learned.
        """
        kind = self.environment.kind
        graded = kind not in ENVIRONMENTS or ENVIRONMENTS[kind].measures == OUTCOMES
        labeled = kind == "preferences" and getattr(self.environment, "label", None) is not None
        for stage in self.stages if not graded else ():
            algorithm = stage.algorithm
            if isinstance(algorithm, UncheckedAlgorithmConfig):
                continue
            if labeled and stage.episodes_of is None and algorithm.facts.preferences != "labels":
                raise ValueError(
                    f"environment.label makes rows of one reply, good or bad, and {algorithm.kind} does not "
                    "learn from these; set algorithm: kto, or give a table of chosen and rejected replies"
                )
            if stage.samples:
                needed = "reward" if algorithm.facts.on_policy else "success"
                raise ValueError(
                    f"environment: {kind} has no outcome to grade, so {algorithm.kind} has "
                    f"no {needed} to learn from; set algorithm: sft, or environment.kind: questions"
                )

    def _check_measured(self, key: str, metric: str) -> None:
        """Check that the evaluation measures a metric of evaluations, which ``key`` names."""
        assert self.evaluation is not None
        known = [f"evaluation.{name}" for name in self.evaluation.measures]
        if metric not in known:
            raise ValueError(
                f"{key}: evaluation.environment.kind: {self.evaluation.environment.kind} does not measure "
                f"{metric!r}; {nearest(metric, known)}"
            )

    def _check_best(self) -> None:
        best = self.checkpoint.keep_best
        if best is None:
            return
        if best.of_evaluations and self.evaluation is None:
            raise ValueError(
                f"checkpoint.keep_best.metric: {best.metric} needs evaluations; set evaluation.environment"
            )
        if best.of_evaluations:
            self._check_measured("checkpoint.keep_best.metric", best.metric)
        checked = [s for s in self.stages if not isinstance(s.algorithm, UncheckedAlgorithmConfig)]
        known = list(dict.fromkeys((*METRICS, *(name for stage in checked for name in stage.metrics))))
        if len(checked) == len(self.stages) and best.metric not in known:
            raise ValueError(
                f"checkpoint.keep_best.metric: {best.metric!r} is not a metric; {nearest(best.metric, known)}"
            )

    def _check_evaluations(self, stage: StageConfig, first: int) -> None:
        """Check that an evaluation may end a stage that begins at the run's step ``first``."""
        every = self.evaluation.every if self.evaluation is not None else 0
        last = first + stage.steps - 1
        if not every or last // every * every <= first:
            raise ValueError(
                f"until.metric of stage {stage.name!r}: no evaluation is due between the steps {first} and "
                f"{last + 1}; set evaluation.every to less than the steps of the stage"
            )
        assert stage.until is not None
        self._check_measured(f"until.metric of stage {stage.name!r}", stage.until.metric)

    def with_steps(self, tasks: Sequence[Task]) -> TrainConfig:
        """This run with the steps that the ``epochs`` of its stages take, and the skills of their
        ``task_order``, for an environment of these tasks.
        """
        for stage in self.stages:
            stage.trip(tasks)  # an error now and not when the stage begins
        stages = tuple(stage.with_steps(tasks) for stage in self.stages)
        if stages == self.stages:
            return self
        try:
            return TrainConfig(**{**dict(self), "stages": stages})
        except ValidationError as error:
            raise AgentPeftError(first_error(error)) from error

    @property
    def pairs(self) -> AlgorithmConfig | None:
        """The algorithm whose loss held-out pairs have: of the last stage that learns from pairs."""
        algorithms = (stage.algorithm for stage in reversed(self.stages))
        return next((one for one in algorithms if one.facts.preferences == "pairs"), None)

    def stage_at(self, steps: int) -> StageConfig:
        """The stage to which step number ``steps`` of the run belongs."""
        ends = accumulate(stage.steps for stage in self.stages)
        return next(
            (stage for stage, end in zip(self.stages, ends, strict=True) if steps <= end), self.stages[-1]
        )


def resolved(config: TrainConfig) -> dict[str, Any]:
    """Every effective value, as YAML can hold it. ``read_config`` of it gives an equal configuration."""
    content = config.model_dump(mode="json")
    for stage, values in zip(config.stages, content["stages"], strict=True):
        if stage.epochs is not None:
            del values["steps"]  # not known yet
        for key in unused_keys(stage.algorithm, stage.learn_from):
            section, _, name = key.rpartition(".")
            del (values[section] if section else values)[name]
    if config.evaluation is not None and config.evaluation.of_replies:
        for key in SAMPLED:
            del content["evaluation"][key]
    elif (
        config.evaluation is not None
        and len({tuple(getattr(stage.sampling, key) for key in LIMITS) for stage in config.stages}) > 1
    ):
        content["evaluation"]["sampling"] |= dict.fromkeys(config.evaluation.inherited)
    return content
