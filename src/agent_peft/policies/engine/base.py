"""What the engine is configured by, what it drives, and what it says of a call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Protocol

from pydantic import BaseModel, ConfigDict, Field

from agent_peft.policies.engine.schedule import Schedule


class EngineConfig(BaseModel):
    """How much is computed at once. None of it changes what is sampled, but for rounding."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rows: int = Field(default=64, ge=1, description="conversations that hold keys and values at once")
    kv_tokens: int | None = Field(
        default=None,
        ge=1,
        description="memory's budget: no more rows than may each be max_tokens long within it",
    )
    prefill_tokens: int = Field(default=2048, ge=1, description="tokens of one prefill, padding included")
    environment_threads: int | None = Field(
        default=None, ge=1, description="environments that answer at once; null is one for each row"
    )
    overlap: int = Field(
        default=2,
        ge=1,
        description="decode steps after which an environment's answer joins, if it is there; if not, as soon as it is",
    )
    schedule: Path | None = Field(
        default=None,
        description="a run directory: late answers join where they did in that run, which this one so repeats bit for bit",
    )

    def rows_of(self, max_tokens: int) -> int:
        """How many conversations at once, if each may be so long.

        >>> EngineConfig(rows=64, kv_tokens=8192).rows_of(max_tokens=1024)
        8
        """
        return self.rows if self.kv_tokens is None else max(1, min(self.rows, self.kv_tokens // max_tokens))


class Conversation(Protocol):
    """What the engine drives. ``seed`` alone decides what is drawn from a given distribution."""

    @property
    def prompt(self) -> Sequence[int] | None:
        """Tokens, or None where there is nothing to say. Asked once, on a thread, when there is a row for
        it or will soon be: so it may open what lies behind. The seed is asked later.
        """
        ...

    @property
    def seed(self) -> int: ...

    def act(self, action: Sequence[int], logprobs: Sequence[float], room: int) -> Sequence[int] | None:
        """Take the sampled action; give the tokens to read next, or None when it is over. Called on a thread,
        one call at a time.

        ``room`` is how many tokens the episode may still read and sample; observations that do not fit leave
        one more action no place.
        """
        ...


@dataclass(frozen=True)
class EngineStatistics:
    """What one call did: tokens read, tokens read if nothing had been shared or kept, tokens sampled, and
    decode steps. Sums have no schedule.
    """

    prefilled: int
    prefilled_naive: int
    sampled: int
    steps: int
    row_halvings: int = 0  # because the memory was too small
    late: int = 0  # answers that joined after they were due
    waited: float = field(
        default=0.0, compare=False
    )  # seconds in which nothing was computed, for environments
    schedule: Schedule = ()

    def __add__(self, other: EngineStatistics) -> EngineStatistics:
        return EngineStatistics(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)[:-1]))
