"""An adapter goes to the model it is of, wherever that lies; to another one not without a word."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
)

from agent_peft.policies.config import LoraSettings, PretrainedConfig
from agent_peft.policies.loading import load_policy
from agent_peft.policies.policy import Policy
from agent_peft.types import AgentPeftError

SETTINGS = LoraSettings(rank=2, alpha=4)


@pytest.fixture
def model(tmp_path: Path, tiny_llama: LlamaForCausalLM, char_tokenizer: PreTrainedTokenizerFast) -> Path:
    folder = tmp_path / "first" / "tiny"
    tiny_llama.save_pretrained(folder)
    char_tokenizer.save_pretrained(folder)
    return folder


def load(model: Path | str, adapter: Path | None = None) -> Policy:
    return load_policy(
        PretrainedConfig(model=str(model), lora=SETTINGS, device="cpu", adapter=adapter), seed=0
    )


@pytest.fixture
def adapter(model: Path, tmp_path: Path) -> Path:
    load(model).save(tmp_path / "adapter")
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())[
        "base_model_name_or_path"
    ] == str(model)
    return tmp_path / "adapter"


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of PEFT
@pytest.mark.slow  # loads SmolLM2 twice
def test_the_readme_of_a_bundled_models_adapter_loads_it_in_plain_peft(smollm2, tmp_path, monkeypatch):
    policy = load("smollm2-135m")
    policy.save(tmp_path)
    code = (tmp_path / "README.md").read_text().split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(code, names)
    tokens = torch.arange(100, 108)[None]
    with torch.no_grad():
        ours, theirs = policy.model(tokens).logits, names["policy"](tokens).logits
    torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=0)


def test_an_adapter_of_a_folder_needs_no_readme(adapter):
    assert not (adapter / "README.md").exists()


def copy_of(model: Path, name: str, **changes: object) -> Path:
    folder = model.parent.parent / name
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def test_its_own_model_here_or_moved(model, adapter, monkeypatch, caplog):
    load(model, adapter)
    monkeypatch.chdir(model.parent)
    load("tiny", adapter)
    moved = model.parent.parent / "second" / "tiny"
    moved.parent.mkdir()
    model.rename(moved)
    load(moved, adapter)
    assert not caplog.messages


def test_another_architecture_of_equal_shapes_is_refused(model, adapter):
    """Every tensor of the adapter fits."""
    other, config = copy_of(model, "other"), LlamaConfig.from_pretrained(model)
    same = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    )
    MistralForCausalLM(
        MistralConfig(**{key: getattr(config, key) for key in same}, tie_word_embeddings=True)
    ).save_pretrained(other)
    load(other)
    with pytest.raises(
        AgentPeftError,
        match=r"the adapter in .* was trained on '.*/tiny', whose model_type is llama; "
        r"that of the model '.*/other' is mistral: ",
    ):
        load(other, adapter)


def test_another_model_of_the_same_architecture_is_told(model, adapter, caplog):
    load(copy_of(model, "tuned"), adapter)
    (line,) = caplog.messages
    assert "/tiny', and the model is" in line and "/tuned'" in line and "\n" not in line
