"""Tensors of a batch of trajectories, and the one collate. Everything that is learnt from is a trajectory."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from agent_peft.types import Trajectory


@dataclass(frozen=True)
class Batch:
    """Right-padded trajectories. Index t of a (B, T) tensor speaks of token t given tokens[:t].

    ``weights`` is zero off the action mask; an algorithm sets it once per minibatch, with one global
    denominator, so that the loss of the minibatch is the *sum* over its microbatches (and ranks) of
    ``(weights * per-token loss).sum()``.

    >>> from agent_peft.types import Task, Turn
    >>> batch = collate([Trajectory(Task("t"), (Turn((1, 2), (3,), (-0.5,)),), rewards=(1.0,))], groups=[0])
    >>> batch.tokens.tolist(), batch.action_mask.tolist(), batch.returns.tolist()
    ([[1, 2, 3]], [[False, False, True]], [1.0])
    """

    tokens: Tensor  # (B, T) int64
    lengths: Tensor  # (B,) int64: how many tokens are real
    action_mask: Tensor  # (B, T) bool: sampled by the policy
    logprobs: Tensor  # (B, T) fp32: the sampler's, zero off the mask
    rewards: Tensor  # (B, T) fp32: each turn's on its last sampled token
    returns: Tensor  # (B,) fp32: sum of the rewards
    groups: Tensor  # (B,) int64: trajectories of one task share a number
    advantages: Tensor  # (B, T) fp32, zero until an algorithm sets them
    weights: Tensor  # (B, T) fp32, zero until an algorithm sets them
    reference_logprobs: Tensor | None = None  # (B, T) fp32, only where a penalty asks for them
    values: Tensor | None = (
        # (B, T) fp32: the critic's before the update, zero off the mask; only where an algorithm has a critic
        None
    )
    value_targets: Tensor | None = None  # (B, T) fp32: what the critic is to learn, set with the advantages

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def select(self, rows: Sequence[int]) -> Batch:
        """The given rows, cut to their longest trajectory."""
        index = torch.as_tensor(list(rows), dtype=torch.int64, device=self.tokens.device)
        longest = int(self.lengths[index].max()) if len(index) else 0
        chosen = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if value is not None:
                value = value[index]
                chosen[f.name] = value[:, :longest] if value.ndim == 2 else value
        return replace(self, **chosen)

    def to(self, device: torch.device | str) -> Batch:
        present = {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}
        return replace(self, **{name: value.to(device) for name, value in present.items()})


@dataclass(frozen=True)
class PolicyOutput:
    """What one forward says of a batch of trajectories. Index t speaks of token t given tokens[:t]."""

    logprobs: Tensor  # (B, T) fp32, under the sampling distribution; zero off the action mask
    entropy: Tensor | None  # (B, T) fp32 nats, only where asked for
    values: Tensor | None = (
        None  # (B, T) fp32, the critic's V(tokens[:t]), zero off the action mask; only where asked for
    )


def collate(trajectories: Sequence[Trajectory], groups: Sequence[int], mask_cut: bool = False) -> Batch:
    """Trajectories to tensors, right-padded with token 0 (padding is told by ``lengths``, never by a token
    id).

    Args:
        trajectories: B of them; empty ones are refused.
        groups: B group numbers.
        mask_cut: leave the actions that a limit on tokens ended out of the action mask.
    """
    if not trajectories:
        raise ValueError("cannot collate an empty batch")
    lengths = [len(t.tokens) for t in trajectories]
    shape = (len(trajectories), max(lengths))
    tokens = torch.zeros(shape, dtype=torch.int64)
    action_mask = torch.zeros(shape, dtype=torch.bool)
    logprobs = torch.zeros(shape, dtype=torch.float32)
    rewards = torch.zeros(shape, dtype=torch.float32)
    for row, trajectory in enumerate(trajectories):
        tokens[row, : lengths[row]] = torch.tensor(trajectory.tokens)
        mask = trained_mask(trajectory, mask_cut)
        action_mask[row, : lengths[row]] = torch.tensor(mask)
        logprobs[row, : lengths[row]] = torch.tensor(trajectory.logprobs).masked_fill(
            ~torch.tensor(mask), 0.0
        )
        for place, reward in _places(trajectory, mask):
            rewards[row, place] += reward
    action_mask[:, 0] = False  # the first token has no predictor
    return Batch(
        tokens=tokens,
        lengths=torch.tensor(lengths),
        action_mask=action_mask,
        logprobs=logprobs,
        rewards=rewards,
        returns=torch.tensor([t.reward for t in trajectories], dtype=torch.float32),
        groups=torch.tensor(list(groups), dtype=torch.int64),
        advantages=torch.zeros(shape),
        weights=torch.zeros(shape),
    )


def trained_mask(trajectory: Trajectory, mask_cut: bool) -> tuple[bool, ...]:
    """(T,) the action mask, with or without cut actions.

    >>> from agent_peft.types import Task, Turn
    >>> trajectory = Trajectory(Task("t"), (Turn((1,), (2, 3), (-0.5, -0.5), cut=True), Turn((4,), (5,), (-0.5,))))
    >>> trained_mask(trajectory, mask_cut=True)
    (False, False, False, False, True)
    """
    if not mask_cut:
        return trajectory.action_mask
    turns = trajectory.turns
    return tuple(
        m for turn in turns for m in (*(False,) * len(turn.observation), *(not turn.cut,) * len(turn.action))
    )


def _places(trajectory: Trajectory, mask: Sequence[bool]) -> Iterator[tuple[int, float]]:
    """Where each turn's reward goes: to the last trained token sampled by its end; before any was, to the
    first that will be.
    """
    sampled = [t for t, mine in enumerate(mask) if mine and t > 0]
    end = 0
    for turn, reward in zip(trajectory.turns, trajectory.rewards, strict=bool(trajectory.rewards)):
        end += len(turn.observation) + len(turn.action)
        if sampled:
            yield sampled[max(bisect_left(sampled, end) - 1, 0)], reward
