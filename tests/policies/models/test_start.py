"""What ``policy.model`` stands for, from Python."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from agent_peft.policies import adapters
from agent_peft.policies.loading import load_policy
from agent_peft.policies.models import bundled
from agent_peft.policies.models.bundled import BundledModel
from agent_peft.policies.models.start import portable
from agent_peft.policies.models.tokenizer import character_tokenizer, save_tokenizer
from agent_peft.policies.policy import Policy
from agent_peft.policies.tokenization import ChatTokenizer
from agent_peft.types import AgentPeftError, Message

SHA = "0123456789abcdef" * 4
TOKENS = torch.tensor([[1, 4, 7, 13, 5, 2]])


def logits(policy: Policy) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = policy.model(TOKENS).logits
        return found


def load(model: str | Path, **keys: Any) -> Policy:
    return load_policy(model, device="cpu", **keys)


def named(adapter: Path) -> str:
    return str(json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"])


def rename(adapter: Path, name: str) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": name}))


@pytest.fixture
def model(
    tmp_path: Path,
    tiny_llama: LlamaForCausalLM,
    char_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    """A bundled model whose name is ``tiny``."""
    monkeypatch.setenv("AGENT_PEFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(bundled.BUNDLED, "tiny", BundledModel((), SHA, "MIT"))  # type: ignore[arg-type]
    folder = tmp_path / "cache" / "models" / f"tiny-{SHA[:16]}-1"
    tiny_llama.save_pretrained(folder)
    char_tokenizer.save_pretrained(folder)
    return "tiny"


@pytest.fixture
def adapter(model: str, tmp_path: Path) -> Path:
    """As if it had learned something, with a critic."""
    policy = load(model, lora={"rank": 4, "alpha": 8})
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(1))
    policy.attach_value_head(detach=False).weight.data.fill_(2.0)
    policy.save(tmp_path / "adapter")
    return tmp_path / "adapter"


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_adapters_name_the_bundled_model(adapter, model, tiny_llama):
    assert named(adapter) == model
    policy = load(adapter)
    expected = logits(policy)
    assert not torch.equal(expected, logits(load(model, lora=None)))
    again = PeftModel.from_pretrained(tiny_llama, adapter)  # and plain PEFT takes the folder, too
    with torch.no_grad():
        assert torch.allclose(again(TOKENS).logits, expected, atol=1e-6)


def test_an_adapter_has_its_own_rank_and_its_critic(adapter):
    policy = load(adapter)
    assert isinstance(policy.model, PeftModel)
    assert policy.model.peft_config["default"].r == 4
    assert policy.value_head is not None and policy.value_head.weight.eq(2).all()


@pytest.mark.parametrize("lora", [None, {"rank": 2}], ids=["all parameters", "a new adapter"])
def test_merged_into_its_model(adapter, model, tmp_path, lora):
    policy = load(adapter, merge_adapter=True, lora=lora)
    assert torch.allclose(logits(policy), logits(load(adapter)), atol=1e-5)
    assert all(
        ("lora_" in n) == (lora is not None) for n, p in policy.model.named_parameters() if p.requires_grad
    )
    assert policy.trainable_parameters() and policy.value_head is not None
    if lora is not None:
        assert adapters.delta_norm(policy.model) == 0
        policy.save(tmp_path / "second")
        assert named(tmp_path / "second") == f"{adapter} (merged)"
        with pytest.raises(AgentPeftError, match=r"was trained on '.*adapter \(merged\)', which is not here"):
            load(tmp_path / "second")


def test_a_policy_of_all_parameters_saves_its_tokenizer(model, tmp_path, char_tokenizer):
    policy = load(model, lora=None)
    policy.save(tmp_path / "saved")
    again = load(tmp_path / "saved", lora=None)
    assert torch.equal(logits(again), logits(policy))
    assert again.opening() == policy.opening()
    (tmp_path / "saved" / "tokenizer.json").unlink()  # as older versions wrote it
    (tmp_path / "saved" / "tokenizer_config.json").unlink()
    with pytest.raises(AgentPeftError, match="holds no tokenizer that can be loaded") as raised:
        load(tmp_path / "saved", lora=None)
    assert "\n" not in str(raised.value)


def test_a_tokenizer_without_a_template_gets_the_one_that_was_used(tmp_path):
    tokenizer = character_tokenizer("".join(sorted(set(string.printable))))
    tokenizer.chat_template = None
    chat = ChatTokenizer(tokenizer)
    save_tokenizer(tokenizer, chat.template, tmp_path)
    assert tokenizer.chat_template is None
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.chat_template
    messages = [Message("user", "1+1="), Message("assistant", "2"), Message("user", "2+2=")]
    assert ChatTokenizer(again).opening(messages) == chat.opening(messages)


def test_an_adapter_of_random_weights_names_no_model(adapter):
    rename(adapter, "")
    with pytest.raises(AgentPeftError, match=r"names no model that it was trained on.*agent-peft merge"):
        load(adapter)


def test_names_that_others_can_use(tmp_path, monkeypatch):
    """A relative path would be taken for a hub id elsewhere, and a GGUF file is not a folder of a cache."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama").mkdir()
    (tmp_path / "model.gguf").touch()
    assert portable("llama") == str(tmp_path / "llama")
    assert portable("model.gguf") == str(tmp_path / "model.gguf")
    assert portable("somebody/model") == "somebody/model"
