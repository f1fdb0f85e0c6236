"""Activation checkpointing: the same log-probabilities and gradients, from less memory."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from agent_peft.batch import Batch, collate
from agent_peft.policies.config import LoraSettings, ScratchConfig
from agent_peft.policies.loading import load_policy
from agent_peft.policies.models.shape import layers_of
from agent_peft.policies.policy import Policy
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.types import AgentPeftError, Task, Trajectory, Turn
from tests.conftest import case

PLAIN = SamplingConfig()
ALPHABET = "0123456789+*-= ^$"


def make_batch(length: int = 20) -> Batch:
    """Two groups of three that share a prompt."""
    found = []
    for i in range(6):
        drawn = torch.randint(3, 19, (length,), generator=torch.Generator().manual_seed(i)).tolist()
        prompt = [1, 3 + i // 3, *range(4, 12)]
        found.append(Trajectory(Task("t"), (Turn(tuple(prompt), tuple(drawn), (-1.0,) * length),)))
    batch = collate(found, [0, 0, 0, 1, 1, 1])
    return replace(
        batch,
        weights=torch.randn(batch.tokens.shape, generator=torch.Generator().manual_seed(9))
        * batch.action_mask,
    )


def checkpointed(policy: Policy) -> Policy:
    return Policy(policy.model, policy.chat, packing=policy.packing, activation_checkpointing=True)


def gradient(policy: Policy, batch: Batch, **options: object) -> tuple[Tensor, Tensor]:
    """Log-probabilities, and the gradient of their weighted sum as one vector."""
    policy.model.zero_grad()
    logprobs = policy.forward(batch, PLAIN, **options).logprobs
    (batch.weights * logprobs).sum().backward()
    found = [
        torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten()
        for p in policy.trainable_parameters()
    ]
    return logprobs.detach(), torch.cat(found)


def assert_same(policy: Policy, **options: object) -> None:
    batch = make_batch()
    expected, wanted = gradient(policy, batch, **options)
    again = checkpointed(policy)
    calls = []
    hooks = [layer.register_forward_hook(lambda *_: calls.append(1)) for layer in again.checkpointed]
    inner = [
        next(layer.children()).register_forward_hook(lambda *_: calls.append(2))
        for layer in again.checkpointed
    ]
    logprobs, found = gradient(again, batch, **options)
    for hook in (*hooks, *inner):
        hook.remove()
    assert calls.count(2) > calls.count(1), "nothing was computed again"
    assert float(wanted.norm()) > 1e-2
    assert torch.equal(logprobs, expected)
    assert float((found - wanted).norm() / wanted.norm()) < 1e-6
    assert not any("forward" in vars(module) for module in again.model.modules()), (
        "the layers are as they were"
    )


@pytest.mark.parametrize(
    ("kind", "lora", "packing"),
    [
        case(kind, lora, packing, fast=kind == "llama" or lora == packing)
        for kind in ("llama", "gpt2", "gpt_neox", "qwen3", "gemma3_text", "gemma2")
        for lora, packing in product((True, False), (True, False))
    ],
)
def test_the_gradient_is_the_same(kind, lora, packing, make_policy):
    assert_same(make_policy(kind, lora=lora, packing=packing))


def test_dropout_drops_the_same_again(make_policy):
    policy = make_policy()
    for module in policy.model.modules():
        if hasattr(module, "lora_dropout"):
            module.lora_dropout["default"] = nn.Dropout(0.4)
    policy.model.eval()
    assert policy.dropouts
    assert_same(policy, dropout_seed=5)
    dropped, _ = gradient(checkpointed(policy), make_batch(), dropout_seed=5)
    assert not torch.equal(dropped, gradient(policy, make_batch())[0]), "the dropout must act"
    assert not any(module.training for module in policy.model.modules())


def test_it_takes_less_memory(make_policy, peak_bytes):
    policy, batch = make_policy(num_hidden_layers=8), make_batch(60)
    plain, less = (peak_bytes(lambda p=p: gradient(p, batch)) for p in (policy, checkpointed(policy)))
    assert less < plain / 3


class Own(nn.Module):
    """Causal, with its blocks in a list."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)) for _ in range(3)
        )
        self.out = nn.Linear(16, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.out(x)


class Bare(nn.Module):
    """Without a list of layers."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(vocab_size, 16), nn.Linear(16, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.embedding(tokens))


def own_policy(name: str, lora: LoraSettings | None, monkeypatch: pytest.MonkeyPatch) -> Policy:
    monkeypatch.setitem(sys.modules, "own_layers", sys.modules[__name__])
    config = ScratchConfig(
        architecture={"model_type": f"own_layers:{name}"},
        alphabet=ALPHABET,
        lora=lora,
        device="cpu",
        activation_checkpointing=True,
    )
    return load_policy(config, 0)


@pytest.mark.parametrize("lora", [LoraSettings(rank=2), None], ids=["lora", "whole"])
def test_a_module_of_ones_own(lora, monkeypatch):
    policy = own_policy("Own", lora, monkeypatch)
    assert len(policy.checkpointed) == 3
    policy.checkpointed = []
    assert_same(policy)


def test_a_module_without_layers_is_refused(monkeypatch):
    with pytest.raises(
        AgentPeftError, match=r"policy\.activation_checkpointing: the model has no nn\.ModuleList"
    ):
        own_policy("Bare", None, monkeypatch)


def test_lists_within_layers_are_no_layers_of_their_own():
    def block() -> nn.Module:
        return nn.ModuleDict(
            {
                "attention": nn.Linear(2, 2),
                "experts": nn.ModuleList([nn.Sequential(nn.Linear(2, 2)) for _ in range(2)]),
            }
        )

    blocks = [block() for _ in range(3)]
    assert layers_of(nn.ModuleDict({"h": nn.ModuleList(blocks)})) == blocks
