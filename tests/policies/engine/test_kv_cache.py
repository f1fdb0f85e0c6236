from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from agent_peft.policies.engine import kv_cache
from agent_peft.policies.engine.kv_cache import COMMON, PROMPTS, ROWS, TierCache

CPU = torch.device("cpu")
SLOTS, LAYERS, HEADS, SIZE = 4, 2, 2, 3


def make_cache(shared: bool = True, capacity: int = 4) -> TierCache:
    config = LlamaConfig(
        num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=HEADS, hidden_size=4 * SIZE
    )
    return TierCache((1, SLOTS, SLOTS), (capacity,) * 3, config, torch.float32, CPU, shared)


def tensors(rows: list[list[float]], layer: int) -> torch.Tensor:
    """(B, H, Q, D) in which each element tells its value, layer, head and place."""
    values = torch.tensor(rows)[:, None, :, None] * 1000 + layer * 100
    return values + torch.arange(HEADS)[:, None, None] * 10 + torch.arange(SIZE)


class Told:
    """The same as a cache, in the plainest way: for each slot of each tier, all that was read, parents
    included.
    """

    def __init__(self) -> None:
        self.tiers: list[list[list[float]]] = [[[]], [[] for _ in range(SLOTS)], [[] for _ in range(SLOTS)]]


def write(
    cache: TierCache, tier: int, slots: list[int], starts: list[int], rows: list[list[float]]
) -> list[torch.Tensor]:
    """Write, and read back for each layer the keys of all tiers as one (B, H, positions, D)."""
    positions = torch.tensor(
        [list(range(start, start + len(row))) for start, row in zip(starts, rows, strict=True)]
    )
    mask = cache.place(tier, slots, positions)
    assert mask.shape[:3] == (len(slots), 1, positions.shape[1])
    seen = mask == 0 if cache.shared else mask
    found = []
    for layer in range(LAYERS):
        keys, values = cache.update(tensors(rows, layer), -tensors(rows, layer), layer)
        assert torch.equal(keys, -values)
        whole = []
        for b in range(len(slots)):
            pieces = [keys[b, :, seen[b, 0, -1]]]  # the last query sees all that came before
            for prefix in cache.prefixes(layer) if cache.shared else []:
                slot, groups = int(prefix.groups.index[b]) // prefix.groups.members.shape[1], prefix.groups
                assert (
                    torch.equal(prefix.keys, -prefix.values)
                    and groups.members.flatten()[groups.index[b]] == b
                )
                visible = slice(None) if groups.bias is None else groups.bias[slot, 0, 0] == 0
                pieces.insert(0, prefix.keys[slot][:, visible])
            whole.append(torch.cat(pieces, 1))
        found.append(whole)
    for b, start in enumerate(starts):  # each earlier query sees one key less
        counts = seen[b, 0].sum(-1).tolist()
        assert counts == list(range(counts[0], counts[0] + len(counts))) and counts[-1] <= start + len(counts)
    return found


def num_bytes(cache: TierCache) -> int:
    tensors = (tensor for tier in cache.tiers for tensor in (*tier.keys, *tier.values))
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


operations = st.one_of(
    st.tuples(st.just("common"), st.integers(1, 5)),
    st.tuples(
        st.just("prompt"),
        st.permutations(range(SLOTS)),
        st.integers(1, SLOTS),
        st.integers(1, 5),
        st.booleans(),
    ),
    st.tuples(
        st.just("fork"), st.integers(0, SLOTS - 1), st.sets(st.integers(0, SLOTS - 1), min_size=1, max_size=3)
    ),
    st.tuples(st.just("write"), st.permutations(range(SLOTS)), st.integers(1, SLOTS), st.integers(1, 5)),
    st.tuples(st.just("swap"), st.integers(0, SLOTS - 1), st.integers(0, SLOTS - 1)),
)


@pytest.mark.parametrize("shared", [True, False])
@settings(max_examples=60, deadline=None)
@given(st.lists(operations, min_size=1, max_size=16))
def test_any_sequence_of_operations_reads_back_what_was_written(shared, sequence):
    cache, told, number = make_cache(shared), Told(), 0

    def put(tier: int, slots: list[int], length: int) -> None:
        nonlocal number
        starts = [len(told.tiers[tier][slot]) for slot in slots]
        rows = [[float(number + b * length + q + 1) for q in range(length)] for b in range(len(slots))]
        number += len(slots) * length
        read = write(cache, tier, slots, starts, rows)
        for slot, row in zip(slots, rows, strict=True):
            told.tiers[tier][slot] += row
        for layer, whole in enumerate(read):
            for b, slot in enumerate(slots):
                assert torch.equal(whole[b], tensors([told.tiers[tier][slot]], layer)[0])

    for operation, *arguments in sequence:
        if operation == "common":
            if not told.tiers[COMMON][0]:
                put(COMMON, [0], arguments[0])
        elif operation == "prompt":
            order, count, length, continues = arguments
            slots, common = list(order)[:count], told.tiers[COMMON][0]
            slots = [
                slot
                for slot in slots
                if all(slot != getattr(told, "forked", {}).get(row) for row in range(SLOTS))
            ]
            if slots:
                for slot in slots:
                    cache.fork(
                        PROMPTS, [slot], 0 if continues and common else None, len(common) if continues else 0
                    )
                    told.tiers[PROMPTS][slot] = list(common) if continues else []
                put(PROMPTS, slots, length)
        elif operation == "fork":
            parent, rows = arguments
            prompt = told.tiers[PROMPTS][parent]
            if prompt:
                cache.fork(ROWS, sorted(rows), parent, len(prompt))
                told.forked = getattr(told, "forked", {}) | dict.fromkeys(rows, parent)
                for row in rows:
                    told.tiers[ROWS][row] = list(prompt)
        elif operation == "write":
            order, count, length = arguments
            slots = [row for row in list(order)[:count] if row in getattr(told, "forked", {})]
            kinds = {cache.tiers[PROMPTS].parents[told.forked[row]] for row in slots} if slots else set()
            if slots and len(kinds) == 1:  # a forward's rows all have what is common, or none has
                put(ROWS, slots, length)
        elif operation == "swap":
            a, b = arguments
            cache.swap(a, b)
            rows, forked = told.tiers[ROWS], getattr(told, "forked", {})
            rows[a], rows[b] = rows[b], rows[a]
            told.forked = {{a: b, b: a}.get(row, row): parent for row, parent in forked.items()}


def test_it_grows_by_doubling_and_keeps_what_it_holds():
    cache = make_cache()
    write(cache, ROWS, [2], [0], [[1.0, 2.0, 3.0]])
    small = num_bytes(cache)
    assert cache.tiers[ROWS].capacity == 4 and small == 2 * LAYERS * SLOTS * HEADS * 4 * SIZE * 4
    read = write(cache, ROWS, [2], [3], [[float(i) for i in range(4, 14)]])
    assert cache.tiers[ROWS].capacity == 16 and num_bytes(cache) == 4 * small
    assert torch.equal(read[1][0], tensors([[float(i) for i in range(1, 14)]], 1)[0])


def test_padding_repeats_the_last_position_and_is_overwritten():
    cache = make_cache()
    cache.place(ROWS, [0, 1], torch.tensor([[0, 1, 2], [0, 0, 0]]))
    for layer in range(LAYERS):
        cache.update(
            tensors([[1.0, 2.0, 3.0], [7.0, 7.0, 7.0]], layer),
            -tensors([[1.0, 2.0, 3.0], [7.0, 7.0, 7.0]], layer),
            layer,
        )
    read = write(cache, ROWS, [1], [1], [[8.0]])
    assert torch.equal(read[0][0], tensors([[7.0, 8.0]], 0)[0])


def test_neighbouring_slots_are_read_without_a_copy():
    cache = make_cache()
    cache.place(ROWS, [1, 2], torch.tensor([[0], [0]]))
    keys, _ = cache.update(tensors([[1.0], [2.0]], 0), tensors([[1.0], [2.0]], 0), 0)
    assert (
        cache.tiers[ROWS].keys[0] is not None
        and keys.untyped_storage().data_ptr() == cache.tiers[ROWS].keys[0].untyped_storage().data_ptr()
    )


def test_siblings_keep_their_prompt_once():
    sizes = {}
    for shared in (True, False):
        cache = make_cache(shared)
        cache.fork(PROMPTS, [0], None)
        write(cache, PROMPTS, [0], [0], [[float(i) for i in range(64)]])
        cache.fork(ROWS, [0, 1, 2, 3], 0, 64)
        write(cache, ROWS, [0, 1, 2, 3], [64] * 4, [[1.0], [2.0], [3.0], [4.0]])
        sizes[shared] = cache.tiers[ROWS].capacity
    assert sizes == {True: 4, False: 128}


def large_cache(capacity: int) -> TierCache:
    """Of layers of 32 KB a token."""
    config = LlamaConfig(num_hidden_layers=10, num_attention_heads=2, num_key_value_heads=2, hidden_size=128)
    return TierCache((1, 1, 64), (1, 1, capacity), config, torch.float32, CPU, True)


def write_large(cache: TierCache, position: int) -> None:
    cache.place(ROWS, range(64), torch.full((64, 1), position))
    states = torch.ones(64, 2, 1, 64)
    for layer in range(10):
        cache.update(states, states, layer)


def test_old_and_new_are_there_together_for_one_layer_only(peak_bytes):
    caches: list[TierCache] = []

    def work() -> None:
        caches.append(large_cache(32))
        write_large(caches[0], 31)
        write_large(caches[0], 32)

    peak = peak_bytes(work)
    layer = num_bytes(caches[0]) // 10
    assert caches[0].tiers[ROWS].capacity == 64 and num_bytes(caches[0]) == 10 * 2 * 64 * 2 * 64 * 64 * 4
    assert peak <= num_bytes(caches[0]) + layer


def test_exchanged_rows_take_no_second_cache(peak_bytes):
    cache = large_cache(32)
    write_large(cache, 31)

    def work() -> None:
        for row in range(32):
            cache.swap(row, 63 - row)
        write_large(cache, 30)

    assert peak_bytes(work) <= num_bytes(cache) // 10


def test_what_it_grew_out_of_goes_back_to_the_system(monkeypatch):
    """The pieces between the layers fit none of the larger tensors."""
    asked = []
    monkeypatch.setattr(kv_cache, "give_back_memory", lambda: asked.append(None))
    cache = large_cache(32)
    write_large(cache, 31)
    assert not asked
    write_large(cache, 32)
    assert len(asked) == 2 * 10
    small = make_cache()
    write(small, ROWS, [2], [0], [[float(i) for i in range(1, 20)]])
    assert len(asked) == 2 * 10, "a few kilobytes are not worth it"
