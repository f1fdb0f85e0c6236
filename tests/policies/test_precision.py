from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from agent_peft import hardware
from agent_peft.policies import precision
from agent_peft.policies.config import PretrainedConfig, ScratchConfig
from agent_peft.policies.loading import load_policy
from agent_peft.policies.models import bundled
from agent_peft.policies.precision import choose_precision, speed_of_bf16

NATIVE = {"avx512_bf16"}
SMALL = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}
LARGE = SMALL | {"n_embd": 1024, "n_layer": 4}


def policy(architecture: dict[str, object] = LARGE, **more: object) -> ScratchConfig:
    return ScratchConfig.model_validate(
        {"architecture": architecture, "alphabet": "0123456789", "device": "cpu", **more}
    )


@pytest.fixture
def features(monkeypatch):
    """What the CPU is said to have."""

    def have(found):
        monkeypatch.setattr(hardware, "_cpu_features", lambda: found)

    have(NATIVE)
    return have


@pytest.mark.parametrize(
    ("found", "native"),
    [({"avx512_f"}, False), ({"avx512_bf16"}, True), ({"amx_bf16"}, True), ({"bf16"}, True)],
)
def test_bfloat16_is_told_where_it_is_emulated(features, caplog, found, native):
    features(found)
    assert load_policy(policy(SMALL, dtype="bfloat16"), 0).dtype == torch.bfloat16, (
        "the user's word is the last"
    )
    told = [record.getMessage() for record in caplog.records if record.name.startswith("agent_peft")]
    expected = (
        "policy.dtype: bfloat16 is emulated on this CPU, several times slower than float32: "
        "set policy.dtype=auto"
    )
    assert told == ([] if native else [expected])


@pytest.mark.parametrize(
    ("times", "dtype"),
    [(2.0, torch.bfloat16), (1.3, torch.bfloat16), (1.2, torch.float32), (0.5, torch.float32)],
)
def test_auto_on_a_cpu_is_what_is_measured_to_be_faster(features, monkeypatch, times, dtype):
    asked = []
    monkeypatch.setattr(precision, "speed_of_bf16", lambda *sizes: asked.append(sizes) or times)
    found = choose_precision(policy())
    assert found.dtype == dtype and f"{times:.1f} times as fast" in found.reason
    assert asked == [(1024, 4096, torch.get_num_threads())]


def test_the_measured_products_have_a_largest_size(features, monkeypatch):
    asked = []
    monkeypatch.setattr(precision, "speed_of_bf16", lambda *sizes: asked.append(sizes) or 2.0)
    monkeypatch.setattr(precision, "WIDEST", 2048)
    choose_precision(policy())
    assert asked == [(1024, 2048, torch.get_num_threads())]


def test_auto_measures_nothing_where_nothing_could_come_of_it(features, monkeypatch):
    monkeypatch.setattr(precision, "speed_of_bf16", None)
    assert "so small a model" in choose_precision(policy(SMALL)).reason
    assert (
        "a run fetches the model first"
        in choose_precision(PretrainedConfig(model="nobody/nothing", device="cpu")).reason
    )
    features({"avx2"})
    assert "does not multiply bfloat16 natively" in choose_precision(policy()).reason
    for dtype in ("float32", "bfloat16"):
        assert choose_precision(policy(dtype=dtype)).name == dtype


@pytest.fixture
def tiny(tmp_path) -> Path:
    """A model of a few weights, in Transformers' layout."""
    GPT2LMHeadModel(GPT2Config(**SMALL, vocab_size=8)).save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_auto_is_the_same_before_and_after_the_model_is_fetched(features, monkeypatch, tiny):
    """The first run on a machine once had float32, and every later one bfloat16."""
    here = []
    monkeypatch.setattr(bundled, "cached", lambda name: here[0] if here else None)
    monkeypatch.setattr(bundled, "fetch", lambda name: here.append(tiny) or tiny)
    monkeypatch.setattr(precision, "CACHED_WEIGHTS", 1)
    monkeypatch.setattr(precision, "speed_of_bf16", lambda *sizes: 2.0)
    config = PretrainedConfig(model="smollm2-135m", device="cpu")
    assert choose_precision(config).dtype == torch.float32 and not here, "only a run fetches"
    assert choose_precision(config, fetch=True).dtype == torch.bfloat16
    assert choose_precision(config).dtype == torch.bfloat16


def test_auto_reads_the_configuration_of_a_hub_model(features, monkeypatch, tiny):
    asked = []
    monkeypatch.setattr(precision, "read_model_config", asked.append)
    choose_precision(PretrainedConfig(model="nobody/nothing", device="cpu"), fetch=True)
    assert asked == ["nobody/nothing"]


def test_auto_is_the_default():
    assert policy().dtype == PretrainedConfig(model="m").dtype == "auto"


def test_a_measurement_is_made_once(monkeypatch):
    monkeypatch.setattr(precision, "SECONDS", 1e-4)
    speed_of_bf16.cache_clear()
    assert 0 < speed_of_bf16(64, 64, 1) == speed_of_bf16(64, 64, 1)
    assert speed_of_bf16.cache_info().hits == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_auto_on_a_gpu():
    expected = torch.bfloat16 if torch.cuda.get_device_capability() >= (8, 0) else torch.float32
    assert choose_precision(policy(device="cuda")).dtype == expected
