"""From facts to rewards: what an outcome is worth is the configuration's word, never the environment's.

An episode's reward is its prices (for most, its accuracy) and the ``terms``: Σ weight · term(trajectory),
added at the last turn.
"""

from __future__ import annotations

import difflib
import inspect
import math
import numbers
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator

from agent_peft.lookup import find, may_import
from agent_peft.types import AgentPeftError, Outcome, StopReason, Trajectory


class TermConfig(BaseModel):
    """Base of the terms: how much one is worth, and for which episodes."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kind: str
    weight: float
    when: Literal["correct", "always"]


class LengthPenaltyConfig(TermConfig):
    """0 up to ``target_tokens``, then falling, -1 from twice as many on: with a weight below the price of
    being correct, a correct answer is never worth less than none.
    """

    kind: Literal["length_penalty"] = "length_penalty"
    target_tokens: int = Field(ge=1, description="action tokens of an episode that cost nothing")
    weight: float = Field(default=0.1, ge=0)
    when: Literal["correct", "always"] = "correct"


class ReasoningStepsConfig(TermConfig):
    """One for each reasoning step: a line of what the agent said, but for its last line, the answer. Blank
    and repeated lines are none.
    """

    kind: Literal["reasoning_steps"] = "reasoning_steps"
    max_steps: int = Field(default=5, ge=1, description="more are worth no more")
    weight: float = Field(default=0.1, ge=0)
    when: Literal["correct", "always"] = "correct"


class FormatConfig(TermConfig):
    """The share of turns whose action the environment could understand."""

    kind: Literal["format"] = "format"
    weight: float = Field(default=0.1, ge=0)
    when: Literal["correct", "always"] = "always"


class OwnTermConfig(TermConfig):
    """A function of the user's own, from a ``Trajectory`` (with its prices in ``rewards``) to a number."""

    kind: str = Field(
        description="length_penalty, reasoning_steps, format, or a function of your own as package.module:function"
    )
    weight: float = 1.0
    when: Literal["correct", "always"] = "always"

    @field_validator("kind")
    @classmethod
    def _importable(cls, kind: str) -> str:
        if ":" not in kind:
            near = difflib.get_close_matches(kind, TERMS, 1)
            advice = (
                f"did you mean {near[0]!r}?"
                if near
                else f"give one of {', '.join(TERMS)}, or your own as package.module:function"
            )
            raise ValueError(f"there is no kind {kind!r}; {advice}")
        if may_import(kind):
            own_function(kind)
        return kind


def length_penalty(config: LengthPenaltyConfig, trajectory: Trajectory) -> float:
    """-min(1, max(0, n - target) / target) for n action tokens."""
    return -min(1.0, max(0, trajectory.num_action_tokens - config.target_tokens) / config.target_tokens)


def reasoning_steps(config: ReasoningStepsConfig, trajectory: Trajectory) -> float:
    """min(max_steps, number of different lines before the last).

    >>> from agent_peft.types import Message, Task
    >>> said = Message("assistant", "48 / 2 = 24\\n48 + 24 = 72\\n\\n#### 72")
    >>> reasoning_steps(ReasoningStepsConfig(), Trajectory(Task("t"), (), messages=(said,)))
    2.0
    """
    said = "\n".join(message.content for message in trajectory.messages if message.role == "assistant")
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return float(min(config.max_steps, len(set(lines[:-1]))))


def valid_share(config: FormatConfig, trajectory: Trajectory) -> float:
    """1 where every action was valid, 0 where none was."""
    return 1.0 - trajectory.num_invalid / len(trajectory.turns)


def own_term(config: OwnTermConfig, trajectory: Trajectory) -> float:
    """What the user's function returns.

    Raises:
        AgentPeftError: it fails, or returns no finite number.
    """
    place = f"reward term {config.kind!r}, task {trajectory.task.id!r}"
    try:
        found = own_function(config.kind)(trajectory)
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # anything may go wrong in there, and a library in Rust may panic
        last = traceback.extract_tb(error.__traceback__)[-1]
        cause = f"{type(error).__name__}: {error}"
        raise AgentPeftError(
            f"{place}: fails at {Path(last.filename).name}:{last.lineno} ({cause}); correct it"
        ) from error
    if not isinstance(found, numbers.Real) or not math.isfinite(found):
        raise AgentPeftError(f"{place}: returned {found!r:.60}, which is no finite number; return a float")
    return float(found)


def own_function(kind: str) -> Callable[[Trajectory], Any]:
    """The function that ``package.module:function`` names.

    Raises:
        ValueError: there is none.
    """
    found = find(kind, "package.module:function")
    if not callable(found):
        raise ValueError(f"{kind!r} is no function but {found!r:.60}; name a function of a trajectory")
    try:
        inspect.signature(found).bind(None)
    except TypeError as error:
        raise ValueError(
            f"{kind!r} cannot be called with a trajectory ({error}); write it as def f(trajectory)"
        ) from error
    except ValueError:  # not all that is built in says what it takes
        pass
    return found  # type: ignore[no-any-return]


TERMS: dict[str, tuple[type[TermConfig], Callable[[Any, Trajectory], float]]] = {
    "length_penalty": (LengthPenaltyConfig, length_penalty),
    "reasoning_steps": (ReasoningStepsConfig, reasoning_steps),
    "format": (FormatConfig, valid_share),
}


def _tag(value: Any) -> str:
    kind = value.get("kind") if isinstance(value, Mapping) else getattr(value, "kind", None)
    return str(kind) if kind in TERMS else "own"


AnyTerm = Annotated[
    Annotated[
        OwnTermConfig, Tag("own")
    ]  # first, so that the mistakes of a kind that is in no row are told as its
    | Annotated[LengthPenaltyConfig, Tag("length_penalty")]
    | Annotated[ReasoningStepsConfig, Tag("reasoning_steps")]
    | Annotated[FormatConfig, Tag("format")],
    Discriminator(_tag),
]


class RewardConfig(BaseModel):
    """Prices. That of a stop reason, where one is given, takes the place of the outcome's, unless the outcome
    is correct. An episode that the agent crashed, or that met a defect, costs what the worst end costs:
    neither is a way out of another one.

    >>> RewardConfig(timeout=-0.3).end(Outcome.INCORRECT, StopReason.TIMEOUT)
    -0.3
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    correct: float = Field(default=1.0, description="an episode that the environment grades as correct")
    incorrect: float = Field(default=-0.1, description="one that it grades as incorrect")
    unknown: float = Field(default=0.0, description="one that it does not grade")
    timeout: float | None = Field(
        default=None, description="one whose clock ran out (episode_seconds); null: as its outcome"
    )
    turn_limit: float | None = Field(
        default=None, description="one that used all its turns; null: as its outcome"
    )
    token_limit: float | None = Field(
        default=None, description="one that ran into sampling.max_tokens; null: as its outcome"
    )
    invalid_action: float = Field(
        default=0.0, description="for each turn whose action could not be understood"
    )
    cut_action: float = Field(
        default=0.0, description="for each turn whose action sampling.max_new_tokens or max_tokens ended"
    )
    terms: tuple[AnyTerm, ...] = Field(
        default=(), description="what else is worth something, at the last turn"
    )

    def end(self, outcome: Outcome, stop_reason: StopReason) -> float:
        """What the end of an episode is worth.

        Raises:
            ValueError: an infrastructure failure, which has no price: such an episode is repeated, never
                learnt from.
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
    """The trajectory with one reward per turn: an invalid or cut action's at its turn, the end's and the
    terms' at the last (they add up).

    Raises:
        ValueError: an infrastructure failure, or no turn to bear the price.
        AgentPeftError: a term of the user's own fails.

    >>> from agent_peft.types import Task, Turn
    >>> turns = (Turn((1,), (2,), (-0.5,), valid=False), Turn((3,), (4,), (-0.5,)))
    >>> price(Trajectory(Task("t"), turns, outcome=Outcome.CORRECT), RewardConfig(invalid_action=-0.1)).rewards
    (-0.1, 1.0)
    """
    end = config.end(trajectory.outcome, trajectory.stop_reason)
    if not trajectory.turns:
        raise ValueError(f"the trajectory of task {trajectory.task.id!r} has no turn to bear a reward")
    rewards = [0.0 if turn.valid else config.invalid_action for turn in trajectory.turns]
    rewards = [
        reward + config.cut_action if turn.cut else reward
        for reward, turn in zip(rewards, trajectory.turns, strict=True)
    ]
    rewards[-1] += end
    priced = replace(trajectory, rewards=tuple(rewards))
    if not config.terms:
        return priced
    rewards[-1] += sum(term.weight * worth(term, priced) for term in config.terms)
    return replace(priced, rewards=tuple(rewards))


def worth(term: TermConfig, trajectory: Trajectory) -> float:
    """A term's value before its weight; 0 for an episode that it does not speak of."""
    if term.when == "correct" and trajectory.outcome is not Outcome.CORRECT:
        return 0.0
    measure: Callable[[Any, Trajectory], float] = TERMS[term.kind][1] if term.kind in TERMS else own_term
    return measure(term, trajectory)
