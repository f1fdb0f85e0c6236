from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

from agent_peft.policies import adapters
from agent_peft.policies.forward import products
from agent_peft.policies.forward.language_model import logprobs_of_targets
from agent_peft.policies.forward.products import (
    MIN_SPEEDUP,
    choose_library,
    has_onednn,
    onednn,
    speed_of_onednn,
    use_onednn,
)
from agent_peft.policies.sampling import SamplingConfig

CPU, ROWS, IN, OUT = torch.device("cpu"), 48, 160, 192
needs_onednn = pytest.mark.skipif(not has_onednn(), reason="this torch has no oneDNN")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the products that oneDNN computed."""
    seen: list[tuple[int, ...]] = []
    kernel = torch.ops.mkldnn._linear_pointwise

    def counted(x, weight, *rest):
        out = kernel(x, weight, *rest)
        seen.append((len(x), *weight.shape))
        return out

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", counted)
    return seen


def layer_of(kind: type[nn.Module], bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    layer = Conv1D(OUT, IN) if kind is Conv1D else nn.Linear(IN, OUT, bias=bias)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.1)
    return layer


def run(layer: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The output and all gradients."""
    x, weights = x.detach().clone().requires_grad_(), torch.linspace(-1, 1, OUT).to(x.dtype)
    layer.zero_grad(set_to_none=True)
    out = layer(x)
    (out * weights).sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]


@needs_onednn
@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize(
    ("kind", "bias"), [(nn.Linear, True), (nn.Linear, False), (Conv1D, True)], ids=["bias", "plain", "Conv1D"]
)
def test_a_layer_gives_the_same_output_and_gradients(calls, kind, bias, trained):
    layer = layer_of(kind, bias).requires_grad_(trained)
    x = torch.randn(2, ROWS, IN)
    if kind is nn.Linear:  # GPT-2's layer refuses rows that are not contiguous
        x = x.transpose(0, 1)
    expected = run(layer, x)
    use_onednn(layer)
    assert len(expected) == 2 + trained * (1 + bias) and not calls
    for ours, theirs in zip(run(layer, x), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert len(calls) == 2 + trained, "forward, and the backward of x and of W"
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert not twin(x).any() and layer(x).any(), "a copy reads its own weights"


@needs_onednn
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_an_adapted_model_gives_the_same_gradients(calls, architecture, dtype):
    """Its head is frozen, so its states' gradient is computed in the forward. In 16 bits nothing changes."""
    sizes = {"vocab_size": 300, "tie_word_embeddings": False}
    torch.manual_seed(0)
    model = (
        LlamaForCausalLM(
            LlamaConfig(
                hidden_size=128,
                intermediate_size=256,
                num_hidden_layers=1,
                num_attention_heads=4,
                max_position_embeddings=64,
                **sizes,
            )
        )
        if architecture == "llama"
        else GPT2LMHeadModel(GPT2Config(n_embd=128, n_layer=1, n_head=4, n_positions=64, **sizes))
    )
    adapted = adapters.attach(model.to(dtype).eval(), adapters.LoraSettings(rank=4), seed=0)
    with torch.no_grad():
        for _, layer in adapters.lora_layers(adapted):
            adapters.factors(layer)[1].normal_(std=0.1)
    tokens = torch.arange(3, 51)[None]

    def gradients() -> list[torch.Tensor]:
        adapted.zero_grad(set_to_none=True)
        base = adapted.get_base_model()
        states = base.get_decoder()(input_ids=tokens).last_hidden_state[0]
        head = base.get_output_embeddings()
        (logp,) = logprobs_of_targets(head, True, head, states, tokens[0], SamplingConfig())
        logp.sum().backward()
        return [logp.detach(), *(p.grad for p in adapted.parameters() if p.grad is not None)]

    expected = gradients()
    assert not calls
    use_onednn(adapted)
    found = gradients()
    linears = 7 if architecture == "llama" else 4
    # the input of the first layer's products has a gradient only where an adapter is below it
    assert len(calls) > linears + 2 if dtype == torch.float32 else not calls
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).norm() <= 1e-4 * theirs.norm() and theirs.norm() > 0


@needs_onednn
def test_narrow_and_short_products_and_those_without_a_kernel_are_torch_s(calls, monkeypatch):
    x, weight = torch.randn(ROWS, IN), torch.randn(OUT, IN)
    expected = nn.functional.linear(x, weight)
    onednn(x[:1], weight)
    narrow = nn.Linear(IN, 16)
    use_onednn(narrow)
    narrow(x)
    assert not calls
    with torch.autocast("cpu", torch.bfloat16):
        wide = layer_of(nn.Linear)
        use_onednn(wide)
        assert wide(x).dtype == torch.bfloat16 and not calls, "autocast is torch's own"

    def refuse(*_: object) -> None:
        raise RuntimeError("could not create a primitive descriptor")

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", refuse)
    assert torch.equal(onednn(x, weight), expected)


@needs_onednn
@pytest.mark.parametrize(("times", "name"), [(MIN_SPEEDUP - 0.01, "torch"), (MIN_SPEEDUP, "onednn")])
def test_auto_takes_onednn_only_where_it_is_clearly_faster(monkeypatch, caplog, times, name):
    monkeypatch.setattr(products, "speed_of_onednn", lambda: times)
    assert choose_library("auto", CPU, torch.float32).name == name
    for library in ("torch", "onednn"):
        assert choose_library(library, CPU, torch.float32).name == library, (
            "a configured library is not measured"
        )
    monkeypatch.setattr(products, "speed_of_onednn", None)  # a call would raise
    assert choose_library("auto", CPU, torch.bfloat16).name == "torch"
    assert choose_library("auto", torch.device("cuda"), torch.float32).name == "torch"
    assert not caplog.messages
    assert choose_library("onednn", torch.device("cuda"), torch.float32).name == "torch"
    monkeypatch.setattr(products, "has_onednn", lambda: False)
    assert choose_library("onednn", CPU, torch.float32).name == "torch"
    assert [text.partition(": ")[0] for text in caplog.messages] == ["policy.matmul"] * 2


@needs_onednn
def test_the_measurement_is_made_once_and_keeps_the_threads():
    speed_of_onednn.cache_clear()
    threads = torch.get_num_threads()
    assert 0 < speed_of_onednn() == speed_of_onednn()
    assert speed_of_onednn.cache_info().hits == 1 and torch.get_num_threads() == threads
