"""An episode whose chat template drops earlier thoughts is several rows, each what the sampler read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from agent_peft.algorithms import GrpoConfig, PpoConfig
from agent_peft.batch import Batch, collate
from agent_peft.environments.base import Environment, Episode
from agent_peft.policies import adapters
from agent_peft.policies.engine import load_sampler
from agent_peft.policies.engine.base import EngineConfig
from agent_peft.policies.engine.decoding import Decoding, Row
from agent_peft.policies.models.chat_template import check_thoughts
from agent_peft.policies.models.tokenizer import character_tokenizer
from agent_peft.policies.policy import Policy
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.policies.tokenization import ChatTokenizer
from agent_peft.rollout.collector import Collector, trajectory_from_json, trajectory_to_json
from agent_peft.rollout.pairs import read_arrays, read_episode
from agent_peft.rollout.rewards import RewardConfig
from agent_peft.runs.trajectories import write_trajectories
from agent_peft.training.stage import StageConfig
from agent_peft.training.trainer import Trainer
from agent_peft.types import InfrastructureError, Message, Outcome, StepResult, StopReason, Task, Trajectory
from tests.conftest import case
from tests.policies.conftest import random_model

# as DeepSeek R1's and Qwen3's: the prompt opens a thought, and a new message of the user drops it
DROPS = """{%- set ns = namespace(last=-1) %}
{%- for m in messages %}
{%- if m.role == 'user' and not keeps %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}<|im_start|>{{ m.role[0] }}
{%- if m.role == 'assistant' and loop.index0 > ns.last %}<think>{{ m.reasoning_content }}</think>{% endif %}
{{- m.content }}<|im_end|>{% endfor %}
{%- if add_generation_prompt %}<|im_start|>a<think>{% endif %}"""
APPENDS = """{%- for m in messages %}<|im_start|>{{ m.role[0] }}{{ m.content }}<|im_end|>{% endfor %}
{%- if add_generation_prompt %}<|im_start|>a{% endif %}"""
SAMPLING = SamplingConfig(max_new_tokens=8, max_tokens=90)


class Three(Environment):
    """Three turns. A world may fail at its second action."""

    def __init__(self) -> None:
        self.fails = 0

    @property
    def tasks(self) -> list[Task]:
        return [Task("ab"), Task("ba")]

    def episode(self, task: Task, seed: int) -> ThreeEpisode:
        self.fails -= 1
        return ThreeEpisode(task, seed, self.fails >= 0)

    def close(self) -> None: ...


class ThreeEpisode(Episode):
    def __init__(self, task: Task, seed: int, fails: bool) -> None:
        self.task, self.seed, self.fails, self.replies = task, seed, fails, list[str]()

    def start(self) -> list[Message]:
        return [Message("system", "s"), Message("user", self.task.id)]

    def step(self, action: str) -> StepResult:
        self.replies.append(action)
        if self.fails and len(self.replies) == 2:
            raise InfrastructureError("gone")
        if len(self.replies) < 3:
            return StepResult("ab")
        outcome = Outcome.CORRECT if self.seed % 2 else Outcome.INCORRECT
        return StepResult("", done=True, outcome=outcome, stop_reason=StopReason.FINISHED)

    def close(self) -> None: ...


def policy_of(template: str = DROPS, packing: bool = True, dtype: torch.dtype = torch.float32) -> Policy:
    tokenizer = character_tokenizer("abus<>|/thinkmpdoe_r")  # a sampled mark can be written as plain text
    tokenizer.add_tokens(["<think>", "</think>", "<|im_start|>", "<|im_end|>"], special_tokens=True)
    tokenizer.eos_token, tokenizer.chat_template = "<|im_end|>", template
    model = adapters.attach(random_model("llama", len(tokenizer), dtype), adapters.LoraSettings(rank=2), 0)
    return Policy(model, ChatTokenizer(tokenizer), packing=packing)


def collect(policy: Policy, environment: Three | None = None, seed: int = 0) -> list[Trajectory]:
    environment = environment or Three()
    collector = Collector(environment, load_sampler(policy, EngineConfig(rows=5)))
    groups = collector.collect(environment.tasks, 4, SAMPLING, RewardConfig(), seed).groups
    return [trajectory for group in groups for trajectory in group.trajectories]


@pytest.fixture(scope="module")
def policy() -> Policy:
    return policy_of()


@pytest.fixture(scope="module")
def episodes(policy: Policy) -> list[Trajectory]:
    return collect(policy)


def batch_of(episodes: list[Trajectory]) -> Batch:
    return collate(episodes, [n // 4 for n in range(len(episodes))])


def test_the_rows_are_what_the_sampler_read(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[int, int, tuple[int, ...], tuple[int, ...]]] = []
    take = Decoding._take

    def recording(self: Decoding, row: Row, *drawn: object) -> bool:
        ended = take(self, row, *drawn)  # type: ignore[arg-type]
        if ended:
            read.append((row.conversation.seed, row.before, tuple(row.tokens), tuple(row.action)))
        return ended

    monkeypatch.setattr(Decoding, "_take", recording)
    episodes = collect(policy)
    expected = []
    for episode in episodes:
        assert len(episode.rows) == 3 and [turn.new_row for turn in episode.turns] == [False, True, True]
        before = 0
        for row, turn in zip(episode.rows, episode.turns, strict=True):
            prompt = tuple(row[: len(row) - len(turn.action)])
            expected.append((episode.seed, before, prompt, turn.action))
            before += len(row)
        # the last prompt is the template's own text of the messages, whose thoughts it drops
        *messages, _ = episode.messages
        shown = [{"role": m.role, "content": m.content.rpartition("</think>")[2]} for m in messages]
        text = policy.chat.render(
            [m if "<think>" not in m["content"] else m | {"content": ""} for m in shown]
        )
        assert policy.chat.tokenizer.decode(episode.turns[-1].observation) == text
    assert sorted(read) == sorted(expected)


def test_an_episode_counts_once_and_learns_each_token_once(episodes: list[Trajectory]) -> None:
    batch = batch_of(episodes)
    for weighting in ("sequence_mean", "sequence_sum"):
        assert float(GrpoConfig(weighting=weighting).build().weigh(batch)[1]) == len(episodes)
    assert torch.allclose(GrpoConfig().build().weigh(batch)[0].weights.sum(1), torch.ones(len(episodes)))
    mask = batch.rows.action_mask
    assert int(mask.sum()) == sum(t.num_action_tokens for t in episodes) and len(mask) == 3 * len(episodes)
    assert batch.rows.sequences == [row for t in episodes for row in t.rows]
    assert torch.equal(batch.joined(batch.rows.logprobs), batch.logprobs)
    advantages = GrpoConfig().build().prepare(batch).advantages
    for row, trained in zip(advantages, batch.action_mask, strict=True):
        assert len(row[trained].unique()) == 1, "one advantage for all rows"


@pytest.mark.parametrize("packing", [True, False])
def test_the_gradient_is_that_of_separate_sequences(packing: bool, episodes: list[Trajectory]) -> None:
    policy, algorithm = policy_of(packing=packing), GrpoConfig(kl_coef=0.1).build()
    batch = batch_of(episodes)
    batch, denominator = algorithm.weigh(algorithm.prepare(batch))
    batch = batch.select(range(len(batch)))
    assert (batch.advantages != 0).any()

    def gradient(parts: list[Batch]) -> torch.Tensor:
        policy.model.zero_grad()
        for part in parts:
            reference = torch.where(part.action_mask, part.logprobs - 0.5, 0.0)
            part = Batch(**{**vars(part), "reference_logprobs": reference})
            loss, _ = algorithm.loss(policy.forward(part, SAMPLING), part)
            (loss / denominator).backward()  # type: ignore[no-untyped-call]
        return torch.cat([p.grad.flatten() for p in policy.trainable_parameters() if p.grad is not None])

    def plain(part: Batch) -> Batch:
        return Batch(**{name: value for name, value in vars(part).items() if name in Batch.__annotations__})

    rows = batch.rows
    alone = gradient([plain(rows.select([row])) for row in range(len(rows))])
    assert float(alone.abs().max()) > 1e-4
    bound = 1e-6 * float(alone.norm())
    assert float((gradient([plain(batch)]) - alone).abs().max()) <= bound
    halves = [plain(batch.select(range(3))), plain(batch.select(range(3, len(batch))))]
    assert float((gradient(halves) - alone).abs().max()) <= bound


@pytest.mark.parametrize(
    ("algorithm", "dtype"),
    [
        case(GrpoConfig(kl_coef=0.1), torch.float32, fast=True),
        case(GrpoConfig(kl_coef=0.1), torch.bfloat16, fast=False),
        case(PpoConfig(update_epochs=2), torch.float32, fast=False),
        case(PpoConfig(update_epochs=2), torch.bfloat16, fast=True),
    ],
)
def test_training_raises_no_alarm(algorithm: GrpoConfig | PpoConfig, dtype: torch.dtype) -> None:
    stage = StageConfig(
        algorithm=algorithm, steps=2, tasks_per_step=2, group_size=4, sampling=SAMPLING,
        microbatch_tokens=256, optimizer={"learning_rate": 1e-2},
    )  # fmt: skip
    for step in Trainer(policy_of(dtype=dtype), Three(), stage):
        assert step.metrics["episodes"] == 8 and step.metrics["turns"] == 3
        assert all(len(trajectory.rows) == 3 for trajectory in step.trajectories)


def test_values_are_bootstrapped_over_the_rows_in_the_order_of_turns(episodes: list[Trajectory]) -> None:
    batch = batch_of(episodes[:1])
    values = torch.where(batch.action_mask, torch.rand(batch.tokens.shape), 0.0)
    algorithm = PpoConfig(gae_lambda=0.0, normalize_advantages=False).build()
    prepared = algorithm.prepare(Batch(**{**vars(batch), "values": values}))
    places = batch.action_mask[0].nonzero()[:, 0]
    ahead = torch.cat([values[0, places[1:]], torch.zeros(1)])
    expected = batch.rewards[0, places].float() + ahead - values[0, places]
    assert torch.allclose(prepared.advantages[0, places], expected, atol=1e-6)


def test_a_failed_world_is_replayed_to_the_same_rows(policy: Policy, episodes: list[Trajectory]) -> None:
    environment = Three()
    environment.fails = 5
    again = [[(t.observation, t.action, t.new_row) for t in e.turns] for e in collect(policy, environment)]
    assert again == [[(t.observation, t.action, t.new_row) for t in e.turns] for e in episodes]


def test_the_journal_keeps_the_rows(tmp_path: Path, episodes: list[Trajectory]) -> None:
    from agent_peft.types import Group

    path = write_trajectories(tmp_path, 0, "grpo", [Group(episodes[0].task, episodes[:4])])
    arrays = read_arrays(path.with_suffix(".safetensors"))
    for line, episode in zip(map(json.loads, path.read_text().splitlines()), episodes, strict=False):
        assert line["new_rows"] == [1, 2] and read_episode(line, arrays).turns == tuple(
            type(turn)(**{**vars(turn), "logprobs": read.logprobs})
            for turn, read in zip(episode.turns, read_episode(line, arrays).turns, strict=True)
        )
    for episode in episodes:
        content = json.loads(json.dumps(trajectory_to_json(episode)))
        assert trajectory_from_json(episode.task, content) == episode


@pytest.mark.parametrize("template, thoughts", [(APPENDS, "template"), (DROPS, "keep")])
def test_one_row_is_as_it_was(template: str, thoughts: str) -> None:
    policy = policy_of(template)
    policy.chat.thoughts = thoughts  # type: ignore[assignment]
    for episode in collect(policy):
        assert len(episode.rows) == 1 and collate([episode], [0]).row_starts is None
        assert "new_row" not in json.dumps(trajectory_to_json(episode))
        for turn, before in zip(episode.turns[1:], episode.turns, strict=False):
            assert turn.observation == tuple(policy.chat.following("ab", before.action))


@pytest.fixture(params=[(APPENDS, False, "no effect"), (DROPS, True, "template: {keeps: true} instead")])
def refused(request: pytest.FixtureRequest) -> Iterator[tuple[str, bool, str]]:
    yield request.param


def test_keep_is_refused_where_it_is_not_needed(refused: tuple[str, bool, str]) -> None:
    from agent_peft.types import AgentPeftError

    template, rewrites, message = refused
    with pytest.raises(AgentPeftError, match=message):
        check_thoughts(policy_of(template).chat.tokenizer, rewrites)
    assert ("another row" in policy_of(template).chat.history) == rewrites
