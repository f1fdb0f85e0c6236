"""What prompts have in common at their beginning, which is read once for all of them."""

from __future__ import annotations

from collections.abc import Sequence


def common_prefix(prompts: Sequence[Sequence[int]]) -> list[int]:
    """The longest common prefix of the prompts that leaves each of them a token to read. It is empty where
    sharing saves nothing.
    """
    if len({tuple(p) for p in prompts}) < 2:
        return []
    low, high = min(map(list, prompts)), max(map(list, prompts))
    return low[: min(common_length(low, high), common_length(high, low))]


def common_length(tokens: Sequence[int], other: Sequence[int]) -> int:
    """The length of the common prefix, leaving at least one of ``tokens``."""
    limit = min(len(tokens) - 1, len(other))
    return next((i for i in range(limit) if tokens[i] != other[i]), limit)
