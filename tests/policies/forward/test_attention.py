from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from agent_peft.policies.forward import attention
from agent_peft.policies.forward.trie import build_trie, fill_rows


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=6),
    st.integers(1, 5),
    st.integers(1, 3),
)
def test_tiles_show_what_the_mask_shows_and_leave_out_what_none_sees(sequences, tile, groups):
    rows = fill_rows([build_trie(sequences)], [range(len(sequences))])
    whole, before = rows.mask()[0, 0], attention.TILE
    attention.TILE = tile
    try:
        found = attention.cut_tiles(rows.ends[0], torch.float32, groups)
    finally:
        attention.TILE = before
    assert (
        [t.start for t in found[1:]] == [t.stop for t in found[:-1]]
        and found[0].start == 0
        and found[-1].stop == len(whole)
    )
    for t in found:
        keys = torch.arange(len(whole))[t.keys]
        seen = torch.zeros(t.stop - t.start, len(whole), dtype=torch.bool)
        for group in t.bias[0, 0].split(t.stop - t.start):
            seen[:, keys] = group == 0
            assert torch.equal(seen, whole[t.start : t.stop])
        assert seen[:, keys].any(0).all()
        assert isinstance(t.keys, slice) or (keys.diff() > 1).any()


def test_what_is_compared_grows_with_depth_not_with_the_square():
    """32 siblings of 64 after a prompt of 256: a dense mask compares six times as much."""
    trie = build_trie([[*range(256), 1000 + i, *range(63)] for i in range(32)])
    found = attention.cut_tiles(torch.tensor(trie.ends), torch.float32)
    compared = sum((t.stop - t.start) * len(torch.arange(len(trie))[t.keys]) for t in found)
    assert len(trie) ** 2 > 6 * compared


def test_the_gradient_of_pieces_that_overlap():
    x = torch.randn(1, 2, 6, 3, dtype=torch.float64, requires_grad=True)
    pieces = (slice(0, 4), torch.tensor([0, 3, 5]), slice(2, 6))
    torch.autograd.gradcheck(lambda x: attention._Cut.apply(x, *pieces), x)
    for piece, found in zip(pieces, attention._Cut.apply(x, *pieces), strict=True):
        assert torch.equal(found, x[:, :, piece])
