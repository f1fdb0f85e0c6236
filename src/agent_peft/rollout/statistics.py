"""Statistics of evaluations: success rates and means with their uncertainty, and tests for a difference."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from agent_peft.types import AgentPeftError, Group, Outcome, StopReason, Trajectory

T = TypeVar("T")
Z95 = 1.959963984540054  # the normal distribution's 97.5 % point
NO_SKILL = "(no skill)"
MAX_LEFT_OUT = 0.05  # share of the episodes; above it the summary reports them
UNMEASURED = {"rewards", "seed"}  # settings that do not change what a success rate is of
METRICS = ("evaluation.success", "evaluation.score", "evaluation.reward")  # the names of ``metric``


@dataclass(frozen=True)
class Rate:
    """A success rate over tasks, with the bounds of its 95 % interval.

    >>> rate_of([(1, 1), (1, 1), (0, 1), (0, 1)]).value
    0.5
    """

    value: float
    low: float
    high: float
    tasks: int

    @property
    def percent(self) -> str:
        """The rate with its interval, such as ``50.0% (15–85)``."""
        return f"{self.value:.1%} ({100 * self.low:.0f}–{100 * self.high:.0f})"


@dataclass(frozen=True)
class Mean:
    """A mean over tasks, with the bounds of its 95 % interval. They are None where the tasks do not show how
    much tasks differ: there is one task, or all are alike.

    >>> mean_over_tasks([0.5, 1.5]).value
    1.0
    """

    value: float
    low: float | None
    high: float | None
    tasks: int

    @property
    def text(self) -> str:
        """The mean with its interval, such as ``0.412 (0.301…0.523)``."""
        if self.low is None or self.high is None:
            return f"{self.value:.3f}"
        return f"{self.value:.3f} ({self.low:.3f}…{self.high:.3f})"


@dataclass(frozen=True)
class EvaluationReport:
    """The result of an evaluation. All rates and means are over tasks; a task counts once, however often it
    was tried.
    """

    success: Rate
    by_skill: Mapping[str, Rate]  # by a task's first skill
    pass_at: Mapping[int, float]  # k -> pass@k, for 1, 2, 4, … up to the fewest attempts of any task
    attempts: int  # episodes that count
    infrastructure_failures: int  # that do not count: the environment failed before the agent had acted
    stop_reasons: Mapping[str, int]
    invalid_actions: float  # share of turns
    mean_turns: float  # per episode
    mean_action_tokens: float  # per episode
    outcomes: Mapping[str, tuple[str, ...]]  # task id -> the outcome of each attempt
    cut_actions: float = 0.0  # share of turns whose action a limit on tokens ended
    score: Rate | None = None  # mean of the environment's scores; None where no episode has one
    reward: Mean | None = None  # mean return; None where the episodes have no rewards
    reward_follows_success: bool = True  # the outcome alone decides the reward
    # what was measured does not count when reports are compared
    name: str | None = field(default=None, compare=False)  # of an evaluation of a run, such as "after grpo"
    run: str | None = field(default=None, compare=False)  # what ``agent-peft evaluate`` was given
    checkpoint: str | None = field(default=None, compare=False)  # of that run
    step: int | None = field(default=None, compare=False)  # steps of the run that were done
    # tasks, attempts, sampling, seed and rewards, and a digest of the environment
    settings: Mapping[str, Any] = field(default_factory=dict, compare=False)
    groups: Sequence[Group] = field(default=(), compare=False, repr=False)  # the episodes; not in the JSON

    @property
    def summary(self) -> str:
        """The result in one line."""
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

    def metric(self, name: str) -> float | None:
        """Return a number by its name in ``METRICS``; None where the report does not have it."""
        measure: Rate | Mean | None = getattr(self, name.removeprefix("evaluation."))
        return None if measure is None else measure.value

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values, without its episodes. What is None is left out."""
        fields = asdict(replace(self, groups=()))
        del fields["groups"]
        heading = {key: fields.pop(key) for key in ("name", "run", "checkpoint", "step", "settings")}
        return {
            **{key: value for key, value in (heading | fields).items() if value is not None},
            "pass_at": {str(k): value for k, value in self.pass_at.items()},
            "outcomes": {task: list(outcomes) for task, outcomes in self.outcomes.items()},
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> EvaluationReport:
        """Return the report that ``to_json`` wrote."""
        rest = dict(content)
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
    """``difference`` = success after - success before, its 95 % interval, and the two-sided p-value of
    "nothing has changed".
    """

    difference: float
    low: float
    high: float
    p: float


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


def mean_over_tasks(means: Sequence[float]) -> Mean:
    """Return the mean of n ≥ 1 tasks' means, with Student's (1908) interval: mean ± t · s / √n, where s is
    the standard deviation of the tasks' means and t the 97.5 % point with n - 1 degrees of freedom.

    Tasks are drawn independently, attempts at one task are not. A task is therefore one observation, however
    often it was tried (Miller, 2024, section 2.2, on clustered standard errors).

    >>> mean_over_tasks([1.0, 2.0, 3.0, 6.0]).text
    '3.000 (-0.433…6.433)'
    """
    n = len(means)
    mean = math.fsum(means) / n
    if len(set(means)) == 1:
        return Mean(mean, None, None, n)
    half = t95(n - 1) * math.sqrt(math.fsum((x - mean) ** 2 for x in means) / (n - 1) / n)
    return Mean(mean, mean - half, mean + half, n)


def t95(degrees: int) -> float:
    """Return the 97.5 % point of Student's t distribution: exact for 1 and 2 degrees of freedom, within
    0.004 of it from 3 on (Abramowitz and Stegun, 1964, equation 26.7.5).

    >>> [round(t95(degrees), 2) for degrees in (1, 2, 9, 99)]
    [12.71, 4.3, 2.26, 1.98]
    """
    if degrees <= 2:
        return math.tan(0.475 * math.pi) if degrees == 1 else 0.95 * math.sqrt(2 / 0.0975)
    z = Z95
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / float(degrees) ** power for power, term in enumerate(terms))


def rate_of(scores: Iterable[tuple[float, int]]) -> Rate:
    """Return the success rate of n ≥ 1 tasks, each given as (successes, attempts), with the interval of
    Wilson (1927, eq. 4).

    Tasks are drawn independently, attempts at one task are not. The interval therefore counts effective
    observations instead of attempts: p(1 - p) n² / Σ(pᵢ - p)², where pᵢ is the rate of task i (Korn and
    Graubard, 1998). This is n if each task was tried once or always ends the same way, and never more than
    the number of attempts.

    >>> rate_of([(2, 2), (0, 2)]) == rate_of([(1, 1), (0, 1)])
    True
    """
    pairs = list(scores)
    rates = [successes / attempts for successes, attempts in pairs]
    n, total = len(rates), sum(attempts for _, attempts in pairs)
    p = math.fsum(rates) / n
    spread = math.fsum((rate - p) ** 2 for rate in rates)
    effective: float = n
    if 0 < p < 1:
        effective = min(total, p * (1 - p) * n * n / spread) if spread > 0 else total
        effective = max(effective, n)  # rounding may go below
    return Rate(p, *wilson_interval(p, effective), n)


def wilson_interval(p: float, n: float) -> tuple[float, float]:
    """Return the 95 % score interval of a proportion p in n observations (Wilson, 1927).

    >>> low, high = wilson_interval(0.5, 10)
    >>> round(low, 4), round(high, 4)
    (0.2366, 0.7634)
    """
    z2 = Z95 * Z95 / n
    center = (p + z2 / 2) / (1 + z2)
    half = math.sqrt(p * (1 - p) * z2 + z2 * z2 / 4) / (1 + z2)
    return (0.0 if p == 0 else center - half, 1.0 if p == 1 else center + half)


def pass_at_k(scores: Iterable[tuple[int, int]], k: int) -> float:
    """Return the probability that one of k attempts succeeds, 1 - C(n - c, k) / C(n, k), averaged over tasks
    (Chen et al., 2021, eq. 1).

    Raises:
        ValueError: a task was tried fewer than k times.

    >>> pass_at_k([(1, 2)], 1), pass_at_k([(1, 2)], 2)
    (0.5, 1.0)
    """
    chances = []
    for successes, attempts in scores:
        if not 1 <= k <= attempts:
            raise ValueError(f"pass@{k} of a task that was tried {attempts} times")
        chances.append(1 - math.comb(attempts - successes, k) / math.comb(attempts, k))
    return math.fsum(chances) / len(chances)


def paired_test(before: EvaluationReport, after: EvaluationReport) -> Comparison:
    """Test whether ``after`` does better than ``before`` on the same tasks.

    p is that of the exact sign-flip test on the differences in success rate of the tasks: if nothing has
    changed, before and after are exchangeable within each task. With one attempt per task this is McNemar's
    exact test (1947). The interval is that of Bonett and Price (2012, eq. 3): the Wald interval with one task
    added as gained and one as lost. It may disagree with p where p is close to 0.05.
    """
    unpaired = before.outcomes.keys() ^ after.outcomes.keys()
    if unpaired or "tasks_digest" in other_settings(before.settings, after.settings):
        cause = f"task {min(unpaired)!r} is in one only" if unpaired else "tasks of equal ids differ"
        raise AgentPeftError(
            f"evaluations on different tasks cannot be paired ({cause}): evaluate both on the same"
        )
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


def sign_flip_p(differences: Sequence[int]) -> float:
    """Return the exact probability that |sum| is as large as it is, or larger, if each difference gets a
    random sign.

    >>> sign_flip_p([1, 1, 1, 1, 1, 0]) == 2 / 2**5
    True
    """
    ways = {0: 1}  # sum -> how many of the 2^m choices of signs have it
    sizes = [abs(difference) for difference in differences if difference]
    for size in sizes:
        longer: dict[int, int] = {}
        for total, count in ways.items():
            for signed in (total - size, total + size):
                longer[signed] = longer.get(signed, 0) + count
        ways = longer
    observed = abs(sum(differences))
    extreme = sum(count for total, count in ways.items() if abs(total) >= observed)
    return extreme / (1 << len(sizes))


def _successes(outcomes: Sequence[str]) -> tuple[int, int]:
    """Return (successes, attempts)."""
    return sum(outcome == Outcome.CORRECT for outcome in outcomes), len(outcomes)
