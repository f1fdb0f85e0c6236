from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from pydantic import ValidationError

from agent_peft.policies.engine import load_sampler
from agent_peft.policies.engine.base import EngineConfig, EngineStatistics
from agent_peft.policies.engine.kv_cache import TierCache, _Tier
from agent_peft.policies.engine.local import LocalEngine
from agent_peft.policies.policy import Policy
from agent_peft.policies.sampling import SamplingConfig, log_distribution
from agent_peft.types import AgentPeftError

MakePolicy = Callable[..., Policy]
ARCHITECTURES = ("llama", "qwen3", "gpt2", "gpt_neox", "mistral", "gemma3_text", "gemma2")  # of conftest.py


@dataclass
class Talk:
    """A conversation whose answers are fixed beforehand. Records all that passes."""

    prompt: Sequence[int]
    seed: int
    answers: Sequence[Sequence[int]] = ()
    delay: Callable[[], float] | None = None
    actions: list[tuple[int, ...]] = field(default_factory=list)
    logprobs: list[tuple[float, ...]] = field(default_factory=list)
    rooms: list[int] = field(default_factory=list)
    threads: set[str] = field(default_factory=set)

    def act(self, action: Sequence[int], logprobs: Sequence[float], room: int) -> Sequence[int] | None:
        if self.delay is not None:
            time.sleep(self.delay())
        self.threads.add(threading.current_thread().name)
        self.actions.append(tuple(action))
        self.logprobs.append(tuple(logprobs))
        self.rooms.append(room)
        turn = len(self.actions) - 1
        return self.answers[turn] if turn < len(self.answers) and len(self.answers[turn]) < room else None

    @property
    def pieces(self) -> list[tuple[Sequence[int], tuple[int, ...]]]:
        """(what was read, what was sampled), turn by turn."""
        return list(zip([self.prompt, *self.answers], self.actions, strict=False))

    @property
    def tokens(self) -> list[int]:
        return [token for read, action in self.pieces for token in (*read, *action)]

    @property
    def mask(self) -> list[bool]:
        return [
            sampled
            for read, action in self.pieces
            for sampled in (*[False] * len(read), *[True] * len(action))
        ]

    @property
    def flat_logprobs(self) -> list[float]:
        return [x for turn in self.logprobs for x in turn]


def talks(count: int = 9, delay: Callable[[], float] | None = None) -> list[Talk]:
    """Prompts of three families (siblings, a common beginning, one that begins another), one to four
    turns, answers of 0 to 9 tokens.
    """
    prompts = [[1, 5, 6, 7, 8, 9], [1, 5, 6, 12, 13], [1, 5, 6, 7]]
    found = []
    for i in range(count):
        draws = random.Random(i)
        answers = [[draws.randrange(3, 19) for _ in range(draws.randrange(10))] for _ in range(i % 4)]
        found.append(Talk(prompts[i % 7 % 3], seed=100 + i, answers=answers, delay=delay))
    return found


SAMPLING = SamplingConfig(max_new_tokens=6, max_tokens=200)


def drive(
    policy: Policy, conversations: list[Talk], sampling: SamplingConfig = SAMPLING, **settings: int
) -> EngineStatistics:
    return LocalEngine(policy, EngineConfig(**settings)).generate(conversations, sampling)


def own_logprobs(policy: Policy, talk: Talk, sampling: SamplingConfig = SAMPLING) -> torch.Tensor:
    """What the model itself says of the sampled tokens, in one plain forward: no cache, no folding, no
    code of ours around it.
    """
    tokens = torch.tensor([talk.tokens])
    with torch.no_grad():
        logp = log_distribution(policy.model(input_ids=tokens).logits[0, :-1], sampling)
    return logp.gather(-1, tokens[0, 1:, None]).squeeze(-1)[torch.tensor(talk.mask)[1:]]


@pytest.fixture
def small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that must grow several times."""
    cache = LocalEngine.new_cache
    monkeypatch.setattr(LocalEngine, "new_cache", lambda engine, slots, *_: cache(engine, slots, (4, 4, 4)))


def test_a_cache_begins_with_room_for_the_first_turn(make_policy, monkeypatch):
    """Its zeroes cost more than short episodes do."""
    made: list[tuple[int, int, int]] = []
    grow, make = _Tier.grow, TierCache.__init__
    monkeypatch.setattr(
        _Tier,
        "grow",
        lambda tier, extent, *most: (
            grow(tier, extent, *most) if extent <= tier.capacity else pytest.fail("grew")
        ),
    )
    monkeypatch.setattr(
        TierCache,
        "__init__",
        lambda cache, slots, sizes, *more: made.append(sizes) or make(cache, slots, sizes, *more),
    )
    engine = LocalEngine(make_policy(), EngineConfig())
    made.clear()
    engine.generate([Talk([1, 5, 6], seed=0), Talk([1, 5, 6, 7, 8], seed=1)], SAMPLING)
    engine.generate([Talk([1, 5, 6], seed=0)], SamplingConfig(max_new_tokens=6, max_tokens=7))
    assert made == [(2, 3, 6), (0, 3, 6)]


# -- what is sampled is what the model says ------------------------------------------------------------------


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_logprobs_are_those_of_a_full_forward(kind, make_policy, small_cache):
    """Forked prompts, kept turns, fewer rows than conversations, a growing cache, windows, a folded
    adapter.
    """
    policy, conversations = make_policy(kind, lora=kind != "gpt2"), talks()
    drive(policy, conversations, rows=3, prefill_tokens=12)
    assert {len(talk.actions) for talk in conversations} == {1, 2, 3, 4}
    for talk in conversations:
        assert torch.allclose(torch.tensor(talk.flat_logprobs), own_logprobs(policy, talk), atol=1e-4), (
            talk.seed
        )


def test_logprobs_are_of_the_sampling_distribution(make_policy):
    policy, conversations = make_policy(), talks()
    sampling = SamplingConfig(temperature=0.7, top_p=0.9, top_k=8, max_new_tokens=6, max_tokens=200)
    drive(policy, conversations, sampling)
    for talk in conversations:
        assert torch.allclose(
            torch.tensor(talk.flat_logprobs), own_logprobs(policy, talk, sampling), atol=1e-4
        )


def test_temperature_zero_takes_the_most_likely(make_policy):
    policy, conversations = make_policy(), talks(4)
    drive(policy, conversations, SamplingConfig(temperature=0.0, max_new_tokens=6, max_tokens=200), rows=2)
    for talk in conversations:
        with torch.no_grad():
            best = policy.model(input_ids=torch.tensor([talk.tokens])).logits[0, :-1].argmax(-1)
        mask = torch.tensor(talk.mask)[1:]
        assert torch.equal(best[mask], torch.tensor(talk.tokens)[1:][mask])


def test_siblings_with_seeds_of_their_own_differ(make_policy):
    conversations = [Talk([1, 5, 6], seed) for seed in range(12)] + [Talk([1, 5, 6], 0)]
    drive(make_policy(), conversations)
    assert len({talk.actions[0] for talk in conversations}) > 6
    assert conversations[0].actions == conversations[-1].actions


def test_score_reads_as_the_sampler_does(make_policy):
    policy = make_policy("gemma3_text")
    engine = LocalEngine(policy, EngineConfig())
    tokens = random.Random(0).choices(range(3, 19), k=25)
    with torch.no_grad():
        own = policy.model(input_ids=torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    expected = own.gather(-1, torch.tensor(tokens[1:])[:, None]).squeeze(-1)
    assert torch.allclose(torch.tensor(engine.score(tokens, SamplingConfig())), expected, atol=1e-4)
    for length in (2, 3):
        assert torch.allclose(
            torch.tensor(engine.score(tokens[:length], SamplingConfig())), expected[: length - 1], atol=1e-4
        )


# -- what is sampled depends on nothing around it ------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"rows": 1},
        {"rows": 2, "overlap": 1},
        {"rows": 5, "overlap": 7},
        {"prefill_tokens": 1},
        {"environment_threads": 1, "overlap": 3},
    ],
)
def test_settings_do_not_change_what_is_sampled(settings, make_policy):
    policy, first, second = make_policy(), talks(), talks()
    drive(policy, first)
    drive(policy, second, **settings)
    assert [talk.actions for talk in first] == [talk.actions for talk in second]
    for a, b in zip(first, second, strict=True):
        assert a.flat_logprobs == pytest.approx(b.flat_logprobs, abs=1e-4)


def test_who_shares_the_batch_does_not_change_what_is_sampled(make_policy):
    policy, together = make_policy(), talks(21)
    drive(policy, together, rows=8)
    for i in (0, 3, 7, 18):
        alone = talks(21)[i]
        drive(policy, [alone])
        assert alone.actions == together[i].actions
        assert alone.flat_logprobs == pytest.approx(together[i].flat_logprobs, abs=1e-4)


@pytest.mark.slow
def test_a_run_repeats_bit_for_bit_however_slow_the_environments_are(make_policy):
    """Where the first one waited for none, its schedule says nothing, and others that follow it wait for
    each answer when it is due.
    """
    engine = LocalEngine(make_policy(), EngineConfig(rows=4, environment_threads=3, prefill_tokens=24))
    runs = []
    for attempt in range(4):
        clock = random.Random(attempt)
        conversations = talks(14, delay=(lambda clock=clock: clock.random() * 0.012) if attempt else None)
        statistics = engine.generate(conversations, SAMPLING, () if attempt else None)
        runs.append(
            ([talk.actions for talk in conversations], [talk.logprobs for talk in conversations], statistics)
        )
    assert runs[0] == runs[1] == runs[2] == runs[3]


# -- where actions and conversations end ---------------------------------------------------------------------


def test_an_action_ends_at_a_stop_string_an_end_token_or_its_limit(make_policy):
    policy, stops = make_policy(), ("3", "+-", "=1")
    conversations = [Talk([1, 5, 6], seed, [[7, 8], [9]]) for seed in range(40)]
    drive(
        policy, conversations, SamplingConfig(temperature=2.0, max_new_tokens=12, max_tokens=300, stop=stops)
    )
    reasons = set()
    for action in (action for talk in conversations for action in talk.actions):
        text = "".join(policy.chat.tokenizer.convert_ids_to_tokens(list(action)))
        before = "".join(policy.chat.tokenizer.convert_ids_to_tokens(list(action[:-1])))
        assert 2 not in action[:-1] and not any(stop in before for stop in stops)
        ended = "eos" if action[-1] == 2 else next((stop for stop in stops if text.endswith(stop)), None)
        assert ended or len(action) == 12
        reasons.add(ended)
    assert {"eos", "3", None} <= reasons and reasons & {"+-", "=1"}


def test_room_and_the_limit_of_an_episode(make_policy):
    conversations = [Talk([1, 5, 6], seed, [[7] * 3] * 9) for seed in range(8)]
    drive(make_policy(), conversations, SamplingConfig(max_new_tokens=4, max_tokens=20))
    cut = 0
    for talk in conversations:
        read = 3
        for action, room in zip(talk.actions, talk.rooms, strict=True):
            read += len(action)
            assert room == 20 - read >= 0
            cut += room == 0 and action[-1] != 2 and len(action) < 4
            read += 3
        assert 17 <= len(talk.tokens) <= 20  # another answer of three and one token would not have fitted
    assert cut, "some action was cut short by the limit of the episode"


def test_a_prompt_as_long_as_the_limit_still_gets_one_token(make_policy):
    talk = Talk([1, *[5] * 30], 0)
    drive(make_policy(), [talk], SamplingConfig(max_new_tokens=4, max_tokens=20))
    assert [len(action) for action in talk.actions] == [1] and talk.rooms[0] < 0


def test_a_prompt_that_its_conversation_goes_on_writing_to(make_policy):
    """It is read once, when the conversation begins."""
    kept, policy = [1, 5, 6], make_policy()
    growing, fixed = Talk(kept, 0, [[7, 8]]), Talk([1, 5, 6], 0, [[7, 8]])
    growing.delay = lambda: kept.append(9) or 0.0
    drive(policy, [growing])
    drive(policy, [fixed])
    assert growing.actions == fixed.actions and len(kept) > 3


def test_nothing_to_do(make_policy):
    assert drive(make_policy(), []) == EngineStatistics(0, 0, 0, 0)


def test_an_empty_prompt_is_refused(make_policy):
    with pytest.raises(ValueError, match="empty prompt"):
        drive(make_policy(), [Talk([1, 5], 0), Talk([], 1)])


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_prompt_that_the_model_cannot_read_is_refused(make_policy, kind):
    policy = make_policy(kind)
    positions = policy.bound.positions
    drive(policy, [longest := Talk([1] * positions, 0)], SamplingConfig(max_new_tokens=2))
    assert len(longest.actions[0]) == 1
    with pytest.raises(
        AgentPeftError, match=rf"has {positions + 1} tokens, and the model can read {positions}"
    ):
        drive(policy, [Talk([1, 5], 0), Talk([1] * (positions + 1), 1)], SamplingConfig(max_new_tokens=2))


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValidationError, match="at least 1 character"):
        SamplingConfig(stop=("a", ""))


def test_answers_come_from_other_threads(make_policy):
    conversations = talks()
    drive(make_policy(), conversations)
    assert all(name.startswith("environment") for talk in conversations for name in talk.threads)


# -- what it costs -------------------------------------------------------------------------------------------


def test_statistics_counted_by_hand(make_policy):
    """Two siblings and one that shares three tokens; each samples one token, reads two and samples one
    more.
    """
    conversations = [
        Talk([1, 4, 5, 6, 7], 0, [[8, 9]]),
        Talk([1, 4, 5, 6, 7], 1, [[8, 9]]),
        Talk([1, 4, 5, 8], 2, [[8, 9]]),
    ]
    statistics = drive(
        make_policy(), conversations, SamplingConfig(max_new_tokens=1, max_tokens=100), overlap=2
    )
    # the beginning; its two ends; for each, the sampled token and the answer
    assert statistics.prefilled == 3 + 2 + 1 + 3 * (1 + 2)
    assert statistics.prefilled_naive == 5 + 5 + 4 + 8 + 8 + 7
    assert statistics.sampled == 6
    alone = drive(make_policy(), [Talk([1, 4, 5], 0)], SamplingConfig(max_new_tokens=1, max_tokens=100))
    assert (alone.prefilled, alone.prefilled_naive, alone.sampled) == (3, 3, 1)
    total = statistics + alone
    assert (total.prefilled, total.prefilled_naive, total.sampled, total.steps) == (
        18,
        40,
        7,
        statistics.steps + alone.steps,
    )


def test_only_as_many_rows_as_configured(make_policy, monkeypatch):
    policy, widths = make_policy(), []
    engine = LocalEngine(policy, EngineConfig(rows=4, prefill_tokens=12))
    forward = policy.read
    monkeypatch.setattr(
        policy,
        "read",
        lambda tokens, **inputs: widths.append(tuple(tokens.shape)) or forward(tokens, **inputs),
    )
    engine.generate(talks(), SAMPLING)
    assert max(rows for rows, _ in widths) <= 4
    assert all(rows * length <= 12 for rows, length in widths if length > 1 and rows > 1)


def test_a_samplers_keys_are_checked(make_policy):
    policy = make_policy()
    sampler = load_sampler(policy, {"rows": 3})
    assert sampler.chat is policy.chat and isinstance(sampler, LocalEngine) and sampler.rows == 3
    with pytest.raises(AgentPeftError, match=r"^engine\.row: unknown key; did you mean 'rows'\?$"):
        load_sampler(policy, {"row": 3})


# -- the policy is left as it was ----------------------------------------------------------------------------


def test_weights_are_left_bit_for_bit(make_policy):
    policy = make_policy()
    before = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
    modules = [type(module) for module in policy.model.modules()]
    drive(policy, talks())
    after = policy.model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert [type(module) for module in policy.model.modules()] == modules
    assert any(parameter.requires_grad for parameter in policy.model.parameters())


@dataclass
class Broken(Talk):
    def act(self, action: Sequence[int], logprobs: Sequence[float], room: int) -> Sequence[int] | None:
        raise ZeroDivisionError("a fault of the environment")


def test_an_exception_in_a_conversation_surfaces_and_leaves_the_policy_whole(make_policy):
    policy = make_policy()
    before = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
    found: list[BaseException] = []

    def run() -> None:
        try:
            drive(policy, [*talks(5), Broken([1, 5, 6], 9), *talks(5)], rows=3)
        except ZeroDivisionError as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "it hangs"
    assert [str(error) for error in found] == ["a fault of the environment"]
    assert all(torch.equal(before[name], tensor) for name, tensor in policy.model.state_dict().items())
    again, fresh = talks(3), talks(3)
    drive(policy, again)
    drive(make_policy(), fresh)
    assert [talk.actions for talk in again] == [talk.actions for talk in fresh]


def test_a_model_without_keys_and_values_is_refused(make_policy):
    policy = make_policy("mamba", lora=False, hidden_size=16, num_hidden_layers=1, state_size=4)
    with pytest.raises(AgentPeftError, match=r"MambaForCausalLM cannot be sampled here: it"):
        LocalEngine(policy, EngineConfig())


def test_a_budget_of_positions_bounds_the_rows(make_policy):
    def told(**settings: int) -> tuple[EngineStatistics, list[list[tuple[int, ...]]]]:
        conversations = [Talk([1, 5, 6 + i % 3], i, [[4, 5], [7]]) for i in range(9)]
        return drive(
            make_policy(), conversations, SamplingConfig(max_new_tokens=6, max_tokens=50), **settings
        ), [c.actions for c in conversations]

    assert told(kv_tokens=149) == told(rows=2) != told(rows=3)
    assert told(kv_tokens=20) == told(rows=1), "one at least"


def test_slots_grow_to_what_an_episode_may_need_and_no_further(make_policy):
    tier = _Tier(2, 12, [torch.zeros(2, 1, 12, 4)], [torch.zeros(2, 1, 12, 4)], [-1, -1], [0, 0])
    sizes = []
    for extent in (13, 25, 48):
        tier.grow(extent, 50)
        sizes.append((tier.capacity, tier.keys[0].shape[2]))
    assert sizes == [(24, 24), (48, 48), (48, 48)]
    tier.grow(49, 50)
    assert tier.capacity == tier.values[0].shape[2] == 50
