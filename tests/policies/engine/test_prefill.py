"""The batches of a prefill."""

from __future__ import annotations

import random

import pytest

from agent_peft.policies.engine.prefill import batches


def cost(split: list[list[int]], lengths: list[int], overhead: int) -> int:
    return sum(len(batch) * max(lengths[i] for i in batch) + overhead for batch in split)


def splits(order: list[int]) -> list[list[list[int]]]:
    """All ways to cut a list into batches."""
    if not order:
        return [[]]
    cuts = range(1, len(order) + 1)
    return [[order[:cut], *rest] for cut in cuts for rest in splits(order[cut:])]


@pytest.mark.parametrize("seed", range(20))
def test_no_other_split_of_the_sorted_pieces_costs_less(seed):
    draws = random.Random(seed)
    lengths = [draws.randrange(1, 40) for _ in range(draws.randrange(1, 9))]
    most, overhead = draws.randrange(20, 120), draws.randrange(50)
    split = batches(lengths, most, overhead)
    assert sorted(i for batch in split for i in batch) == list(range(len(lengths)))

    def fits(batch: list[int]) -> bool:
        return len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= most

    assert all(map(fits, split))
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    others = [other for other in splits(order) if all(map(fits, other))]
    assert cost(split, lengths, overhead) == min(cost(other, lengths, overhead) for other in others)


def test_nothing_to_read_has_no_batch():
    assert batches([], 10, 1) == []
