from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from agent_peft.policies.kv_cache import SlotCache

CPU = torch.device("cpu")
SLOTS, LAYERS, HEADS, SIZE = 4, 2, 2, 3


def make_cache(capacity: int = 4) -> SlotCache:
    config = LlamaConfig(num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=HEADS, hidden_size=4 * SIZE)
    return SlotCache(SLOTS, config, torch.float32, CPU, capacity=capacity)


class Written:
    """The same as a cache, in the plainest way: for each slot, what was written at each position, of each layer."""

    def __init__(self) -> None:
        self.slots: list[list[float]] = [[] for _ in range(SLOTS)]


def tensors(rows: list[list[float]], layer: int) -> torch.Tensor:
    """(B, H, Q, D) in which each element tells its value, layer, head and place."""
    values = torch.tensor(rows)[:, None, :, None] * 1000 + layer * 100
    return values + torch.arange(HEADS)[:, None, None] * 10 + torch.arange(SIZE)


def write(cache: SlotCache, slots: list[int], starts: list[int], rows: list[list[float]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    positions = torch.tensor([list(range(start, start + len(row))) for start, row in zip(starts, rows, strict=True)])
    mask = cache.place(slots, positions)
    extent = max(start + len(row) for start, row in zip(starts, rows, strict=True))
    assert mask.shape == (len(slots), 1, positions.shape[1], extent)
    for b, start in enumerate(starts):
        for q in range(positions.shape[1]):
            assert mask[b, 0, q].nonzero().flatten().tolist() == list(range(start + q + 1))
    return [cache.update(tensors(rows, layer), -tensors(rows, layer), layer) for layer in range(LAYERS)]


operations = st.one_of(
    st.tuples(st.just("write"), st.permutations(range(SLOTS)), st.integers(1, SLOTS), st.integers(1, 5)),
    st.tuples(st.just("copy"), st.integers(0, SLOTS - 1), st.sets(st.integers(0, SLOTS - 1), max_size=3)),
    st.tuples(st.just("swap"), st.integers(0, SLOTS - 1), st.integers(0, SLOTS - 1)),
    st.tuples(st.just("forget"), st.integers(0, SLOTS - 1)),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(operations, min_size=1, max_size=14))
def test_any_sequence_of_operations_reads_back_what_was_written(sequence: list[tuple]) -> None:
    cache, plain, number = make_cache(), Written(), 0
    for operation, *arguments in sequence:
        if operation == "write":
            order, count, length = arguments
            slots = list(order)[:count]
            starts = [len(plain.slots[slot]) for slot in slots]
            rows = [[float(number + b * length + q + 1) for q in range(length)] for b in range(count)]
            number += count * length
            read = write(cache, slots, starts, rows)
            for slot, row in zip(slots, rows, strict=True):
                plain.slots[slot] += row
            for layer, (keys, values) in enumerate(read):
                assert keys.shape == values.shape == (count, HEADS, max(len(plain.slots[s]) for s in slots), SIZE)
                for b, slot in enumerate(slots):
                    expected = tensors([plain.slots[slot]], layer)[0]
                    assert torch.equal(keys[b, :, : expected.shape[1]], expected)
                    assert torch.equal(values[b, :, : expected.shape[1]], -expected)
        elif number and operation == "copy":
            source, targets = arguments
            length = max(len(plain.slots[source]) - 1, 0)
            cache.copy(source, sorted(targets - {source}), length)
            for target in targets - {source}:
                plain.slots[target] = plain.slots[source][:length]
        elif operation == "swap":
            a, b = arguments
            cache.swap(a, b)
            plain.slots[a], plain.slots[b] = plain.slots[b], plain.slots[a]
        elif operation == "forget":
            plain.slots[arguments[0]] = []


def test_it_grows_by_doubling_and_keeps_what_it_holds() -> None:
    cache = make_cache(capacity=4)
    write(cache, [2], [0], [[1.0, 2.0, 3.0]])
    small = cache.num_bytes
    assert cache.capacity == 4 and small == 2 * LAYERS * SLOTS * HEADS * 4 * SIZE * 4
    read = write(cache, [2], [3], [[float(i) for i in range(4, 14)]])
    assert cache.capacity == 16 and cache.num_bytes == 4 * small
    assert torch.equal(read[1][0], tensors([[float(i) for i in range(1, 14)]], 1))


def test_padding_repeats_the_last_position_and_is_overwritten() -> None:
    cache = make_cache()
    cache.place([0, 1], torch.tensor([[0, 1, 2], [0, 0, 0]]))
    for layer in range(LAYERS):
        cache.update(tensors([[1.0, 2.0, 3.0], [7.0, 7.0, 7.0]], layer), tensors([[1.0, 2.0, 3.0], [7.0, 7.0, 7.0]], layer), layer)
    read = write(cache, [1], [1], [[8.0]])
    assert torch.equal(read[0][0], tensors([[7.0, 8.0]], 0))


def test_neighbouring_slots_are_read_without_a_copy() -> None:
    cache = make_cache()
    keys, _ = write(cache, [1, 2], [0, 0], [[1.0], [2.0]])[0]
    assert cache.keys[0] is not None and keys.untyped_storage().data_ptr() == cache.keys[0].untyped_storage().data_ptr()
    apart, _ = write(cache, [2, 1], [1, 1], [[3.0], [4.0]])[0]
    assert torch.equal(apart, tensors([[2.0, 3.0], [1.0, 4.0]], 0))
