"""Prefill: many tokens of many slots, in batches with little padding."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from agent_peft.policies.engine.kv_cache import TierCache, padded
from agent_peft.policies.policy import Policy

FORWARD = 64  # tokens that cost a CPU as much as one more forward: its weights are read again
Job = tuple[int, Sequence[int], int]  # a slot, the tokens to read into it, and the position of the first


def prefill(
    policy: Policy, cache: TierCache, tier: int, jobs: Sequence[Job], most: int
) -> list[torch.Tensor]:
    """Logits (V,) after each job, in batches of ``most`` tokens, padding included."""
    jobs = [_begin(policy, cache, tier, job, most) for job in jobs]
    device, logits = policy.device, dict[int, torch.Tensor]()
    # a GPU computes a full batch in little more than the time of a small one
    overhead = FORWARD if device.type == "cpu" else most
    for batch in batches([len(tokens) for _, tokens, _ in jobs], most, overhead):
        slots, pieces, starts = zip(*(jobs[i] for i in batch), strict=True)
        tokens, positions = padded(pieces, starts, device)
        last = torch.tensor([len(piece) - 1 for piece in pieces], device=device)
        hidden = cache.read(policy, tier, slots, tokens, positions)
        out = policy.logits(hidden[torch.arange(len(batch), device=device), last])
        logits |= zip(batch, out, strict=True)
    return [logits[i] for i in range(len(jobs))]


def _begin(policy: Policy, cache: TierCache, tier: int, job: Job, most: int) -> Job:
    """Read a long job in parts, as attention takes memory for each pair of tokens. Return the rest."""
    slot, tokens, start = job
    while len(tokens) > most:
        cache.read(policy, tier, [slot], *padded([tokens[:most]], [start], policy.device))
        tokens, start = tokens[most:], start + most
    return slot, tokens, start


def batches(lengths: Sequence[int], most: int, overhead: int) -> list[list[int]]:
    """Indices of pieces that are read together, longest first, so that padding and forwards cost least.

    Args:
        most: tokens of a batch, padding included; a longer piece is a batch alone.
        overhead: tokens that cost as much as one more forward.

    >>> batches([9, 600, 8, 600], most=2048, overhead=64)
    [[1, 3], [0, 2]]
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    best = [(0, 0)]  # for each number of the longest pieces: the least cost, and where the last batch begins
    for end in range(1, len(order) + 1):
        costs = []
        for begin in range(end - 1, -1, -1):
            tokens = (end - begin) * lengths[order[begin]]
            if tokens > most and begin < end - 1:
                break
            costs.append((best[begin][0] + tokens + overhead, begin))
        best.append(min(costs))
    cuts = [len(order)]
    while cuts[-1]:
        cuts.append(best[cuts[-1]][1])
    return [order[begin:end] for end, begin in pairwise(cuts)][::-1]
