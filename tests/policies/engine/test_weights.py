from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from agent_peft.hardware import has_bf16
from agent_peft.policies.engine import fused_linear, lean
from agent_peft.policies.engine.base import EngineConfig
from agent_peft.policies.engine.fused_linear import FusedLinear
from agent_peft.policies.engine.kv_cache import ROWS
from agent_peft.policies.engine.local import LocalEngine
from agent_peft.policies.engine.weights import sampling_weights
from agent_peft.policies.policy import Policy
from agent_peft.policies.sampling import SamplingConfig

MakePolicy = Callable[..., Policy]


@pytest.mark.parametrize("shape", [(1, 16), (5, 16), (2, 3, 16), (70, 16)])
def test_a_onednn_layer_computes_what_a_plain_one_does(shape):
    torch.manual_seed(0)
    x = torch.randn(shape)
    for bias in (True, False):
        layer = nn.Linear(16, 7, bias=bias)
        with torch.no_grad():
            assert torch.allclose(FusedLinear([layer], onednn=True)(x), layer(x), atol=1e-5)


def test_inside_every_linear_layer_is_onednns_and_afterwards_none(make_policy, monkeypatch):
    policy = make_policy()
    before = {name: module for name, module in policy.model.named_modules()}
    assert not fused_linear.suits(policy.base), "so small a model stays in the caches"
    monkeypatch.setattr(fused_linear, "CACHED_WEIGHTS", 1)
    assert fused_linear.suits(policy.base)
    with pytest.raises(ZeroDivisionError), sampling_weights(policy, "layers"):
        inside = [type(module) for module in policy.base.modules()]
        assert nn.Linear not in inside and isinstance(policy.head, FusedLinear)
        raise ZeroDivisionError
    assert dict(policy.model.named_modules()) == before


def test_the_sampler_gives_the_same_log_probabilities(make_policy):
    policy = make_policy()
    torch.nn.init.normal_(next(p for n, p in policy.model.named_parameters() if "lora_B" in n))
    engine = LocalEngine(policy, EngineConfig())
    plain = engine.score([1, 5, 6, 7, 8, 9, 10], SamplingConfig())
    laid_out = [engine._score([1, 5, 6, 7, 8, 9, 10], SamplingConfig(), way) for way in ("lean", "layers")]
    assert engine.way == "lean"
    for scores in laid_out:
        assert scores == pytest.approx(plain, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_its_adapter_the_sampler_is_the_base_model(make_policy, monkeypatch, dtype):
    monkeypatch.setattr(fused_linear, "CACHED_WEIGHTS", 1)
    policy, base = make_policy(dtype=dtype), make_policy(lora=False, dtype=dtype)
    tokens, plain = list(range(1, 17)), SamplingConfig()
    engine = LocalEngine(policy, EngineConfig())
    expected = torch.tensor(LocalEngine(base, EngineConfig()).score(tokens, plain))
    with_adapter, without = (torch.tensor(engine.score(tokens, plain, on)) for on in (True, False))
    assert policy.drift(without - expected) <= policy.rounding < policy.drift(with_adapter - expected)


class NoSynchronization(TorchDispatchMode):
    """An operation whose result the host must wait for is an error."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_cuda_graph_can_capture_a_step_of_the_lean_decoder(make_policy, kind):
    policy = make_policy(kind, packing=False)
    engine = LocalEngine(policy, EngineConfig(rows=2))
    cache = engine.new_cache((1, 1, 2), (1, 1, 5))
    positions = torch.arange(5).expand(2, -1)
    with sampling_weights(policy, "lean"):
        cache.read(policy, ROWS, range(2), torch.full((2, 4), 3), positions[:, :4])
        mask = cache.place(ROWS, range(2), positions[:, 4:])
        how = {"position_ids": positions[:, 4:], "attention_mask": mask, "past_key_values": cache}
        with NoSynchronization():
            states = policy.read(torch.full((2, 1), 3), **how)
        with pytest.raises(AssertionError), NoSynchronization():
            states.sum().item()
    own = policy.base.base_model(torch.full((1, 5), 3)).last_hidden_state[:, -1]
    assert torch.allclose(states[:, 0], own.expand(2, -1), atol=1e-5)


def test_a_model_whose_layers_cannot_be_replaced_is_sampled_without(make_policy, monkeypatch):
    policy = make_policy()
    monkeypatch.setattr(fused_linear, "CACHED_WEIGHTS", 1)
    assert LocalEngine(policy, EngineConfig()).way == "lean"
    monkeypatch.setattr(lean.LeanDecoder, "__call__", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        LocalEngine(policy, EngineConfig())
    monkeypatch.setattr(lean.LeanDecoder, "__call__", lambda *_, **__: [][0])
    assert LocalEngine(policy, EngineConfig()).way == "layers"
    monkeypatch.setattr(FusedLinear, "forward", lambda layer, x: x.new_zeros(*x.shape[:-1], 3))
    assert LocalEngine(policy, EngineConfig()).way == "modules"


needs_bf16 = pytest.mark.skipif(
    not has_bf16(torch.device("cpu")), reason="this CPU does not multiply bfloat16 natively"
)


@needs_bf16
@pytest.mark.parametrize("bias", [False, True])
def test_beside_the_product_a_small_change_is_not_rounded_away(bias):
    """A tenth of a percent of W x: folded into weights of 16 bits, four fifths of it would be lost."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 256, generator=generator).bfloat16()
    w = (torch.randn(192, 256, generator=generator) / 16).bfloat16()
    a = (torch.randn(8, 256, generator=generator) / 16).bfloat16()
    b = (torch.randn(192, 8, generator=generator) * 2e-4).bfloat16()
    vector = torch.randn(192, generator=generator).bfloat16() if bias else None
    base = nn.Linear(256, 192, bias=bias, dtype=torch.bfloat16)
    base.weight.data = w
    if vector is not None:
        base.bias.data = vector
    adapted = LoraLinear(base, "default", LoraConfig(), r=8, lora_alpha=16)
    adapted.lora_A["default"].weight.data, adapted.lora_B["default"].weight.data = a, b
    layer, alone = FusedLinear([adapted], onednn=True), FusedLinear([base], onednn=True)
    exact = 2 * x.double() @ a.double().T @ b.double().T
    change = layer(x).double() - alone(x).double()
    folded = (
        nn.functional.linear(x, (w.float() + 2 * b.float() @ a.float()).bfloat16(), vector).double()
        - alone(x).double()
    )
    kept, rounded = (float((one * exact).sum() / (exact * exact).sum()) for one in (change, folded))
    assert kept == pytest.approx(1, abs=0.1)
    assert (change - exact).norm() < (folded - exact).norm() or rounded < 0.9


@needs_bf16
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_in_16_bits_the_adapter_is_computed_beside_the_weights(make_policy, monkeypatch, kind):
    monkeypatch.setattr(fused_linear, "CACHED_WEIGHTS", 1)
    policy = make_policy(kind, dtype=torch.bfloat16)
    assert fused_linear.suits(policy.base) and policy.dtype == torch.bfloat16
    before = dict(policy.model.named_modules())
    with sampling_weights(policy, "layers"):
        inside = list(policy.base.modules())
        assert any(isinstance(module, FusedLinear) and module.a is not None for module in inside)
        assert not any(isinstance(module, nn.Linear) for module in inside), "the others are replaced, too"
    assert dict(policy.model.named_modules()) == before
    engine, tokens = LocalEngine(policy, EngineConfig()), list(range(1, 17))
    plain, laid_out = (
        torch.tensor(engine._score(tokens, SamplingConfig(), way)) for way in ("modules", engine.way)
    )
    assert policy.drift(plain - laid_out) <= policy.rounding
    base = torch.tensor(engine.score(tokens, SamplingConfig(), adapter=False))
    assert policy.drift(base - laid_out) > policy.rounding, "the adapter counts"


@needs_bf16
def test_an_adapter_that_was_not_trained_costs_nothing(make_policy, monkeypatch):
    monkeypatch.setattr(fused_linear, "CACHED_WEIGHTS", 1)
    policy = make_policy("llama", dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
    with sampling_weights(policy, "layers"):
        assert not any(isinstance(m, FusedLinear) and m.a is not None for m in policy.base.modules())
    scores = LocalEngine(policy, EngineConfig())._score(list(range(1, 17)), SamplingConfig(), "layers")
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "any", lambda *_: True)
        beside = LocalEngine(policy, EngineConfig())._score(list(range(1, 17)), SamplingConfig(), "layers")
    assert scores == beside, "it has the same bits"
