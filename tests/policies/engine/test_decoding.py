"""One call of the engine: prompts that nobody knows beforehand, slow environments, and a memory that is
too small.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest
import torch

from agent_peft.policies.engine import schedule
from agent_peft.policies.engine.base import EngineConfig, EngineStatistics
from agent_peft.policies.engine.decoding import AHEAD
from agent_peft.policies.engine.kv_cache import TierCache
from agent_peft.policies.engine.local import LocalEngine
from agent_peft.policies.policy import Policy
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.types import AgentPeftError
from tests.conftest import case

MakePolicy = Callable[..., Policy]
SAMPLING = SamplingConfig(max_new_tokens=6, max_tokens=200)


class Doors:
    """Counts the worlds that are open."""

    def __init__(self) -> None:
        self.lock, self.open, self.peak, self.total = threading.Lock(), 0, 0, 0

    def move(self, by: int) -> None:
        with self.lock:
            self.open += by
            self.total += by > 0
            self.peak = max(self.peak, self.open)


@dataclass
class Talk:
    """A conversation whose answers are fixed beforehand. It is opened when it is asked for its prompt, and
    closes at its end.
    """

    tokens: Sequence[int]
    seed: int
    answers: Sequence[Sequence[int]] = ()
    latency: Callable[[], float] = lambda: 0.0
    doors: Doors = field(default_factory=Doors)
    actions: list[tuple[int, ...]] = field(default_factory=list)
    logprobs: list[tuple[float, ...]] = field(default_factory=list)

    @property
    def prompt(self) -> Sequence[int]:
        self.doors.move(+1)
        time.sleep(self.latency())
        return self.tokens

    def act(self, action: Sequence[int], logprobs: Sequence[float], room: int) -> Sequence[int] | None:
        time.sleep(self.latency())
        self.actions.append(tuple(action))
        self.logprobs.append(tuple(logprobs))
        if len(self.actions) <= len(self.answers):
            return self.answers[len(self.actions) - 1]
        self.doors.move(-1)
        return None

    def own_logprobs(self, policy: Policy) -> list[float]:
        """What the model itself says of the sampled tokens, in one plain forward."""
        pieces = list(zip([self.tokens, *self.answers], self.actions, strict=True))
        tokens = torch.tensor([[token for read, action in pieces for token in (*read, *action)]])
        sampled = torch.tensor(
            [mine for read, action in pieces for mine in (*[False] * len(read), *[True] * len(action))]
        )
        with torch.no_grad():
            logp = policy.model(input_ids=tokens).logits[0, :-1].log_softmax(-1)
        return logp.gather(-1, tokens[0, 1:, None]).squeeze(-1)[sampled[1:]].tolist()


PROMPTS = (  # siblings first, then what begins like them but for less and less, and then what does not
    *[[1, 5, 6, 7, 8, 9]] * 3,
    [1, 5, 6, 7, 8, 10],
    [1, 5, 6, 12, 13],
    [1, 5],
    [1, 5, 6, 7, 8],
    [1],
    [4, 5, 6, 7],
    [1, 5, 6, 7, 8, 9, 11, 12],
    [4],
)


def talks(
    count: int = 22, latency: Callable[[], float] = lambda: 0.0, doors: Doors | None = None
) -> list[Talk]:
    """One to four turns each."""
    doors = doors or Doors()
    draws = [random.Random(i) for i in range(count)]
    answers = [
        [[draw.randrange(3, 19) for _ in range(draw.randrange(7))] for _ in range(i % 4)]
        for i, draw in enumerate(draws)
    ]
    return [Talk(PROMPTS[i % len(PROMPTS)], 100 + i, answers[i], latency, doors) for i in range(count)]


def flat(talk: Talk) -> list[float]:
    return [x for turn in talk.logprobs for x in turn]


# -- prompts that come one after the other -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        case(kind, rows, fast=(kind == "gpt2") == (rows == 1))
        for kind, rows in product(["llama", "gpt2", "gemma2"], [1, 3, 64])
    ],
)
def test_prompts_share_what_they_begin_with_and_no_more(kind, rows, make_policy):
    policy, conversations = make_policy(kind, lora=kind != "gpt2"), talks()
    statistics = LocalEngine(policy, EngineConfig(rows=rows, prefill_tokens=24)).generate(
        conversations, SAMPLING
    )
    for talk in conversations:
        assert flat(talk) == pytest.approx(talk.own_logprobs(policy), abs=1e-4), talk.seed
    assert statistics.prefilled < statistics.prefilled_naive


def test_a_beginning_that_comes_late_is_read_once(make_policy):
    """The first row has one prompt; from the second prompt on it is known what they share."""
    prompts = [[1, 5, 6, 7, 8, 9, 10 + i] for i in range(6)]
    conversations = [Talk(prompt, i) for i, prompt in enumerate(prompts)]
    engine = LocalEngine(make_policy(), EngineConfig(rows=1))
    statistics = engine.generate(conversations, SamplingConfig(max_new_tokens=1, max_tokens=20))
    assert engine.shares and statistics.prefilled == 7 + (6 + 1) + 4 * 1


def test_there_are_slots_for_prompts_as_many_as_rows_need(make_policy):
    """One sibling of each of many prompts continues: the first rows had two prompts, later ones have a
    prompt each.
    """
    policy = make_policy()
    conversations = [Talk([1, 5, 6 + i // 4], i, [[7, 8]] * 9 if i % 4 == 0 else []) for i in range(48)]
    LocalEngine(policy, EngineConfig(rows=8)).generate(conversations, SAMPLING)
    for talk in conversations:
        assert flat(talk) == pytest.approx(talk.own_logprobs(policy), abs=1e-4), talk.seed


# -- conversations are opened when there is a row for them ---------------------------------------------------


@pytest.mark.parametrize("latency", [lambda: 0.0, lambda: 0.002])
def test_no_more_are_open_than_there_are_rows_and_a_few(latency, make_policy):
    doors = Doors()
    conversations = talks(120, latency, doors)
    LocalEngine(make_policy(), EngineConfig(rows=8)).generate(conversations, SAMPLING)
    assert doors.total == 120 and doors.open == 0
    assert 8 < doors.peak <= 8 + AHEAD


def test_one_that_has_nothing_to_say_leaves_its_row_to_the_next(make_policy):
    class Mute(Talk):
        @property
        def prompt(self) -> None:
            return None

    conversations: list[Talk] = [Mute([1], i) if i % 3 else Talk([1, 5, 6 + i], i) for i in range(12)]
    LocalEngine(make_policy(), EngineConfig(rows=2)).generate(conversations, SAMPLING)
    assert [len(talk.actions) for talk in conversations] == [1, 0, 0] * 4
    assert LocalEngine(make_policy(), EngineConfig()).generate([Mute([1], 0)], SAMPLING).sampled == 0


# -- slow environments ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_decoding_does_not_wait_for_slow_environments(make_policy):
    """64 rows that end at steps of their own would stop each other at nearly every step: some forty waits
    of 0.2 s.
    """
    policy = make_policy()

    def seconds(latency: float) -> float:
        conversations = [Talk([1, 5, 6], seed, [[4, 5]] * 2, lambda: latency) for seed in range(64)]
        begin = time.perf_counter()
        LocalEngine(policy, EngineConfig()).generate(
            conversations, SamplingConfig(max_new_tokens=40, max_tokens=200)
        )
        return time.perf_counter() - begin

    alone = seconds(0.0)
    assert seconds(0.2) < 2 * (alone + 4 * 0.2 + schedule.PATIENCE + schedule.FIRST_PATIENCE)


@pytest.mark.parametrize("rows", [4, 64])
def test_a_run_that_follows_a_schedule_repeats_bit_for_bit(rows, make_policy, monkeypatch):
    """However slow its environments are, and however slow they were."""
    for name in ("PATIENCE", "FIRST_PATIENCE"):
        monkeypatch.setattr(schedule, name, 0.0)
    engine = LocalEngine(make_policy(), EngineConfig(rows=rows, prefill_tokens=24))

    def run(seed: int, most: float, schedule: schedule.Schedule | None) -> tuple[EngineStatistics, object]:
        clock = random.Random(seed)
        conversations = talks(20, lambda: clock.random() * most)
        return engine.generate(conversations, SAMPLING, schedule), [
            (talk.actions, talk.logprobs) for talk in conversations
        ]

    recorded, expected = run(0, 0.03, None)
    assert recorded.late == len(recorded.schedule) > 20
    for seed, most in ((1, 0.0), (2, 0.03)):
        followed, found = run(seed, most, recorded.schedule)
        assert found == expected
        assert followed == recorded
    other, _ = run(3, 0.03, None)
    assert other.schedule != recorded.schedule, "these answers do come late at other steps in each run"


def test_fast_environments_need_no_schedule(make_policy):
    policy, runs = make_policy(), []
    for _ in range(3):
        conversations = talks(20)
        statistics = LocalEngine(policy, EngineConfig(rows=4)).generate(conversations, SAMPLING)
        runs.append((statistics, [(talk.actions, talk.logprobs) for talk in conversations]))
    assert runs[0] == runs[1] == runs[2] and runs[0][0].schedule == ()


# -- a memory that is too small ------------------------------------------------------------------------------

FULL = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 8 bytes."
    ),
    MemoryError(),
]


def fill(
    engine: LocalEngine,
    monkeypatch: pytest.MonkeyPatch,
    when: Callable[[int, int], bool],
    error: Exception = FULL[0],
) -> None:
    """From now on a forward finds the memory full where ``when(its number, its rows)`` says so."""
    calls, forward = [0], engine.policy.read

    def read(tokens: torch.Tensor, **inputs: object) -> torch.Tensor:
        calls[0] += 1
        if when(calls[0], tokens.shape[0]):
            raise error
        return forward(tokens, **inputs)

    monkeypatch.setattr(engine.policy, "read", read)


MOMENTS = [{1}, {2}, {3}, {4}, {9}, {25}, {3, 4}, {5, 12, 30}]


@pytest.mark.parametrize(
    ("calls", "error"),
    [
        *(case(calls, FULL[0], fast=calls not in ({2}, {3}, {9}, {3, 4})) for calls in MOMENTS),
        ({4}, FULL[1]),
        ({4}, FULL[2]),
    ],
    ids=lambda value: str(value)[:12],
)
def test_out_of_memory_halves_the_rows_and_nobody_acts_twice(calls, error, make_policy, monkeypatch):
    """The beginning, prompts, decoding, observations; before and after episodes have ended."""
    engine, plain, doors = LocalEngine(make_policy(), EngineConfig(rows=16)), talks(), Doors()
    roomy = engine.generate(plain, SAMPLING)
    halved = talks(doors=doors)
    fill(engine, monkeypatch, lambda number, rows: number in calls, error)
    tight = engine.generate(halved, SAMPLING)
    assert [talk.actions for talk in halved] == [talk.actions for talk in plain], (
        "and each action reached its world once"
    )
    for ours, theirs in zip(halved, plain, strict=True):
        assert flat(ours) == pytest.approx(flat(theirs), abs=1e-4)
    assert doors.total == len(halved) and doors.open == 0 and doors.peak <= 16 + AHEAD
    assert (roomy.row_halvings, tight.row_halvings, engine.rows) == (0, len(calls), 16 >> len(calls))


def test_the_smaller_number_of_rows_is_kept(make_policy, monkeypatch, caplog):
    engine = LocalEngine(make_policy(), EngineConfig(rows=12))
    fill(engine, monkeypatch, lambda number, rows: rows > 3)
    assert engine.generate(talks(), SAMPLING).row_halvings == 2
    assert [line for line in caplog.messages if "rows" in line] == [
        f"out of memory while sampling: continuing with engine.rows={rows}" for rows in (6, 3)
    ]
    assert engine.generate(talks(), SAMPLING).row_halvings == 0 and engine.rows == 3


def test_a_row_that_does_not_fit_alone_is_one_line(make_policy, monkeypatch):
    engine = LocalEngine(make_policy(), EngineConfig(rows=4))
    fill(engine, monkeypatch, lambda number, rows: number > 6)
    with pytest.raises(
        AgentPeftError, match=r"out of memory while sampling: .* lower sampling\.max_tokens"
    ) as raised:
        engine.generate(talks(), SAMPLING)
    assert "\n" not in str(raised.value)


def test_an_environment_without_memory_is_none_of_the_engines(make_policy):
    class Full(Talk):
        def act(self, action: Sequence[int], logprobs: Sequence[float], room: int) -> Sequence[int] | None:
            raise MemoryError("of the environment")

    engine = LocalEngine(make_policy(), EngineConfig(rows=4))
    with pytest.raises(MemoryError, match="of the environment"):
        engine.generate([*talks(6), Full([1, 5], 9)], SAMPLING)
    assert engine.rows == 4


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_long_prompt_is_read_in_parts(make_policy, kind, monkeypatch):
    policy, sizes = make_policy(kind), []
    read = TierCache.read

    def noting(self: TierCache, model: Any, tier: int, slots: Any, tokens: Any, positions: Any) -> Any:
        sizes.append(tokens.numel())
        return read(self, model, tier, slots, tokens, positions)

    monkeypatch.setattr(TierCache, "read", noting)
    draws = random.Random(0)
    talks = [
        Talk([draws.randrange(3, 9) for _ in range(length)], seed, [[3, 4] * 12])
        for seed, length in enumerate((61, 8, 61, 25))
    ]
    LocalEngine(policy, EngineConfig(rows=3, prefill_tokens=20)).generate(talks, SAMPLING)
    assert max(sizes) <= 20
    for talk in talks:
        said = [logprob for action in talk.logprobs for logprob in action]
        assert said == pytest.approx(talk.own_logprobs(policy), abs=1e-4)
