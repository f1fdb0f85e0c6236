"""Decoding that conversations join while it runs, each with its own sampling: for a server of policies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any, Protocol

import torch

from agent_peft.hardware import is_out_of_memory
from agent_peft.policies.engine.base import Conversation, EngineConfig
from agent_peft.policies.engine.decoding import CacheMaker, Decoding, Row
from agent_peft.policies.engine.kv_cache import ROWS
from agent_peft.policies.policy import Policy
from agent_peft.policies.sampling import SamplingConfig, draw, log_distribution
from agent_peft.types import AgentPeftError, InfrastructureError

FIRST_TOKENS = 32  # of one action, for which a row has room at first


class Request(Conversation, Protocol):
    """A conversation of one action that brings its own sampling, and hears each token as it is drawn."""

    sampling: SamplingConfig
    alternatives: int  # likeliest tokens to report with each drawn one
    cancelled: bool  # nobody waits for it any more, so its row becomes free after the next token

    def take(self, place: int, token: int, logprob: float, alternatives: Sequence[tuple[int, float]]) -> None:
        """Hear the action's token at ``place``, on the thread that draws. After an out of memory, tokens come
        again.
        """
        ...

    def fail(self, error: BaseException) -> None:
        """No further token will come. Without effect after the action's end."""
        ...


class _SameThread(Executor):
    """Runs at once, on the calling thread: these conversations answer without waiting for anything."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(work(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class OpenDecoding(Decoding):
    """``advance`` it while it is ``busy``. The distributions of rows differ, and their keys lie side by side,
    so a forward reads all of them.

    Args:
        capacity: the most rows at once; more conversations wait.
        max_tokens: the most tokens of one conversation; ``sampling.max_tokens`` of none may be larger.
    """

    def __init__(
        self,
        policy: Policy,
        config: EngineConfig,
        new_cache: CacheMaker,
        shares: bool,
        capacity: int,
        max_tokens: int,
    ) -> None:
        sampling = SamplingConfig(max_new_tokens=FIRST_TOKENS, max_tokens=max_tokens)
        config = config.model_copy(update={"overlap": 1})  # nobody's answer is waited for
        super().__init__(policy, config, new_cache, (), sampling, _SameThread(), shares, capacity)
        self._added, self._most = 0, capacity

    @property
    def busy(self) -> bool:
        return bool(self.queue or self.rows)

    @property
    def requests(self) -> list[Any]:
        """Those that have a row or wait for one."""
        return [row.conversation for row in (*self.rows, *self.queue)]

    def add(self, request: Request) -> None:
        """Let a request join at the next step at which there is a row for it."""
        self.queue.append(Row(request, self._added))
        self._added += 1

    def advance(self) -> None:
        for row in [row for row in self.queue if _request_of(row).cancelled]:
            self.queue.remove(row)
            _request_of(row).fail(InfrastructureError("the client has hung up"))
        try:
            self._widen()
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self._halve(error)
        super().advance()

    def _widen(self) -> None:
        """Make room for the rows that are there: keys for all that may come take gigabytes."""
        rows = self._most_rows()
        if self._cache is not None and rows > (have := self._cache.tiers[ROWS].slots):
            self._cache.widen(ROWS, min(self.capacity, max(rows, 2 * have)))

    def _halve(self, error: Exception) -> None:
        """Where one row alone does not fit, its request fails, and the others continue with as many rows as
        there were at first: it was not their number.
        """
        try:
            super()._halve(error)
        except AgentPeftError as refused:
            for row in self.rows:
                _request_of(row).fail(refused)
            self.capacity = self._most
            self._clear()

    def _sampling_of(self, row: Row) -> SamplingConfig:
        return _request_of(row).sampling

    def _is_full(self, row: Row) -> bool:
        return _request_of(row).cancelled or super()._is_full(row)

    def _draw(
        self, rows: Sequence[Row], logits: torch.Tensor, uniforms: torch.Tensor
    ) -> tuple[list[int], list[float]]:
        alike: dict[tuple[float, float, int], list[int]] = {}
        for i, row in enumerate(rows):
            sampling = self._sampling_of(row)
            alike.setdefault((sampling.temperature, sampling.top_p, sampling.top_k), []).append(i)
        tokens, logprobs = [0] * len(rows), [0.0] * len(rows)
        for places in alike.values():
            index: Any = slice(None)  # of all rows, without a copy
            if len(alike) > 1:
                index = torch.tensor(places, device=logits.device)
            drawn = draw(logits[index], uniforms[index], self._sampling_of(rows[places[0]]))
            for i, token, logprob in zip(places, drawn[0].tolist(), drawn[1].tolist(), strict=True):
                tokens[i], logprobs[i] = token, logprob
        for i, row in enumerate(rows):
            request = _request_of(row)
            others = _likeliest(logits[i], request.sampling, request.alternatives)
            request.take(len(row.action), tokens[i], logprobs[i], others)
        return tokens, logprobs


def _request_of(row: Row) -> Request:
    return row.conversation  # type: ignore[return-value]  # ``add`` takes no others


def _likeliest(logits: torch.Tensor, sampling: SamplingConfig, count: int) -> Sequence[tuple[int, float]]:
    """The likeliest tokens inside the support, and their log-probabilities in nats."""
    if not count:
        return ()
    values, tokens = log_distribution(logits, sampling).topk(min(count, logits.shape[-1]))
    pairs = zip(tokens.tolist(), values.tolist(), strict=True)
    return [(token, value) for token, value in pairs if value > -torch.inf]
