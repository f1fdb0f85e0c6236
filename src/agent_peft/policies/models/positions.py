"""The longest sequence that a model can read, and its sliding window, from its configuration."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from agent_peft.policies.sampling import SamplingConfig
from agent_peft.types import AgentPeftError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

logger = logging.getLogger(__name__)

# Names for the number of positions. Transformers maps most other names to the first.
_LENGTHS = ("max_position_embeddings", "max_seq_len")
# Rotary frequencies that depend on the longest position of a forward. Keys in a cache, and other rows of a
# batch, would have been computed with other frequencies.
_FOLLOWS_LENGTH = ("dynamic", "longrope")


@dataclass(frozen=True)
class Bound:
    """The most positions of a sequence. ``reason`` names the part of the configuration that limits them."""

    positions: int
    reason: str


def bound_of(config: PreTrainedConfig) -> Bound | None:
    """The longest sequence that a model was made for, or None where it has no positions (Mamba).

    Rotary positions that are stretched evenly (linear, yarn) reach as far as they are stretched to, as vLLM
    reads them; frequencies that change with the length are constant up to the original length only.

    >>> from transformers import GPT2Config, LlamaConfig, MambaConfig
    >>> bound_of(GPT2Config(n_positions=64)), bound_of(MambaConfig())
    (Bound(positions=64, reason='max_position_embeddings'), None)
    >>> yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
    >>> bound_of(LlamaConfig(max_position_embeddings=8192, rope_parameters=yarn)).positions
    32768
    """
    text: Any = config.get_text_config()
    most = next((n for name in _LENGTHS if isinstance(n := getattr(text, name, None), int) and n > 1), None)
    table = [] if most is None else [Bound(most, "max_position_embeddings")]
    bounds: list[Bound] = []
    for rope in _ropes(text):
        kind, original = rope.get("rope_type"), rope.get("original_max_position_embeddings") or most
        if not original:
            continue
        if kind in _FOLLOWS_LENGTH:
            length = most if kind == "dynamic" and most else original
            bounds.append(
                Bound(int(length), f"beyond them its rotary frequencies ({kind}) change with the length")
            )
        elif kind in ("linear", "yarn") and most is not None:
            stretched = int(original * float(rope.get("factor") or 1.0))
            table = [
                Bound(
                    max(table[0].positions, stretched),
                    "max_position_embeddings, as far as its rotary positions are stretched",
                )
            ]
    if "local" in (getattr(text, "attention_layers", None) or ()):  # GPT-Neo
        limit = "its local attention has a window_size, which Agent-PEFT cannot apply to a cache"
        bounds.append(Bound(int(text.window_size), limit))
    return min(bounds + table, key=lambda bound: bound.positions, default=None)


def _ropes(text: Any) -> Iterator[dict[str, Any]]:
    """The rotary parameters of all layers, or of each type of layer."""
    rope = getattr(text, "rope_parameters", None)
    if isinstance(rope, dict):
        yield from (
            [rope] if "rope_type" in rope else [inner for inner in rope.values() if isinstance(inner, dict)]
        )


def fit(sampling: SamplingConfig, bound: Bound | None, where: str = "sampling.max_tokens") -> SamplingConfig:
    """Limit the length of episodes to the bound: lower ``max_tokens`` if it is the default."""
    if (sampling.max_thinking_tokens or 0) >= sampling.max_new_tokens:
        raise AgentPeftError(
            f"sampling.max_thinking_tokens: {sampling.max_thinking_tokens} has no effect within "
            f"sampling.max_new_tokens: {sampling.max_new_tokens}; lower it, or raise max_new_tokens"
        )
    if bound is not None and sampling.max_new_tokens != SamplingConfig().max_new_tokens:
        _check_new_tokens(sampling.max_new_tokens, bound.positions)
    if bound is None or sampling.max_tokens <= bound.positions:
        return sampling
    if "max_tokens" not in sampling.model_fields_set:
        return sampling.model_copy(update={"max_tokens": bound.positions})
    raise AgentPeftError(
        f"{where}: {sampling.max_tokens} is more than the {bound.positions} positions that the model can "
        f"read ({bound.reason}); set it to {bound.positions} or less"
    )


@cache  # so that it warns once
def _check_new_tokens(tokens: int, positions: int) -> None:
    if tokens >= positions:
        logger.warning(
            "sampling.max_new_tokens: %d has no effect: the model can read %d positions, prompt included; "
            "lower it",
            tokens,
            positions,
        )


def window_of(config: PreTrainedConfig) -> int | None:
    """The sliding window in tokens, or None where every layer sees the longest sequence that there can be.

    >>> from transformers import MistralConfig
    >>> window_of(MistralConfig(sliding_window=4096))
    4096
    >>> window_of(MistralConfig(sliding_window=4096, max_position_embeddings=2048)) is None
    True
    """
    text: Any = config.get_text_config()
    window, kinds = getattr(text, "sliding_window", None), getattr(text, "layer_types", None)
    if not isinstance(window, int) or window < 1 or getattr(text, "use_sliding_window", True) is False:
        return None
    if kinds is not None and not any("sliding" in kind for kind in kinds):
        return None
    bound = bound_of(config)
    return None if bound is not None and window >= bound.positions else window
