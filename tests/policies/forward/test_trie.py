from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_peft.policies.forward.trie import (
    Trie,
    build_trie,
    common_length,
    count_nodes,
    fill_rows,
    lay_out,
)

sequences = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=7)


def ancestors(trie: Trie) -> list[set[int]]:
    """Each node and all before it on a path, read from the paths alone."""
    found: list[set[int]] = [set() for _ in trie.tokens]
    for path in trie.paths:
        for depth, node in enumerate(path):
            found[node] |= set(path[: depth + 1])
    return found


@settings(deadline=None)
@given(sequences)
def test_paths_spell_the_sequences(given_sequences):
    trie = build_trie(given_sequences)
    assert [[trie.tokens[node] for node in path] for path in trie.paths] == given_sequences
    for path in trie.paths:
        assert [trie.positions[node] for node in path] == list(range(len(path)))
        assert path == sorted(path), "parents come before their children"


@settings(deadline=None)
@given(sequences)
def test_one_node_for_each_distinct_prefix(given_sequences):
    trie = build_trie(given_sequences)
    prefixes = {tuple(s[: i + 1]) for s in given_sequences for i in range(len(s))}
    assert len(trie) == len(trie.positions) == len(trie.ends) == len(prefixes)
    owner = {}
    for sequence, path in zip(given_sequences, trie.paths, strict=True):
        for depth, node in enumerate(path):
            assert owner.setdefault(node, tuple(sequence[: depth + 1])) == tuple(sequence[: depth + 1])
    assert len(owner) == len(trie)


@settings(deadline=None)
@given(sequences)
def test_counting_needs_no_trie(given_sequences):
    assert count_nodes(given_sequences) == len(build_trie(given_sequences))


@settings(deadline=None)
@given(*2 * [st.lists(st.integers(0, 1), max_size=9)])
def test_common_prefixes(one, other):
    expected = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    assert common_length(one, other) == (min(len(one), len(other)) if expected is None else expected)


def test_the_predictor_of_a_token_is_the_node_before_it():
    layout = fill_rows([build_trie([[1, 2, 3], [1, 2, 4]]), build_trie([[5, 6]])], [[0, 2], [1]])
    assert layout.predictors(4).tolist() == [[0, 0, 1, 0], [0, 4, 0, 0], [0, 0, 1, 0]]


@settings(deadline=None)
@given(sequences)
def test_a_node_sees_itself_and_its_ancestors_and_nothing_else(given_sequences):
    trie = build_trie(given_sequences)
    mask = fill_rows([trie], [range(len(given_sequences))]).mask()
    assert mask.shape == (1, 1, len(trie), len(trie)) and mask.dtype == torch.bool
    assert [set(row.nonzero().flatten().tolist()) for row in mask[0, 0]] == ancestors(trie)


@settings(deadline=None)
@given(sequences)
def test_ends_are_where_subtrees_end(given_sequences):
    trie = build_trie(given_sequences)
    seen_by = ancestors(trie)
    for node, end in enumerate(trie.ends):
        assert {other for other, above in enumerate(seen_by) if node in above} == set(range(node, end))


@settings(deadline=None)
@given(sequences, st.randoms(use_true_random=False))
def test_order_and_repetition_change_nothing(given_sequences, random):
    trie = build_trie(given_sequences)
    order = list(range(len(given_sequences))) * 2
    random.shuffle(order)  # type: ignore[attr-defined]
    again = build_trie([given_sequences[b] for b in order])
    assert (again.tokens, again.positions, again.ends) == (trie.tokens, trie.positions, trie.ends)
    assert again.paths == [trie.paths[b] for b in order]


def test_identical_siblings_share_every_node():
    trie = build_trie([[5, 6, 7]] * 4)
    assert trie.tokens == [5, 6, 7] and trie.paths == [[0, 1, 2]] * 4


def test_a_prefix_of_another_has_no_node_of_its_own():
    trie = build_trie([[5, 6, 7, 8], [5, 6], [5, 6, 9]])
    assert trie.tokens == [5, 6, 7, 8, 9] and trie.paths == [[0, 1, 2, 3], [0, 1], [0, 1, 4]]
    assert trie.ends == [5, 5, 4, 4, 5]


def test_several_roots_do_not_see_each_other():
    trie = build_trie([[1, 2], [3, 4]])
    assert fill_rows([trie], [range(2)]).mask()[0, 0].int().tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [0, 0, 1, 0],
        [0, 0, 1, 1],
    ]


families = st.lists(
    st.tuples(st.integers(0, 3), st.lists(st.integers(0, 2), min_size=1, max_size=6)), min_size=1, max_size=9
)


@settings(deadline=None)
@given(families, st.sampled_from([0.0, 0.01, 10.0]))
def test_rows_hold_the_same_tries(given_families, attention_cost):
    numbers, given_sequences = [f for f, _ in given_families], [s for _, s in given_families]
    rows = lay_out(given_sequences, numbers, attention_cost)
    tokens = rows.tokens.flatten().tolist()
    positions = rows.positions.flatten().tolist()
    mask = rows.mask()[:, 0]
    width = rows.tokens.shape[1]
    assert [[tokens[node] for node in path] for path in rows.paths] == given_sequences
    for path in rows.paths:
        assert [positions[node] for node in path] == list(range(len(path)))
        for depth, node in enumerate(path):  # exactly itself and its ancestors, all in one row
            row, place = divmod(node, width)
            assert (row * width + mask[row, place].nonzero().flatten()).tolist() == path[: depth + 1]
    assert mask.any(-1).all(), "a place that sees nothing would be NaN"


def test_the_layout_is_the_cheaper_one():
    shared, apart = [[1, 1, 1, 1, 2], [1, 1, 1, 1, 3]], [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert lay_out(shared, [0, 1], 0.0).tokens.shape == (1, 6)
    assert lay_out(apart, [0, 1], 0.01).tokens.shape == (2, 4)
    assert lay_out(apart, [0, 0], 0.01).tokens.shape == (1, 8), "a family is never cut"


def test_paths_are_lists_of_their_own():
    trie = build_trie([[1, 2], [1, 2], [1, 2, 3]])
    trie.paths[0].append(99)
    assert trie.paths[1:] == [[0, 1], [0, 1, 2]]
