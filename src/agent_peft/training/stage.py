"""The configuration of a stage of training."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from agent_peft.algorithms import (
    Algorithm,
    AlgorithmConfig,
    AnyAlgorithm,
    UncheckedAlgorithmConfig,
    mean_normalized,
)
from agent_peft.algorithms.base import fault_under_lag
from agent_peft.config import FIXED, FIXED_KIND, FREE, Config, PublicConfig
from agent_peft.policies.config import ReferenceKind
from agent_peft.policies.sampling import DISTRIBUTION, SamplingConfig
from agent_peft.rollout.pairs import EPISODE_PAIR_METRICS, EpisodesOfConfig
from agent_peft.rollout.rewards import RewardConfig
from agent_peft.rollout.sources import REFILL_METRICS, SUCCESS_METRICS
from agent_peft.rollout.statistics import METRICS
from agent_peft.rollout.task_order import ORDER_NAMES, AnyOrder, BySkillConfig, length_of_trip
from agent_peft.training.optimizer import OptimizerConfig
from agent_peft.training.step_metrics import LAG_METRICS, THINKING_METRICS, metrics_of
from agent_peft.training.teacher_config import TeacherConfig
from agent_peft.training.until import UntilConfig, unknown_metric
from agent_peft.types import AgentPeftError, Task

MAX_STEPS = 1_000_000
DROPOUT_UNDER_LAG = (
    "a ratio under dropout needs the weights that sampled; set policy.lora.dropout: 0, or lag: 0"
)
MAX_EPISODES = 1_000_000  # of a step: a group, or groups


class StageConfig(Config):
    """A part of a run with one algorithm. Supervised stages learn from demonstrations, in groups of one."""

    algorithm: AnyAlgorithm = Field(
        description="how the policy learns from the episodes", json_schema_extra=FIXED_KIND
    )
    name: str = Field(
        default_factory=lambda before: before["algorithm"].kind.rpartition(":")[2],
        min_length=1,
        description="name of the stage in metrics and files; default: the algorithm's kind",
        json_schema_extra=FIXED,
    )
    learn_from: Literal["demonstrations", "successes"] = Field(
        default="demonstrations",
        description="what a supervised stage learns from: the demonstrations of the environment, or the "
        "policy's own episodes that succeed, of which it samples group_size for each task",
    )
    episodes_of: EpisodesOfConfig | None = Field(
        default=None,
        description="a run whose episodes are the preferences to learn from; null takes those of the "
        "environment, which are its demonstrations and worse replies to the same tasks",
    )
    # 0 as long as it follows from ``epochs``, before the tasks are loaded
    steps: int = Field(
        default_factory=lambda: 0,
        validate_default=False,
        ge=1,
        le=MAX_STEPS,
        description="number of steps: trips through the main loop; set this or epochs",
    )
    epochs: float | None = Field(
        default=None,
        gt=0,
        le=MAX_STEPS,
        description="number of trips through the tasks, from which steps follows, rounded up; set this or "
        "steps",
    )
    until: UntilConfig | None = Field(
        default=None, description="ends the stage before its last step; null never does"
    )
    tasks_per_step: int = Field(default=8, ge=1, le=MAX_EPISODES, description="number of tasks of one step")
    group_size: int = Field(
        default_factory=lambda before: (
            8 if before["algorithm"].facts.on_policy or before.get("learn_from") == "successes" else 1
        ),
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
        json_schema_extra=FREE,
    )
    reference: ReferenceKind = Field(
        default="stage_start",
        description="the policy that the KL is measured to: stage_start is the policy at the start of the "
        "stage, base is the policy with its adapter off",
    )
    teacher: TeacherConfig = Field(
        default_factory=TeacherConfig, description="whom a distillation learns from"
    )
    mask_cut_actions: bool = Field(
        default=False, description="do not train on actions that a token limit ended; they still get rewards"
    )
    task_order: AnyOrder = Field(
        default="shuffle",
        description="order of the tasks in each trip through them: shuffle, sequential, a mapping of kind "
        "by_skill, or a file that lists the ids of tasks, one in a line (or a JSON list in a .json file)",
    )
    refill: int = Field(
        default=0,
        ge=0,
        le=100,
        description="leave out each group whose episodes all have one return, and collect another one in its "
        "place, in at most so many rounds; 0 leaves none out",
    )
    replay_in_prompt: int = Field(
        default=0,
        ge=0,
        le=1000,
        description="before each task, the prompt shows so many of the run's latest successful episodes of "
        "other tasks, one of each task, as earlier turns; the oldest are left out where the opening would "
        "take more than half of sampling.max_tokens; evaluations that follow the stage show them, too",
    )
    lag: int = Field(
        default=0,
        ge=0,
        le=16,
        description="step n learns from what the weights before step n - lag have sampled, so that sampling "
        "and learning take place at once; 0 samples each step with its own weights",
    )
    nonfinite: Literal["stop", "skip"] = Field(
        default="stop",
        description="what happens at an update whose loss or gradient is NaN or infinite",
        json_schema_extra=FREE,
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

    @field_validator("task_order")
    @classmethod
    def _names_an_order(cls, order: AnyOrder) -> AnyOrder:
        if isinstance(order, Path) and not order.suffix and len(order.parts) == 1:
            raise ValueError(
                f"{str(order)!r} is not an order; give {', '.join(ORDER_NAMES)}, a file such as order.txt, "
                "or {kind: by_skill, steps: 20}"
            )
        return order

    @model_validator(mode="after")
    def _one_length(self) -> StageConfig:
        if not self.steps and self.epochs is None:
            raise ValueError(f"steps is missing ({type(self).model_fields['steps'].description})")
        if self.steps and self.epochs is not None:
            raise ValueError("steps and epochs both set the length of the stage; give one of them")
        return self

    def trip(self, tasks: Sequence[Task]) -> int:
        """How many tasks one trip through them takes."""
        return length_of_trip(self.task_order, tasks, self.tasks_per_step)

    def with_steps(self, tasks: Sequence[Task]) -> StageConfig:
        """This stage with the number of steps that its trips through the tasks take, without ``epochs``, and
        with the skills that ``task_order`` takes one after another.

        >>> stage = StageConfig(algorithm="rloo", epochs=1.5, tasks_per_step=8)
        >>> stage.with_steps([Task(str(number)) for number in range(20)]).steps
        4
        """
        order, update = self.task_order, dict[str, Any]()
        if isinstance(order, BySkillConfig) and order.skills is None:
            update["task_order"] = order.settled(tasks)
        if self.epochs is not None:
            # a float such as 0.1 stands for the decimal that the user wrote
            steps = math.ceil(Fraction(str(self.epochs)) * self.trip(tasks) / self.tasks_per_step)
            if steps > MAX_STEPS:
                raise AgentPeftError(
                    f"epochs: {self.epochs:g} of stage {self.name!r} take {steps:,} steps, and {MAX_STEPS:,} "
                    "are the most; lower it, or raise tasks_per_step"
                )
            update |= {"steps": steps, "epochs": None}
        return self.model_copy(update=update) if update else self

    @property
    def episodes_per_step(self) -> int:
        return self.tasks_per_step * self.group_size

    @property
    def copies_reference(self) -> bool:
        """Whether the reference is a copy of the weights that are trained."""
        return self.uses_reference and self.reference == "stage_start"

    @property
    def uses_reference(self) -> bool:
        """Whether a KL is measured to the reference, or the reference is the teacher."""
        return self.algorithm.facts.needs_reference or (self.has_teacher and self.teacher.model is None)

    @property
    def has_teacher(self) -> bool:
        return self.algorithm.facts.divergence is not None

    @property
    def needs_demonstrations(self) -> bool:
        """Whether the environment's demonstrations decide what is learned."""
        if self.has_teacher:
            return self.teacher.prompt is not None
        return not self.samples and self.episodes_of is None

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of all metrics that a step of the stage may have."""
        facts, thinking = self.algorithm.facts, THINKING_METRICS if self.limits_thoughts else ()
        if not facts.on_policy:
            if facts.preferences:
                ties = self.episodes_of is not None and facts.preferences == "pairs"
                return metrics_of(facts, EPISODE_PAIR_METRICS if ties else ())
            source = ("groups_with_signal", *SUCCESS_METRICS, *thinking) if self.samples else None
            return metrics_of(facts, source, self.samples)
        refilled, late = REFILL_METRICS if self.refill else (), LAG_METRICS if self.lag else ()
        return metrics_of(facts, (*refilled, *late, *thinking))

    @property
    def limits_thoughts(self) -> bool:
        """Whether the thoughts of the policy's episodes have a limit."""
        return self.samples and self.sampling.max_thinking_tokens is not None

    @property
    def samples(self) -> bool:
        """Whether the stage learns from episodes of the policy."""
        return self.algorithm.facts.on_policy or self.learn_from == "successes"

    @property
    def scoring(self) -> SamplingConfig:
        """The distribution that a token's log-probability is of: the sampler's, or in a supervised stage the
        whole one at temperature 1.
        """
        if self.algorithm.facts.on_policy:
            return self.sampling
        return self.sampling.model_copy(update={key: getattr(SamplingConfig(), key) for key in DISTRIBUTION})

    @property
    def updates(self) -> int:
        """The number of optimizer updates of the stage, if every step has something to learn from."""
        facts = self.algorithm.facts
        return self.steps * facts.update_epochs * facts.minibatches

    def _sets(self, key: str) -> bool:
        """Whether a key, such as ``sampling.top_p``, has another value than its default."""
        section, _, name = key.rpartition(".")
        model: Config = getattr(self, section) if section else self
        default = (
            type(model).model_fields[name].get_default(call_default_factory=True, validated_data=dict(model))
        )
        return bool(getattr(model, name) != default)

    @model_validator(mode="after")
    def _effective(self) -> StageConfig:
        if isinstance(self.algorithm, UncheckedAlgorithmConfig):
            return self  # its facts are not known
        kind, algorithm, sampling = self.algorithm.kind, self.algorithm.facts, self.sampling
        compares = algorithm.keeps_groups_whole or algorithm.preferences
        if self.learn_from == "successes" and compares and not algorithm.on_policy:
            raise ValueError(
                f"learn_from: successes leaves {kind} nothing to compare them with; take sft, or learn from "
                "the episodes of a run (episodes_of)"
            )
        for key, reason in unused_keys(self.algorithm, self.learn_from).items():
            if self._sets(key):
                raise ValueError(f"{key} has no effect on {kind}, which {reason}; leave it out")
        # terms may lift a return, and they are known only when episodes are there
        low = None if self.rewards.terms else self.rewards.price_below_0
        if getattr(algorithm, "advantage", None) is mean_normalized and low:
            raise ValueError(
                f"{kind} divides by a group's mean return, as a rate of success, and rewards.{low} is "
                "below 0; set it to 0"
            )
        if self.episodes_of is not None and self.task_order != "shuffle":
            raise ValueError(
                "task_order has no effect with episodes_of, whose groups are shuffled; leave it out"
            )
        if self.episodes_of is not None and self.epochs is not None:
            raise ValueError(
                "epochs counts the environment's tasks, and a stage with episodes_of has others; set steps"
            )
        if not algorithm.on_policy and not self.optimizer.learning_rate:
            raise ValueError(f"optimizer.learning_rate: 0 leaves {kind} nothing to do; raise it")
        if algorithm.on_policy and sampling.temperature == 0:
            raise ValueError(
                "sampling.temperature: 0 has no density to train on; set it above 0 (evaluation may use 0)"
            )
        if self.lag and (fault := fault_under_lag(algorithm)):
            raise ValueError(f"lag: {kind} {fault}")
        if self._sets("reference") and not self.uses_reference:
            raise ValueError("reference has no effect with teacher.model; leave it out")
        if (algorithm.needs_reference or algorithm.divergence) and sampling.truncates:
            key = next(key for key in DISTRIBUTION[1:] if self._sets(f"sampling.{key}"))
            other = "teacher" if algorithm.divergence else "reference"
            raise ValueError(
                f"sampling.{key} cuts off tokens that the {other} gives probability to, so the KL cannot be "
                "measured on those that are drawn; leave top_p, top_k and min_p out, or the KL"
            )
        if self.until is not None and self.until.metric not in (*self.metrics, *METRICS):
            raise ValueError(unknown_metric(self.until.metric, self.metrics))
        if algorithm.minibatches > self.tasks_per_step:
            raise ValueError(
                f"algorithm.minibatches: {algorithm.minibatches} is more than "
                f"tasks_per_step: {self.tasks_per_step}"
            )
        if self.group_size == 1 and algorithm.compares_groups:
            raise ValueError(
                f"group_size: 1 is too small for {kind}, which compares the episodes of a task; raise it"
            )
        return self


@dataclass(frozen=True)
class Unused:
    """Keys of a stage, and the algorithms on which they have no effect: ``when`` gets an algorithm and the
    value of ``learn_from``. ``reason`` continues "The stage ...".
    """

    keys: tuple[str, ...]
    when: Callable[[Algorithm, object], bool]
    reason: str


_OF_EPISODES = (
    "group_size",
    "mask_cut_actions",
    "replay_in_prompt",
    *(f"sampling.{k}" for k in DISTRIBUTION),
)
UNUSED = (
    Unused(("episodes_of",), lambda it, _: not it.preferences, "does not learn from preferences"),
    Unused(("learn_from",), lambda it, _: it.on_policy, "learns from the policy's own episodes"),
    Unused(
        ("learn_from", *_OF_EPISODES),
        lambda it, _: bool(it.preferences) and not it.on_policy,
        "learns from preferences, and draws no tokens",
    ),
    Unused(
        _OF_EPISODES,
        lambda it, source: not (it.on_policy or it.preferences) and source == "demonstrations",
        "learns from demonstrations, in groups of one, and draws no tokens",
    ),
    Unused(
        ("refill",),
        lambda it, _: not it.compares_groups,
        "does not compare the episodes of a task with each other",
    ),
    Unused(("lag",), lambda it, _: not it.on_policy, "has no ratio to its sampler"),
    Unused(("teacher",), lambda it, _: it.divergence is None, "has no teacher"),
    Unused(
        ("reference",),
        lambda it, _: not (it.needs_reference or it.divergence),
        "measures no KL (kl_coef is 0)",
    ),
)


def unused_keys(algorithm: AlgorithmConfig, learn_from: object = "demonstrations") -> dict[str, str]:
    """The keys of a stage that have no effect with this algorithm, each with the reason."""
    if isinstance(algorithm, UncheckedAlgorithmConfig):
        return {}
    rows = (row for row in UNUSED if row.when(algorithm.facts, learn_from))
    return {key: row.reason for row in rows for key in row.keys}


class Stage(PublicConfig, StageConfig):
    """A stage for ``Trainer``, from the keys and short forms of a YAML file.

    >>> Stage(algorithm="rloo", steps=50, optimizer={"learning_rate": 3e-4}).group_size
    8
    """

    def __init__(self, /, **keys: Any) -> None:
        super().__init__(**keys)
        if self.until is not None and self.until.of_evaluations:
            raise AgentPeftError(
                f"stage.until.metric: {self.until.metric} is measured by the evaluations of a run, and a "
                "Trainer makes none; give a metric of its steps, or start a run with train"
            )
