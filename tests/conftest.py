"""Fixtures that many tests share. Models are small and random; the real ones skip, with the reason, where they cannot be had."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from agent_peft.policies import bundled
from agent_peft.policies.tokenization import character_tokenizer
from agent_peft.types import AgentPeftError

torch.set_num_threads(1)


@pytest.fixture
def shared() -> Path:
    """The folder of real sets beside the repository. Never committed, so it may be absent."""
    folder = Path(__file__).resolve().parents[2] / "shared"
    if not folder.is_dir():
        pytest.skip(f"no folder {folder.name}/ beside the repository: the real sets are not here")
    return folder


@pytest.fixture
def char_tokenizer() -> PreTrainedTokenizerFast:
    return character_tokenizer("0123456789+-*= \n")


@pytest.fixture
def tiny_llama(char_tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Two random layers over ``char_tokenizer``'s tokens, tied embeddings, grouped heads, fp32, in evaluation mode."""
    config = LlamaConfig(
        vocab_size=len(char_tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=char_tokenizer.pad_token_id,
        bos_token_id=char_tokenizer.bos_token_id,
        eos_token_id=char_tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct, fetched on first use."""
    try:
        return bundled.fetch("smollm2-135m")
    except AgentPeftError as error:
        pytest.skip(f"SmolLM2 is not in the cache and cannot be fetched: {error}")
