"""The thread that computes for a server: its end; and how requests join those that decode."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field

import pytest

from agent_peft.policies.engine import service as services
from agent_peft.policies.engine.base import EngineConfig
from agent_peft.policies.engine.kv_cache import TierCache
from agent_peft.policies.engine.local import LocalEngine
from agent_peft.policies.engine.service import OpenDecoding, Service
from agent_peft.policies.engine.weights import sampling_weights
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.types import InfrastructureError


class Asked:
    """A request for nothing: it ends as soon as the engine looks at it. It keeps what it hears."""

    seed = 0
    constraint = None

    def __init__(self):
        self.heard = []

    @property
    def prompt(self):
        self.heard.append("over")

    def fail(self, error):
        self.heard.append(error)


@pytest.fixture
def service(make_policy):
    return Service({"mine": make_policy("llama")}, EngineConfig(rows=1), 32)


def test_what_is_submitted_after_the_end_fails_at_once(service):
    service.close()
    late = Asked()
    service.submit("mine", late)
    (error,) = late.heard
    assert isinstance(error, InfrastructureError) and str(error) == "the server is stopping"


def test_no_request_is_lost_while_the_service_closes(service):
    requests, half = [Asked() for _ in range(1000)], threading.Event()

    def ask():
        for number, request in enumerate(requests):
            service.submit("mine", request)
            if number == 500:
                half.set()

    client = threading.Thread(target=ask)
    client.start()
    assert half.wait(60)
    service.close()
    client.join(60)
    assert not client.is_alive() and all(request.heard for request in requests)


@dataclass
class Greedy:
    """A request at temperature 0, which keeps its tokens."""

    prompt: list[int]
    count: int
    seed: int = 0
    alternatives: int = 0
    constraint: None = None
    cancelled: bool = False
    taken: list[int] = field(default_factory=list)

    @property
    def sampling(self):
        return SamplingConfig(temperature=0.0, max_new_tokens=self.count, max_tokens=200)

    def take(self, place, token, logprob, others):
        self.taken.append(token)

    def act(self, action, logprobs, room):
        return None

    def fail(self, error):
        raise error


@pytest.mark.parametrize("kind", ["llama", "gemma2"])  # with shared prompts, and with copies of them
def test_long_prompts_are_read_while_others_decode(kind, make_policy, monkeypatch):
    policy, read, sizes = make_policy(kind), TierCache.read, []
    policy.chat.end_of_turn = frozenset()
    engine = LocalEngine(policy, EngineConfig(rows=6))

    def noting(self, model, tier, slots, tokens, positions):
        sizes.append(tokens.numel())
        return read(self, model, tier, slots, tokens, positions)

    draws = random.Random(0)
    long, other = ([1, 5, *(draws.randrange(3, 19) for _ in range(count))] for count in (70, 30))

    def requests():
        return [Greedy([1, 5, 6], 60), Greedy(long, 9), Greedy(other, 9), Greedy(long, 5), Greedy([1, 7], 9)]

    expected = requests()
    with sampling_weights(policy, engine.way):
        for request in expected:
            alone = OpenDecoding(engine, 200)
            alone.add(request)
            while alone.busy:
                alone.advance()
        monkeypatch.setattr(services, "STEP_TOKENS", 10)
        monkeypatch.setattr(TierCache, "read", noting)
        first, *later = ours = requests()
        decoding = OpenDecoding(engine, 200)
        decoding.add(first)
        decoding.advance()
        sizes.clear()
        for number, request in enumerate(later):
            decoding.add(request)
            before = len(first.taken)
            decoding.advance()
            assert len(first.taken) > before and (number > 1 or not request.taken)
        while not all(request.taken for request in later):
            before = len(first.taken)
            decoding.advance()
            assert len(first.taken) > before, "its next token does not wait for prompts"
        steps = decoding.clock.step
        while decoding.busy:
            decoding.advance()
    assert max(sizes) <= 10 and steps >= (70 + 30) / 10
    assert [request.taken for request in ours] == [request.taken for request in expected]
