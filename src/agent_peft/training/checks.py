"""Checks that are always on. A run whose numbers could not be trusted stops; it does not go on with a
warning.

In fp32 sampler and trainer agree to a thousandth of a nat, so each token is compared. In 16 bits rounding
alone puts them some hundredths apart, and up to half a nat for a token: there, what is compared is how they
*change*, over many tokens, together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from agent_peft.batch import collate
from agent_peft.policies import adapters
from agent_peft.policies.engine.local import Engine
from agent_peft.policies.policy import Policy
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.ranks import Ranks
from agent_peft.types import Task, Trajectory, TrustError, Turn

CANARY_TOKENS = 16  # where each token is compared
CHANGE_TOKENS = 192  # where changes are
LEAST_SLOPE = (
    0.05  # of the difference on the mean of two changes: the sampler's is 5 % too small or too large
)
LEAST_TILT = 0.02  # of the difference on the log-probabilities: a temperature of 1.02 or more
CERTAIN = 6.0  # standard errors
PARTS = 8  # of the tokens, most of which must agree


@dataclass
class Mismatch:
    """How far the sampler's log-probabilities of freshly sampled tokens are from the trainer's, over the
    microbatches of an update.

    ``mismatch`` is the mean |Δ log p| in nats, ``mismatch_max`` the largest, and ``mismatch_k3`` the mean of
    e^Δ - 1 - Δ, which is an estimate of the KL divergence from the sampler to the trainer (Schulman 2020,
    "Approximating KL divergence").
    """

    sums: Tensor = field(
        default_factory=lambda: torch.zeros(8, dtype=torch.float64)
    )  # n, |d|, k3, d, d², m, m², dm
    largest: float = 0.0

    def add(self, trainer: Tensor, sampler: Tensor) -> None:
        """Of the same tokens (n,)."""
        d = trainer.detach().to(sampler).double() - sampler.double()
        m = sampler.double() + d / 2  # the mean of both, so that the rounding of neither is taken for a slope
        one = torch.ones_like(d)
        self.sums += torch.stack(
            [x.sum() for x in (one, d.abs(), d.exp() - 1 - d, d, d * d, m, m * m, d * m)]
        ).cpu()
        self.largest = max(self.largest, float(d.abs().max())) if not d.isnan().any() else math.nan

    def over(self, ranks: Ranks) -> Mismatch:
        """That of all ranks."""
        found = (
            [self]
            if ranks.world == 1
            else [
                Mismatch(torch.tensor(s, dtype=torch.float64), x)
                for s, x in ranks.gather_objects([self.sums.tolist(), self.largest])
            ]
        )
        return Mismatch(
            torch.stack([one.sums for one in found]).sum(0),
            max((one.largest for one in found), key=_nan_last),
        )

    @property
    def metrics(self) -> dict[str, float]:
        count, mean, k3 = self.sums[:3].tolist()
        return (
            {"mismatch": mean / count, "mismatch_max": self.largest, "mismatch_k3": k3 / count}
            if count
            else {}
        )

    @property
    def slope(self) -> tuple[float, float]:
        """Of the difference on the log-probabilities themselves, with its standard error. Another
        temperature shows here.
        """
        n, _, _, d, dd, m, mm, dm = self.sums.tolist()
        spread, together = mm - m * m / max(n, 1), dm - d * m / max(n, 1)
        if n < CHANGE_TOKENS or spread <= 0:
            return 0.0, math.inf
        slope = together / spread
        left = max(dd - d * d / n - slope * together, 0.0)
        return slope, math.sqrt(left / n / spread)


def assert_on_policy(policy: Policy, mismatch: Mismatch, sampling: SamplingConfig) -> None:
    """The first minibatch after a rollout is on policy: ratio 1, KL 0, clip fraction 0. Anything else means
    that the trainer and the sampler disagree about the tokens, the mask, the distribution or the weights.

    In fp32 over the whole vocabulary no token may differ. Where rounding can move a token across the border
    of top-p or top-k, or in 16 bits, the mean may not, and the difference may not grow with the
    log-probability.
    """
    if not mismatch.metrics:
        return
    strict = policy.dtype == torch.float32 and not sampling.truncates
    worst = mismatch.metrics["mismatch_max" if strict else "mismatch"]
    if not worst <= policy.rounding:  # NaN is no agreement either
        raise TrustError(
            f"the trainer's log-probabilities of freshly sampled tokens differ from the sampler's by {worst:.3g} nats "
            f"({'at most' if strict else 'on average'}; {policy.rounding:.2g} is rounding): the loss mask, the sampling distribution or "
            "the sampler's weights are not what the trainer takes them for"
        )
    slope, error = mismatch.slope
    if not strict and not sampling.truncates and abs(slope) > LEAST_TILT + CERTAIN * error:
        raise TrustError(
            f"the trainer's log-probabilities of freshly sampled tokens are {100 * abs(slope):.0f} % "
            f"{'larger' if slope > 0 else 'smaller'} than the sampler's, which is no rounding: they do not mean the same temperature"
        )


class Canary:
    """A few tokens that sampler and trainer are asked about after each update: it must have reached both.

    In fp32 they are tokens of each minibatch, and each of their log-probabilities must be the same. In 16
    bits they stay the same, and so must what has become of their log-probabilities: since the last update,
    and since the adapter was zero.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.policy = engine, engine.policy
        self.tokens: list[int] = []
        self.first: tuple[Tensor, Tensor] | None = (
            None  # of the adapter off; of weights that are all trained, before the first update
        )
        self.last: tuple[Tensor, Tensor] | None = None

    def before_update(self, tokens: Sequence[int]) -> None:
        """
        Args:
            tokens: of a trajectory, whose beginning is scored. A piece out of its middle would be text as the
                model never sees it: an end token in second place makes hidden states of SmolLM2 24,000 large,
                and what fp32 rounds off there is 0.002 nats.
        """
        if self.policy.dtype == torch.float32 or self.last is not None or len(tokens) < 2:
            return
        self.tokens = list(tokens[:CHANGE_TOKENS])
        self.last = self._read(self.tokens)
        self.first = self.last
        if self.policy.has_adapter and adapters.delta_norm(self.policy.model) > 0.0:
            self.first = self._read(self.tokens, adapter=False)

    def after_update(self, tokens: Sequence[int]) -> None:
        """
        Raises:
            TrustError: the update has not reached the sampler, or not all of it.
        """
        tokens = self.tokens or list(tokens[:CANARY_TOKENS])
        if len(tokens) < 2:
            return
        sampler, trainer = self._read(tokens)
        drift, bound = self.policy.drift(sampler - trainer), self.policy.rounding
        if not drift <= bound:
            raise TrustError(
                f"sampler and trainer score the same tokens {drift:.3g} nats apart ({bound:.2g} is rounding): "
                "the sampler does not act with the weights that were just updated"
            )
        if self.first is None or self.last is None:
            return
        for since, (sampler_then, trainer_then) in (
            ("the last update", self.last),
            ("the adapter was zero", self.first),
        ):
            if (slope := changed_apart(sampler - sampler_then, trainer - trainer_then)) is not None:
                share = (2 + slope) / max(2 - slope, 0.01)
                raise TrustError(
                    f"since {since}, the sampler's log-probabilities have changed by {100 * share:.0f} % of what the trainer's have: "
                    "the sampler does not act with the weights that were just updated"
                )
        self.last = sampler, trainer

    def _read(self, tokens: list[int], adapter: bool = True) -> tuple[Tensor, Tensor]:
        """Log-probabilities (T - 1) of tokens[1:]: the sampler's, and the trainer's."""
        plain, policy = SamplingConfig(), self.policy
        strict = policy.dtype == torch.float32
        with nullcontext() if adapter else policy.model.disable_adapter():
            # a layout of its own takes longer to make than a few tokens to read; where many are read, it is
            # the one that samples
            sampler = torch.tensor(
                self.engine.score(tokens, plain, blocks=policy.blocks and adapter and not strict)
            )
            turn = Turn((tokens[0],), tuple(tokens[1:]), (0.0,) * (len(tokens) - 1))
            whole = collate([Trajectory(Task("canary"), (turn,))], [0])
            with torch.no_grad():
                trainer = policy.forward(whole, plain).logprobs[0, 1:].cpu()
        return sampler, trainer


def changed_apart(sampler: Tensor, trainer: Tensor) -> float | None:
    """The slope of (sampler - trainer) on the mean of both changes (n,), if it is certain that it is not 0;
    None where they may agree.

    It is 0 where both change alike, -2 where the sampler's do not change, and -0.1 where they lack a tenth.
    Both are rounded alike, so rounding adds nothing to it, and its standard error says how small a change can
    be told from rounding. As rounding has outliers, most of ``PARTS`` parts of the tokens must say the same.

    >>> change = torch.linspace(-1, 1, 64)
    >>> changed_apart(change, change) is None, changed_apart(0.9 * change, change) is None
    (True, False)
    """
    d, m = sampler.double() - trainer.double(), (sampler.double() + trainer.double()) / 2
    slope, error = _slope(d, m)
    if not abs(slope) > LEAST_SLOPE + CERTAIN * error:
        return None
    parts = [_slope(d[part::PARTS], m[part::PARTS])[0] for part in range(PARTS)]
    agree = sum(one * slope > 0 and abs(one) > LEAST_SLOPE / 2 for one in parts)
    return slope if agree >= PARTS - 1 else None


def _slope(d: Tensor, m: Tensor) -> tuple[float, float]:
    """Through the origin, with its standard error."""
    length = float(m @ m)
    if not length > 0.0:
        return 0.0, math.inf
    slope = float(d @ m) / length
    return slope, float((d - slope * m).norm()) / math.sqrt(len(m) * length)


def _nan_last(value: float) -> float:
    return math.inf if math.isnan(value) else value


def assert_learning(policy: Policy, changed: bool) -> None:
    """After the first update the adapter's delta is no longer zero; of a model without one, the weights
    are others.
    """
    if policy.has_adapter and not adapters.delta_norm(policy.model) > 0.0:
        raise TrustError(
            "the adapter's delta is still zero after the first update: its parameters get no gradient, or the optimizer does not hold them"
        )
    if not policy.has_adapter and not changed:
        raise TrustError(
            "the first update has changed no weight: optimizer.learning_rate is too small for fp32, or nothing is trained"
        )
