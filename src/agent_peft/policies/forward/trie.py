"""The token trie: trajectories that share a prefix share its computation.

Nodes are laid out depth-first; node i has a depth (its position) and ``ends[i]``, where its subtree ends. A
node sees exactly itself and its ancestors: ``mask[q, k] = k <= q and q < ends[k]``. Tries lie one after the
other in rows, several to a row, and cannot see each other. One forward over the rows gives the exact
log-probs of all trajectories.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Trie:
    """N nodes for B token sequences of lengths L_b.

    >>> trie = build_trie([[1, 2, 3], [1, 2, 4]])
    >>> trie.tokens, trie.positions, trie.ends, trie.paths
    ([1, 2, 3, 4], [0, 1, 2, 2], [4, 4, 3, 4], [[0, 1, 2], [0, 1, 3]])
    """

    tokens: list[int]  # (N,)
    positions: list[int]  # (N,) depth
    ends: list[int]  # (N,) one past the subtree's last node
    paths: list[list[int]]  # B lists of L_b nodes

    def __len__(self) -> int:
        return len(self.tokens)


def build_trie(sequences: Sequence[Sequence[int]]) -> Trie:
    """Merge B token sequences. In sorted order every subtree is contiguous, so one pass over them lays the
    nodes out depth-first.
    """
    order = sorted(range(len(sequences)), key=lambda b: list(sequences[b]))
    tokens: list[int] = []
    positions: list[int] = []
    ends: list[int] = []
    paths: list[list[int]] = [[] for _ in sequences]
    previous: list[int] = []  # path of the sequence laid out last
    for b in order:
        sequence = sequences[b]
        shared = 0
        while shared < min(len(sequence), len(previous)) and tokens[previous[shared]] == sequence[shared]:
            shared += 1
        for node in previous[shared:]:
            ends[node] = len(tokens)
        path = previous[:shared]
        for depth in range(shared, len(sequence)):
            path.append(len(tokens))
            tokens.append(sequence[depth])
            positions.append(depth)
            ends.append(-1)
        paths[b] = path
        previous = path
    for node, end in enumerate(ends):
        if end < 0:
            ends[node] = len(tokens)
    return Trie(tokens, positions, ends, paths)


@dataclass(frozen=True)
class Rows:
    """Tries side by side: R rows of N places, what is left over filled with nodes that see only themselves.

    >>> rows = fill_rows([build_trie([[1, 2, 3], [1, 2, 4]]), build_trie([[5, 6]]), build_trie([[7]])], [[0, 1], [2], [3]])
    >>> rows.tokens.tolist(), rows.ends.tolist(), rows.paths
    ([[1, 2, 3, 4], [5, 6, 7, 0]], [[4, 4, 3, 4], [2, 2, 3, 4]], [[0, 1, 2], [0, 1, 3], [4, 5], [6]])
    """

    tokens: Tensor  # (R, N) int64
    positions: Tensor  # (R, N) int64
    ends: Tensor  # (R, N) int64, within the row
    paths: list[list[int]]  # of each sequence, its nodes as row * N + place

    def mask(self) -> Tensor:
        """(R, 1, N, N) bool attention mask: a node sees itself and its ancestors."""
        index = torch.arange(self.tokens.shape[1], device=self.ends.device)
        return ((index[:, None] >= index[None, :]) & (index[:, None] < self.ends[:, None, :]))[:, None]


def fill_rows(tries: Sequence[Trie], members: Sequence[Sequence[int]]) -> Rows:
    """Lay tries into rows as long as the longest of them, the longest first, each into the first row with
    room for it.

    Args:
        members: for each trie, which sequences (numbered over all tries) its paths are of.
    """
    width = max(map(len, tries))
    used: list[int] = []
    places: dict[int, int] = {}
    for t in sorted(range(len(tries)), key=lambda t: -len(tries[t])):
        row = next((r for r, full in enumerate(used) if full + len(tries[t]) <= width), len(used))
        if row == len(used):
            used.append(0)
        places[t] = row * width + used[row]
        used[row] += len(tries[t])
    tokens, positions = [0] * (len(used) * width), [0] * (len(used) * width)
    ends = [place + 1 for place in range(width)] * len(used)
    paths: list[list[int]] = [[] for _ in range(sum(map(len, members)))]
    for t, start in places.items():
        trie, end = tries[t], start + len(tries[t])
        tokens[start:end], positions[start:end] = trie.tokens, trie.positions
        ends[start:end] = [start % width + e for e in trie.ends]
        for b, path in zip(members[t], trie.paths, strict=True):
            paths[b] = [start + node for node in path]
    shape = (len(used), width)
    return Rows(
        torch.tensor(tokens).view(shape),
        torch.tensor(positions).view(shape),
        torch.tensor(ends).view(shape),
        paths,
    )


def lay_out(sequences: Sequence[Sequence[int]], families: Sequence[int], attention_cost: float) -> Rows:
    """The cheaper of two layouts: one trie of everything, or one for each family (the trajectories of a
    group).

    One trie computes what families share once; but every node of a row is compared with every other, and that
    grows with the square.

    Args:
        families: for each sequence, the number of its family.
        attention_cost: of one pair of nodes, as a part of what a node costs without attention.
    """
    members: dict[int, list[int]] = {}
    for b, family in enumerate(families):
        members.setdefault(family, []).append(b)
    whole = fill_rows([build_trie(sequences)], [range(len(sequences))])
    if len(members) == 1:
        return whole
    apart = fill_rows(
        [build_trie([sequences[b] for b in rows]) for rows in members.values()], list(members.values())
    )

    def cost(rows: Rows) -> float:
        count, width = rows.tokens.shape
        return count * width * (1 + attention_cost * width)

    return min(apart, whole, key=cost)
