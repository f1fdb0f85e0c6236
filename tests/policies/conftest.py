"""Random models of several shapes, and policies around them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from agent_peft.policies import adapters
from agent_peft.policies.policy import Policy
from agent_peft.policies.tokenization import ChatTokenizer

from ..conftest import made_once

_SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
_GROUPED = _SHAPE | {"num_key_value_heads": 2, "head_dim": 8}
_WINDOWED = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}

# weights are drawn large, so that attention and distributions are far from uniform
ARCHITECTURES = {
    "llama": _GROUPED | {"tie_word_embeddings": True, "initializer_range": 0.3},
    "qwen3": _GROUPED | {"initializer_range": 0.3},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512, "initializer_range": 0.2},
    "gpt_neox": _SHAPE | {"initializer_range": 0.3},
    "mistral": _GROUPED | {"sliding_window": 6, "initializer_range": 0.3},  # one mask for all layers
    "gemma3_text": _GROUPED
    | _WINDOWED
    | {"query_pre_attn_scalar": 8, "initializer_range": 0.3},  # a mask for each type of layer
    "gemma2": _GROUPED  # eager attention only, and logits that pass through a tanh
    | _WINDOWED
    | {
        "query_pre_attn_scalar": 8,
        "final_logit_softcapping": 2.0,
        "attn_logit_softcapping": 3.0,
        "initializer_range": 0.3,
    },
}


def random_model(
    kind: str, vocab_size: int, dtype: torch.dtype = torch.float32, **more: object
) -> PreTrainedModel:
    settings = ARCHITECTURES.get(kind, {}) | more
    config = AutoConfig.for_model(
        kind, vocab_size=vocab_size, pad_token_id=0, bos_token_id=1, eos_token_id=2, **settings
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(dtype).eval()


@pytest.fixture
def make_policy(char_tokenizer: PreTrainedTokenizerFast) -> Callable[..., Policy]:
    """``make_policy(kind, new=False, lora=True, packing=True, dtype=torch.float32)``: a copy of that policy,
    or a ``new`` one. With LoRA, B is random too, so that the adapter counts.
    """

    def made(kind: str, *, lora: bool = True, packing: bool = True, **more: object) -> Policy:
        model = random_model(kind, len(char_tokenizer), **more)
        if lora:
            model = adapters.attach(model, adapters.LoraSettings(rank=2, alpha=4), seed=0)
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.normal_(
                        parameter, std=0.1, generator=torch.Generator().manual_seed(len(name))
                    )
        return Policy(model, ChatTokenizer(char_tokenizer), packing=packing)

    def make(kind: str = "llama", *, new: bool = False, **more: object) -> Policy:
        if new:
            return made(kind, **more)
        key = f"{kind} {sorted(more.items(), key=str)} {sorted(char_tokenizer.get_vocab())}"
        return made_once(key, partial(made, kind, **more))

    return make
