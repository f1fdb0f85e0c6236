"""What trajectories say of a policy: rates with their uncertainty, and whether two policies differ. Pure
arithmetic, no torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from rich.table import Table
from rich.text import Text

from agent_peft.types import AgentPeftError, Group, Outcome, StopReason, Trajectory

Z95 = 1.959963984540054  # the normal distribution's 97.5 % point
NO_SKILL = "(no skill)"
TOO_MANY = 0.05  # share of the episodes that may be left out without a word


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


@dataclass(frozen=True)
class EvaluationReport:
    """How a policy did. All rates are means over tasks, each task being worth the same however often it
    was tried.
    """

    success: Rate
    by_skill: Mapping[str, Rate]  # by a task's first skill
    pass_at: Mapping[int, float]  # k -> pass@k, for 1, 2, 4, … up to the fewest attempts that any task had
    attempts: int  # episodes that count
    infrastructure_failures: int  # episodes that do not: their world failed before the agent had acted
    stop_reasons: Mapping[str, int]
    invalid_actions: float  # share of turns
    mean_turns: float  # per episode
    mean_action_tokens: float  # per episode
    outcomes: Mapping[str, tuple[str, ...]]  # task id -> the outcome of each attempt
    cut_actions: float = 0.0  # share of turns whose action a limit on tokens ended

    @property
    def summary(self) -> str:
        """In one line, for people."""
        left_out, episodes = self.infrastructure_failures, self.attempts + self.infrastructure_failures
        rates = f"success {_percent(self.success)} on {self.success.tasks} tasks"
        return (
            f"{rates}; {left_out} of {episodes} episodes are left out: their world failed"
            if left_out > TOO_MANY * episodes
            else rates
        )

    def to_json(self) -> dict[str, Any]:
        """The report in what JSON knows."""
        return {
            **asdict(self),
            "pass_at": {str(k): value for k, value in self.pass_at.items()},
            "outcomes": _lists(self.outcomes),
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> EvaluationReport:
        """What ``to_json`` gave, also after a trip through a file."""
        rest = dict(content)
        return cls(
            success=Rate(**rest.pop("success")),
            by_skill={skill: Rate(**rate) for skill, rate in rest.pop("by_skill").items()},
            pass_at={int(k): value for k, value in rest.pop("pass_at").items()},
            outcomes={task: tuple(found) for task, found in rest.pop("outcomes").items()},
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
    """The report of some attempts at some tasks. Those that the infrastructure broke before the agent had
    acted are counted and left out; those that the agent crashed, or that met a defect, are incorrect.

    Args:
        left_out: how many attempts are in no group.

    Raises:
        AgentPeftError: no attempt is left.
    """
    trajectories: list[Trajectory] = [t for group in groups for t in group.trajectories]
    counted = [t for t in trajectories if t.stop_reason is not StopReason.INFRASTRUCTURE]
    if not counted:
        raise AgentPeftError(
            "there is nothing to evaluate: no episode came to an end (the environment failed, or there are no tasks)"
        )
    outcomes: dict[str, tuple[str, ...]] = {}
    skills: dict[str, str] = {}
    for t in counted:
        outcomes[t.task.id] = (*outcomes.get(t.task.id, ()), str(t.outcome))
        skills[t.task.id] = t.task.skills[0] if t.task.skills else NO_SKILL
    scores = {task: _score(found) for task, found in outcomes.items()}
    turns = sum(len(t.turns) for t in counted)
    fewest = min(tried for _, tried in scores.values())
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
    )


def rate_of(scores: Iterable[tuple[int, int]]) -> Rate:
    """The success rate of n ≥ 1 tasks, each given as (successes, attempts), with Wilson's interval (1927, eq.
    4).

    Tasks are drawn independently, attempts at one task are not, so the interval takes for its number of
    observations not the attempts but the effective ones, p(1 - p) n² / Σ(pᵢ - p)² with pᵢ the rate of task i
    (Korn and Graubard, 1998): n if each task was tried once or always ends the same way, and never more than
    the attempts.

    >>> rate_of([(2, 2), (0, 2)]) == rate_of([(1, 1), (0, 1)])
    True
    """
    pairs = list(scores)
    rates = [successes / attempts for successes, attempts in pairs]
    n, tried = len(rates), sum(attempts for _, attempts in pairs)
    p = math.fsum(rates) / n
    spread = math.fsum((rate - p) ** 2 for rate in rates)
    effective: float = n
    if 0 < p < 1:
        effective = min(tried, p * (1 - p) * n * n / spread) if spread > 0 else tried
        effective = max(effective, n)  # against rounding
    return Rate(p, *wilson_interval(p, effective), n)


def wilson_interval(p: float, n: float) -> tuple[float, float]:
    """The 95 % score interval of a proportion p seen in n observations (Wilson, 1927).

    >>> low, high = wilson_interval(0.5, 10)
    >>> round(low, 4), round(high, 4)
    (0.2366, 0.7634)
    """
    z2 = Z95 * Z95 / n
    center = (p + z2 / 2) / (1 + z2)
    half = math.sqrt(p * (1 - p) * z2 + z2 * z2 / 4) / (1 + z2)
    return (0.0 if p == 0 else center - half, 1.0 if p == 1 else center + half)


def pass_at_k(scores: Iterable[tuple[int, int]], k: int) -> float:
    """The chance that one of k attempts succeeds, 1 - C(n - c, k) / C(n, k), meaned over tasks (Chen et al.,
    2021, eq. 1).

    Raises:
        ValueError: a task was tried less than k times.

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
    """Whether ``after`` does better than ``before`` on the same tasks.

    p is that of the exact sign-flip test on the tasks' differences in success rate: if nothing has changed,
    before and after are exchangeable within each task. With one attempt each this is McNemar's exact test
    (1947). The interval is Bonett and Price's (2012, eq. 3), the Wald interval with one imaginary task gained
    and one lost; it may disagree with p close to 0.05.

    Raises:
        AgentPeftError: they were measured on different tasks.
    """
    if before.outcomes.keys() != after.outcomes.keys():
        other = min(before.outcomes.keys() ^ after.outcomes.keys())
        raise AgentPeftError(
            f"evaluations on different tasks cannot be paired (task {other!r} is in one only): evaluate both on the same"
        )
    pairs = [(_score(before.outcomes[task]), _score(after.outcomes[task])) for task in before.outcomes]
    unit = math.lcm(*(attempts for pair in pairs for _, attempts in pair))
    steps = [
        c2 * unit // n2 - c1 * unit // n1 for (c1, n1), (c2, n2) in pairs
    ]  # in units of 1 / unit, so that all is exact
    n = len(steps)
    mean = sum(steps) / unit / (n + 2)
    variance = (sum(step * step for step in steps) / unit**2 + 2) / (n + 2) - mean**2
    half = Z95 * math.sqrt(variance / (n + 2))
    return Comparison(
        sum(steps) / unit / n, max(-1.0, mean - half), min(1.0, mean + half), sign_flip_p(steps)
    )


def sign_flip_p(differences: Sequence[int]) -> float:
    """The chance that |sum| is as large as it is, or larger, when each difference is given a random sign.
    Exact.

    >>> sign_flip_p([1, 1, 1, 1, 1, 0]) == 2 / 2**5
    True
    """
    ways = {0: 1}  # sum -> how many of the 2^m choices of signs give it
    sizes = [abs(difference) for difference in differences if difference]
    for size in sizes:
        grown: dict[int, int] = {}
        for total, count in ways.items():
            for changed in (total - size, total + size):
                grown[changed] = grown.get(changed, 0) + count
        ways = grown
    observed = abs(sum(differences))
    extreme = sum(count for total, count in ways.items() if abs(total) >= observed)
    return extreme / (1 << len(sizes))


def table(reports: Mapping[str, EvaluationReport]) -> Table:
    """Reports side by side, one column each ("base", "after sft", …), with what has changed since the
    column before.
    """
    columns = list(reports.values())
    shown = _table("success on the evaluation tasks (95 % interval)", reports)
    shown.add_row("tasks", *(str(report.success.tasks) for report in columns))
    shown.add_row("success", *(_percent(report.success) for report in columns))
    if len(columns) > 1:
        changes = [_change(before, after) for before, after in pairwise(columns)]
        shown.add_row("change, points", "", *(change for change, _ in changes))
        shown.add_row("p, if no change", "", *(p for _, p in changes))
    for k in sorted({k for report in columns for k in report.pass_at} - {1}):
        shown.add_row(
            f"pass@{k}", *(f"{report.pass_at[k]:.1%}" if k in report.pass_at else "" for report in columns)
        )
    shown.add_section()
    shown.add_row("attempts", *(str(report.attempts) for report in columns))
    for reason in sorted({reason for report in columns for reason in report.stop_reasons}):
        shown.add_row(
            f"ended: {reason}",
            *(f"{report.stop_reasons.get(reason, 0) / report.attempts:.1%}" for report in columns),
        )
    shown.add_row("invalid actions", *(f"{report.invalid_actions:.1%}" for report in columns))
    shown.add_row("cut actions", *(f"{report.cut_actions:.1%}" for report in columns))
    shown.add_row("turns", *(f"{report.mean_turns:.2f}" for report in columns))
    shown.add_row("action tokens", *(f"{report.mean_action_tokens:.1f}" for report in columns))
    if any(report.infrastructure_failures for report in columns):
        shown.add_row("left out (world failed)", *(str(report.infrastructure_failures) for report in columns))
    return shown


def skill_table(reports: Mapping[str, EvaluationReport]) -> Table:
    """The success rates by a task's first skill, reports side by side."""
    columns = list(reports.values())
    shown = _table("success by skill (95 % interval)", reports, "tasks")
    for skill in sorted({skill for report in columns for skill in report.by_skill}):
        rates = [report.by_skill.get(skill) for report in columns]
        counts = "/".join(sorted({str(rate.tasks) for rate in rates if rate is not None}))
        shown.add_row(Text(skill), counts, *("" if rate is None else _percent(rate) for rate in rates))
    return shown


def _table(title: str, reports: Mapping[str, EvaluationReport], *more: str) -> Table:
    shown = Table(title=title, title_justify="left")
    shown.add_column("")
    for name in (*more, *reports):
        shown.add_column(Text(name), justify="right")
    return shown


def _score(outcomes: Sequence[str]) -> tuple[int, int]:
    """(successes, attempts)"""
    return sum(outcome == Outcome.CORRECT for outcome in outcomes), len(outcomes)


def _lists(outcomes: Mapping[str, tuple[str, ...]]) -> dict[str, list[str]]:
    return {task: list(found) for task, found in outcomes.items()}


def _percent(rate: Rate) -> str:
    return f"{rate.value:.1%} ({100 * rate.low:.0f}–{100 * rate.high:.0f})"


def _change(before: EvaluationReport, after: EvaluationReport) -> tuple[str, str]:
    try:
        found = paired_test(before, after)
    except AgentPeftError:
        return "other tasks", ""
    return f"{100 * found.difference:+.1f} ({100 * found.low:+.0f}…{100 * found.high:+.0f})", f"{found.p:.2g}"
