"""Requests of many clients on one thread that computes: those for one policy share its decode steps."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from queue import Empty, SimpleQueue

from agent_peft.hardware import give_back_memory
from agent_peft.policies.engine.base import EngineConfig
from agent_peft.policies.engine.local import LocalEngine, OpenEngine
from agent_peft.policies.engine.open_decoding import OpenDecoding, Request
from agent_peft.policies.models.positions import bound_of
from agent_peft.policies.policy import Policy
from agent_peft.types import InfrastructureError

logger = logging.getLogger(__name__)

STOPPING = "the server is stopping"
IDLE = 1.0  # seconds without a request, after which the keys and values are given back


class Service:
    """Policies that answer requests, by name. Each has its own decoding, and they take turns, a step each.

    The weights are prepared for sampling at a policy's first request, and stay so until ``close``: do not
    train the policies meanwhile.

    Args:
        max_tokens: the most tokens of a prompt and its reply together, as far as the model can read them.
    """

    def __init__(self, policies: Mapping[str, Policy], config: EngineConfig, max_tokens: int) -> None:
        self.policies = policies
        self.config = config
        self.max_tokens = {}
        for name, policy in policies.items():
            bound = bound_of(policy.base.config)
            self.max_tokens[name] = min(max_tokens, max_tokens if bound is None else bound.positions)
        self._engines = {name: LocalEngine(policy, config) for name, policy in policies.items()}
        self._arrivals: SimpleQueue[tuple[str, Request] | None] = SimpleQueue()
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

    def submit(self, name: str, request: Request) -> None:
        """Let a request join. Any thread may call this. After ``close`` the request fails at once."""
        with self._closing:
            if not self._closed:
                self._arrivals.put((name, request))
                return
        request.fail(InfrastructureError(STOPPING))

    def close(self) -> None:
        """Fail what is under way, and end the thread."""
        with self._closing:
            self._closed = True
        self._arrivals.put(None)
        self._thread.join()

    def _run(self) -> None:
        with ExitStack() as stack:
            ready: dict[str, OpenEngine] = {}
            while not self._closed:
                for name, request in self._wait():
                    try:
                        if name not in ready:
                            engine = self._engines[name]
                            ready[name] = stack.enter_context(engine.opened(self.max_tokens[name]))
                        if name not in self._decodings:
                            self._decodings[name] = ready[name]()
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
        while not self._arrivals.empty():
            if (arrival := self._arrivals.get()) is not None:
                arrival[1].fail(stopping)

    def _wait(self) -> list[tuple[str, Request]]:
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
