"""Attention over keys that lie in several places: siblings read what they share in one product, and the parts
are joined exactly.

Softmax over the union of two sets of keys is the mean of the two softmaxes, weighted by their sums of
exponentials (Juravsky et al. 2024, "Hydragen", eq. 3-5). So a prompt's keys are read once for all rows that
continue it, not once for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from agent_peft.policies.forward.attention_override import now_read

NAME = "agent_peft_shared"
NOWHERE = -1e4  # a score whose exponential is zero beside any other's


@dataclass(frozen=True)
class Relatives:
    """Which of B rows continue which of n slots, at most W a slot.

    >>> kin = relatives([0, 0, 1], [5, 5, 3], torch.float32, torch.device("cpu"))
    >>> kin.members.tolist(), kin.places.tolist(), kin.extent
    ([[0, 1], [2, 0]], [0, 1, 2], 5)
    """

    slots: int  # n
    members: Tensor  # (n, W) rows, filled up with 0
    places: Tensor  # (B,) where in the n * W members a row is
    bias: (
        Tensor | None
        # (n, 1, 1, extent) added to the scores, where slots differ in length; (n, 1, W, extent) where members do
    )
    extent: int


def relatives(
    parents: Sequence[int], lengths: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Relatives:
    """Sort B rows by the slot that each continues, and by how many of its tokens.

    A row may continue none of them: its scores are then so low that what it reads there has no weight, and is
    still finite.
    """
    count, extent = max(parents) + 1, max(lengths)
    families: list[list[int]] = [[] for _ in range(count)]
    size = [0] * count
    for row, (parent, length) in enumerate(zip(parents, lengths, strict=True)):
        families[parent].append(row)
        size[parent] = length
    width = max(map(len, families))
    places = [0] * len(parents)
    for slot, family in enumerate(families):
        for place, row in enumerate(family):
            places[row] = slot * width + place
    seen = [[size[slot]] for slot in range(count)]
    if any(length != size[parent] for parent, length in zip(parents, lengths, strict=True)):
        seen = [[lengths[row] for row in family] + [extent] * (width - len(family)) for family in families]
    bias = None
    if min(map(min, seen)) < extent:
        most = torch.tensor(seen, device=device).unsqueeze(-1)  # (n, 1 or W, 1)
        bias = torch.zeros(*most.shape[:2], extent, dtype=dtype, device=device)
        bias = (
            bias.masked_fill_(torch.arange(extent, device=device) >= most, -torch.inf)
            .masked_fill_(most == 0, NOWHERE)
            .unsqueeze(1)
        )
    members = torch.tensor([family + [0] * (width - len(family)) for family in families], device=device)
    return Relatives(count, members, torch.tensor(places, device=device), bias, extent)


@dataclass(frozen=True)
class Ancestor:
    """Keys and values (n, kv heads, extent, D) that rows see before their own."""

    keys: Tensor
    values: Tensor
    kin: Relatives


class Ancestry(Protocol):
    """A cache that knows what the rows of the present forward see besides their own keys."""

    def ancestors(self, layer: int) -> list[Ancestor]: ...


def attend(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of queries (B, H, M, D) to keys (B, H, K, D), and the log of the sum of exponentials (B,
    H, M) of each.
    """
    if query.device.type == "cpu" and keys.shape[-1] == values.shape[-1]:
        mask = None if bias is None else bias.expand(-1, -1, query.shape[2], -1)
        found: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, keys, values, 0.0, False, attn_mask=mask, scale=scale
        )
        return found
    scores = (query @ keys.transpose(-1, -2)).float() * scale
    if bias is not None:
        scores = scores + bias
    total = scores.logsumexp(-1)
    return (scores - total.unsqueeze(-1)).exp().to(values.dtype) @ values, total


def attend_relatives(query: Tensor, ancestor: Ancestor, scale: float) -> tuple[Tensor, Tensor]:
    """The same for B rows of queries (B, H, M, D) that continue n slots: one product a slot, for all its
    rows.
    """
    kin, (heads, length, size) = ancestor.kin, query.shape[1:]
    slots, width = kin.members.shape
    together = query.index_select(0, kin.members.flatten()).view(slots, width, heads, length, size)
    together = together.transpose(1, 2).reshape(slots, heads, width * length, size)
    bias = (
        kin.bias if kin.bias is None or kin.bias.shape[2] == 1 else kin.bias.repeat_interleave(length, dim=2)
    )
    out, total = attend(together, ancestor.keys, ancestor.values, bias, scale)
    out = out.view(slots, heads, width, length, -1).transpose(1, 2).reshape(slots * width, heads, length, -1)
    total = total.view(slots, heads, width, length).transpose(1, 2).reshape(slots * width, heads, length)
    return out.index_select(0, kin.places), total.index_select(0, kin.places)


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
    """Transformers' attention interface: queries (B, heads, Q, D), the rows' own keys (B, kv heads, K, D),
    the mask of ``place``.

    Raises:
        ValueError: the model adds something to its scores that this does not know.
    """
    cache: Ancestry = now_read(others)
    rows, heads, length, size = query.shape
    groups = heads // key.shape[1]
    scale = size**-0.5 if scaling is None else scaling
    # heads that share their keys become queries of one head
    query = query.reshape(rows, key.shape[1], groups * length, size)
    bias = attention_mask if length == 1 else attention_mask.repeat(1, 1, groups, 1)
    layer: int = module.layer_idx  # type: ignore[assignment]
    ancestors = cache.ancestors(layer)
    if not ancestors:  # a prompt that is read: there is nothing to join
        out = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale)
    else:
        out, total = attend(query, key, value, bias, scale)
    for ancestor in ancestors:
        above, sums = attend_relatives(query, ancestor, scale)
        out = torch.lerp(out, above, torch.sigmoid(sums - total).unsqueeze(-1).to(out.dtype))
        total = torch.logaddexp(total, sums)
    return out.view(rows, heads, length, -1).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, shared_attention)
