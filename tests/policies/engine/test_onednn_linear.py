from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from agent_peft.hardware import has_bf16
from agent_peft.policies.engine import onednn_linear as layout
from agent_peft.policies.engine.base import EngineConfig
from agent_peft.policies.engine.local import Engine
from agent_peft.policies.policy import Policy
from agent_peft.policies.sampling import SamplingConfig

MakePolicy = Callable[..., Policy]


@pytest.mark.parametrize("shape", [(1, 16), (5, 16), (2, 3, 16), (70, 16)])
def test_a_blocked_layer_computes_what_a_plain_one_does(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape)
    for bias in (True, False):
        layer = nn.Linear(16, 7, bias=bias)
        with torch.no_grad():
            assert torch.allclose(layout.BlockedLinear(layer.weight, layer.bias)(x), layer(x), atol=1e-5)


def test_inside_every_linear_layer_is_blocked_and_afterwards_none(
    make_policy: MakePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = make_policy()
    before = {name: module for name, module in policy.model.named_modules()}
    assert not policy.blocks, "so small a model stays in the caches"
    monkeypatch.setattr(layout, "LEAST", 1)
    assert layout.worth_it(policy.base)
    policy.blocks = True
    with pytest.raises(ZeroDivisionError), policy.sampling_mode(True):
        inside = [type(module) for module in policy.base.modules()]
        assert nn.Linear not in inside and isinstance(policy.head, layout.BlockedLinear)
        raise ZeroDivisionError
    assert dict(policy.model.named_modules()) == before


def test_the_sampler_says_the_same(make_policy: MakePolicy) -> None:
    policy = make_policy()
    torch.nn.init.normal_(next(p for n, p in policy.model.named_parameters() if "lora_B" in n))
    engine = Engine(policy, EngineConfig())
    plain = engine.score([1, 5, 6, 7, 8, 9, 10], SamplingConfig())
    assert engine.score([1, 5, 6, 7, 8, 9, 10], SamplingConfig(), blocks=True) == pytest.approx(
        plain, abs=1e-5
    )


def test_a_model_whose_layers_cannot_be_replaced_is_sampled_without(
    make_policy: MakePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = make_policy()
    policy.blocks = True
    monkeypatch.setattr(layout.BlockedLinear, "forward", lambda layer, x: x.new_zeros(*x.shape[:-1], 3))
    Engine(policy, EngineConfig())
    assert not policy.blocks


needs_bf16 = pytest.mark.skipif(
    not has_bf16(torch.device("cpu")), reason="this CPU does not multiply bfloat16 by itself"
)


@needs_bf16
@pytest.mark.parametrize("bias", [False, True])
def test_beside_the_product_a_small_change_is_not_rounded_away(bias: bool) -> None:
    """A tenth of a percent of W x: folded into weights of 16 bits, four fifths of it would be lost."""
    generator = torch.Generator().manual_seed(0)
    x, w = (
        torch.randn(64, 256, generator=generator).bfloat16(),
        (torch.randn(192, 256, generator=generator) / 16).bfloat16(),
    )
    a, b = (
        (torch.randn(8, 256, generator=generator) / 16).bfloat16(),
        (torch.randn(192, 8, generator=generator) * 2e-4).bfloat16(),
    )
    vector = torch.randn(192, generator=generator).bfloat16() if bias else None
    layer, exact = layout.BlockedLora(w, vector, a, b, 2.0), 2 * x.double() @ a.double().T @ b.double().T
    change = layer(x).double() - layer.base(x).double()
    folded = (
        nn.functional.linear(x, (w.float() + 2 * b.float() @ a.float()).bfloat16(), vector).double()
        - layer.base(x).double()
    )
    kept, rounded = (float((one * exact).sum() / (exact * exact).sum()) for one in (change, folded))
    assert kept == pytest.approx(1, abs=0.1)
    assert (change - exact).norm() < (folded - exact).norm() or rounded < 0.9


@needs_bf16
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_in_16_bits_the_adapter_is_computed_beside_the_weights(
    make_policy: MakePolicy, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(layout, "LEAST", 1)
    policy = make_policy(kind, dtype=torch.bfloat16)
    assert policy.blocks and policy.dtype == torch.bfloat16
    before = dict(policy.model.named_modules())
    with policy.sampling_mode(True):
        inside = list(policy.base.modules())
        assert any(isinstance(module, layout.BlockedLora) for module in inside)
        assert not any(isinstance(module, nn.Linear) for module in inside), "the others are blocked, too"
    assert dict(policy.model.named_modules()) == before
    engine, tokens = Engine(policy, EngineConfig()), list(range(1, 17))
    plain, blocks = (
        torch.tensor(engine.score(tokens, SamplingConfig(), blocks=blocks)) for blocks in (False, True)
    )
    assert policy.drift(plain - blocks) <= policy.rounding
    with policy.model.disable_adapter():
        assert (
            policy.drift(torch.tensor(engine.score(tokens, SamplingConfig())) - blocks) > policy.rounding
        ), "the adapter counts"
