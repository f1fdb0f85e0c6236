"""Episodes are no longer than the model can read, and that is known before any weights are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoConfig

from agent_peft.configuration.load import Provenance, dump_config, read_config
from agent_peft.configuration.run_config import TrainConfig
from agent_peft.types import AgentPeftError

Load = Callable[..., tuple[TrainConfig, Provenance]]

SCRATCH = (
    '{kind: scratch, alphabet: "0123456789+*-= ", '
    "architecture: {model_type: gpt2, n_layer: 1, n_head: 1, n_embd: 8, n_positions: 32}}"
)
TEXT = """\
run_dir: runs/a
policy: %s
environment: {kind: arithmetic, num_tasks: 4}
evaluation:
  environment: {kind: arithmetic, num_tasks: 4, split: heldout}
stages:
  - {algorithm: sft, steps: 1}
  - {algorithm: grpo, steps: 1}
"""
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 1e4}


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def load(policy: str, *overrides: str) -> tuple[TrainConfig, Provenance]:
        (tmp_path / "x.yaml").write_text(TEXT % policy)
        return read_config(tmp_path / "x.yaml", overrides)

    return load


def lengths(config: TrainConfig) -> list[int]:
    assert config.evaluation is not None
    return [*(stage.sampling.max_tokens for stage in config.stages), config.evaluation.sampling.max_tokens]


def folder_of(tmp_path: Path, kind: str, **settings: object) -> str:
    """A model without weights: its configuration is enough."""
    AutoConfig.for_model(kind, **settings).save_pretrained(tmp_path / "model")
    return f"{{kind: pretrained, model: {tmp_path / 'model'}}}"


def test_a_default_is_lowered_to_the_models_positions(load: Load, tmp_path: Path) -> None:
    config, provenance = load(SCRATCH)
    assert lengths(config) == [32, 32, 32]
    for path in ("stages.0", "stages.1"):
        assert provenance.of(f"{path}.sampling.max_tokens") == "the positions of policy.model"
    dump_config(config, tmp_path / "resolved.yaml")
    assert read_config(tmp_path / "resolved.yaml")[0] == config


def test_what_fits_stays(load: Load, tmp_path: Path) -> None:
    config, provenance = load(SCRATCH, "stages.1.sampling.max_tokens=20", "evaluation.sampling.max_tokens=30")
    assert lengths(config) == [32, 20, 30] and provenance.of("stages.1.sampling.max_tokens") == "command line"
    config, provenance = load(
        folder_of(tmp_path, "llama", max_position_embeddings=2048), "evaluation.sampling.max_tokens=2048"
    )
    assert (
        lengths(config) == [1024, 1024, 2048] and provenance.of("stages.0.sampling.max_tokens") == "default"
    )


@pytest.mark.parametrize(
    "where",
    ["stages.0.sampling.max_tokens", "stages.1.sampling.max_tokens", "evaluation.sampling.max_tokens"],
)
def test_what_was_set_and_is_too_long_is_refused(where: str, load: Load) -> None:
    with pytest.raises(AgentPeftError) as raised:
        load(SCRATCH, f"{where}=33")
    line = "33 is more than the 32 positions that the model can read (max_position_embeddings); "
    assert str(raised.value) == f"command line: {where}: {line}set it to 32 or less"


def test_rotary_frequencies_that_change_with_the_length(load: Load, tmp_path: Path) -> None:
    policy = folder_of(
        tmp_path,
        "phi3",
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
        rope_parameters=LONGROPE,
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=4,
        pad_token_id=0,
    )
    assert lengths(load(policy, "stages.1.sampling.max_tokens=4096")[0]) == [1024, 4096, 4096]
    with pytest.raises(
        AgentPeftError,
        match=r"4097 is more than the 4096 positions .* its rotary frequencies \(longrope\) change with the",
    ):
        load(policy, "stages.1.sampling.max_tokens=4097")


def test_a_model_that_is_not_here_is_asked_later(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENT_PEFT_CACHE", str(tmp_path))
    for model in ("smollm2-135m", "/nowhere/at/all"):
        assert lengths(
            load(f"{{kind: pretrained, model: {model}}}", "stages.0.sampling.max_tokens=100000")[0]
        ) == [100000, 1024, 1024]
