"""Fixtures that many tests share. Models are small and random; the real ones skip, with the reason, where
they cannot be had.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from agent_peft.environments.arithmetic import ALPHABET
from agent_peft.policies.config import LoraSettings, ScratchConfig
from agent_peft.policies.models import bundled
from agent_peft.policies.models.character_tokenizer import character_tokenizer
from agent_peft.types import AgentPeftError

torch.set_num_threads(1)


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operators have made and that are still there: exact, and the same
    each time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {
            x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if (
                    key not in self.known and key not in given
                ):  # made here, and no view of what was there before
                    self.known.add(key)
                    self.now += size
                    weakref.finalize(storage, self.forget, key, size)
        self.peak = max(self.peak, self.now)
        return out

    def forget(self, key: int, size: int) -> None:
        self.known.remove(key)
        self.now -= size


@pytest.fixture
def peak_bytes() -> Callable[[Callable[[], object]], int]:
    """``peak_bytes(work)``: the most bytes of tensors that ``work`` has made and holds at once, its
    backward included.
    """

    def measure(work: Callable[[], object]) -> int:
        with _LiveBytes() as live:
            work()
        return live.peak

    return measure


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
    """Two random layers over ``char_tokenizer``'s tokens, tied embeddings, grouped heads, fp32, in
    evaluation mode.
    """
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


ARCHITECTURE = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,  # a peaked distribution, so that a wrong temperature or a wrong token shows
}


@pytest.fixture
def policy_config() -> ScratchConfig:
    return ScratchConfig(
        architecture=ARCHITECTURE, alphabet=ALPHABET, lora=LoraSettings(rank=4, alpha=8), device="cpu"
    )


@pytest.fixture
def run_contents() -> Callable[[Path], dict[str, bytes]]:
    """The bytes of every file that the configuration alone decides."""

    def contents(folder: Path) -> dict[str, bytes]:
        files = [
            path
            for path in sorted(folder.rglob("*"))
            if path.is_file() and path.name not in ("timing.jsonl", "run.json", "log.txt", ".lock")
        ]
        return {str(path.relative_to(folder)): path.read_bytes() for path in files}

    return contents
