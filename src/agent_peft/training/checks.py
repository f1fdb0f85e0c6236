"""Checks that are always on. A run whose numbers cannot be trusted stops, instead of logging a warning.

In fp32 sampler and trainer agree to a thousandth of a nat, so each token is compared. In 16 bits rounding
alone makes them differ by some hundredths, and by up to half a nat for a single token. There, the *changes*
of many tokens are compared together. Rounding depends on the weights, the temperature and the tokens, so
before an alarm in 16 bits it is measured on the tokens in question: the present weights, in 16 bits and in
fp32. A difference that is not larger raises nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from agent_peft.batch import Batch, collate
from agent_peft.policies import adapters
from agent_peft.policies.engine.base import Sampler
from agent_peft.policies.policy import Policy
from agent_peft.policies.proofs import ALLOWED
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.ranks import Ranks
from agent_peft.types import Task, Trajectory, TrustError, Turn

CANARY_TOKENS = 16  # where each token is compared
CHANGE_TOKENS = 192  # whose changes are compared
SCORED_TOKENS = 512  # up to the last of them
# slope of the difference on the mean of two changes: the sampler's change is 5 % too small or too large
MIN_SLOPE = 0.05
MIN_TEMPERATURE_SLOPE = 0.02  # of the difference on the log-probabilities: a temperature of 1.02 or more
SIGMAS = 6.0  # standard errors
PARTS = 8  # parts of the tokens, most of which must agree
MEASURED_POSITIONS = 2048  # on which rounding is measured before an alarm
# of the rounding's norm: a missing change that is not larger raises nothing, and a tilt over many tokens
MIN_MISSING, MIN_TILTED = 2.0, 0.5


@dataclass
class Mismatch:
    """The difference between the sampler's and the trainer's log-probabilities of freshly sampled tokens,
    over the microbatches of an update.

    ``mismatch`` is the mean |Δ log p| in nats, ``mismatch_max`` the largest, and ``mismatch_k3`` the mean of
    e^Δ - 1 - Δ, which is an estimate of the KL divergence from the sampler to the trainer (Schulman 2020,
    "Approximating KL divergence").
    """

    # n, |d|, k3
    sums: Tensor = field(default_factory=lambda: torch.zeros(3, dtype=torch.float64))
    largest: float = 0.0
    # n, d, d², m, m², dm of each of ``PARTS`` parts of the tokens
    parts: Tensor = field(default_factory=lambda: torch.zeros(PARTS, 6, dtype=torch.float64))

    def add(self, trainer: Tensor, sampler: Tensor) -> None:
        """Add log-probabilities (n,) of the same tokens."""
        if not len(sampler):  # a microbatch of replayed trajectories alone
            return
        d = trainer.detach().to(sampler).double() - sampler.double()
        m = sampler.double() + d / 2  # the mean of both, so that rounding of one is not taken for a slope
        one = torch.ones_like(d)
        self.sums += torch.stack([x.sum() for x in (one, d.abs(), d.exp() - 1 - d)]).cpu()
        self.largest = max(self.largest, float(d.abs().max())) if not d.isnan().any() else math.nan
        terms = torch.stack([one, d, d * d, m, m * m, d * m], dim=1).cpu()
        self.parts.index_add_(0, torch.arange(len(d)) % PARTS, terms)

    def over(self, ranks: Ranks) -> Mismatch:
        """The mismatch over all ranks."""
        if ranks.world_size == 1:
            return self
        mine = [self.sums.tolist(), self.largest, self.parts.tolist()]
        sums, largest, parts = zip(*ranks.gather_objects(mine), strict=True)
        total = [torch.tensor(values, dtype=torch.float64).sum(0) for values in (sums, parts)]
        return Mismatch(total[0], max(largest, key=_nan_last), total[1])

    @property
    def metrics(self) -> dict[str, float]:
        count, mean, k3 = self.sums.tolist()
        return (
            {"mismatch": mean / count, "mismatch_max": self.largest, "mismatch_k3": k3 / count}
            if count
            else {}
        )

    @property
    def staleness(self) -> dict[str, float]:
        """The mean |Δ log p| under the name that it has where an earlier version of the policy sampled."""
        return {"staleness": self.metrics["mismatch"]} if self.metrics else {}

    @property
    def rms(self) -> float:
        """The root of the mean square of the differences."""
        n, _, dd, *_ = self.parts.sum(0).tolist()
        return math.sqrt(dd / n) if n else math.inf

    @property
    def spread(self) -> float:
        """The standard deviation of the log-probabilities themselves."""
        n, _, _, m, mm, _ = self.parts.sum(0).tolist()
        return math.sqrt(max(mm / n - (m / n) ** 2, 0.0)) if n else 0.0

    @property
    def slope(self) -> tuple[float, float]:
        """The slope of the difference on the log-probabilities themselves, and its standard error. It shows a
        wrong temperature.

        Rounding is larger where a token is less likely. If a policy is nearly certain, a few unlikely tokens
        decide the slope, and the error of a regression is too small. So the error is at least that of the
        mean of the slopes of ``PARTS`` parts of the tokens.
        """
        if self.sums[0] < CHANGE_TOKENS:
            return 0.0, math.inf
        slope, error = _regression(*self.parts.sum(0).tolist())
        slopes = torch.tensor([_regression(*part)[0] for part in self.parts.tolist()], dtype=torch.float64)
        return slope, max(error, float(slopes.std()) / math.sqrt(PARTS))


def _regression(n: float, d: float, dd: float, m: float, mm: float, dm: float) -> tuple[float, float]:
    """The slope of d on m and its standard error, from sums over n tokens."""
    spread, together = mm - m * m / max(n, 1), dm - d * m / max(n, 1)
    if spread <= 0:
        return 0.0, math.inf
    slope = together / spread
    residual = max(dd - d * d / n - slope * together, 0.0)
    return slope, math.sqrt(residual / n / spread)


def measure_batch_rounding(policy: Policy, minibatch: Batch, sampling: SamplingConfig) -> Mismatch:
    """The difference that rounding to 16 bits makes to the log-probabilities of a minibatch's tokens,
    with the present weights. Nothing is added where the model cannot compute in fp32.

    Each trajectory is read alone, by the trainer's weights, so a fault of the sampler, of the trie or of the
    mask adds nothing to it.
    """
    measured, room = Mismatch(), MEASURED_POSITIONS
    learned = minibatch.weights.abs().sum(1) > 0
    for row in learned.nonzero()[:, 0].tolist():
        alone = minibatch.select([row])
        room -= int(alone.lengths[0])
        exact = policy.exact_logprobs(alone, sampling)
        if exact is None:
            return Mismatch()
        with torch.no_grad():
            rounded = policy.forward(alone, sampling).logprobs
        measured.add(rounded.cpu()[alone.action_mask], exact.cpu()[alone.action_mask])
        if room <= 0:
            break
    return measured


def assert_mask(mask: Tensor, sampled: Tensor) -> None:
    """No token that was sampled lies outside of the action mask. In 16 bits a mask that is shifted by one
    changes the mean of the log-probabilities by less than rounding, if a template's token is predicted well.

    Args:
        mask: (B, T) the action mask.
        sampled: (B, T) the sampler's log-probabilities, 0 where nothing was sampled.
    """
    if (sampled[~mask] != 0).any():
        raise TrustError(
            "the loss mask leaves out tokens that the sampler drew: it is not that of the trajectories"
        )


def assert_on_policy(
    policy: Policy, mismatch: Mismatch, sampling: SamplingConfig, rounding: Callable[[], Mismatch]
) -> None:
    """The first minibatch after a rollout is on policy: ratio 1, KL 0, clip fraction 0. Anything else means
    that the trainer and the sampler disagree about the tokens, the mask, the distribution or the weights.

    In fp32 over the whole vocabulary no single token may differ. In 16 bits, or where rounding can move a
    token across the border of top-p or top-k, the mean must not differ, and the difference must not grow with
    the log-probability.

    Args:
        rounding: ``measure_batch_rounding`` of the minibatch, over all ranks. It is called before an alarm
            in 16 bits.
    """
    if not mismatch.metrics:
        return
    strict = policy.dtype == torch.float32 and not sampling.truncates
    worst, bound = mismatch.metrics["mismatch_max" if strict else "mismatch"], policy.rounding
    slope, error = mismatch.slope
    tilted = not strict and not sampling.truncates and abs(slope) > MIN_TEMPERATURE_SLOPE + SIGMAS * error
    if worst <= bound and not tilted:
        return
    if policy.dtype != torch.float32 and (measured := rounding()).metrics:
        bound = max(bound, ALLOWED * measured.metrics["mismatch"])
        tilted = tilted and abs(slope) * mismatch.spread > MIN_TILTED * measured.rms
    if not worst <= bound:  # so NaN fails
        raise TrustError(
            "the trainer's log-probabilities of freshly sampled tokens differ from the sampler's by "
            f"{worst:.3g} nats ({'at most' if strict else 'on average'}; {bound:.2g} is rounding): "
            "the loss mask, the sampling distribution or the sampler's weights are not those that the "
            "trainer assumes"
        )
    if tilted:
        raise TrustError(
            f"the trainer's log-probabilities of freshly sampled tokens are {100 * abs(slope):.0f} % "
            f"{'larger' if slope > 0 else 'smaller'} than the sampler's, which is more than rounding: they "
            "do not use the same temperature"
        )


class Canary:
    """A few tokens that sampler and trainer score after each update, to show that it has reached both.

    In fp32 they are tokens of each minibatch, and every log-probability must be equal. In 16 bits the tokens
    stay the same, and the change of their log-probabilities must be equal: since the last update, and since
    the adapter was zero. On tokens that are learned already, the change is rounding, whose errors depend on
    each other and are not equally large in sampler and trainer. So what is missing must also be larger than
    the rounding of the present scores. It adds up since the adapter was zero, and rounding does not.
    """

    def __init__(self, policy: Policy, sampler: Sampler) -> None:
        self.policy, self.sampler = policy, sampler
        self.tokens: list[int] = []
        # with the adapter off; where all weights are trained, before the first update
        self.first: tuple[Tensor, Tensor] | None = None
        self.last: tuple[Tensor, Tensor] | None = None

    def before_update(self, tokens: Sequence[int]) -> None:
        """Score the tokens whose change the 16-bit check follows.

        Args:
            tokens: a trajectory, which is scored from its beginning. A piece from its middle would be text
                that the model never sees: an end token in second place makes hidden states of SmolLM2 as
                large as 24,000, where fp32 rounding amounts to 0.002 nats. Of the tokens scored, the last
                ones are compared: actions change far more than the prompt, and rounding does not.
        """
        if self.policy.dtype == torch.float32 or self.last is not None or len(tokens) < 2:
            return
        self.tokens = list(tokens[:SCORED_TOKENS])
        self.last = self._read(self.tokens)
        self.first = self.last
        if self.policy.has_adapter and adapters.delta_norm(self.policy.model) > 0.0:
            self.first = self._read(self.tokens, adapter=False)

    def after_update(self, tokens: Sequence[int]) -> None:
        """Compare sampler and trainer."""
        tokens = self.tokens or list(tokens[:CANARY_TOKENS])
        if len(tokens) < 2:
            return
        sampler, trainer = self._read(tokens)
        apart, narrow = sampler - trainer, self.policy.dtype != torch.float32
        drift, bound = self.policy.drift(apart), self.policy.rounding
        slopes = {}
        if self.first is not None and self.last is not None:
            for since, then in (("the last update", self.last), ("the adapter was zero", self.first)):
                change, own = sampler - then[0], trainer - then[1]
                if (slope := slope_if_significant(change, own)) is not None:
                    slopes[since] = slope, (change + own) / 2
        if narrow and (slopes or not drift <= bound) and (rounding := self._rounding(tokens)) is not None:
            bound = max(bound, ALLOWED * float(rounding.abs().mean()))
            slopes = {
                since: (slope, change)
                for since, (slope, change) in slopes.items()
                if float((apart @ change).abs() / change.norm()) > MIN_MISSING * float(rounding.norm())
            }
        if not drift <= bound:
            raise TrustError(
                f"sampler and trainer score the same tokens {drift:.3g} nats apart ({bound:.2g} is "
                "rounding): the sampler does not act with the weights that were just updated"
            )
        for since, (slope, _) in slopes.items():
            share = (2 + slope) / max(2 - slope, 0.01)
            raise TrustError(
                f"since {since}, the sampler's log-probabilities have changed by {100 * share:.0f} % of "
                "the trainer's change: the sampler does not act with the weights that were just updated"
            )
        if self.last is not None:
            self.last = sampler, trainer

    def state_dict(self) -> dict[str, Any]:
        """The tokens that the 16-bit check follows, and their scores, so that a resumed run raises the same
        alarms. Empty in fp32.
        """
        return {"tokens": self.tokens, "first": self.first, "last": self.last} if self.tokens else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state and self.policy.dtype != torch.float32:
            self.tokens, self.first, self.last = state["tokens"], state["first"], state["last"]

    def _read(self, tokens: list[int], adapter: bool = True) -> tuple[Tensor, Tensor]:
        """Log-probabilities (up to CHANGE_TOKENS) of the last tokens: the sampler's, and the trainer's."""
        sampler = torch.tensor(self.sampler.score(tokens, SamplingConfig(), adapter))
        with nullcontext() if adapter else self.policy.model.disable_adapter(), torch.no_grad():
            trainer = self.policy.forward(_whole(tokens), SamplingConfig()).logprobs[0, 1:].cpu()
        return sampler[-CHANGE_TOKENS:], trainer[-CHANGE_TOKENS:]

    def _rounding(self, tokens: list[int]) -> Tensor | None:
        """The rounding of the trainer's scores, or None where the model cannot compute in fp32."""
        whole, plain = _whole(tokens), SamplingConfig()
        if (exact := self.policy.exact_logprobs(whole, plain)) is None:
            return None
        with torch.no_grad():
            rounded = self.policy.forward(whole, plain).logprobs
        return (rounded - exact)[0, 1:].cpu()[-CHANGE_TOKENS:]


def _whole(tokens: list[int]) -> Batch:
    """One trajectory whose tokens are all scored, except the first."""
    turn = Turn((tokens[0],), tuple(tokens[1:]), (0.0,) * (len(tokens) - 1))
    return collate([Trajectory(Task("canary"), (turn,))], [0])


def canary_tokens(minibatch: Batch) -> list[int]:
    """The first row of the minibatch; none on a rank that has no part of it."""
    return minibatch.select([0]).rows.sequences[0] if len(minibatch) else []


def slope_if_significant(sampler: Tensor, trainer: Tensor) -> float | None:
    """The slope of (sampler - trainer) on the mean of both changes (n,) if it is certainly not 0, else None.

    It is 0 where both change equally, -2 where the sampler's values do not change, and -0.1 where their
    change is a tenth too small. If the errors of the tokens are independent, its standard error shows how
    small a change differs from rounding. Rounding has outliers, so most of ``PARTS`` parts of the tokens must
    agree.

    >>> change = torch.linspace(-1, 1, 64)
    >>> slope_if_significant(change, change) is None, slope_if_significant(0.9 * change, change) is None
    (True, False)
    """
    d, m = sampler.double() - trainer.double(), (sampler.double() + trainer.double()) / 2
    slope, error = _slope(d, m)
    if not abs(slope) > MIN_SLOPE + SIGMAS * error:
        return None
    parts = [_slope(d[part::PARTS], m[part::PARTS])[0] for part in range(PARTS)]
    agree = sum(one * slope > 0 and abs(one) > MIN_SLOPE / 2 for one in parts)
    return slope if agree >= PARTS - 1 else None


def _slope(d: Tensor, m: Tensor) -> tuple[float, float]:
    """The slope of d on m through the origin, and its standard error."""
    length = float(m @ m)
    if not length > 0.0:
        return 0.0, math.inf
    slope = float(d @ m) / length
    return slope, float((d - slope * m).norm()) / math.sqrt(len(m) * length)


def _nan_last(value: float) -> float:
    return math.inf if math.isnan(value) else value


def assert_learning(policy: Policy, changed: bool) -> None:
    """After the first update the adapter's delta is not zero; without an adapter, some weight has changed."""
    if policy.has_adapter and not adapters.delta_norm(policy.model) > 0.0:
        raise TrustError(
            "the adapter's delta is still zero after the first update: its parameters get no gradient, or "
            "the optimizer does not hold them"
        )
    if not policy.has_adapter and not changed:
        raise TrustError(
            "the first update has changed no weight: optimizer.learning_rate is too small for fp32, or "
            "nothing is trained"
        )
