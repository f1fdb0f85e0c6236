"""The token trie: trajectories that share a prefix share its computation.

Nodes are laid out depth-first. Node i has a depth (its position) and ``ends[i]``, where its subtree ends. A
node sees exactly itself and its ancestors: ``mask[q, k] = k <= q and q < ends[k]``. Several tries may stand
in one row, one after the other, and do not see each other. One forward over the rows gives the exact
log-probabilities of all trajectories.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

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
    ends: list[int]  # (N,) one past the last node of the subtree
    paths: list[list[int]]  # B lists of L_b nodes

    def __len__(self) -> int:
        return len(self.tokens)


def build_trie(sequences: Sequence[Sequence[int]]) -> Trie:
    """Merge B token sequences. In sorted order every subtree is contiguous, so one pass lays the nodes out
    depth-first.
    """
    tokens: list[int] = []
    positions: list[int] = []
    ends: list[int] = []
    paths: list[list[int]] = [[] for _ in sequences]
    previous: list[int] = []
    path: list[int] = []
    for sequence, b in sorted((list(sequence), b) for b, sequence in enumerate(sequences)):
        shared = common_length(previous, sequence)
        count, more = len(tokens), len(sequence) - shared
        for node in path[shared:]:
            ends[node] = count
        path = path[:shared] + list(range(count, count + more))
        tokens += sequence[shared:]
        positions += range(shared, len(sequence))
        ends += [-1] * more
        paths[b], previous = path, sequence
    for node in path:
        ends[node] = len(tokens)
    return Trie(tokens, positions, ends, paths)


def count_nodes(sequences: Sequence[Sequence[int]]) -> int:
    """The length of ``build_trie(sequences)``, without the trie.

    >>> count_nodes([[1, 2, 3], [1, 2, 4]])
    4
    """
    ordered = sorted(map(list, sequences))
    shared = sum(common_length(one, other) for one, other in pairwise(ordered))
    return sum(map(len, ordered)) - shared


def common_length(one: list[int], other: list[int]) -> int:
    """The length of the common prefix. Comparing slices is many times as fast as comparing tokens one by one.

    >>> common_length([1, 2, 3], [1, 2, 4, 5])
    2
    """
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def common_prefix(prompts: Sequence[Sequence[int]]) -> list[int]:
    """The longest common prefix that leaves each prompt a token; empty where sharing saves nothing."""
    if len(set(map(tuple, prompts))) < 2:
        return []
    low, high = min(map(list, prompts)), max(map(list, prompts))
    return low[: min(common_length(low, high), len(low) - 1, len(high) - 1)]


@dataclass(frozen=True)
class Layout:
    """Tries side by side in R rows of N nodes. Nodes that only see themselves fill the rest of a row.

    >>> layout = fill_rows([build_trie([[1, 2, 3], [1, 2, 4]]), build_trie([[5, 6]]), build_trie([[7]])],
    ...                    [[0, 1], [2], [3]])
    >>> layout.tokens.tolist(), layout.ends.tolist(), layout.paths
    ([[1, 2, 3, 4], [5, 6, 7, 0]], [[4, 4, 3, 4], [2, 2, 3, 4]], [[0, 1, 2], [0, 1, 3], [4, 5], [6]])
    """

    tokens: Tensor  # (R, N) int64
    positions: Tensor  # (R, N) int64
    ends: Tensor  # (R, N) int64, within the row
    paths: list[list[int]]  # for each sequence, its nodes as row * N + index

    def mask(self) -> Tensor:
        """(R, 1, N, N) bool attention mask: a node sees itself and its ancestors."""
        index = torch.arange(self.tokens.shape[1], device=self.ends.device)
        return ((index[:, None] >= index[None, :]) & (index[:, None] < self.ends[:, None, :]))[:, None]

    def nodes(self, values: Tensor) -> Tensor:
        """(R, N) the values of the nodes, from those of the sequences' tokens (B, T). Tokens of one node have
        one value.
        """
        found = torch.zeros(self.tokens.numel(), dtype=values.dtype)
        for path, row in zip(self.paths, values, strict=True):
            found[torch.tensor(path, dtype=torch.int64)] = row[: len(path)]
        return found.view(self.tokens.shape)

    def predictors(self, length: int) -> Tensor:
        """(B, length) the node (of R * N) that predicts token t of sequence b; 0 where there is none."""
        predictors = torch.zeros(len(self.paths), length, dtype=torch.int64)
        for b, path in enumerate(self.paths):
            predictors[b, 1 : len(path)] = torch.tensor(path[:-1], dtype=torch.int64)
        return predictors


def fill_rows(tries: Sequence[Trie], members: Sequence[Sequence[int]]) -> Layout:
    """Lay tries into rows as long as the longest trie: the longest first, each into the first row with room.

    Args:
        members: for each trie, the numbers (over all tries) of the sequences that its paths belong to.
    """
    width = max(map(len, tries))
    used: list[int] = []
    starts: dict[int, int] = {}
    for t in sorted(range(len(tries)), key=lambda t: -len(tries[t])):
        row = next((r for r, full in enumerate(used) if full + len(tries[t]) <= width), len(used))
        if row == len(used):
            used.append(0)
        starts[t] = row * width + used[row]
        used[row] += len(tries[t])
    tokens, positions = [0] * (len(used) * width), [0] * (len(used) * width)
    ends = [index + 1 for index in range(width)] * len(used)
    paths: list[list[int]] = [[] for _ in range(sum(map(len, members)))]
    for t, start in starts.items():
        trie, end = tries[t], start + len(tries[t])
        tokens[start:end], positions[start:end] = trie.tokens, trie.positions
        ends[start:end] = [start % width + e for e in trie.ends]
        for b, path in zip(members[t], trie.paths, strict=True):
            paths[b] = [start + node for node in path]
    shape = (len(used), width)
    return Layout(
        torch.tensor(tokens).view(shape),
        torch.tensor(positions).view(shape),
        torch.tensor(ends).view(shape),
        paths,
    )


def lay_out(sequences: Sequence[Sequence[int]], groups: Sequence[int], attention_cost: float) -> Layout:
    """The cheaper of two layouts: one trie of all sequences, or one trie for each group.

    One trie computes once what groups share, such as a system prompt. But every node of a row is compared
    with every other node of it, and that cost grows with the square of the row's length.

    Args:
        groups: for each sequence, the number of its group.
        attention_cost: cost of one pair of nodes, relative to the cost of one node without attention.
    """
    members: dict[int, list[int]] = {}
    for b, group in enumerate(groups):
        members.setdefault(group, []).append(b)
    together = fill_rows([build_trie(sequences)], [range(len(sequences))])
    if len(members) == 1:
        return together
    apart = fill_rows(
        [build_trie([sequences[b] for b in rows]) for rows in members.values()], list(members.values())
    )

    def cost(layout: Layout) -> float:
        count, width = layout.tokens.shape
        return count * width * (1 + attention_cost * width)

    return min(apart, together, key=cost)
