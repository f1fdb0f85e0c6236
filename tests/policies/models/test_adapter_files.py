"""Adapters as PEFT writes them, today and years ago, and as somebody with bad intentions might."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from agent_peft.policies import adapters
from agent_peft.policies.config import LoraSettings
from agent_peft.policies.models.adapter_files import lora_settings, read_tensors
from agent_peft.types import AgentPeftError


@pytest.fixture
def adapter(tiny_llama: LlamaForCausalLM, tmp_path: Path) -> Path:
    model = adapters.attach(
        tiny_llama, LoraSettings(rank=4, alpha=8, target_modules=["q_proj", "up_proj"]), 1
    )
    adapters.save(model, tmp_path / "adapter")
    model.unload()
    return tmp_path / "adapter"


def pickled(adapter: Path, content: object) -> None:
    (adapter / "adapter_model.safetensors").unlink(missing_ok=True)
    torch.save(content, adapter / "adapter_model.bin")


def change(adapter: Path, **more: object) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **more}))


def test_tensors_of_an_older_peft_are_read(adapter, tiny_llama):
    expected = load_file(adapter / "adapter_model.safetensors")
    pickled(adapter, expected)
    found = read_tensors(adapter)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    model = adapters.attach(tiny_llama, lora_settings(adapter, 0.0), seed=2)
    adapters.load(model, adapter)
    adapters.save(model, adapter)
    again = load_file(adapter / "adapter_model.safetensors")
    assert all(torch.equal(again[name], expected[name]) for name in expected)


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("raise SystemExit('executed')",)


@pytest.mark.parametrize("content", [Evil(), {"a": Evil()}, {"a": [1, 2]}, [torch.zeros(1)]])
def test_nothing_in_a_pickle_is_run(adapter, content):
    pickled(adapter, content)
    with pytest.raises(AgentPeftError, match=r"the adapter in .* cannot be read: ") as raised:
        read_tensors(adapter)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("targets", ["(a+)+$", "all-linear", None])
def test_a_pattern_of_layers_is_never_evaluated(adapter, targets):
    change(adapter, target_modules=targets)
    settings = lora_settings(adapter, dropout=0.1)
    assert (settings.rank, settings.alpha, settings.dropout) == (4, 8, 0.1)
    assert settings.target_modules == sorted(
        f"model.layers.{layer}.{name}" for layer in (0, 1) for name in ("mlp.up_proj", "self_attn.q_proj")
    )


def test_an_adapter_of_some_layers_is_loaded_onto_those(adapter, tiny_llama):
    """PEFT's ``layers_to_transform``."""
    first = {n: t for n, t in load_file(adapter / "adapter_model.safetensors").items() if "layers.0" in n}
    pickled(adapter, first)
    change(adapter, layers_to_transform=[0])
    model = adapters.attach(tiny_llama, lora_settings(adapter, 0.0), seed=2)
    adapters.load(model, adapter)
    assert len(adapters.lora_layers(model)) == 2


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{}", "holds no LoRA adapter"),
        ("[]", "is damaged"),
        ("{", "is damaged"),
        ('{"r": 0, "lora_alpha": 8, "target_modules": ["q_proj"]}', "holds no LoRA adapter"),
    ],
)
def test_a_damaged_configuration_is_one_line(adapter, content, told):
    (adapter / "adapter_config.json").write_text(content)
    with pytest.raises(AgentPeftError, match=told) as raised:
        lora_settings(adapter, 0.0)
    assert "\n" not in str(raised.value)
