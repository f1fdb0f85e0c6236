from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from agent_peft.policies import blocked as layout
from agent_peft.policies.engine import Engine, EngineConfig
from agent_peft.policies.language_model import Policy
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


def test_inside_every_linear_layer_is_blocked_and_afterwards_none(make_policy: MakePolicy, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert engine.score([1, 5, 6, 7, 8, 9, 10], SamplingConfig(), blocks=True) == pytest.approx(plain, abs=1e-5)


def test_a_model_whose_layers_cannot_be_replaced_is_sampled_without(make_policy: MakePolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make_policy()
    policy.blocks = True
    monkeypatch.setattr(layout.BlockedLinear, "forward", lambda layer, x: x.new_zeros(*x.shape[:-1], 3))
    Engine(policy, EngineConfig())
    assert not policy.blocks
