"""A user's own module: any nn.Module from token ids to logits acts, trains, gets an adapter, and is saved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from agent_peft.environments.arithmetic import ALPHABET, Arithmetic, ArithmeticConfig
from agent_peft.policies.config import LoraSettings, ScratchConfig
from agent_peft.policies.engine import load_sampler
from agent_peft.policies.engine.base import EngineConfig
from agent_peft.policies.loading import load_policy
from agent_peft.policies.models.custom_module import is_custom_module
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.rollout.collector import Collector
from agent_peft.rollout.rewards import RewardConfig
from agent_peft.runs.targets import target_kind
from agent_peft.training.trainer import collate_groups
from agent_peft.types import AgentPeftError


class Recurrent(nn.Module):
    """No attention, no keys, no values."""

    def __init__(self, vocab_size: int, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.cells = nn.GRU(width, width, batch_first=True)
        self.mix = nn.Linear(width, width)
        self.out = nn.Linear(width, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.out(self.mix(self.cells(self.embedding(tokens))[0]))
        return logits


class Noncausal(Recurrent):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens.flip(1)).flip(1)


class OneForAll(Recurrent):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens)[:, -1]


def config(name: str = "Recurrent", lora: LoraSettings | None = None, **arguments: Any) -> ScratchConfig:
    return ScratchConfig(
        architecture={"model_type": f"{__name__}:{name}", **arguments},
        alphabet=ALPHABET,
        lora=lora,
        device="cpu",
    )


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=2, target_modules=["mix", "out"])])
def test_what_the_engine_samples_is_what_forward_scores(lora):
    policy = load_policy(config(lora=lora), seed=0)
    environment = Arithmetic(ArithmeticConfig(digits=1, num_tasks=8))
    engine = load_sampler(policy, EngineConfig(rows=3))
    sampling = SamplingConfig(max_new_tokens=5, max_tokens=32)
    groups = (
        Collector(environment, engine)
        .collect(environment.tasks[:4], 2, sampling, RewardConfig(), seed=1)
        .groups
    )
    batch = collate_groups(dict(enumerate(groups)))
    scored = policy.forward(batch, sampling).logprobs
    assert torch.allclose(scored[batch.action_mask], batch.logprobs[batch.action_mask], atol=1e-5)
    scored.sum().backward()
    assert all(p.grad is not None for p in policy.trainable_parameters())


def test_it_is_saved_and_loaded(tmp_path):
    first, second = load_policy(config(), seed=0), load_policy(config(), seed=1)
    first.save(tmp_path)
    second.load(tmp_path)
    assert all(
        torch.equal(a, b) for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True)
    )


def test_a_folder_does_not_say_which_class_it_is_of(tmp_path):
    """A configuration has to: nothing is imported because a folder names it."""
    load_policy(config(), seed=0).save(tmp_path)
    assert is_custom_module(tmp_path) and target_kind(tmp_path) == "weights"
    with pytest.raises(AgentPeftError, match=r"holds a module of your own.*evaluate --config") as raised:
        load_policy(tmp_path, lora=None)
    assert "\n" not in str(raised.value)


def test_arguments_reach_the_class():
    assert load_policy(config(width=8), seed=0).decoder.module.embedding.weight.shape[1] == 8


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("Noncausal", {}, "not causal"),
        ("OneForAll", {}, "must give logits"),
        ("Nobody", {}, "cannot be imported"),
        ("Recurrent", {"depth": 3}, "depth"),
        ("Any", {}, "cannot be made"),
    ],
)
def test_mistakes_are_told(name, arguments, message):
    with pytest.raises(AgentPeftError, match=message):
        load_policy(config(name, **arguments), seed=0)
