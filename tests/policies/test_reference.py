"""The reference is another policy for as long as it is asked, and the policy is afterwards what it was."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from agent_peft.batch import Batch, collate
from agent_peft.policies.adapters import attach
from agent_peft.policies.config import LoraSettings
from agent_peft.policies.policy import Policy
from agent_peft.policies.reference import put_back, reference_of
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.types import AgentPeftError, Task, Trajectory, Turn

MakePolicy = Callable[..., Policy]
PLAIN = SamplingConfig()


def make_batch() -> Batch:
    actions = [(3, 4, 5), (3, 4, 6, 7), (8,)]
    return collate(
        [Trajectory(Task("t"), (Turn((1, 2, 9), a, (0.0,) * len(a)),)) for a in actions], [0, 0, 1]
    )


def move(policy: Policy) -> None:
    with torch.no_grad():
        for parameter in policy.trainable_parameters():
            parameter.add_(
                torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
                * 0.05
            )


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("lora", [True, False], ids=["adapter", "all weights"])
def test_it_stays_the_policy_of_then(lora, packing, make_policy):
    policy, batch = make_policy(lora=lora, packing=packing), make_batch()
    before = policy.forward(batch, PLAIN).logprobs.detach()
    reference = reference_of(policy.model)
    assert torch.equal(policy.reference_logprobs(batch, PLAIN, reference), before)
    move(policy)
    weights = [p.detach().clone() for p in policy.trainable_parameters()]
    now = policy.forward(batch, PLAIN).logprobs
    assert not torch.allclose(now, before, atol=1e-2)
    found = policy.reference_logprobs(batch, PLAIN, reference)
    assert torch.equal(found, before) and not found.requires_grad
    assert all(torch.equal(p, w) for p, w in zip(policy.trainable_parameters(), weights, strict=True))
    now.sum().backward()
    assert all(p.grad is not None for p in policy.trainable_parameters()), (
        "a graph from before is still whole"
    )


def test_activation_checkpointing_computes_the_policy_again_and_not_its_reference(make_policy):
    batch, gradients = make_batch(), []
    for checkpointing in (False, True):
        made = make_policy()
        policy = Policy(made.model, made.chat, activation_checkpointing=checkpointing)
        reference = reference_of(policy.model)
        move(policy)
        loss = policy.forward(batch, PLAIN).logprobs.sum()
        policy.reference_logprobs(batch, PLAIN, reference)
        loss.backward()
        gradients.append([p.grad for p in policy.trainable_parameters()])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*gradients, strict=True))


def test_the_base_is_the_model_without_its_adapter(make_policy):
    policy, bare, batch = make_policy(), make_policy(lora=False), make_batch()
    expected = bare.forward(batch, PLAIN).logprobs
    assert torch.allclose(
        policy.reference_logprobs(batch, PLAIN, reference_of(policy.model, "base")), expected, atol=1e-5
    )
    assert not torch.allclose(
        policy.reference_logprobs(batch, PLAIN, reference_of(policy.model)), expected, atol=1e-2
    )
    with pytest.raises(
        AgentPeftError,
        match=r"reference: base means the policy with its adapter off, and it has none; set policy\.lora",
    ):
        reference_of(bare.model, "base")


def test_of_an_adapter_that_is_zero_nothing_is_copied(make_policy):
    bare = make_policy(lora=False)
    assert reference_of(attach(bare.base, LoraSettings(rank=2), seed=0)).weights is None


def test_a_failure_inside_leaves_the_policy_as_it_was(make_policy):
    policy = make_policy()
    reference = reference_of(policy.model)
    move(policy)
    weights = [p.detach().clone() for p in policy.trainable_parameters()]
    with pytest.raises(ZeroDivisionError), reference.acting(policy.model):
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), put_back(policy.model):
        move(policy)
        raise ZeroDivisionError
    assert all(torch.equal(p, w) for p, w in zip(policy.trainable_parameters(), weights, strict=True))
