"""The report of an evaluation, and tests for a difference between two."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from agent_peft.environments.base import OUTCOMES
from agent_peft.rollout.intervals import (
    Z95,
    Mean,
    Rate,
    in_words,
    mean_over_tasks,
    pass_at_k,
    rate_of,
    sign_flip_p,
)
from agent_peft.types import AgentPeftError, Group, Outcome, StopReason, Trajectory

T = TypeVar("T")
NO_SKILL = "(no skill)"
MAX_LEFT_OUT = 0.05  # share of the episodes; above it the summary reports them
UNMEASURED = {"rewards", "seed"}  # settings that do not change what a success rate is of
OF_REPLIES = ("loss", "token_accuracy", "accuracy", "margin")  # what no outcome decides
METRICS = tuple(f"evaluation.{name}" for name in (*OUTCOMES, *OF_REPLIES))  # the names of ``metric``


@dataclass(frozen=True)
class EvaluationReport:
    """The result of an evaluation. All rates and means are over tasks; a task counts once, however often it
    was tried. Recorded replies that no outcome grades have ``means`` and ``losses``, and no success.
    """

    success: Rate | None = None
    by_skill: Mapping[str, Rate] = field(default_factory=dict)  # by a task's first skill
    # k -> pass@k, for 1, 2, 4, … up to the fewest attempts of any task
    pass_at: Mapping[int, float] = field(default_factory=dict)
    attempts: int = 0  # episodes that count
    infrastructure_failures: int = 0  # that do not count: the environment failed before the agent had acted
    stop_reasons: Mapping[str, int] = field(default_factory=dict)
    invalid_actions: float = 0.0  # share of turns
    mean_turns: float = 0.0  # per episode
    mean_action_tokens: float = 0.0  # per episode
    # task id -> the outcome of each attempt
    outcomes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    cut_actions: float = 0.0  # share of turns whose action a limit on tokens ended
    score: Rate | None = None  # mean of the environment's scores; None where no episode has one
    reward: Mean | None = None  # mean return; None where the episodes have no rewards
    reward_follows_success: bool = True  # the outcome alone decides the reward
    means: Mapping[str, Mean] = field(default_factory=dict)  # of ``OF_REPLIES``, the first is compared
    # task id -> its loss in nats, and the number of target tokens that it is the sum of; of a pair 1
    losses: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    # what was measured does not count when reports are compared
    name: str | None = field(default=None, compare=False)  # of an evaluation of a run, such as "after grpo"
    run: str | None = field(default=None, compare=False)  # what ``agent-peft evaluate`` was given
    checkpoint: str | None = field(default=None, compare=False)  # of that run
    step: int | None = field(default=None, compare=False)  # steps of the run that were done
    # tasks, attempts, sampling, seed and rewards, and a digest of the environment
    settings: Mapping[str, Any] = field(default_factory=dict, compare=False)
    groups: Sequence[Group] = field(default=(), compare=False, repr=False)  # the episodes; not in the JSON

    @property
    def measures(self) -> tuple[str, ...]:
        """The names of what was measured."""
        return tuple(self.means) or OUTCOMES

    @property
    def headline(self) -> Rate | Mean:
        """The first of the measures, which is compared."""
        return self.success or self.means[self.measures[0]]

    def measure(self, name: str) -> Rate | Mean | None:
        """Return one of the measures; None where the report does not have it."""
        measure: Rate | Mean | None = getattr(self, name) if name in OUTCOMES else self.means.get(name)
        return measure

    @property
    def summary(self) -> str:
        """The result in one line."""
        if self.success is None:
            texts = (f"{name.replace('_', ' ')} {in_words(name, one)}" for name, one in self.means.items())
            return f"{', '.join(texts)} on {self.headline.tasks} {self.unit}"
        left_out, episodes = self.infrastructure_failures, self.attempts + self.infrastructure_failures
        rates = f"success {self.success.percent} on {self.success.tasks} tasks"
        if self.score is not None:
            rates += f", score {self.score.percent}"
        if self.reward is not None and not self.reward_follows_success:
            rates += f", reward {self.reward.text}"
        return (
            f"{rates}; {left_out} of {episodes} episodes are left out: their environment failed"
            if left_out > MAX_LEFT_OUT * episodes
            else rates
        )

    @property
    def unit(self) -> str:
        """What the measures are means over."""
        return "tasks" if not self.means else "pairs" if "margin" in self.means else "conversations"

    def metric(self, name: str) -> float | None:
        """Return a number by its name in ``METRICS``; None where the report does not have it."""
        measure = self.measure(name.removeprefix("evaluation."))
        return None if measure is None else measure.value

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values, without its episodes. What is None is left out."""
        fields = asdict(replace(self, groups=()))
        del fields["groups"]
        heading = {key: fields.pop(key) for key in ("name", "run", "checkpoint", "step", "settings")}
        heading |= fields.pop("means")
        losses = fields.pop("losses")
        if losses:
            fields = {key: fields[key] for key in ("attempts", "mean_action_tokens")} | {"losses": losses}
            return {key: value for key, value in (heading | fields).items() if value is not None}
        return {
            **{key: value for key, value in (heading | fields).items() if value is not None},
            "pass_at": {str(k): value for k, value in self.pass_at.items()},
            "outcomes": {task: list(outcomes) for task, outcomes in self.outcomes.items()},
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> EvaluationReport:
        """Return the report that ``to_json`` wrote."""
        rest = dict(content)
        if "losses" in rest:
            means = {name: Mean(**rest.pop(name)) for name in OF_REPLIES if name in rest}
            losses = {task: (nats, number) for task, (nats, number) in rest.pop("losses").items()}
            return cls(means=means, losses=losses, **rest)
        return cls(
            success=Rate(**rest.pop("success")),
            by_skill={skill: Rate(**rate) for skill, rate in rest.pop("by_skill").items()},
            pass_at={int(k): value for k, value in rest.pop("pass_at").items()},
            outcomes={task: tuple(outcomes) for task, outcomes in rest.pop("outcomes").items()},
            score=Rate(**rest.pop("score")) if "score" in rest else None,
            reward=Mean(**rest.pop("reward")) if "reward" in rest else None,
            **rest,
        )


@dataclass(frozen=True)
class Comparison:
    """``difference`` = success after - success before, or that of the loss in nats, its 95 % interval, and
    the two-sided p-value of "nothing has changed".
    """

    difference: float
    low: float
    high: float
    p: float

    def text(self, points: bool) -> str:
        """The difference with its interval, in percentage points or in nats.

        >>> Comparison(0.125, -0.02, 0.3, 0.5).text(points=True)
        '+12.5 (-2…+30)'
        """
        if points:
            return f"{100 * self.difference:+.1f} ({100 * self.low:+.0f}…{100 * self.high:+.0f})"
        return f"{self.difference:+.3f} ({self.low:+.3f}…{self.high:+.3f})"


def other_settings(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The names of the settings in which two evaluations did not measure the same. A setting that one of them
    lacks, because an earlier version wrote it, does not count.

    >>> other_settings({"tasks": 3, "seed": 0, "attempts": 1}, {"tasks": 4, "seed": 1})
    ['tasks']
    """
    return sorted(key for key in (one.keys() & other.keys()) - UNMEASURED if one[key] != other[key])


def summarize(groups: Sequence[Group], left_out: int = 0) -> EvaluationReport:
    """Summarize the attempts of groups.

    Attempts whose environment failed before the agent had acted are counted and left out. Those that the
    agent crashed, or that met a defect of the environment, are incorrect.

    Args:
        left_out: the number of attempts that are in no group.
    """
    trajectories: list[Trajectory] = [t for group in groups for t in group.trajectories]
    counted = [t for t in trajectories if t.stop_reason is not StopReason.INFRASTRUCTURE]
    if not counted:
        raise AgentPeftError(
            "there is nothing to evaluate: no episode came to an end (the environment failed, or there are "
            "no tasks)"
        )
    outcomes = {task: tuple(found) for task, found in _by_task(counted, lambda t: str(t.outcome)).items()}
    skills = {t.task.id: t.task.skills[0] if t.task.skills else NO_SKILL for t in counted}
    scores = {task: _successes(of_task) for task, of_task in outcomes.items()}
    turns = sum(len(t.turns) for t in counted)
    fewest = min(attempts for _, attempts in scores.values())
    return EvaluationReport(
        success=rate_of(scores.values()),
        by_skill={
            skill: rate_of(scores[task] for task in scores if skills[task] == skill)
            for skill in sorted(set(skills.values()))
        },
        pass_at={
            k: pass_at_k(scores.values(), k)
            for k in sorted({*(2**i for i in range(fewest.bit_length())), fewest})
        },
        attempts=len(counted),
        infrastructure_failures=len(trajectories) - len(counted) + left_out,
        stop_reasons=dict(sorted(Counter(str(t.stop_reason) for t in counted).items())),
        invalid_actions=sum(t.num_invalid for t in counted) / max(turns, 1),
        mean_turns=turns / len(counted),
        mean_action_tokens=sum(t.num_action_tokens for t in counted) / len(counted),
        outcomes=outcomes,
        cut_actions=sum(t.num_cut for t in counted) / max(turns, 1),
        score=score_of(counted),
        reward=reward_of(counted),
        reward_follows_success=_follows_success(counted),
        groups=tuple(groups),
    )


def _by_task(trajectories: Sequence[Trajectory], value: Callable[[Trajectory], T]) -> dict[str, list[T]]:
    """A value of each attempt at a task, by the task's id."""
    found: dict[str, list[T]] = {}
    for trajectory in trajectories:
        found.setdefault(trajectory.task.id, []).append(value(trajectory))
    return found


def score_of(trajectories: Sequence[Trajectory]) -> Rate | None:
    """The mean score over tasks, or None where no trajectory has a score. A trajectory that ended before its
    environment could grade it counts as 0.

    The interval is that of `rate_of`. It is on the safe side, because a score in [0, 1] varies at most as
    much as a success of the same mean.

    >>> from agent_peft.types import Task
    >>> score_of([Trajectory(Task("a"), (), score=0.25), Trajectory(Task("b"), (), score=0.75)]).value
    0.5
    """
    if all(t.score is None for t in trajectories):
        return None
    scores = _by_task(trajectories, lambda t: t.score or 0.0)
    return rate_of((math.fsum(of_task), len(of_task)) for of_task in scores.values())


def reward_of(trajectories: Sequence[Trajectory]) -> Mean | None:
    """The mean return over tasks, or None where a trajectory has no rewards.

    >>> from agent_peft.types import Task
    >>> reward_of([Trajectory(Task("a"), (), rewards=(0.5, 1.0))])
    Mean(value=1.5, low=None, high=None, tasks=1)
    """
    if not all(t.rewards for t in trajectories):
        return None
    rewards = _by_task(trajectories, lambda t: t.reward)
    return mean_over_tasks([math.fsum(of_task) / len(of_task) for of_task in rewards.values()])


def _follows_success(trajectories: Sequence[Trajectory]) -> bool:
    """Whether the outcome alone decides the reward, so that its mean adds nothing to the success rate."""
    pairs = {(t.outcome is Outcome.CORRECT, t.reward) for t in trajectories}
    return len(pairs) == len({correct for correct, _ in pairs})


def paired_test(before: EvaluationReport, after: EvaluationReport) -> Comparison:
    """Test whether ``after`` does better than ``before`` on the same tasks.

    p is that of the exact sign-flip test on the differences in success rate of the tasks: if nothing has
    changed, before and after are exchangeable within each task. With one attempt per task this is McNemar's
    exact test (1947). The interval is that of Bonett and Price (2012, eq. 3): the Wald interval with one task
    added as gained and one as lost. It may disagree with p where p is close to 0.05.

    Of losses, the interval is that of ``mean_over_tasks``, and p that of the sign test: of how many tasks the
    loss has fallen.
    """
    unpaired = (before.losses or before.outcomes).keys() ^ (after.losses or after.outcomes).keys()
    if unpaired or "tasks_digest" in other_settings(before.settings, after.settings):
        cause = f"task {min(unpaired)!r} is in one only" if unpaired else "tasks of equal ids differ"
        raise AgentPeftError(
            f"evaluations on different tasks cannot be paired ({cause}): evaluate both on the same"
        )
    if before.losses:
        both = [(*one, *after.losses[task]) for task, one in before.losses.items()]
        means = [new / number - old / count for old, count, new, number in both]
        change = mean_over_tasks(means, [count for _, count, _, _ in both])
        low, high = (change.value if bound is None else bound for bound in (change.low, change.high))
        return Comparison(change.value, low, high, sign_flip_p([(x > 0) - (x < 0) for x in means]))
    pairs = [
        (_successes(before.outcomes[task]), _successes(after.outcomes[task])) for task in before.outcomes
    ]
    unit = math.lcm(*(attempts for pair in pairs for _, attempts in pair))
    # in units of 1 / unit, so that all is exact
    steps = [c2 * unit // n2 - c1 * unit // n1 for (c1, n1), (c2, n2) in pairs]
    n = len(steps)
    mean = sum(steps) / unit / (n + 2)
    variance = (sum(step * step for step in steps) / unit**2 + 2) / (n + 2) - mean**2
    half = Z95 * math.sqrt(variance / (n + 2))
    return Comparison(
        sum(steps) / unit / n, max(-1.0, mean - half), min(1.0, mean + half), sign_flip_p(steps)
    )


def _successes(outcomes: Sequence[str]) -> tuple[int, int]:
    """Return (successes, attempts)."""
    return sum(outcome == Outcome.CORRECT for outcome in outcomes), len(outcomes)
