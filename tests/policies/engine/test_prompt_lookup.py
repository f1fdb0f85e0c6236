"""Drafts from the conversation change how fast tokens are drawn, and not which."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product

import pytest
import torch

from agent_peft.policies.engine import decoding
from agent_peft.policies.engine.base import EngineConfig, EngineStatistics
from agent_peft.policies.engine.local import LocalEngine
from agent_peft.policies.engine.prompt_lookup import PromptLookup
from agent_peft.policies.engine.service import OpenDecoding
from agent_peft.policies.engine.weights import sampling_weights
from agent_peft.policies.policy import Policy
from agent_peft.policies.sampling import SamplingConfig
from tests.conftest import case

Tokens = Sequence[int]
GREEDY = SamplingConfig(temperature=0.0, max_new_tokens=24, max_tokens=120)
PATTERN = [5, 6, 7, 8, 9, 10]


@dataclass
class Talk:
    """A conversation with fixed answers, and a request with its own sampling."""

    prompt: Tokens
    seed: int
    sampling: SamplingConfig = GREEDY
    answers: Sequence[Tokens] = ()
    cancel_at: int | None = None  # the place after whose token nobody waits any more
    alternatives: int = 2
    constraint: None = None
    cancelled: bool = False
    actions: list[list[int]] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    rooms: list[int] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)
    others: list[int] = field(default_factory=list)

    def act(self, action: Tokens, logprobs: Sequence[float], room: int) -> Tokens | None:
        self.actions.append(list(action))
        self.logprobs += logprobs
        self.rooms.append(room)
        turn = len(self.actions) - 1
        return self.answers[turn] if turn < len(self.answers) and len(self.answers[turn]) < room else None

    def take(self, place: int, token: int, logprob: float, others: Sequence[tuple[int, float]]) -> None:
        assert place == len(self.taken)
        self.taken.append(token)
        self.others += [other for other, _ in others]
        self.cancelled = place == self.cancel_at

    def fail(self, error: BaseException) -> None:
        raise error

    @property
    def tokens(self) -> list[int]:
        answers = [*self.answers[: len(self.actions) - 1], []]
        turns = zip(self.actions, answers, strict=True)
        return [*self.prompt, *(token for action, answer in turns for token in (*action, *answer))]


def talks(sampling: SamplingConfig = GREEDY, count: int = 4) -> list[Talk]:
    """Different lengths, one to three turns, and observations that repeat the prompt."""
    return [
        Talk([1, *PATTERN[i:], *PATTERN], 100 + i, sampling, [[11, *PATTERN[:3]]] * (i % 3))
        for i in range(count)
    ]


def generate(policy: Policy, conversations: list[Talk], rows: int = 4) -> EngineStatistics:
    return LocalEngine(policy, EngineConfig(rows=rows)).generate(conversations, conversations[0].sampling)


def serve(policy: Policy, requests: list[Talk], rows: int = 4) -> int:
    """Answer requests; return the decode steps."""
    engine = LocalEngine(policy, EngineConfig(rows=rows))
    served = OpenDecoding(engine, 120)
    for request in requests:
        served.add(request)
    with sampling_weights(policy, engine.way):
        while served.busy:
            served.advance()
    return served.clock.step


@pytest.fixture
def plainly(monkeypatch: pytest.MonkeyPatch) -> Callable[..., object]:
    """Run something without drafts."""

    def run(work: Callable[..., object], *arguments: object) -> object:
        with monkeypatch.context() as patch:
            patch.setattr(decoding, "PLACES", 0)
            return work(*arguments)

    return run


def assert_alike(ours: Sequence[Talk], plain: Sequence[Talk]) -> None:
    for one, other in zip(ours, plain, strict=True):
        assert (one.actions, one.rooms, one.taken) == (other.actions, other.rooms, other.taken), one.seed
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4) and one.others == other.others


def test_a_draft_is_the_continuation_of_the_latest_and_longest_occurrence():
    lookup = PromptLookup()
    assert lookup.draft([1, 2, 3, 4, 9, 2, 3, 5, 8], [2, 3], 9) == [5, 8, 2, 3], "the latest"
    assert lookup.draft([1, 2, 3, 4, 9, 2, 3, 5, 8], [2, 3, 4], 9) == [9, 2, 3, 5, 8, 2], "the longest"
    assert lookup.draft([1, 2, 3, 4, 9, 2, 3, 5, 8], [2, 3, 4], 1) == [9]
    assert lookup.draft([1, 2, 3, 4, 9, 2, 3, 5, 8], [2, 3, 4, 7], 9) == [], "a token that is new"


def slow_lookup(tokens: list[int], most: int) -> list[int]:
    for n in (3, 2, 1):
        for begin in range(len(tokens) - n - 1, -1, -1):
            if tokens[begin : begin + n] == tokens[-n:]:
                return tokens[begin + n :][: min(2 * n, most)]
    return []


def test_the_index_that_grows_agrees_with_a_search():
    draws, lookup = random.Random(0), PromptLookup()
    tokens = [draws.randrange(6) for _ in range(3)]
    for _ in range(300):
        split, most = draws.randrange(len(tokens)), draws.randrange(8)
        assert lookup.draft(tokens[:split], tokens[split:], most) == slow_lookup(tokens, most)
        tokens += [draws.randrange(6) for _ in range(draws.randrange(4))]


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        case(kind, rows, fast=(kind == "llama") == (rows in (1, 4)) and (rows == 2) == (kind == "gpt2"))
        for kind, rows in product(["llama", "gpt2", "gemma3_text"], [1, 2, 3, 4])
    ],
)
def test_greedy_tokens_are_the_same_in_fewer_steps(kind, rows, make_policy, plainly):
    policy, ours, plain = make_policy(kind, lora=kind != "gpt2"), talks(), talks()
    with_drafts, without = generate(policy, ours, rows), plainly(generate, policy, plain, rows)
    assert_alike(ours, plain)
    assert with_drafts.sampled == without.sampled
    assert with_drafts.steps < without.steps, "drafts were accepted"


def test_training_and_many_rows_decode_without_drafts(make_policy, monkeypatch):
    monkeypatch.setattr(PromptLookup, "draft", lambda *given: pytest.fail("drafted") if given[3] > 0 else [])
    generate(make_policy(), talks(GREEDY.model_copy(update={"temperature": 1.0})))
    generate(make_policy(), [Talk([1, 5, 6], seed) for seed in range(9)], 9)


LIMITS = {"max_new_tokens": 24, "max_tokens": 120}
REQUESTS = (
    SamplingConfig(temperature=0.0, **LIMITS),
    SamplingConfig(temperature=1.0, **LIMITS),
    SamplingConfig(temperature=0.7, top_p=0.8, **LIMITS),
    SamplingConfig(temperature=1.3, top_k=5, **LIMITS),
    SamplingConfig(temperature=1.0, max_new_tokens=2, max_tokens=120),
    SamplingConfig(temperature=1.0, max_new_tokens=24, max_tokens=19),
    SamplingConfig(temperature=1.0, stop=("1", "2+", "="), **LIMITS),
)


@pytest.mark.parametrize(
    ("rows", "right"),
    [case(rows, right, fast=right == (rows == 3)) for rows in (1, 3) for right in (True, False)],
)
def test_requests_get_the_same_tokens_whatever_is_drafted(rows, right, make_policy, plainly, monkeypatch):
    """Drafts from an oracle: ends of turns, stop strings and limits fall inside of them."""
    policy = make_policy()

    def requests() -> list[Talk]:
        prompts = [[1, 3 + seed // 5, 3 + seed % 5, *PATTERN[: seed % 6]] for seed in range(21)]
        return [Talk(prompt, i, REQUESTS[i % len(REQUESTS)]) for i, prompt in enumerate(prompts)]

    ours, plain = requests(), requests()
    steps = plainly(serve, policy, plain, rows)
    ends = [talk.actions[0][-1] in policy.chat.end_of_turn for talk in plain]
    assert any(ends) and not all(ends)
    truth = {tuple(talk.prompt): talk for talk in plain}

    def draft(lookup: PromptLookup, tokens: Tokens, action: Tokens, most: int) -> list[int]:
        talk, place = truth[tuple(tokens)], len(tokens) + len(action)
        assert talk.tokens[:place] == [*tokens, *action]
        assert len(action) + most < talk.sampling.max_new_tokens
        assert place + most < talk.sampling.max_tokens, "no further token can be drawn after the last draft"
        drafts = [*talk.tokens[place:], *PATTERN][: max(0, most)]
        return drafts if right else [*drafts[:1], *(max(3, token - 1) for token in drafts[1:])]

    monkeypatch.setattr(PromptLookup, "draft", draft)
    assert serve(policy, ours, rows) < steps
    assert_alike(ours, plain)


def test_a_request_that_is_cancelled_inside_a_draft_gets_no_further_token(make_policy):
    request = Talk([1, *PATTERN], 0, GREEDY, cancel_at=13)
    serve(make_policy(), [request])
    assert len(request.taken) == 14 == len(request.actions[0])


def test_out_of_memory_draws_the_same_tokens_again(make_policy, plainly, monkeypatch):
    policy, ours, plain = make_policy(), talks(), talks()
    plainly(generate, policy, plain)
    engine, reads = LocalEngine(policy, EngineConfig(rows=4)), iter(range(10_000))
    read = policy.read

    def full(tokens: torch.Tensor, **inputs: object) -> torch.Tensor:
        if next(reads) in (5, 8):
            raise MemoryError
        return read(tokens, **inputs)

    monkeypatch.setattr(policy, "read", full)
    assert engine.generate(ours, GREEDY).row_halvings == 2
    assert_alike(ours, plain)
