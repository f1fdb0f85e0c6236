"""Attention over keys in several tensors: siblings read their shared prefix in one product, and the parts are
joined exactly.

The softmax over the union of two sets of keys is the mean of the two softmaxes, weighted by their sums of
exponentials (Juravsky et al. 2024, "Hydragen", eq. 3-5). So the keys of a prompt are read once for all rows
that continue it, and not once for each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from agent_peft.policies.forward.attention import override_context

NAME = "agent_peft_shared"
NEGLIGIBLE = -1e4  # a score whose exponential is zero compared with any other


@dataclass(frozen=True)
class PrefixGroups:
    """Which of B rows continue which of n slots, with at most W rows for each slot.

    >>> groups = group_by_prefix([7, 7, 8], [5, 5, 3], torch.float32, torch.device("cpu"))
    >>> groups.slots, groups.members.tolist(), groups.index.tolist(), groups.extent
    (slice(7, 9, None), [[0, 1], [2, 0]], [0, 1, 2], 5)
    """

    slots: slice | Tensor  # the n slots
    members: Tensor  # (n, W) rows, filled up with 0
    index: Tensor  # (B,) the index of each row among the n * W members
    # Added to the scores: (n, 1, 1, extent) where slots differ in length, (n, 1, W, extent) where rows of one
    # slot do.
    bias: Tensor | None
    extent: int  # keys of the longest slot


def group_by_prefix(
    parents: Sequence[int], lengths: Sequence[int], dtype: torch.dtype, device: torch.device
) -> PrefixGroups:
    """Sort B rows by the slot that each of them continues.

    Slots that no row continues are left out, because most conversations of a call end before the last one.
    Where they are few, they stay: a range of slots needs no copy.

    A row of length 0 continues no slot. Its scores there are so low that they have no weight, and finite.

    Args:
        parents: (B,) slots.
        lengths: (B,) how many keys of its slot each row sees.
    """
    used, extent = sorted(set(parents)), max(lengths)
    is_range = len(used) > 0.75 * (used[-1] + 1 - used[0])
    slots = list(range(used[0], used[-1] + 1)) if is_range else used
    place_of = {slot: place for place, slot in enumerate(slots)}
    families: list[list[int]] = [[] for _ in slots]
    size = [0] * len(slots)
    for row, (parent, length) in enumerate(zip(parents, lengths, strict=True)):
        families[place_of[parent]].append(row)
        size[place_of[parent]] = length
    width = max(map(len, families))
    index = [0] * len(parents)
    for slot, family in enumerate(families):
        for place, row in enumerate(family):
            index[row] = slot * width + place
    visible = [[length] for length in size]
    if any(length != size[place_of[parent]] for parent, length in zip(parents, lengths, strict=True)):
        visible = [[lengths[row] for row in family] + [extent] * (width - len(family)) for family in families]
    bias = None
    if min(map(min, visible)) < extent:
        ends = torch.tensor(visible, device=device).unsqueeze(-1)  # (n, 1 or W, 1)
        bias = torch.zeros(*ends.shape[:2], extent, dtype=dtype, device=device)
        bias.masked_fill_(torch.arange(extent, device=device) >= ends, -torch.inf)
        bias = bias.masked_fill_(ends == 0, NEGLIGIBLE).unsqueeze(1)
    members = torch.tensor([family + [0] * (width - len(family)) for family in families], device=device)
    read = slice(used[0], used[-1] + 1) if is_range else torch.tensor(used, device=device)
    return PrefixGroups(read, members, torch.tensor(index, device=device), bias, extent)


@dataclass(frozen=True)
class Prefix:
    """Keys and values (n, kv heads, extent, D) that rows see before their own."""

    keys: Tensor
    values: Tensor
    groups: PrefixGroups


class PrefixCache(Protocol):
    """A cache that knows which prefixes the rows of the present forward see."""

    def prefixes(self, layer: int) -> list[Prefix]: ...


def attend(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of queries (B, H, M, D) to keys and values (B, H, K, D).

    Args:
        bias: added to the scores, broadcast to (B, H, M, K).

    Returns:
        (B, H, M, D) the outputs, and (B, H, M) the logarithms of the sums of exponentials.
    """
    if query.device.type == "cpu" and keys.shape[-1] == values.shape[-1]:
        mask = None if bias is None else bias.expand(-1, -1, query.shape[2], -1)
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(  # type: ignore[no-any-return]
            query, keys, values, 0.0, False, attn_mask=mask, scale=scale
        )
    scores = (query @ keys.transpose(-1, -2)).float() * scale
    if bias is not None:
        scores = scores + bias
    total = scores.logsumexp(-1)
    return (scores - total.unsqueeze(-1)).exp().to(values.dtype) @ values, total


def attend_prefix(query: Tensor, prefix: Prefix, scale: float) -> tuple[Tensor, Tensor]:
    """``attend`` for B rows of queries (B, H, M, D) that continue n slots: one product for each slot."""
    groups, (heads, length, size) = prefix.groups, query.shape[1:]
    slots, width = groups.members.shape
    together = query.index_select(0, groups.members.flatten()).view(slots, width, heads, length, size)
    together = together.transpose(1, 2).reshape(slots, heads, width * length, size)
    bias = groups.bias
    if bias is not None and bias.shape[2] > 1:
        bias = bias.repeat_interleave(length, dim=2)
    out, total = attend(together, prefix.keys, prefix.values, bias, scale)
    out = out.view(slots, heads, width, length, -1).transpose(1, 2).reshape(slots * width, heads, length, -1)
    total = total.view(slots, heads, width, length).transpose(1, 2).reshape(slots * width, heads, length)
    return out.index_select(0, groups.index), total.index_select(0, groups.index)


def shared_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention interface: queries (B, heads, Q, D), the rows' own keys and values
    (B, kv heads, K, D), and the mask of ``TierCache.place``.

    Raises:
        ValueError: the model adds something to its scores that is not computed here.
    """
    cache: PrefixCache = override_context(others)
    rows, heads, length, size = query.shape
    # heads that share their keys become queries of one head
    query = query.reshape(rows, key.shape[1], -1, size)
    layer: int = module.layer_idx  # type: ignore[assignment]
    scale = size**-0.5 if scaling is None else scaling
    out = attend_with_prefixes(query, key, value, attention_mask, cache.prefixes(layer), scale)
    return out.view(rows, heads, length, -1).transpose(1, 2).contiguous(), None


def attend_with_prefixes(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, prefixes: Sequence[Prefix], scale: float
) -> Tensor:
    """Attention (B, kv heads, G * Q, D) of queries of G heads to their own keys and values
    (B, kv heads, K, D) under an additive mask (B, 1, Q, K), and to those of the prefixes.
    """
    groups = query.shape[2] // mask.shape[2]
    bias = mask if mask.shape[2] == 1 else mask.repeat(1, 1, groups, 1)
    if not prefixes:
        return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale)
    out, total = attend(query, key, value, bias, scale)
    for prefix in prefixes:
        above, sums = attend_prefix(query, prefix, scale)
        out = torch.lerp(out, above, torch.sigmoid(sums - total).unsqueeze(-1).to(out.dtype))
        total = torch.logaddexp(total, sums)
    return out


AttentionInterface.register(NAME, shared_attention)
