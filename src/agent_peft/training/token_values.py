"""What the trainer computes for each token of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from agent_peft.batch import Batch
from agent_peft.ranks import Ranks
from agent_peft.types import Group


@dataclass(frozen=True)
class TokenValues:
    """Numbers for the N tokens of a step's trajectories, which lie one after another.

    Attributes:
        advantages: (N,) fp32, zero where nothing was sampled; NaN where nothing is learned from: in
            trajectories that were dropped, and in a group that was left out, because failing environments
            had left too few episodes in it. None where the algorithm sets none.
        logprobs: (N,) fp32, the log-probabilities (nats) of the policy that acted, as the trainer computes
            them before the step's first update, zero where nothing was sampled; NaN in trajectories without a
            forward before that update: those without a gradient, and those of later minibatches. None for
            demonstrations.
    """

    advantages: Tensor | None
    logprobs: Tensor | None


def gather_values(
    ranks: Ranks,
    collected: Sequence[Group],
    compared: Sequence[Group],
    batch: Batch,
    logprobs: Tensor | None,
) -> TokenValues:
    """The values of all ranks' tokens, in the order of ``collected``. It is a collective.

    Args:
        compared: those of them that the step learns from, by the numbers in ``batch.groups``.
        logprobs: (B, T) of this rank's part; None for demonstrations.
    """
    lengths = [len(t.tokens) for group in collected for t in group.trajectories]
    starts = [0, *accumulate(lengths)]
    trajectories = (t for group in collected for t in group.trajectories)
    spans = {id(t): slice(*span) for t, span in zip(trajectories, pairwise(starts), strict=True)}
    real = torch.arange(batch.tokens.shape[1]) < batch.lengths[:, None]

    def spread(values: Tensor) -> Tensor:
        flat = torch.full((starts[-1],), math.nan)
        for trajectory in (t for group in compared for t in group.trajectories):
            flat[spans[id(trajectory)]] = 0.0
        for number, rows in batch.rows_by_group().items():
            if number < 0:  # only measured
                continue
            for trajectory, row in zip(compared[number].trajectories, rows, strict=True):
                # 0.0 + -0.0 is 0.0, on any number of ranks
                flat[spans[id(trajectory)]] += values[row][real[row]]
        return ranks.sum(flat)

    scored = None if logprobs is None else spread(logprobs)
    advantages = spread(batch.advantages)
    return TokenValues(
        advantages if scored is not None or bool(advantages.nan_to_num().any()) else None, scored
    )
