"""Replaces the attention of a model for as long as a context lasts; and the attention along a trie.

Tree attention compares a tile of neighboring nodes only with the nodes that at least one of them sees. A
dense mask compares every node with every other node, which grows with the square of the trie. The number of
nodes that one node sees grows with the trie's depth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig

from agent_peft.hardware import is_out_of_memory
from agent_peft.policies.models.positions import window_of

# Terms that a model may add to its attention scores, and that our attention does not compute.
_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "sliding_window")
# Exceptions that a model may raise when its attention cannot be overridden. Callers fall back or report it.
_REFUSALS = (
    AssertionError,
    AttributeError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)
T = TypeVar("T")


def attempt(work: Callable[[], T]) -> T | Exception:
    """The result of ``work``, or the exception with which the model refuses it.

    Running out of memory is not a property of the model, so that error is raised.

    >>> attempt(lambda: 1), attempt(lambda: int("one"))
    (1, ValueError("invalid literal for int() with base 10: 'one'"))
    """
    try:
        return work()
    except _REFUSALS as error:
        if is_out_of_memory(error):
            raise
        return error


@dataclass(frozen=True)
class Override:
    """The attention registered as ``name`` acts in models of ``config`` (the text model's). It gets its
    ``context``, such as tiles or a cache, from ``override_context``.
    """

    config: PreTrainedConfig
    name: str
    context: Any


_current: ContextVar[Override | None] = ContextVar("override", default=None)


def refuse_window(config: PreTrainedConfig) -> None:
    """
    Raises:
        ValueError: the model has a sliding window. Our attention does not apply it, and not every model
            passes its window to the attention function.
    """
    if (window := window_of(config)) is not None:
        raise ValueError(f"our attention does not apply a sliding window (of {window} tokens)")


@contextmanager
def overriding(override: Override) -> Iterator[None]:
    """Inside, the model uses another attention, unless it has a sliding window (``refuse_window``)."""
    refuse_window(override.config)
    config, before, token = override.config, override.config._attn_implementation, _current.set(override)
    config._attn_implementation = override.name
    try:
        yield
    finally:
        config._attn_implementation = before
        _current.reset(token)


def current_override() -> AbstractContextManager[None]:
    """Capture the current override, so that activation checkpointing can re-enter it during the backward."""
    override = _current.get()
    return nullcontext() if override is None else overriding(override)


def override_context(arguments: dict[str, Any]) -> Any:
    """The context of the current override.

    Args:
        arguments: the remaining keyword arguments that the model passes to its attention function.

    Raises:
        ValueError: one of them adds something to the scores that our attention does not compute.
    """
    override = _current.get()
    window = None if override is None else getattr(override.config, "sliding_window", None)
    unsupported = [name for name in _UNSUPPORTED if arguments.get(name) is not None]
    if window is not None and arguments.get("sliding_window") == window:
        unsupported.remove("sliding_window")  # too wide to cut anything: `overriding` has checked that
    if unsupported:
        raise ValueError(f"our attention does not support {', '.join(unsupported)}")
    assert override is not None
    return override.context


TREE = "agent_peft_tree"
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


AttentionInterface.register(TREE, tree_attention)
