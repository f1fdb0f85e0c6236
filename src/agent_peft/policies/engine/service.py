"""Requests of many clients on one thread that computes. Those for one policy share its decode steps, which
they join at any time, each with its own sampling.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import ExitStack
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar

import torch

from agent_peft.hardware import give_back_memory, is_out_of_memory
from agent_peft.policies.engine.base import Conversation, EngineConfig
from agent_peft.policies.engine.decoding import Decoding, Row
from agent_peft.policies.engine.kv_cache import ROWS
from agent_peft.policies.engine.local import LocalEngine
from agent_peft.policies.engine.prompt_lookup import PromptLookup
from agent_peft.policies.engine.weights import sampling_weights
from agent_peft.policies.policy import Policy
from agent_peft.policies.sampling import DISTRIBUTION, SamplingConfig, draw, log_distribution
from agent_peft.types import AgentPeftError, InfrastructureError

STEP_TOKENS = 256  # of prompts, which are read between two decode steps
FIRST_TOKENS = 32  # of one action, for which a row has room at first


class Constraint(Protocol):
    """Which tokens a reply may continue with."""

    def allowed(self, action: Sequence[int], size: int) -> torch.Tensor | None:
        """The tokens that may follow ``action``, as a mask (size,) on the CPU. None allows all."""
        ...


class Request(Conversation, Protocol):
    """A conversation of one action that brings its own sampling, and receives each token as it is drawn."""

    sampling: SamplingConfig
    alternatives: int  # likeliest tokens to report with each drawn one
    constraint: Constraint | None  # log-probabilities are then those under its mask
    cancelled: bool  # nobody waits for it any more, so its row becomes free after the next token

    def take(self, place: int, token: int, logprob: float, alternatives: Sequence[tuple[int, float]]) -> None:
        """Receive the action's token at ``place``, on the decoding thread; again after an out of memory."""
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
        engine: its weights must be prepared for sampling.
        max_tokens: the most tokens of one conversation; ``sampling.max_tokens`` of none may be larger.
    """

    def __init__(self, engine: LocalEngine, max_tokens: int) -> None:
        capacity = min(engine.rows, engine.config.rows_of(max_tokens))
        super().__init__(
            engine.policy,
            engine.config.model_copy(update={"overlap": 1}),  # nobody's answer is waited for
            engine.new_cache,
            conversations=(),
            sampling=SamplingConfig(max_new_tokens=FIRST_TOKENS, max_tokens=max_tokens),
            threads=_SameThread(),
            shares=engine.shares,
            capacity=capacity,
            drafts=True,
        )
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
        self.queue.append(row := Row(request, self._added))
        if request.constraint is not None:
            row.lookup = PromptLookup(longest=0)  # a mask follows one token
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
        """Where one row alone does not fit, its request fails, and the others continue with all rows."""
        try:
            super()._halve(error)
        except AgentPeftError as refused:
            for row in self.rows:
                _request_of(row).fail(refused)
            self.capacity = self._most
            self._clear()

    def _sampling_of(self, row: Row) -> SamplingConfig:
        return _request_of(row).sampling

    def _step_tokens(self) -> int:
        return STEP_TOKENS if self.decoding else super()._step_tokens()

    def _room(self, row: Row) -> int:
        return 0 if _request_of(row).cancelled else super()._room(row)

    def _take(self, row: Row, token: int, logprob: float, logits: torch.Tensor) -> bool:
        request = _request_of(row)
        others = _likeliest(logits, request.sampling, request.alternatives)
        request.take(len(row.action), token, logprob, others)
        return super()._take(row, token, logprob, logits)

    def _draw(
        self, rows: Sequence[Row], logits: torch.Tensor, uniforms: torch.Tensor
    ) -> tuple[list[int], list[float]]:
        for i, row in enumerate(rows):
            self._mask(row, logits[i])
        alike: dict[tuple[float, ...], list[int]] = {}
        for i, row in enumerate(rows):
            sampling = self._sampling_of(row)
            alike.setdefault(tuple(getattr(sampling, key) for key in DISTRIBUTION), []).append(i)
        tokens, logprobs = [0] * len(rows), [0.0] * len(rows)
        for places in alike.values():
            index: Any = slice(None)  # of all rows, without a copy
            if len(alike) > 1:
                index = torch.tensor(places, device=logits.device)
            drawn = draw(logits[index], uniforms[index], self._sampling_of(rows[places[0]]))
            for i, token, logprob in zip(places, drawn[0].tolist(), drawn[1].tolist(), strict=True):
                tokens[i], logprobs[i] = token, logprob
        return tokens, logprobs

    def _mask(self, row: Row, logits: torch.Tensor) -> None:
        """Take the tokens that a request does not allow out of ``logits`` (V,)."""
        request = _request_of(row)
        if request.constraint is None:
            return
        try:
            allowed = request.constraint.allowed(row.action, len(logits))
        except AgentPeftError as error:
            request.fail(error)
            return
        if allowed is not None:
            logits.masked_fill_(~allowed.to(logits.device), -torch.inf)


def _request_of(row: Row) -> Request:
    return row.conversation  # type: ignore[return-value]  # ``add`` takes no others


def _likeliest(logits: torch.Tensor, sampling: SamplingConfig, count: int) -> Sequence[tuple[int, float]]:
    """The likeliest tokens inside the support, and their log-probabilities in nats."""
    if not count:
        return ()
    values, tokens = log_distribution(logits, sampling).topk(min(count, logits.shape[-1]))
    pairs = zip(tokens.tolist(), values.tolist(), strict=True)
    return [(token, value) for token, value in pairs if value > -torch.inf]


logger = logging.getLogger(__name__)
Result = TypeVar("Result")
Scored = tuple[float, Sequence[tuple[int, float]]]  # a log-probability, and the likeliest tokens with theirs
WHOLE = SamplingConfig()

STOPPING = "the server is stopping"
IDLE = 1.0  # seconds without a request, after which the keys and values are given back


class _Job(Future[Result]):
    """Work for the thread that computes, between two decode steps. Cancelled, it does nothing."""

    def __init__(self, work: Callable[[], Result]) -> None:
        super().__init__()
        self._work = work

    def run(self) -> None:
        if self.set_running_or_notify_cancel():
            try:
                self.set_result(self._work())
            except BaseException as error:
                self.set_exception(error)

    def fail(self, error: BaseException) -> None:
        if self.set_running_or_notify_cancel():
            self.set_exception(error)


class Service:
    """Policies that answer requests, by name. Each has its own decoding, and they take turns, a step each.

    The weights are prepared for sampling at a policy's first request, and stay so until ``close``: do not
    train the policies meanwhile.

    Args:
        max_tokens: the most tokens of a prompt and its reply together, as far as the model can read them.
    """

    def __init__(self, policies: Mapping[str, Policy], config: EngineConfig, max_tokens: int) -> None:
        self.policies = dict(policies)
        self.config = config
        self.max_tokens = {}
        for name, policy in policies.items():
            positions = max_tokens if policy.bound is None else policy.bound.positions
            self.max_tokens[name] = min(max_tokens, positions)
        self._engines = {name: LocalEngine(policy, config) for name, policy in policies.items()}
        self._arrivals: SimpleQueue[tuple[str, Request | _Job[Any]] | None] = SimpleQueue()
        self._prepared: dict[str, ExitStack] = {}  # policies whose weights are prepared for sampling
        self._decodings: dict[str, OpenDecoding] = {}
        self._worked: dict[str, float] = {}  # when each of them last computed
        self._closed = False
        self._closing = threading.Lock()  # what is submitted before ``close`` is seen by its thread
        self._thread = threading.Thread(target=self._run, name="sampler")
        self._thread.start()

    @property
    def rows(self) -> int:
        """Requests that have a row now, of all policies. They change while others look."""
        return sum(len(decoding.rows) for decoding in list(self._decodings.values()))

    def submit(self, name: str, request: Request | _Job[Any]) -> None:
        """Let a request join. Any thread may call this. After ``close`` the request fails at once."""
        with self._closing:
            if not self._closed:
                self._arrivals.put((name, request))
                return
        request.fail(InfrastructureError(STOPPING))

    def score(self, name: str, tokens: Sequence[int], alternatives: int = 0) -> Future[list[Scored]]:
        """Log-probabilities in nats of tokens[1:] at temperature 1, with the weights that the policy samples
        with, and the likeliest tokens in their places.
        """

        def work() -> list[Scored]:
            others: list[Sequence[tuple[int, float]]] = []
            scores = self._ready(name).read_scores(
                tokens,
                WHOLE,
                lambda logprobs: others.extend(_likeliest(one, WHOLE, alternatives) for one in logprobs),
            )
            return list(zip(scores, others, strict=True))

        job = _Job(work)
        self.submit(name, job)
        return job

    def add(self, name: str, engine: LocalEngine, max_tokens: int) -> None:
        """Serve another policy."""
        self._engines[name], self.max_tokens[name] = engine, max_tokens
        self.policies[name] = engine.policy

    def remove(self, name: str) -> Future[LocalEngine]:
        """Serve a policy no longer: its requests fail. The result is its engine, which nothing uses now."""
        del self.policies[name]
        self.submit(name, job := _Job(lambda: self._drop(name)))
        return job

    def close(self) -> None:
        """Fail what is under way, and end the thread."""
        with self._closing:
            self._closed = True
        self._arrivals.put(None)
        self._thread.join()

    def _ready(self, name: str) -> LocalEngine:
        """The engine of a policy, whose weights are prepared for sampling."""
        if (engine := self._engines.get(name)) is None:
            raise InfrastructureError(f"{name} has been unloaded")
        if name not in self._prepared:
            with ExitStack() as stack:
                stack.enter_context(sampling_weights(engine.policy, engine.way))
                self._prepared[name] = stack.pop_all()
        return engine

    def _drop(self, name: str) -> LocalEngine:
        if (decoding := self._decodings.pop(name, None)) is not None:
            self._fail(decoding.requests, InfrastructureError(f"{name} has been unloaded"))
        if (stack := self._prepared.pop(name, None)) is not None:
            stack.close()
        return self._engines.pop(name)

    def _run(self) -> None:
        with torch.no_grad():  # also once the first policy that was prepared has been dropped
            while not self._closed:
                for name, request in self._wait():
                    if isinstance(request, _Job):
                        request.run()
                        continue
                    try:
                        engine = self._ready(name)
                        if name not in self._decodings:
                            self._decodings[name] = OpenDecoding(engine, self.max_tokens[name])
                        self._decodings[name].add(request)
                    except BaseException as error:  # such as out of memory, as the weights are prepared
                        self._fail([request], error)
                for name in [name for name, decoding in self._decodings.items() if decoding.busy]:
                    self._advance(name)
                    self._worked[name] = time.monotonic()
                self._give_back()
            stopping = InfrastructureError(STOPPING)
            for decoding in self._decodings.values():
                for request in decoding.requests:  # no warning: some have ended, and await their last step
                    request.fail(stopping)
            self._decodings.clear()
            for stack in self._prepared.values():
                stack.close()
        while not self._arrivals.empty():
            if (arrival := self._arrivals.get()) is not None:
                arrival[1].fail(stopping)

    def _wait(self) -> list[tuple[str, Request | _Job[Any]]]:
        """The requests that have arrived. With nothing to decode, wait for one."""
        arrivals = []
        try:
            if not any(decoding.busy for decoding in self._decodings.values()):
                arrivals.append(self._arrivals.get(timeout=IDLE if self._decodings else None))
            while True:
                arrivals.append(self._arrivals.get_nowait())
        except Empty:
            pass
        return [arrival for arrival in arrivals if arrival is not None]

    def _give_back(self) -> None:
        """Drop the keys and values of policies that nobody asks."""
        now = time.monotonic()
        idle = [name for name, one in self._decodings.items() if not one.busy]
        for name in [name for name in idle if now - self._worked.get(name, now) >= IDLE]:
            del self._decodings[name]
            give_back_memory()

    def _advance(self, name: str) -> None:
        decoding = self._decodings[name]
        try:
            decoding.advance()
        except BaseException as error:  # the thread must continue for the others
            del self._decodings[name]
            self._fail(decoding.requests, error)
        else:
            # memory that was too small once is too small for the next ones, too
            self._engines[name].rows = decoding.capacity

    def _fail(self, requests: list[Request], error: BaseException) -> None:
        if requests:
            logger.warning("%d requests have failed: %s: %s", len(requests), type(error).__name__, error)
        for request in requests:
            request.fail(error)
