from __future__ import annotations

import json
import math

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

from agent_peft.policies import adapters
from agent_peft.policies.config import LoraSettings
from agent_peft.policies.engine.fused_linear import FusedLinear
from agent_peft.policies.engine.weights import fused_layers, merged_lora
from agent_peft.types import AgentPeftError, TrustError

TOKENS = torch.tensor([[1, 4, 7, 13, 5, 2], [1, 9, 3, 3, 8, 2]])


def logits(model: nn.Module) -> Tensor:
    with torch.inference_mode():
        return model(TOKENS).logits.clone()


def trained(model: LlamaForCausalLM, scale: float = 0.05, **settings: object) -> PeftModel:
    """An adapter as if it had learned something: B is random."""
    adapted = adapters.attach(model, LoraSettings(rank=4, alpha=8, **settings), seed=1)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return adapted.eval()


def bits(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_a_fresh_adapter_changes_nothing_and_trains_only_itself(tiny_llama):
    before = logits(tiny_llama)
    model = adapters.attach(tiny_llama, LoraSettings(), seed=0).eval()
    adapters.assert_zero_delta(model)
    assert adapters.delta_norm(model) == 0.0
    assert torch.equal(logits(model), before)
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trainable and all("lora_" in name for name in trainable)
    assert len(trainable) == 2 * 2 * 7  # A and B, two blocks, seven linear layers; not the output head


def test_initial_a_comes_from_the_seed_and_from_nothing_else(tiny_llama):
    def initial(seed: int, noise: int) -> dict[str, Tensor]:
        torch.manual_seed(noise)
        model = adapters.attach(tiny_llama, LoraSettings(rank=4), seed)
        found = {name: p.detach().clone() for name, p in model.named_parameters() if "lora_A" in name}
        model.unload()
        return found

    first, again, other = initial(5, 0), initial(5, 1), initial(6, 0)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)
    assert len({round(a.sum().item(), 6) for a in first.values()}) == len(first)  # each layer has its own
    a = next(iter(first.values()))
    assert a.abs().max() <= 1 / math.sqrt(32) and a.std().item() == pytest.approx(
        1 / math.sqrt(3 * 32), rel=0.2
    )


def test_one_planted_element_of_b_breaks_the_proof(tiny_llama):
    model = adapters.attach(tiny_llama, LoraSettings(), seed=0)
    planted = [p for name, p in model.named_parameters() if "lora_B" in name][-1]
    with torch.no_grad():
        planted[0, 0] = 1e-30
    with pytest.raises(TrustError, match=r"1 elements of .*down_proj\.lora_B"):
        adapters.assert_zero_delta(model)


def test_delta_norm_is_the_norm_of_the_product(tiny_llama):
    model = trained(tiny_llama)
    deltas = [
        layer.get_delta_weight("default") for layer in model.modules() if hasattr(layer, "get_delta_weight")
    ]
    expected = math.sqrt(sum(float((d.detach().double() ** 2).sum()) for d in deltas))
    assert adapters.delta_norm(model) == pytest.approx(expected, rel=1e-5) and expected > 0


def test_saved_and_loaded_bit_for_bit(tiny_llama, tmp_path):
    model = trained(tiny_llama)
    wanted, expected = bits(model), logits(model)
    adapters.save(model, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(1.0)
    assert not torch.equal(logits(model), expected)
    adapters.load(model, tmp_path)
    assert all(torch.equal(p, wanted[name]) for name, p in bits(model).items())
    assert all(p.requires_grad == ("lora_" in name) for name, p in model.named_parameters())


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_peft_itself_reads_the_folder(tiny_llama, tmp_path):
    model = trained(tiny_llama)
    expected = logits(model)
    adapters.save(model, tmp_path)
    base = model.unload()
    again = PeftModel.from_pretrained(base, tmp_path).eval()
    assert torch.equal(logits(again), expected)


def test_loading_is_strict(tiny_llama, tmp_path):
    model = trained(tiny_llama)
    with pytest.raises(AgentPeftError, match="holds no adapter"):
        adapters.load(model, tmp_path)
    adapters.save(model, tmp_path)
    weights, config = tmp_path / "adapter_model.safetensors", tmp_path / "adapter_config.json"
    good, settings = load_file(weights), json.loads(config.read_text())
    first = min(good)

    save_file({name: t for name, t in good.items() if name != first}, weights)
    with pytest.raises(AgentPeftError, match="lacks 1 tensors"):
        adapters.load(model, tmp_path)
    save_file({**good, "stranger": torch.zeros(1)}, weights)
    with pytest.raises(AgentPeftError, match="unexpected 1 tensors, first stranger"):
        adapters.load(model, tmp_path)
    save_file({**good, first: good[first][:, :-1].contiguous()}, weights)
    with pytest.raises(AgentPeftError, match="of shape"):
        adapters.load(model, tmp_path)
    weights.write_bytes(b"not safetensors")
    with pytest.raises(AgentPeftError, match="cannot be read"):
        adapters.load(model, tmp_path)
    save_file(good, weights)
    for key, value in (
        ("r", 8),
        ("lora_alpha", 16),
        ("use_rslora", True),
    ):  # the last two keep every shape and change the outcome
        config.write_text(json.dumps({**settings, key: value}))
        with pytest.raises(AgentPeftError, match=f"has {key} {value}"):
            adapters.load(model, tmp_path)


def test_a_model_without_an_adapter_is_saved_whole(tiny_llama, tmp_path):
    wanted, expected = bits(tiny_llama), logits(tiny_llama)
    adapters.save(tiny_llama, tmp_path)
    assert torch.equal(logits(LlamaForCausalLM.from_pretrained(tmp_path)), expected)
    with torch.no_grad():
        for parameter in tiny_llama.parameters():
            parameter.mul_(2.0)
    adapters.load(tiny_llama, tmp_path)
    assert all(torch.equal(p, wanted[name]) for name, p in bits(tiny_llama).items())
    assert torch.equal(logits(tiny_llama), expected)

    good = load_file(tmp_path / "model.safetensors")
    save_file(
        {name: t for name, t in good.items() if "down_proj" not in name},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    with pytest.raises(AgentPeftError, match="2 missing tensors"):
        adapters.load(tiny_llama, tmp_path)
    with pytest.raises(AgentPeftError, match="holds no adapter"):
        adapters.load(adapters.attach(tiny_llama, LoraSettings(), 0), tmp_path)


def test_folded_equals_unfolded_and_gives_every_bit_back(tiny_llama):
    model = trained(tiny_llama)
    before, expected = bits(model), logits(model)
    addresses = {name: p.data_ptr() for name, p in model.named_parameters()}
    with model.disable_adapter():
        base = logits(model)
    with merged_lora(model):
        assert not any("lora_" in name for name, _ in model.named_parameters())
        assert (logits(model) - expected).abs().max() < 1e-5
        assert (logits(model) - base).abs().max() > 1e-3
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == addresses  # in the same order, too
    assert all(torch.equal(p, before[name]) for name, p in bits(model).items())
    assert torch.equal(logits(model), expected)
    assert all(p.requires_grad == ("lora_" in name) for name, p in model.named_parameters())


def test_folded_gives_the_bits_back_after_an_exception(tiny_llama):
    model = trained(tiny_llama)
    before, expected = bits(model), logits(model)
    with pytest.raises(KeyboardInterrupt), merged_lora(model):
        raise KeyboardInterrupt
    assert list(bits(model)) == list(before) and torch.equal(logits(model), expected)


def test_folded_ignores_dropout_and_refuses_to_nest(tiny_llama):
    model = trained(tiny_llama, dropout=0.5)
    expected = logits(model)
    model.train()
    assert not torch.allclose(logits(model), expected, atol=1e-3)
    with merged_lora(model):
        assert (logits(model) - expected).abs().max() < 1e-5
        with pytest.raises(AgentPeftError, match="it is folded"), merged_lora(model):
            pass
    assert model.training


def test_folded_into_layers_of_another_make(tiny_llama):
    model = trained(tiny_llama)
    expected, modules = logits(model), [type(module) for module in model.modules()]
    with fused_layers(model), torch.no_grad():
        assert any(isinstance(module, FusedLinear) for module in model.modules())
        assert (logits(model) - expected).abs().max() < 1e-5
    assert [type(module) for module in model.modules()] == modules and torch.equal(logits(model), expected)


def test_transposed_layers_fold_and_merge_too():
    torch.manual_seed(0)
    gpt2 = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=20, n_embd=32, n_layer=2, n_head=2, n_positions=32, bos_token_id=1, eos_token_id=2
        )
    ).eval()
    model = trained(gpt2, target_modules=["c_attn", "c_fc"])  # type: ignore[arg-type]
    expected = logits(model)
    with merged_lora(model):
        assert (logits(model) - expected).abs().max() < 1e-5
    assert (logits(adapters.merge(model)) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_in_fp32_whatever_the_dtype(tiny_llama, tmp_path, dtype):
    for parameter in (
        tiny_llama.parameters()
    ):  # not .to(dtype): that would round the rotary frequencies, which from_pretrained keeps
        parameter.data = parameter.data.to(dtype)
    model = trained(tiny_llama)
    before = bits(model)
    merged = adapters.merge(model)
    assert all(torch.equal(p, before[name]) for name, p in bits(model).items())
    assert {p.dtype for p in merged.parameters()} == {torch.float32} and not hasattr(merged, "peft_config")
    with model.disable_adapter():
        base = logits(model.float())
    expected = logits(model)  # the adapter's model, computed in fp32
    assert (logits(merged) - expected).abs().max() < 1e-5
    assert (expected - base).abs().max() > 1e-3
    adapters.save(merged, tmp_path)
    again = LlamaForCausalLM.from_pretrained(tmp_path)
    assert again.dtype == torch.float32 and torch.equal(logits(again), logits(merged))


def test_what_cannot_be_is_told_in_one_line(tiny_llama):
    with pytest.raises(AgentPeftError, match="cannot attach a LoRA adapter: Target modules"):
        adapters.attach(tiny_llama, LoraSettings(target_modules=["no_such_layer"]), 0)
    with pytest.raises(AgentPeftError, match="linear layers only"):
        adapters.attach(tiny_llama, LoraSettings(target_modules=["embed_tokens"]), 0)


def test_a_tied_head_gets_no_adapter(tiny_llama):
    with pytest.raises(AgentPeftError, match="lm_head shares its weight"):
        adapters.attach(tiny_llama, LoraSettings(target_modules=["lm_head", "q_proj"]), 0)


def test_a_model_without_an_adapter_has_nothing_to_prove_or_merge(tiny_llama):
    for act in (
        adapters.assert_zero_delta,
        adapters.delta_norm,
        lambda m: merged_lora(m).__enter__(),
        adapters.merge,
    ):
        with pytest.raises(AgentPeftError, match=r"no LoRA layers|no adapter"):
            act(tiny_llama)  # type: ignore[no-untyped-call,operator]
