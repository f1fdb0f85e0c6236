"""Masks of the adapter's dropout: as random as they should be, and the same however a batch is divided."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from agent_peft.batch import Batch, collate
from agent_peft.policies import adapters
from agent_peft.policies.config import LoraSettings
from agent_peft.policies.forward import language_model
from agent_peft.policies.forward.layers import AdapterDropout, dropping, prefix_keys
from agent_peft.policies.policy import Policy
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.types import AgentPeftError, Task, Trajectory, Turn

PLAIN = SamplingConfig()


def make_batch() -> Batch:
    """Two groups of three trajectories of several lengths; all six begin alike, and two are equal."""
    found = []
    for i in range(6):
        length = 5 + 4 * (i % 3)
        drawn = torch.randint(3, 19, (length,), generator=torch.Generator().manual_seed(i % 5)).tolist()
        prompt = (1, 5, 6, 7, 3 + i // 3 * (i < 5), *range(4, 9))
        found.append(Trajectory(Task("t"), (Turn(prompt, tuple(drawn), (-1.0,) * length),)))
    return collate(found, [0, 0, 0, 1, 1, 1])


def gradient(policy: Policy, parts: list[list[int]], seed: int = 5) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the sampled tokens, and the gradient of their sum, from these microbatches."""
    batch = make_batch()
    policy.model.zero_grad()
    logprobs = torch.zeros_like(batch.logprobs)
    for rows in parts:
        found = policy.forward(batch.select(rows), PLAIN, dropout_seed=seed).logprobs
        found.sum().backward()
        logprobs[rows, : found.shape[1]] = found.detach()
    return logprobs, torch.cat([p.grad.flatten() for p in policy.trainable_parameters()])  # type: ignore[union-attr]


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHARED = {"shared_expert_intermediate_size": 16, "initializer_range": 0.3}


@pytest.fixture
def make(make_policy: Callable[..., Policy]) -> Callable[..., Policy]:
    """A policy whose adapter counts, and drops."""

    def dropping_policy(kind: str, targets: list[str] | None = None, **shape: object) -> Policy:
        plain = make_policy(kind, lora=False, **shape)
        settings = LoraSettings(rank=2, alpha=4, dropout=0.4, target_modules=targets or "all-linear")
        model = adapters.attach(plain.model, settings, seed=0)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                draw = torch.Generator().manual_seed(len(name))
                nn.init.normal_(parameter, std=0.1, generator=draw)
        return Policy(model, plain.chat)

    return dropping_policy


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("llama", {}),
        ("gpt2", {}),
        ("gemma3_text", {}),
        ("qwen2_moe", {"hidden_size": 32, "num_hidden_layers": 2, **EXPERTS, **SHARED}),
    ],
)
def test_how_a_batch_is_divided_changes_nothing(make, kind, shape):
    """Microbatches, their order, and one trie, several tries or padding."""
    packed = make(kind, **shape)
    expected, wanted = gradient(packed, [[0, 1, 2, 3, 4, 5]])
    assert float(wanted.norm()) > 1e-2
    padded = Policy(packed.model, packed.chat, packing=False)
    for policy in (packed, padded):
        for parts in ([[0, 1, 2], [3, 4, 5]], [[5], [1, 3], [4, 0, 2]], [[0, 1, 2, 3, 4, 5]]):
            logprobs, found = gradient(policy, parts)
            torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)
            assert float((found - wanted).norm() / wanted.norm()) < 1e-5
    assert not torch.allclose(gradient(packed, [list(range(6))], seed=6)[0], expected, atol=1e-3)
    assert not torch.allclose(packed.forward(make_batch(), PLAIN).logprobs, expected, atol=1e-3), "it acts"


def test_masks_of_the_output_layer_are_the_same_in_chunks(make, monkeypatch):
    """A chunk is computed again in the backward, where it drops the same units."""
    policy = make("llama", ["q_proj", "lm_head"], tie_word_embeddings=False)
    expected, wanted = gradient(policy, [list(range(6))])
    monkeypatch.setattr(language_model, "CHUNK", 7 * policy.text_config.vocab_size)
    logprobs, found = gradient(policy, [[0, 4], [1, 2, 3, 5]])
    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)
    assert float((found - wanted).norm() / wanted.norm()) < 1e-5


def test_masks_are_random_over_tokens_layers_units_and_seeds():
    tokens = torch.randint(0, 50, (4, 100), generator=torch.Generator().manual_seed(0))
    layers = [nn.Dropout(0.3), nn.Dropout(0.3)]

    def kept(seed: int) -> list[Tensor]:
        with dropping(AdapterDropout(layers, seed, prefix_keys(tokens))):
            found = [layer(torch.ones(4, 100, 200)) for layer in layers]
        assert {round(x, 4) for mask in found for x in mask.unique().tolist()} == {0.0, round(1 / 0.7, 4)}
        return [(mask > 0).double() for mask in found]

    (one, layer), (other, _) = kept(1), kept(2)
    assert float(one.mean()) == pytest.approx(0.7, abs=0.01)
    for over in (0, 1, 2):  # of each unit, and of each token, the share that is kept varies as it should
        number = one.numel() / one.mean(over).numel()
        assert float(one.mean(over).std()) == pytest.approx((0.21 / number) ** 0.5, rel=0.2)
    neighbours = [(one[:, 1:], one[:, :-1]), (one[..., 1:], one[..., :-1]), (one[:1], one[1:2])]
    for a, b in [(one, other), (one, layer), *neighbours]:
        assert abs(float(((a - 0.7) * (b - 0.7)).mean()) / 0.21) < 0.03
    assert torch.equal(layers[0](tokens.float()), tokens.float()), "outside, nothing is dropped"


def test_a_layer_that_reads_other_rows_is_refused():
    layer, tokens = nn.Dropout(0.3), torch.ones(2, 3, dtype=torch.int64)
    with (
        dropping(AdapterDropout([layer], 0, prefix_keys(tokens))),
        pytest.raises(AgentPeftError, match=r"policy\.lora\.dropout: a layer reads \(4,\) rows where"),
    ):
        layer(torch.ones(4, 8))
