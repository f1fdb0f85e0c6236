"""Statistics of evaluations: success rates with their uncertainty, and tests for a difference."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from agent_peft.types import AgentPeftError, Group, Outcome, StopReason, Trajectory

Z95 = 1.959963984540054  # the normal distribution's 97.5 % point
NO_SKILL = "(no skill)"
MAX_LEFT_OUT = 0.05  # share of the episodes; above it the summary reports them


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
class EvaluationReport:
    """The result of an evaluation. All rates are means over tasks; a task counts once, however often it was
    tried.
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

    @property
    def summary(self) -> str:
        """The result in one line."""
        left_out, episodes = self.infrastructure_failures, self.attempts + self.infrastructure_failures
        rates = f"success {self.success.percent} on {self.success.tasks} tasks"
        if self.score is not None:
            rates += f", score {self.score.percent}"
        return (
            f"{rates}; {left_out} of {episodes} episodes are left out: their environment failed"
            if left_out > MAX_LEFT_OUT * episodes
            else rates
        )

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        fields = asdict(self)
        if self.score is None:
            del fields["score"]
        return {
            **fields,
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


def summarize(groups: Sequence[Group], left_out: int = 0) -> EvaluationReport:
    """Summarize the attempts of groups.

    Attempts whose environment failed before the agent had acted are counted and left out. Those that the
    agent crashed, or that met a defect of the environment, are incorrect.

    Args:
        left_out: the number of attempts that are in no group.

    Raises:
        AgentPeftError: no attempt remains.
    """
    trajectories: list[Trajectory] = [t for group in groups for t in group.trajectories]
    counted = [t for t in trajectories if t.stop_reason is not StopReason.INFRASTRUCTURE]
    if not counted:
        raise AgentPeftError(
            "there is nothing to evaluate: no episode came to an end (the environment failed, or there are "
            "no tasks)"
        )
    outcomes: dict[str, tuple[str, ...]] = {}
    skills: dict[str, str] = {}
    for t in counted:
        outcomes[t.task.id] = (*outcomes.get(t.task.id, ()), str(t.outcome))
        skills[t.task.id] = t.task.skills[0] if t.task.skills else NO_SKILL
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
    )


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
    scores: dict[str, list[float]] = {}
    for t in trajectories:
        scores.setdefault(t.task.id, []).append(t.score or 0.0)
    return rate_of((math.fsum(of_task), len(of_task)) for of_task in scores.values())


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

    Raises:
        AgentPeftError: the evaluations were made on different tasks.
    """
    if before.outcomes.keys() != after.outcomes.keys():
        other = min(before.outcomes.keys() ^ after.outcomes.keys())
        raise AgentPeftError(
            f"evaluations on different tasks cannot be paired (task {other!r} is in one only): evaluate both "
            "on the same"
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
