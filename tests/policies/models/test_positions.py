from __future__ import annotations

import pytest
from transformers import AutoConfig

from agent_peft.policies.models.positions import bound_of, fit, window_of
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.types import AgentPeftError


@pytest.mark.parametrize(
    ("kind", "settings", "positions"),
    [
        ("llama", {"max_position_embeddings": 8192}, 8192),
        (
            "llama",
            {
                "max_position_embeddings": 4096,
                "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
            },
            8192,
        ),
        (
            "llama",
            {
                "max_position_embeddings": 2048,
                "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
            },
            2048,
        ),
        (
            "gemma3_text",
            {},
            131072,
        ),  # a rope for each type of layer; the one that is stretched makes it no shorter
        ("gpt2", {"n_positions": 1024}, 1024),
        ("mpt", {"max_seq_len": 2048}, 2048),
        (
            "gpt_neo",
            {"num_layers": 2, "attention_types": [[["global"], 2]], "max_position_embeddings": 2048},
            2048,
        ),
        ("mamba", {}, None),
        ("bloom", {}, None),  # its bias falls with the distance, however far
    ],
)
def test_bounds(kind, settings, positions):
    bound = bound_of(AutoConfig.for_model(kind, **settings))
    if kind == "gemma3_text":
        assert bound is not None and bound.positions >= 131072
    else:
        assert (bound and bound.positions) == positions


@pytest.mark.parametrize(
    ("kind", "settings", "window"),
    [
        ("llama", {}, None),
        ("mistral", {"sliding_window": 100}, 100),
        ("mistral", {"sliding_window": None}, None),
        ("mistral", {"sliding_window": 100, "max_position_embeddings": 100}, None),
        (
            "qwen2",
            {
                "use_sliding_window": True,
                "sliding_window": 100,
                "max_window_layers": 1,
                "num_hidden_layers": 2,
            },
            100,
        ),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 100}, None),
        ("qwen2_moe", {"use_sliding_window": False, "sliding_window": 100}, None),
        ("gemma3_text", {"sliding_window": 100}, 100),
        (
            "gemma3_text",
            {"sliding_window": 100, "num_hidden_layers": 1, "layer_types": ["full_attention"]},
            None,
        ),
    ],
)
def test_windows(kind, settings, window):
    assert window_of(AutoConfig.for_model(kind, **settings)) == window


def test_fit():
    bound = bound_of(AutoConfig.for_model("gpt2", n_positions=64))
    assert fit(SamplingConfig(max_new_tokens=5), bound) == SamplingConfig(max_new_tokens=5, max_tokens=64)
    for fitting in (SamplingConfig(max_tokens=64), SamplingConfig(max_tokens=10)):
        assert fit(fitting, bound) is fitting and fit(fitting, None) is fitting
    with pytest.raises(
        AgentPeftError,
        match=r"^x: 65 is more than the 64 positions that the model can read .*; set it to 64 or less$",
    ):
        fit(SamplingConfig(max_tokens=65), bound, "x")


def test_only_a_chosen_limit_on_replies_is_called_too_high(caplog):
    bound = bound_of(AutoConfig.for_model("gpt2", n_positions=61))
    fit(SamplingConfig(), bound)
    written = SamplingConfig().model_dump() | {"max_tokens": 61}  # as a run's config.yaml has it
    fit(SamplingConfig(**written), bound)
    assert not caplog.messages, "it is the default, which nobody can lower where nothing is sampled"
    fit(SamplingConfig(max_new_tokens=62), bound)
    assert len(caplog.messages) == 1
