"""Rewards: the configuration prices the facts that an environment states.

An episode's reward is the configured value of its outcome and stop reason, the weighted ``score`` of its
environment, and Σ weight · term(trajectory) over the ``terms``. A turn has what it added to the score, and
the rest is at the last turn.
"""

from __future__ import annotations

import inspect
import math
import numbers
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from agent_peft.config import Config
from agent_peft.lookup import find, may_import, nearest
from agent_peft.types import AgentPeftError, Outcome, StopReason, Trajectory

WEIGHT = "the term is multiplied by this"
LARGEST = 1e6  # of a price and of a term; fp32 has 24 bits, so rewards that differ by 0.06 stay different
TOO_LARGE = f"beyond {LARGEST:,.0f} small rewards are lost next to it in float32; scale it down"
WHEN = "whether the term counts in every episode or only in correct ones"


class TermConfig(Config):
    """The base of a term: its weight, and the episodes that it counts for."""

    model_config = ConfigDict(allow_inf_nan=False)

    kind: str
    weight: float
    when: Literal["correct", "always"]


class LengthPenaltyConfig(TermConfig):
    """0 up to ``target_tokens``, then falling to -1 after ``buffer_tokens`` more. If its weight is below the
    price of a correct outcome, a correct answer is never worth less than none.
    """

    kind: Literal["length_penalty"] = "length_penalty"
    target_tokens: int = Field(ge=1, description="action tokens of an episode that cost nothing")
    buffer_tokens: int | None = Field(
        default=None,
        ge=1,
        description="tokens above target_tokens over which the term falls from 0 to -1; null takes as many "
        "as target_tokens",
    )
    weight: float = Field(default=0.1, ge=0, description=WEIGHT)
    when: Literal["correct", "always"] = Field(default="correct", description=WHEN)


class ReasoningStepsConfig(TermConfig):
    """One for each reasoning step. A step is a line of the agent's text before the last line, which is the
    answer. Blank and repeated lines do not count.
    """

    kind: Literal["reasoning_steps"] = "reasoning_steps"
    max_steps: int = Field(default=5, ge=1, description="maximum number of steps that count")
    weight: float = Field(default=0.1, ge=0, description=WEIGHT)
    when: Literal["correct", "always"] = Field(default="correct", description=WHEN)


class FormatConfig(TermConfig):
    """The share of turns whose action the environment could understand."""

    kind: Literal["format"] = "format"
    weight: float = Field(default=0.1, ge=0, description=WEIGHT)
    when: Literal["correct", "always"] = Field(default="always", description=WHEN)


class CustomTermConfig(TermConfig):
    """A function of the user's own, from a ``Trajectory`` with its prices in ``rewards`` to a number."""

    kind: str = Field(
        description="length_penalty, reasoning_steps, format, or a function of your own as "
        "package.module:function"
    )
    weight: float = Field(default=1.0, description=WEIGHT)
    when: Literal["correct", "always"] = Field(default="always", description=WHEN)

    @field_validator("kind")
    @classmethod
    def _importable(cls, kind: str) -> str:
        if ":" not in kind:
            advice = nearest(kind, TERMS.keys(), "your own as package.module:function")
            raise ValueError(f"there is no kind {kind!r}; {advice}")
        if may_import(kind):
            custom_function(kind)
        return kind


def length_penalty(config: LengthPenaltyConfig, trajectory: Trajectory) -> float:
    """-min(1, max(0, n - target) / buffer) for n action tokens. With target = L_max - L_cache and buffer =
    L_cache this is DAPO's soft overlong punishment (Yu et al., 2025, equation 13).

    >>> from agent_peft.types import Task, Turn
    >>> episode = Trajectory(Task("t"), (Turn((1,), (2,) * 90, (-0.5,) * 90),))
    >>> length_penalty(LengthPenaltyConfig(target_tokens=80, buffer_tokens=20), episode)
    -0.5
    """
    buffer = config.buffer_tokens or config.target_tokens
    return -min(1.0, max(0, trajectory.num_action_tokens - config.target_tokens) / buffer)


def reasoning_steps(config: ReasoningStepsConfig, trajectory: Trajectory) -> float:
    """min(max_steps, number of different lines before the last).

    >>> from agent_peft.types import Message, Task
    >>> reply = Message("assistant", "48 / 2 = 24\\n48 + 24 = 72\\n\\n#### 72")
    >>> reasoning_steps(ReasoningStepsConfig(), Trajectory(Task("t"), (), messages=(reply,)))
    2.0
    """
    replies = [message.text for message in trajectory.messages if message.role == "assistant"]
    text = "\n".join(replies[-len(trajectory.turns) :])  # earlier ones are examples in the prompt
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return float(min(config.max_steps, len(set(lines[:-1]))))


def valid_share(config: FormatConfig, trajectory: Trajectory) -> float:
    """1 where every action was valid, 0 where none was."""
    return 1.0 - trajectory.num_invalid / len(trajectory.turns)


def custom_term(config: CustomTermConfig, trajectory: Trajectory) -> float:
    """Call the user's function."""
    place = f"reward term {config.kind!r}, task {trajectory.task.id!r}"
    try:
        found = custom_function(config.kind)(trajectory)
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # anything may go wrong in there, and a library in Rust may panic
        last = traceback.extract_tb(error.__traceback__)[-1]
        cause = f"{type(error).__name__}: {error}"
        raise AgentPeftError(
            f"{place}: fails at {Path(last.filename).name}:{last.lineno} ({cause}); correct it"
        ) from error
    number: Any = found if isinstance(found, numbers.Real) else math.nan
    if not -math.inf < number < math.inf:
        raise AgentPeftError(f"{place}: returned {found!r:.60}, which is not a finite number; return a float")
    if abs(number) > LARGEST:  # a whole number may be beyond the floats
        raise AgentPeftError(f"{place}: returned {number!s:.20}; {TOO_LARGE}")
    return float(number)


def custom_function(kind: str) -> Callable[[Trajectory], Any]:
    """Return the function that ``package.module:function`` names.

    Raises:
        ValueError: there is no such function of one argument.
    """
    found = find(kind, "package.module:function")
    if not callable(found):
        raise ValueError(f"{kind!r} is not a function but {found!r:.60}; name a function of a trajectory")
    try:
        inspect.signature(found).bind(None)
    except TypeError as error:
        raise ValueError(
            f"{kind!r} cannot be called with a trajectory ({error}); write it as def f(trajectory)"
        ) from error
    except ValueError:  # not every built-in has a signature
        pass
    return found  # type: ignore[no-any-return]


TERMS: dict[str, tuple[type[TermConfig], Callable[[Any, Trajectory], float]]] = {
    "length_penalty": (LengthPenaltyConfig, length_penalty),
    "reasoning_steps": (ReasoningStepsConfig, reasoning_steps),
    "format": (FormatConfig, valid_share),
}


def _tag(value: Any) -> str:
    kind = value.get("kind") if isinstance(value, Mapping) else getattr(value, "kind", None)
    return str(kind) if kind in TERMS else "custom"


AnyTerm = Annotated[
    # first, so that the mistakes of a kind that is in no row are reported as its
    Annotated[CustomTermConfig, Tag("custom")]
    | Annotated[LengthPenaltyConfig, Tag("length_penalty")]
    | Annotated[ReasoningStepsConfig, Tag("reasoning_steps")]
    | Annotated[FormatConfig, Tag("format")],
    Discriminator(_tag),
]


class RewardConfig(Config):
    """Prices of facts. The price of a stop reason, where one is set, replaces that of the outcome unless the
    outcome is correct. An episode that crashed or met a defect has the lowest of all prices, so that an agent
    cannot gain by it.

    >>> RewardConfig(timeout=-0.3).end(Outcome.INCORRECT, StopReason.TIMEOUT)
    -0.3
    """

    model_config = ConfigDict(allow_inf_nan=False)

    correct: float = Field(
        default=1.0, description="price of an episode that the environment grades as correct"
    )
    incorrect: float = Field(default=-0.1, description="price of an episode that it grades as incorrect")
    unknown: float = Field(default=0.0, description="price of an episode that it does not grade")
    timeout: float | None = Field(
        default=None,
        description="price of an episode whose clock ran out (episode_seconds); null takes its outcome's",
    )
    turn_limit: float | None = Field(
        default=None, description="price of an episode that used all its turns; null takes its outcome's"
    )
    token_limit: float | None = Field(
        default=None,
        description="price of an episode that ran into sampling.max_tokens; null takes its outcome's",
    )
    invalid_action: float = Field(
        default=0.0, description="price of each turn whose action could not be understood"
    )
    cut_action: float = Field(
        default=0.0, description="price of each turn whose action sampling.max_new_tokens or max_tokens ended"
    )
    score: float = Field(
        default=0.0,
        description="weight of the environment's score, from 0 to 1, at the turns that raised it; an episode "
        "that ends without a score gets nothing for it",
    )
    terms: tuple[AnyTerm, ...] = Field(default=(), description="further rewards, added at the last turn")

    @property
    def price_below_0(self) -> str | None:
        """The lowest price, where an episode of one turn could have a return below 0 without ``terms``."""
        ends = ("correct", "unknown", "incorrect", "timeout", "turn_limit", "token_limit")
        prices = {key: getattr(self, key) for key in (*ends, "invalid_action", "cut_action", "score")}
        prices = {key: price for key, price in prices.items() if price is not None}
        failed = min(price for key, price in prices.items() if key in ends[2:])
        failed += sum(min(price, 0.0) for key, price in prices.items() if key not in ends)
        below = min(failed, self.correct, self.unknown) < 0
        return min(prices, key=lambda key: prices[key]) if below else None

    @model_validator(mode="after")
    def _not_too_large(self) -> RewardConfig:
        for key, value in self:
            if isinstance(value, float) and abs(value) > LARGEST:
                raise ValueError(f"{key}: {value:g} is too large: {TOO_LARGE}")
        return self

    def end(self, outcome: Outcome, stop_reason: StopReason) -> float:
        """The price of an episode's end.

        Raises:
            ValueError: for an infrastructure failure, which has no price. Such an episode is repeated, and no
                policy learns from it.
        """
        if stop_reason is StopReason.INFRASTRUCTURE:
            raise ValueError("an infrastructure failure has no price: keep its trajectory out")
        stops = {
            StopReason.TIMEOUT: self.timeout,
            StopReason.TURN_LIMIT: self.turn_limit,
            StopReason.TOKEN_LIMIT: self.token_limit,
        }
        worst = min(self.incorrect, self.unknown, *(price for price in stops.values() if price is not None))
        price = {**stops, StopReason.CRASHED: worst, StopReason.DEFECT: worst}.get(stop_reason)
        if outcome is Outcome.CORRECT or price is None:
            return {
                Outcome.CORRECT: self.correct,
                Outcome.INCORRECT: self.incorrect,
                Outcome.UNKNOWN: self.unknown,
            }[outcome]
        return price


def price(trajectory: Trajectory, config: RewardConfig) -> Trajectory:
    """Return the trajectory with one reward per turn, and with what each term of the reward gave. The prices
    of invalid and cut actions are at their turns, and so is what a turn added to the score; the price of the
    end and the terms are at the last turn.

    ``reward_terms`` names the price of the end ``outcome``, and the others after their keys, as far as these
    are set. Terms of one kind are added up. Their sum is the return, but for rounding.

    Raises:
        ValueError: the trajectory is an infrastructure failure, or has no turn.

    >>> from agent_peft.types import Task, Turn
    >>> turns = (Turn((1,), (2,), (-0.5,), valid=False), Turn((3,), (4,), (-0.5,)))
    >>> solved = Trajectory(Task("t"), turns, outcome=Outcome.CORRECT)
    >>> priced = price(solved, RewardConfig(invalid_action=-0.1))
    >>> priced.rewards, priced.reward_terms
    ((-0.1, 1.0), {'outcome': 1.0, 'invalid_action': -0.1})
    """
    end = config.end(trajectory.outcome, trajectory.stop_reason)
    if not trajectory.turns:
        raise ValueError(f"the trajectory of task {trajectory.task.id!r} has no turn to bear a reward")
    rewards = [
        (0.0 if turn.valid else config.invalid_action) + (config.cut_action if turn.cut else 0.0)
        for turn in trajectory.turns
    ]
    rewards[-1] += end
    given = [("outcome", end)]
    if config.invalid_action:
        given.append(("invalid_action", config.invalid_action * trajectory.num_invalid))
    if config.cut_action:
        given.append(("cut_action", config.cut_action * trajectory.num_cut))
    if config.score and trajectory.score is not None:
        given.append(("score", config.score * trajectory.score))
        rewards = [r + config.score * more for r, more in zip(rewards, _progress(trajectory), strict=True)]
    priced = replace(trajectory, rewards=tuple(rewards), reward_terms=_by_name(given))
    if not config.terms:
        return priced
    terms = [(term.kind, term.weight * worth(term, priced)) for term in config.terms]
    rewards[-1] += sum(value for _, value in terms)
    return replace(priced, rewards=tuple(rewards), reward_terms=_by_name([*given, *terms]))


def _progress(trajectory: Trajectory) -> list[float]:
    """What each turn added to the score; the last one adds what is missing to the score of the episode."""
    so_far = [0.0]
    for turn in trajectory.turns[:-1]:
        so_far.append(so_far[-1] if turn.score is None else turn.score)
    so_far.append(trajectory.score or 0.0)
    return [now - before for before, now in pairwise(so_far)]


def _by_name(values: Sequence[tuple[str, float]]) -> dict[str, float]:
    added: dict[str, float] = {}
    for name, value in values:
        added[name] = added.get(name, 0.0) + value  # also makes 0.0 of -0.0
    return added


def worth(term: TermConfig, trajectory: Trajectory) -> float:
    """A term's value before its weight; 0 for an episode that it does not count for."""
    if term.when == "correct" and trajectory.outcome is not Outcome.CORRECT:
        return 0.0
    measure: Callable[[Any, Trajectory], float] = TERMS[term.kind][1] if term.kind in TERMS else custom_term
    return measure(term, trajectory)
