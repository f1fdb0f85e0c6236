"""The table of model families: what the trainer and the sampler make of each is what the model itself says,
or it is refused in one line.

Sequences are longer than every window, and as long as the model can read.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from agent_peft.batch import Batch, collate
from agent_peft.policies.engine import load_sampler
from agent_peft.policies.engine.base import EngineConfig
from agent_peft.policies.engine.local import LocalEngine
from agent_peft.policies.forward import language_model
from agent_peft.policies.policy import Policy
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.types import AgentPeftError, Task, Trajectory, Turn
from tests.conftest import case

MakePolicy = Callable[..., Policy]

WINDOW, ORIGINAL = 6, 48  # tokens that a window sees; positions before rotary frequencies change
PLAIN = SamplingConfig(max_new_tokens=12, max_tokens=ORIGINAL)
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SMALL |= {"max_position_embeddings": 64, "initializer_range": 0.3}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "rope_theta": 1e4,
}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 1e4}

# name: (Transformers' model_type, its configuration)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3": ("llama", SMALL | {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 16}}),
    "llama-yarn": (
        "llama",
        SMALL | {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}},
    ),
    "llama-dynamic": (
        "llama",
        SMALL | {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}},
    ),
    "qwen2": ("qwen2", SMALL),
    "qwen2-window": (
        "qwen2",
        SMALL | {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen2-moe": ("qwen2_moe", SMALL | EXPERTS),
    "qwen2-moe-window": (
        "qwen2_moe",
        SMALL | EXPERTS | {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    ),
    "qwen3": ("qwen3", SMALL | {"head_dim": 8}),
    "smollm-3": ("smollm3", SMALL | {"no_rope_layers": [1, 0]}),
    "gemma": ("gemma", SMALL | {"head_dim": 8}),
    "phi-3-long": (
        "phi3",
        SMALL | {"rope_parameters": LONGROPE, "original_max_position_embeddings": ORIGINAL},
    ),
    "phi-3-window": ("phi3", SMALL | {"sliding_window": WINDOW}),
    "phi-moe-window": ("phimoe", SMALL | {"num_local_experts": 4, "sliding_window": WINDOW}),
    "doge-window": ("doge", SMALL | {"sliding_window": WINDOW}),
    "mistral-window": ("mistral", SMALL | {"sliding_window": WINDOW}),
    "mistral-wide": ("mistral", SMALL | {"sliding_window": 4096}),
    "gemma-2": ("gemma2", SMALL | {"sliding_window": WINDOW, "head_dim": 8, "query_pre_attn_scalar": 8}),
    "gemma-3": (
        "gemma3_text",
        SMALL
        | {"sliding_window": WINDOW, "head_dim": 8, "query_pre_attn_scalar": 8, "_sliding_window_pattern": 2},
    ),
    "gpt-oss": (
        "gpt_oss",
        SMALL | {"sliding_window": WINDOW, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "gpt-2": (
        "gpt2",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": ORIGINAL, "initializer_range": 0.2},
    ),
    "gpt-neox": ("gpt_neox", SMALL),
    "gpt-neo-local": (
        "gpt_neo",
        {
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": ORIGINAL,
        }
        | {"max_position_embeddings": 64, "initializer_range": 0.2},
    ),
}
# the sampler's own decoder is built like these; all others are sampled by their modules
LEAN = {"llama-3", "llama-yarn", "llama-dynamic", "qwen2", "qwen3", "smollm-3", "gemma", "phi-3-long"}
LEAN |= {"mistral-wide"}
WINDOWED = [name for name, (_, settings) in FAMILIES.items() if settings.get("sliding_window") == WINDOW]
# name: the longest episode, and how a longer one is refused
BOUNDED = {
    "llama-3": (64, r"max_position_embeddings"),
    "llama-yarn": (256, r"max_position_embeddings, as far as its rotary positions are stretched"),
    "llama-dynamic": (64, r"beyond them its rotary frequencies \(dynamic\) change with the length"),
    "phi-3-long": (ORIGINAL, r"beyond them its rotary frequencies \(longrope\) change with the length"),
    "gpt-2": (ORIGINAL, r"max_position_embeddings"),
    "gpt-neo-local": (
        ORIGINAL,
        r"its local attention has a window_size, which Agent-PEFT cannot apply to a cache",
    ),
}
# name: model_type, configuration, and why no policy or no sampler is made of it
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "mamba": (
        "mamba",
        {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
        "MambaForCausalLM .*cannot be sampled here",
    ),
    "llama-4": (
        "llama4_text",
        SMALL
        | {"head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 2, "attention_chunk_size": 8},
        "Llama4ForCausalLM attends in chunks; Agent-PEFT supports full and sliding-window attention only",
    ),
}


class Talk:
    """Two turns: a prompt that siblings share, an action, an answer, an action."""

    def __init__(self, prompt: list[int], seed: int) -> None:
        self.prompt, self.seed, self.turns = prompt, seed, list[Turn]()

    def act(self, action: Sequence[int], logprobs: Sequence[float], room: int) -> Sequence[int] | None:
        read = [4, 5, 6, 7, 8] if self.turns else self.prompt
        self.turns.append(Turn(tuple(read), tuple(action), tuple(logprobs)))
        return [4, 5, 6, 7, 8] if len(self.turns) == 1 and room > 5 else None


def sampled(policy: Policy) -> Batch:
    """Conversations longer than the window, as the engine reads and draws them."""
    talks = [Talk([1, *random.Random(i % 2).choices(range(3, 19), k=14 + i % 2)], i) for i in range(6)]
    policy.chat.end_of_turn = frozenset()  # long actions
    load_sampler(policy, EngineConfig(rows=4)).generate(talks, PLAIN)
    return collate([Trajectory(Task("t"), tuple(talk.turns)) for talk in talks], [i % 2 for i in range(6)])


def short() -> Batch:
    """Shorter than the window, so that what is proven on it says nothing of the window."""
    turns = [Turn((1, 3), action, (-1.0,) * 2) for action in ((4, 5), (4, 6), (7, 8))]
    return collate([Trajectory(Task("t"), (turn,)) for turn in turns], [0] * 3)


def models_own(policy: Policy, batch: Batch) -> Tensor:
    """Log-probabilities by one plain forward for each row, with no code of ours."""
    out = torch.zeros(batch.tokens.shape)
    for b, length in enumerate(batch.lengths.tolist()):
        tokens = batch.tokens[b, :length]
        with torch.no_grad():
            logp = policy.model(input_ids=tokens[None]).logits[0, :-1].float().log_softmax(-1)
        out[b, 1:length] = logp.gather(-1, tokens[1:, None]).squeeze(-1)
    return out * batch.action_mask


@pytest.mark.parametrize("name", [case(name, fast=i % 2 == 0) for i, name in enumerate(FAMILIES)])
def test_trainer_and_sampler_say_what_the_model_says(name, make_policy):
    kind, settings = FAMILIES[name]
    policy = make_policy(kind, lora=False, **settings)
    policy.forward(short(), PLAIN)
    batch = sampled(policy)
    own = models_own(policy, batch)
    assert int(batch.lengths.max()) > 4 * WINDOW and float(own.abs().max()) > 1
    assert torch.allclose(batch.logprobs, own, atol=1e-3), "the sampler"
    with torch.no_grad():
        assert torch.allclose(policy.forward(batch, PLAIN).logprobs, own, atol=1e-3), "as it trains"
        policy.packing = policy.tiled = False
        assert torch.allclose(policy.forward(batch, PLAIN).logprobs, own, atol=1e-3), "padded"


@pytest.mark.parametrize("name", FAMILIES)
def test_which_families_are_sampled_by_our_own_decoder(name, make_policy):
    kind, settings = FAMILIES[name]
    engine = LocalEngine(make_policy(kind, lora=name in LEAN, **settings), EngineConfig())
    assert (engine.way == "lean") == (name in LEAN)


@pytest.mark.parametrize("name", WINDOWED)
def test_the_window_counts(name, make_policy):
    """Else the test above could not fail."""
    kind, settings = FAMILIES[name]
    policy, wide = (
        make_policy(kind, lora=False, **settings | {"sliding_window": window}) for window in (WINDOW, 4096)
    )
    tokens = torch.arange(3, 19)[None]
    with torch.no_grad():
        assert not torch.allclose(
            policy.model(input_ids=tokens).logits, wide.model(input_ids=tokens).logits, atol=0.1
        )


def test_a_window_that_is_cut_otherwise_than_ours_is_refused(make_policy, monkeypatch):
    """As long as 4,096 tokens, it is shown on a few."""
    settings = SMALL | {"sliding_window": 4096, "max_position_embeddings": 8192}
    make_policy("mistral", lora=False, **settings)
    monkeypatch.setattr(language_model, "window_of", lambda config: None)
    with pytest.raises(
        AgentPeftError,
        match="MistralForCausalLM attends within a sliding window in a way that Agent-PEFT does not support",
    ):
        make_policy("mistral", new=True, lora=False, **settings)


@pytest.mark.parametrize("name", BOUNDED)
def test_longer_episodes_are_refused(name, make_policy):
    kind, settings = FAMILIES[name]
    positions, reason = BOUNDED[name]
    engine = load_sampler(make_policy(kind, lora=False, **settings), EngineConfig())
    engine.policy.chat.end_of_turn = frozenset()
    line = (
        rf"^sampling\.max_tokens: {positions + 1} is more than the {positions} positions that the model can"
    )
    with pytest.raises(AgentPeftError, match=rf"{line} read \({reason}\); set it to {positions} or less$"):
        engine.generate([Talk([1, 4, 5], 0)], SamplingConfig(max_tokens=positions + 1))
    talk = Talk([1, 4, 5], 0)
    engine.generate([talk], SamplingConfig(max_new_tokens=300))  # the default max_tokens, which is lowered
    assert sum(len(turn.observation) + len(turn.action) for turn in talk.turns) == positions


@pytest.mark.parametrize("name", REFUSED)
def test_refused_families(name, make_policy):
    kind, settings, line = REFUSED[name]
    with pytest.raises(AgentPeftError, match=line) as raised:
        load_sampler(make_policy(kind, lora=False, **settings), EngineConfig())
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["llama-3", "qwen2-moe-window", "mistral-window", "gemma-3", "gpt-2"])
def test_in_16_bits(name, make_policy):
    kind, settings = FAMILIES[name]
    policy = make_policy(kind, lora=False, **settings | {"initializer_range": 0.05})
    policy.model.to(torch.bfloat16)
    policy = Policy(policy.model, policy.chat)
    batch = sampled(policy)
    with torch.no_grad():
        difference = (policy.forward(batch, PLAIN).logprobs - batch.logprobs)[batch.action_mask].abs()
    assert float(difference.mean()) < 0.1
