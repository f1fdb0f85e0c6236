"""Thoughts that a budget of tokens has closed: the forced mark is read, and never trained."""

from __future__ import annotations

import json

import pytest
import torch

from agent_peft.algorithms.advantages import Turns
from agent_peft.batch import collate
from agent_peft.policies.models.tokenizer import BARE_TEMPLATE
from agent_peft.policies.tokenization import ChatTokenizer
from agent_peft.rollout.collector import trajectory_from_json, trajectory_to_json
from agent_peft.rollout.pairs import EpisodesOfConfig, read_groups
from agent_peft.rollout.rewards import RewardConfig
from agent_peft.runs.reading import read_lines
from agent_peft.runs.trajectories import write_trajectories
from agent_peft.training.trainer import Trainer
from tests.conftest import ALPHABET

SAMPLING = {"max_new_tokens": 16, "max_tokens": 60, "max_thinking_tokens": 3}


def thinking(make_trainer, algorithm="grpo", **keys) -> Trainer:
    """The prompt opens a thought, and its marks are eight tokens."""
    alphabet = ALPHABET + "".join(sorted(set("</think>") - set(ALPHABET)))
    trainer = make_trainer(algorithm, policy={"alphabet": alphabet}, sampling=SAMPLING, **keys)
    tokenizer = trainer.policy.chat.tokenizer
    tokenizer.chat_template = BARE_TEMPLATE + "{% if add_generation_prompt %}<think>{% endif %}"
    trainer.policy.chat = ChatTokenizer(tokenizer)
    return trainer


@pytest.mark.parametrize("weighting", ["token_mean", "turn_mean"])
def test_forced_tokens_are_read_and_not_trained(make_trainer, tmp_path, weighting):
    trainer = thinking(make_trainer, {"kind": "grpo", "weighting": weighting}, steps=1)
    seen: list[torch.Tensor] = []
    compute = trainer.gradients.compute
    trainer.gradients.compute = lambda weighed, *rest: seen.append(weighed) or compute(weighed, *rest)
    (step,) = trainer
    groups = step.collection.groups
    episodes = [t for group in groups for t in group.trajectories]
    turns = [turn for t in episodes for turn in t.turns]
    closing = trainer.policy.chat.encode_rendered("</think>")
    cut = [turn for turn in turns if turn.forced]
    assert len(cut) > len(turns) / 2 and step.metrics["thoughts_cut"] == len(cut) / len(turns)
    assert step.metrics["mismatch_max"] < 1e-3, "the trainer reads what the sampler read"
    for turn in cut:
        assert [turn.action[place] for place in turn.forced] == closing[: len(turn.forced)]
        assert turn.forced[0] == 3 and {turn.logprobs[place] for place in turn.forced} == {0.0}

    (weighed,) = seen
    batch = collate(episodes, [0] * len(episodes))
    assert batch.forced is not None and not (batch.forced & batch.action_mask).any()
    assert (batch.logprobs[~batch.action_mask] == 0).all()
    assert len(Turns.of(batch, 1.0).starts) == len(turns), "a mark parts no turn in two"
    assert batch.action_mask.sum() == sum(t.num_action_tokens for t in episodes)
    assert (weighed.weights[weighed.forced] == 0).all()
    if weighting == "turn_mean":  # a turn weighs the same, whether or not its thought was cut
        shares = (weighed.weights.sum(1) * len(turns)).tolist()
        assert shares == pytest.approx([1.0] * len(weighed))

    path = write_trajectories(tmp_path / "trajectories", 1, "grpo", groups)
    (back,) = ([*read_groups(EpisodesOfConfig(run=tmp_path), trainer.policy.chat, RewardConfig())][:1],)
    assert [t.turns for t in back[0].trajectories] == [t.turns for t in groups[0].trajectories]
    assert [line.get("forced", [[]]) for line in read_lines(path)] == [
        [list(turn.forced) for turn in t.turns] for t in episodes
    ]
    for episode in episodes:
        content = json.loads(json.dumps(trajectory_to_json(episode)))
        assert trajectory_from_json(episode.task, content).turns == episode.turns


def test_a_trainer_that_trains_the_mark_is_stopped(make_trainer, monkeypatch):
    """The policy would hardly have drawn it, so the check on policy sees the difference."""
    from agent_peft.types import TrustError, Turn

    monkeypatch.setattr(Turn, "sampled", property(lambda turn: (True,) * len(turn.action)))
    with pytest.raises(TrustError):
        next(iter(thinking(make_trainer)))


def test_without_a_budget_nothing_is_written_of_it(make_trainer, tmp_path):
    (step, *_) = make_trainer("grpo")
    assert "thoughts_cut" not in step.metrics
    (line, *_) = write_trajectories(tmp_path, 1, "grpo", step.collection.groups).read_text().splitlines()
    assert "forced" not in line
    episode = step.collection.groups[0].trajectories[0]
    assert all("forced" not in turn for turn in trajectory_to_json(episode)["turns"])
