"""Attention along a trie, tile by tile: a tile of neighbouring nodes is compared only with the nodes that
at least one of them sees.

A dense mask compares every node with every other node, which grows with the square of the trie. The number of
nodes that one node sees grows with the trie's depth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from agent_peft.policies.forward.attention_override import override_context

NAME = "agent_peft_tree"
TILE = 128  # queries of a tile: a smaller tile compares fewer pairs in vain, a larger one has larger products


@dataclass(frozen=True)
class Tile:
    """Queries [start, stop) and the ``keys`` that they see: a slice if those are contiguous, else indices
    (K,).
    """

    start: int
    stop: int
    keys: slice | Tensor
    # (1, 1, groups * queries, K) added to the scores. Query heads that share their keys follow one another.
    bias: Tensor


def cut_tiles(ends: Tensor, dtype: torch.dtype, groups: int = 1) -> list[Tile]:
    """Cut a trie's nodes into tiles.

    Args:
        ends: (N,) where each node's subtree ends: q sees k iff k <= q < ends[k].
        groups: query heads for each key head.

    >>> [(tile.start, tile.stop, tile.keys) for tile in cut_tiles(torch.tensor([4, 4, 3, 4]), torch.float32)]
    [(0, 4, slice(0, 4, None))]
    """
    index, tiles = torch.arange(len(ends), device=ends.device), []
    for start in range(0, len(ends), TILE):
        stop = min(start + TILE, len(ends))
        queries = index[start:stop, None]
        seen = (index[:stop] <= queries) & (queries < ends[:stop])
        keys = seen.any(0).nonzero().squeeze(1)
        bias = torch.zeros(stop - start, len(keys), dtype=dtype, device=ends.device).masked_fill_(
            ~seen[:, keys], -torch.inf
        )
        first, last = int(keys[0]), int(keys[-1])
        side_by_side = last - first + 1 == len(keys)
        tiles.append(
            Tile(
                start,
                stop,
                slice(first, last + 1) if side_by_side else keys,
                bias.repeat(groups, 1)[None, None],
            )
        )
    return tiles


class _Cut(torch.autograd.Function):
    """x (1, h, N, D) cut into pieces, which may overlap. Autograd's own backward would make a gradient as
    large as x for each piece, and add them up.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *pieces: slice | Tensor) -> tuple[Tensor, ...]:
        ctx.shape, ctx.pieces = x.shape, pieces
        return tuple(
            x[:, :, piece] if isinstance(piece, slice) else x.index_select(2, piece) for piece in pieces
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        total = gradients[0].new_zeros(ctx.shape)
        for piece, gradient in zip(ctx.pieces, gradients, strict=True):
            if isinstance(piece, slice):
                total[:, :, piece] += gradient
            else:
                total.index_add_(2, piece, gradient)
        return total, *(None for _ in ctx.pieces)


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention interface: queries (1, heads, N, D), keys and values (1, kv heads, N, D) of
    the nodes of one trie.

    Raises:
        ValueError: the model adds something to its scores that is not computed here.
    """
    tiles: list[Tile] = override_context(others)
    heads, kv_heads, size = query.shape[1], key.shape[1], query.shape[3]
    queries, keys = [slice(tile.start, tile.stop) for tile in tiles], [tile.keys for tile in tiles]
    cut: Any = _Cut.apply
    pieces = zip(*(cut(x, *of) for x, of in ((query, queries), (key, keys), (value, keys))), strict=True)
    out = [
        # heads that share their keys become queries of one head
        nn.functional.scaled_dot_product_attention(
            q.reshape(1, kv_heads, -1, size), k, v, attn_mask=tile.bias, scale=scaling
        )
        for tile, (q, k, v) in zip(tiles, pieces, strict=True)
    ]
    return torch.cat([x.view(1, heads, -1, size) for x in out], 2).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, tree_attention)
