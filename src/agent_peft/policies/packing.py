"""The token trie: what several trajectories share is computed once.

Trajectories of a group share their prompt and often whole turns; those of different groups share at least the system's message.
Merged into a trie whose nodes are laid out depth-first, node i has
a position (its depth) and ``end[i]``, where its subtree ends; node q sees exactly its ancestors: ``k <= q < end[k]``. One forward over
the nodes gives the exact log-probabilities of all of them.
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
    """Merge B token sequences. In sorted order every subtree is contiguous, so one pass over them lays the nodes out depth-first."""
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


def tree_mask(trie: Trie, device: torch.device) -> Tensor:
    """(1, 1, N, N) bool attention mask: a node sees itself and its ancestors."""
    index = torch.arange(len(trie), device=device)
    ends = torch.tensor(trie.ends, device=device)
    return ((index[:, None] >= index[None, :]) & (index[:, None] < ends[None, :]))[None, None]
