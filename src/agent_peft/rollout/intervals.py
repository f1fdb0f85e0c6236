"""Rates and means over tasks with their 95 % intervals, and the exact test that they compare with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

SHARES = ("success", "score", "accuracy", "token_accuracy")  # measures that are shown in percent
Z95 = 1.959963984540054  # the normal distribution's 97.5 % point


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


def in_words(name: str, measure: Rate | Mean) -> str:
    """A measure with its interval; shares are in percent.

    >>> in_words("token_accuracy", Mean(0.5, 0.25, 0.75, 4)), in_words("loss", Mean(0.5, None, None, 1))
    ('50.0% (25–75)', '0.500')
    """
    if isinstance(measure, Rate):
        return measure.percent
    if name not in SHARES:
        return measure.text
    if measure.low is None or measure.high is None:
        return f"{measure.value:.1%}"
    return Rate(measure.value, measure.low, measure.high, measure.tasks).percent


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


def mean_over_tasks(means: Sequence[float], weights: Sequence[float] | None = None) -> Mean:
    """Return the mean of n ≥ 1 tasks' means, with Student's (1908) interval: mean ± t · s / √n, where s is
    the standard deviation of the tasks' means and t the 97.5 % point with n - 1 degrees of freedom.

    Tasks are drawn independently, attempts at one task are not. A task is therefore one observation, however
    often it was tried (Miller, 2024, section 2.2, on clustered standard errors).

    With ``weights``, such as numbers of tokens, it is Σ wx / Σ w, and s is that of w (x - mean) over the mean
    weight: the linearized ratio of two means (Cochran, 1977, equation 2.39), so long tasks count for more.

    >>> mean_over_tasks([1.0, 2.0, 3.0, 6.0]).text
    '3.000 (-0.433…6.433)'
    >>> mean_over_tasks([1.0, 4.0], [20, 10]).value
    2.0
    """
    n = len(means)
    weights = [1.0] * n if weights is None else weights
    total = math.fsum(weights)
    mean = math.fsum(x * w for x, w in zip(means, weights, strict=True)) / total
    if len(set(means)) == 1:
        return Mean(mean, None, None, n)
    squares = math.fsum((w * (x - mean)) ** 2 for x, w in zip(means, weights, strict=True))
    half = t95(n - 1) * math.sqrt(squares / (n - 1) / n) * (n / total)
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
