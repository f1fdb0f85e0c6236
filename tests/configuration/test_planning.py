"""The memory of a run on another machine, against numbers by hand, and what to change so that it fits."""

from __future__ import annotations

import json

import pytest

from agent_peft.cli import run
from agent_peft.configuration import planning
from agent_peft.configuration.load import read_config
from agent_peft.configuration.planning import Target, changes_to_fit, memory, peak_of, room_in_words
from agent_peft.configuration.run_config import TrainConfig
from agent_peft.hardware import Memory

QWEN = {  # Qwen2.5-7B's sizes
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
STAGE = "stage 0: rloo"


@pytest.fixture
def configure(tmp_path):
    """A run of the 7B model whose folder holds its configuration alone: 8 x 8 episodes of 1,024 tokens."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN))

    (tmp_path / "c.yaml").write_text(
        f"""\
run_dir: runs/a
policy: {{kind: pretrained, model: {tmp_path}, lora: {{rank: 16}}}}
environment: {{kind: arithmetic, num_tasks: 20}}
engine: {{rows: 32}}
stages:
- algorithm: rloo
  steps: 1
  tasks_per_step: 8
  group_size: 8
  sampling: {{max_tokens: 1024}}
  microbatch_tokens: 2048
"""
    )

    def configure(*overrides: str) -> TrainConfig:
        return read_config(tmp_path / "c.yaml", overrides)[0]

    return configure


def test_each_part_of_a_7b_model_on_a_gpu_is_that_by_hand(configure):
    found = memory(configure(), Target.parse("cuda:24GB"))[STAGE]
    sizes = {part.name: part.size for part in (*found.always, *found.loading, *found.sampling)}
    q, kv, middle = 3584, 4 * 128, 18944
    layer = (q + 1) * q + 2 * (q + 1) * kv + q * q + 3 * q * middle + 2 * q
    parameters = 28 * layer + 2 * 152064 * q + q
    assert parameters == 7_615_616_512  # as its authors give it
    adapter = 28 * 16 * ((q + q) + 2 * (q + kv) + (q + q) + 3 * (q + middle))
    assert sizes == {
        "weights": 2 * parameters,  # bfloat16
        "adapter, gradient, AdamW": 4 * 4 * adapter,
        "keys and values": 32 * 1024 * 28 * 2 * kv * 2,
        "a prefill": 2048 * 4 * (middle + q) * 2,
        "distributions": 32 * 152064 * 24,
    }


@pytest.mark.slow
def test_overrides_that_make_it_fit(configure):
    config, target = configure(), Target.parse("cuda:24GB")
    peak = peak_of(memory(config, target))
    assert peak > target.total
    changes, least = changes_to_fit(config, target.total, target)
    assert changes == ("policy.activation_checkpointing=true",) and least <= target.total
    assert peak_of(memory(configure(*changes), target)) == least
    said = room_in_words(config, peak, target)
    assert said.endswith(f"not enough; with {changes[0]} it takes {least / 1e9:.3g} GB")
    hopeless = room_in_words(config, peak, Target.parse("2xcuda:12GB"))
    assert "each of 2 cuda" in hopeless and hopeless.endswith("take a smaller model")
    assert "policy.lora={rank: 16}" in changes_to_fit(configure("policy.lora=null"), target.total, target)[0]


def test_the_command_reads_no_weights_and_needs_no_such_machine(configure, tmp_path, capsys):
    configure()
    config = str(tmp_path / "c.yaml")
    assert run(["explain", config, "policy.device=cuda", "--on", "8xcuda:80GB", "--json"]) == 0
    assert "of 80 GB (each of 8 cuda)" in json.loads(capsys.readouterr().out)["needs"]["memory"]
    for wrong in ("cuda", "cuda:0GB", "tpu:16GB", "0xcuda:24GB", "cuda:24"):
        assert run(["explain", config, "--on", wrong]) == 2
        assert "write cuda:24GB" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("free", "said"),
    [
        (9, "3 GB at most, of 10 GB (cpu)"),
        (2, "3 GB at most, of 10 GB (cpu), of which only 2 GB are free; close other programs"),
    ],
)
def test_the_room_of_this_machine(monkeypatch, free, said):
    monkeypatch.setattr(planning, "total_memory", lambda: Memory(10 * 10**9, free * 10**9))
    config = read_config("quickstart", ["policy.device=cpu"])[0]
    assert room_in_words(config, 3 * 10**9) == said
    assert ": this is not enough; " in room_in_words(config, 11 * 10**9)
