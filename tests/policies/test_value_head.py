"""The critic on a policy: what it reads, whom it teaches, and where it is kept."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import layer_norm
from transformers import AutoModelForCausalLM

from agent_peft import load_policy
from agent_peft.batch import Batch, collate
from agent_peft.policies.policy import Policy
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.policies.value_head import WEIGHTS, ValueHead
from agent_peft.types import AgentPeftError, Task, Trajectory, Turn

MakePolicy = Callable[..., Policy]
PLAIN = SamplingConfig()


def make_batch() -> Batch:
    """Six trajectories of two turns; those of a group share a prompt, and two are the same."""
    found = []
    for i in range(6):
        common, own = random.Random(i % 2), random.Random(1000 + i // 2)
        first = Turn(
            (1, *common.choices(range(3, 19), k=5)), tuple(own.choices(range(2, 19), k=3)), (-1.0,) * 3
        )
        second = Turn(
            tuple(own.choices(range(3, 19), k=2)),
            tuple(own.choices(range(2, 19), k=1 + i)),
            (-1.0,) * (1 + i),
        )
        found.append(Trajectory(Task("t"), (first, second), rewards=(0.0, float(i % 2))))
    return collate([*found, found[0]], [0, 1, 0, 1, 0, 1, 0])


def with_critic(policy: Policy, detach: bool = False) -> Policy:
    """Its weights are random, as if it had learned."""
    head = policy.attach_value_head(detach=detach)
    torch.nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(0))
    return policy


def value_gradient(policy: Policy, batch: Batch) -> tuple[list[Tensor], Tensor | None]:
    """Of the critic's squared error alone: the trunk's gradients by parameter, and the head's."""
    policy.model.zero_grad()
    values = policy.forward(batch, PLAIN, values=True).values
    assert values is not None and policy.value_head is not None
    ((values - batch.returns[:, None]) * batch.action_mask).square().sum().backward()
    return [
        p.grad for p in policy.trainable_parameters() if p.grad is not None
    ], policy.value_head.weight.grad


# -- what it says --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3_text", "gemma2"])
def test_a_value_is_read_where_its_token_is_predicted(kind, packing, make_policy):
    """Row by row, from the model's own hidden states, with no code of ours but the head."""
    policy, batch = with_critic(make_policy(kind, packing=packing, lora=kind != "gpt2")), make_batch()
    expected = torch.zeros(batch.tokens.shape)
    with torch.no_grad():
        for b, length in enumerate(batch.lengths.tolist()):
            states = policy.model(
                input_ids=batch.tokens[b : b + 1, :length], output_hidden_states=True
            ).hidden_states[-1][0]
            expected[b, 1:length] = (
                layer_norm(states[:-1], states.shape[-1:])
                @ policy.value_head.weight
                / states.shape[-1] ** 0.5
            )
    expected = expected * batch.action_mask
    values = policy.forward(batch, PLAIN, values=True).values
    assert values is not None and values.dtype == torch.float32 and values.requires_grad
    assert float(expected.abs().max()) > 0.1
    torch.testing.assert_close(values.detach(), expected, atol=1e-5, rtol=0)
    alone = policy.values(batch)
    assert not alone.requires_grad
    torch.testing.assert_close(alone, expected, atol=1e-5, rtol=0)
    assert policy.packing == packing


def test_a_fresh_critic_says_nothing_and_disturbs_nothing(make_policy):
    policy, batch = make_policy(), make_batch()
    before = policy.forward(batch, PLAIN, entropy=True)
    assert before.values is None
    head = policy.attach_value_head(detach=False)
    after = policy.forward(batch, PLAIN, entropy=True, values=True)
    assert after.values is not None and not after.values.any()
    assert torch.equal(after.logprobs, before.logprobs)
    assert policy.attach_value_head(detach=True) is head, "a critic continues from stage to stage"
    assert head.detach_states
    assert all(p is not head.weight for p in policy.trainable_parameters()), (
        "it is not the policy's: an update of that alone leaves it"
    )


def test_values_do_not_depend_on_the_scale_of_hidden_states():
    head = ValueHead(64)
    torch.nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(0))
    states = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(head(100 * states + 7), head(states), atol=1e-5, rtol=0)
    assert head(states.bfloat16()).dtype == torch.float32


def test_a_policy_without_a_critic_says_so(make_policy):
    with pytest.raises(ValueError, match="attach_value_head"):
        make_policy().values(make_batch())


# -- whom it teaches -----------------------------------------------------------------------------------------


def test_the_value_loss_reaches_the_adapter(make_policy):
    """The seed's critic under LoRA got no gradient; this one does, and gives it."""
    policy, batch = with_critic(make_policy()), make_batch()
    trunk, head = value_gradient(policy, batch)
    assert len(trunk) == len(policy.trainable_parameters()) > 0
    assert all(bool(gradient.any()) for gradient in trunk), "A and B of every layer"
    assert head is not None and bool(head.all())
    assert all(p.grad is None for p in policy.model.parameters() if not p.requires_grad)


def test_the_size_of_a_critic_is_read_without_a_warning(monkeypatch):
    warnings = []
    monkeypatch.setattr("transformers.modeling_utils.logger.warning_once", warnings.append)
    shape = {"model_type": "gpt2", "n_layer": 1, "n_head": 1, "n_embd": 8, "n_positions": 8}
    policy = load_policy({"kind": "scratch", "alphabet": "01", "architecture": shape})
    assert policy.attach_value_head(detach=False).weight.shape == (8,) and not warnings


def test_the_first_gradient_is_the_heads_alone(make_policy):
    """w = 0: the model under it is asked for nothing until the critic has learned something."""
    policy = make_policy()
    policy.attach_value_head(detach=False)
    trunk, head = value_gradient(policy, make_batch())
    assert not any(gradient.any() for gradient in trunk)
    assert head is not None and bool(head.any())


def test_a_critic_may_be_kept_from_the_trunk(make_policy):
    batch = make_batch()
    trunk, head = value_gradient(with_critic(make_policy(), detach=True), batch)
    assert trunk == []
    _, other = value_gradient(with_critic(make_policy()), batch)
    torch.testing.assert_close(head, other)


@pytest.mark.parametrize(
    "pieces", [[[0, 1, 2, 3, 4, 5, 6]], [[0, 2], [5, 1, 3], [4], [6]]], ids=["whole", "cut"]
)
def test_packed_and_padded_teach_the_same(pieces, make_policy):
    batch = make_batch()
    found = []
    for packing, parts in ((True, pieces), (False, [[0, 1, 2, 3, 4, 5, 6]])):
        policy = with_critic(make_policy(packing=packing))
        # the head's adds up by itself
        gradients = [value_gradient(policy, batch.select(rows)) for rows in parts]
        summed = [
            torch.stack(parameter).sum(0)
            for parameter in zip(*(trunk for trunk, _ in gradients), strict=True)
        ]
        found.append(torch.cat([gradient.flatten() for gradient in (*summed, gradients[-1][1])]))
    assert float((found[0] - found[1]).norm() / found[1].norm()) < 1e-6


# -- where it is kept ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "whole"])
def test_it_is_saved_beside_the_policy_and_comes_back(lora, make_policy, tmp_path):
    policy, batch = with_critic(make_policy(lora=lora)), make_batch()
    policy.save(tmp_path)
    fresh = make_policy(lora=lora)
    fresh.load(tmp_path)
    assert torch.equal(fresh.values(batch), policy.values(batch))
    attached = make_policy(lora=lora)
    weight = attached.attach_value_head(detach=True).weight
    attached.load(tmp_path)
    assert attached.value_head is not None and attached.value_head.weight is weight, (
        "the one that an optimizer holds"
    )
    assert torch.equal(weight, policy.value_head.weight)
    assert attached.value_head.detach_states


@pytest.mark.filterwarnings(
    "ignore:.*is_gradient_checkpointing:FutureWarning"
)  # between PEFT and Transformers
def test_peft_and_transformers_need_not_know(make_policy, tmp_path):
    policy, tokens = with_critic(make_policy()), torch.tensor([[1, 5, 6, 7]])
    policy.save(tmp_path / "adapter")
    theirs = PeftModel.from_pretrained(make_policy(lora=False).model, str(tmp_path / "adapter")).eval()
    torch.testing.assert_close(theirs(input_ids=tokens).logits, policy.model(input_ids=tokens).logits)
    assert not [
        name for name in load_file(tmp_path / "adapter" / "adapter_model.safetensors") if "value" in name
    ]
    whole = with_critic(make_policy(lora=False))
    whole.save(tmp_path / "whole")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "whole").eval()
    torch.testing.assert_close(loaded(input_ids=tokens).logits, whole.model(input_ids=tokens).logits)
    with_critic(make_policy()).save_merged(tmp_path / "merged")
    assert not (tmp_path / "merged" / WEIGHTS).exists()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.unlink(), "cannot be read"),
        (lambda path: path.write_bytes(b"nothing"), "cannot be read"),
        (lambda path: save_file({"weight": torch.zeros(7)}, path), "32 hidden units"),
        (lambda path: save_file({"weights": torch.zeros(32)}, path), "32 hidden units"),
    ],
    ids=["gone", "torn", "another model", "another tensor"],
)
def test_a_critic_that_does_not_fit_is_one_line(spoil, message, make_policy, tmp_path):
    policy = with_critic(make_policy())
    policy.save(tmp_path)
    spoil(tmp_path / WEIGHTS)
    with pytest.raises(AgentPeftError, match=message) as raised:
        policy.load(tmp_path)
    assert "\n" not in str(raised.value)
