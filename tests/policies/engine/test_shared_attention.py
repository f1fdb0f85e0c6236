"""Attention in parts equals attention over everything."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from agent_peft.policies.engine import shared_attention as shared
from agent_peft.policies.engine.shared_attention import Prefix, attend, group_by_prefix
from agent_peft.policies.forward.attention import Override, overriding

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "begins", [[11] * 5, [11, 4, 11, 0, 7], [0, 0, 3, 0, 0]], ids=["all", "parts", "hardly"]
)
@pytest.mark.parametrize(("heads", "kv_heads", "length"), [(4, 4, 1), (6, 2, 1), (6, 2, 3)])
def test_parts_equal_the_whole(heads, kv_heads, length, begins):
    """Five rows continue three prompts of different lengths, which continue what is common, or a beginning
    of it, or nothing.
    """
    torch.manual_seed(0)
    parents, prompt_lengths, own = [2, 0, 2, 1, 2], [7, 3, 5], 4 + length
    size, count = 8, len(parents)
    query, key, value = torch.randn(count, heads, length, size), *torch.randn(2, count, kv_heads, own, size)
    prompts, common = torch.randn(2, 3, kv_heads, 7, size), torch.randn(2, 1, kv_heads, 11, size)
    seen = torch.arange(own) <= torch.arange(4, 4 + length)[:, None]
    bias = torch.zeros(count, 1, length, own).masked_fill(~seen, -torch.inf)
    prefixes = [
        Prefix(*prompts, group_by_prefix(parents, [prompt_lengths[p] for p in parents], torch.float32, CPU)),
        Prefix(
            *(x[:, :, : max(begins)] for x in common),
            group_by_prefix([0] * count, begins, torch.float32, CPU),
        ),
    ]

    class Kept:
        def prefixes(self, layer: int) -> list[Prefix]:
            return prefixes if layer == 3 else []

    module = nn.Module()
    module.layer_idx = 3
    with overriding(Override(LlamaConfig(), shared.NAME, Kept())):
        found, _ = shared.shared_attention(module, query, key, value, bias, scaling=0.3)
    for b, parent in enumerate(parents):
        n = prompt_lengths[parent]
        keys, values = (
            torch.cat([common[i][0][:, : begins[b]], prompts[i][parent, :, :n], (key, value)[i][b]], 1)
            for i in (0, 1)
        )
        keys, values = (x.repeat_interleave(heads // kv_heads, 0) for x in (keys, values))
        mask = torch.cat([torch.ones(length, begins[b] + n, dtype=torch.bool), seen], 1)
        expected = nn.functional.scaled_dot_product_attention(
            query[b], keys, values, attn_mask=mask, scale=0.3
        )
        assert torch.allclose(found[b], expected.transpose(0, 1), atol=1e-6)


@pytest.mark.parametrize(
    ("parents", "slots"),
    [([2], [2]), ([90, 3, 90], [3, 90]), ([4, 5, 7, 8], [4, 5, 6, 7, 8]), ([0, 1, 9], [0, 1, 9])],
)
def test_slots_that_no_row_continues_are_not_read(parents, slots):
    """Most episodes of a call end before the last one; the prompts of those are no work for it."""
    groups = group_by_prefix(parents, [5] * len(parents), torch.float32, CPU)
    assert torch.arange(100)[groups.slots].tolist() == slots
    assert len(groups.members) == len(slots)
    width = groups.members.shape[1]
    assert [slots[place // width] for place in groups.index.tolist()] == parents


def test_the_plain_way_is_the_kernels(monkeypatch):
    """What other devices than a CPU take."""
    torch.manual_seed(1)
    query, keys, values = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 9, 8), torch.randn(2, 3, 9, 8)
    bias = torch.zeros(2, 1, 1, 9).masked_fill(torch.arange(9) > 6, -torch.inf)
    for given in (None, bias):
        quick = attend(query, keys, values, given, 0.5)
        wide = torch.cat([values, torch.zeros(2, 3, 9, 1)], -1)  # values of another size: not for the kernel
        plain, total = attend(query, keys, wide, given, 0.5)
        assert torch.allclose(quick[0], plain[..., :8], atol=1e-6) and torch.allclose(
            quick[1], total, atol=1e-6
        )


def test_terms_that_it_does_not_compute_are_refused():
    module = nn.Module()
    module.layer_idx = 0
    with pytest.raises(ValueError, match="does not support softcap"):
        shared.shared_attention(module, *torch.randn(3, 1, 1, 1, 8), torch.zeros(1, 1, 1, 1), softcap=30.0)
