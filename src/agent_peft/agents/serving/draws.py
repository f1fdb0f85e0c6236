"""Replies that are under way: the engine's thread draws them, and the event loop reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from agent_peft.policies.sampling import SamplingConfig, StopMatcher
from agent_peft.policies.tokenization import ChatTokenizer
from agent_peft.types import InfrastructureError


class Drawn(NamedTuple):
    """A token, its log-probability in nats, and the likeliest tokens in its place with theirs."""

    token: int
    logprob: float
    alternatives: Sequence[tuple[int, float]]


class Draw:
    """One reply to one prompt: a ``Request`` of the engine.

    Args:
        alternatives: how many likeliest tokens to record with each drawn one.
        streamed: call ``on_change`` at each token, and not only at the end.
        on_change: called on the engine's thread.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        seed: int,
        sampling: SamplingConfig,
        on_change: Callable[[Draw], None],
        alternatives: int = 0,
        streamed: bool = False,
    ) -> None:
        self.tokens_before, self.seed, self.sampling = tuple(prompt), seed, sampling
        self.alternatives, self.streamed, self._on_change = alternatives, streamed, on_change
        self.cancelled = self.ended = False
        self.error: BaseException | None = None
        self.drawn: list[Drawn] = []

    @property
    def prompt(self) -> Sequence[int] | None:
        if self.cancelled:
            self._end()
            return None
        return self.tokens_before

    @property
    def tokens(self) -> list[int]:
        return [drawn.token for drawn in self.drawn]

    def take(self, place: int, token: int, logprob: float, alternatives: Sequence[tuple[int, float]]) -> None:
        if place < len(self.drawn):
            if token != self.drawn[place].token:  # of two almost equal ones, rounding has taken the other
                self.fail(InfrastructureError("the memory was too small for a moment; ask again"))
            return
        self.drawn.append(Drawn(token, logprob, alternatives))
        if self.streamed:
            self._on_change(self)

    def act(self, action: Sequence[int], logprobs: Sequence[float], room: int) -> None:
        self._end()

    def fail(self, error: BaseException) -> None:
        if not self.ended:
            self.error, self.cancelled = error, True
            self._end()

    def _end(self) -> None:
        if not self.ended:
            self.ended = True
            self._on_change(self)

    def is_cut(self, chat: ChatTokenizer) -> bool:
        """Whether a limit, and not the policy or a stop string, has ended the reply."""
        matcher = StopMatcher([text.encode() for text in self.sampling.stop], chat.token_bytes)
        return not any(matcher.push(token) or token in chat.end_of_turn for token in self.tokens)
