"""Tensors of a batch of trajectories, and the function that makes them. All algorithms learn from these."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate, pairwise

from agent_peft.lazy_torch import Tensor, torch
from agent_peft.types import Group, Trajectory


@dataclass(frozen=True)
class Batch:
    """Right-padded trajectories. Index t of a (B, T) tensor is about token t given tokens[:t].

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
    action_mask: Tensor  # (B, T) bool: sampled by the policy, or to learn of a demonstration
    logprobs: Tensor  # (B, T) fp32: the sampler's, zero off the mask
    rewards: Tensor  # (B, T) fp64: each turn's on its last sampled token
    returns: Tensor  # (B,) fp32: sum of the rewards
    groups: Tensor  # (B,) int64: trajectories of one task share a number; -1 are measured, and not learned
    advantages: Tensor  # (B, T) fp32, zero until an algorithm sets them
    weights: Tensor  # (B, T) fp32, zero until an algorithm sets them
    reference_logprobs: Tensor | None = None  # (B, T) fp32, only where a penalty needs them
    # (B, T) fp32: of the policy that sampled, scored as the reference's are; only where a reward has a KL
    scored_logprobs: Tensor | None = None
    values: Tensor | None = (
        # (B, T) fp32: the critic's before the update, zero off the mask; only where an algorithm has a critic
        None
    )
    value_targets: Tensor | None = None  # (B, T) fp32: what the critic is to learn, set with the advantages
    labels: Tensor | None = (
        None  # (B,) int64: 1 is desirable, -1 is not, 0 has no label; None where all are 0
    )
    # (B, T) bool: the sampler set the token in a trained action (``Turn.forced``); None where it set none
    forced: Tensor | None = None
    # (B,) bool: it has something to learn from, where the advantages do not decide that: with a KL in the
    # reward (whether it would have one without the KL), and with a teacher
    signal: Tensor | None = None
    # (B, T) bool: where a trajectory's later rows begin (`Trajectory.rows`); None where each has one
    row_starts: Tensor | None = None

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @cached_property
    def sequences(self) -> list[list[int]]:
        """The real tokens of each row. Parts of a batch share these lists."""
        rows = zip(self.tokens.tolist(), self.lengths.tolist(), strict=True)
        return [tokens[:length] for tokens, length in rows]

    @property
    def actions(self) -> Tensor:
        """(B, T) bool: the action mask, with what was forced inside of an action: each run is a turn."""
        return self.action_mask if self.forced is None else self.action_mask | self.forced

    @cached_property
    def rows(self) -> Batch:
        """The batch with each row of a trajectory as a trajectory, which is what a model reads (R, L)."""
        if self.row_starts is None:
            return self
        starts, device = self.row_starts.nonzero().tolist(), self.tokens.device
        cuts = [[0, *(at for b, at in starts if b == row), n] for row, n in enumerate(self.lengths.tolist())]
        spans = [(row, end - start) for row, cut in enumerate(cuts) for start, end in pairwise(cut)]
        members, lengths = torch.tensor(spans, device=device).T
        real = torch.arange(int(lengths.max()), device=device) < lengths[:, None]

        def cut_apart(values: Tensor) -> Tensor:
            if values.ndim < 2:
                return values[members]
            return values.new_zeros(real.shape).masked_scatter(real, values[self._real])

        names = [f.name for f in fields(self) if f.name != "row_starts" and getattr(self, f.name) is not None]
        parts = {name: cut_apart(getattr(self, name)) for name in names}
        return replace(self, **{**parts, "lengths": lengths, "row_starts": None})

    def joined(self, values: Tensor) -> Tensor:
        """(B, T) the values of tokens, from those of ``rows`` (R, L); 0 at padding."""
        if self.row_starts is None:
            return values
        return values.new_zeros(self.tokens.shape).masked_scatter(self._real, values[self.rows._real])

    @property
    def _real(self) -> Tensor:
        return torch.arange(self.tokens.shape[1], device=self.lengths.device) < self.lengths[:, None]

    def rows_by_group(self) -> dict[int, list[int]]:
        """The rows of each group's trajectories, by the group's number."""
        rows: dict[int, list[int]] = {}
        for row, group in enumerate(self.groups.tolist()):
            rows.setdefault(group, []).append(row)
        return rows

    def select(self, rows: Sequence[int]) -> Batch:
        """The given rows, cut to their longest trajectory."""
        index = torch.as_tensor(list(rows), dtype=torch.int64, device=self.tokens.device)
        longest = int(self.lengths[index].max()) if len(index) else 0
        selected = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if value is not None:
                value = value[index]
                selected[f.name] = value[:, :longest] if value.ndim == 2 else value
        part = replace(self, **selected)
        part.__dict__["sequences"] = [self.sequences[row] for row in rows]
        return part

    def to(self, device: torch.device | str) -> Batch:
        present = {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}
        moved = replace(self, **{name: value.to(device) for name, value in present.items()})
        moved.__dict__["sequences"] = self.sequences
        return moved


@dataclass(frozen=True)
class PolicyOutput:
    """The result of one forward over a batch of trajectories. Index t is about token t given tokens[:t]."""

    logprobs: Tensor  # (B, T) fp32, under the sampling distribution; zero off the action mask
    entropy: Tensor | None  # (B, T) fp32 nats, only where asked for
    divergence: Tensor | None = None  # (B, T) fp32 nats, from a teacher's distribution; only where asked for
    values: Tensor | None = (
        None  # (B, T) fp32, the critic's V(tokens[:t]), zero off the action mask; only where asked for
    )
    greedy: Tensor | None = None  # (B, T) fp32, 1 where no token is likelier; only where asked for


def collate(trajectories: Sequence[Trajectory], groups: Sequence[int], mask_cut: bool = False) -> Batch:
    """Trajectories to tensors, right-padded with token 0. ``lengths`` marks the padding, never a token id.

    Args:
        trajectories: B of them. There may be none, on a rank that has no group of a step.
        groups: B group numbers.
        mask_cut: leave actions that a token limit ended out of the action mask.
    """
    lengths = [len(t.tokens) for t in trajectories]
    shape = (len(trajectories), max(lengths, default=0))
    tokens = torch.zeros(shape, dtype=torch.int64)
    action_mask = torch.zeros(shape, dtype=torch.bool)
    logprobs = torch.zeros(shape, dtype=torch.float32)
    forced = torch.zeros(shape, dtype=torch.bool)
    rewards = torch.zeros(shape, dtype=torch.float64)  # so that equal sums are equal, in whatever parts
    for row, trajectory in enumerate(trajectories):
        tokens[row, : lengths[row]] = torch.tensor(trajectory.tokens)
        mask = trained_mask(trajectory, mask_cut)
        action_mask[row, : lengths[row]] = torch.tensor(mask)
        if trajectory.num_thoughts_cut:
            forced[row, : lengths[row]] = torch.tensor(trained_mask(trajectory, mask_cut, forced=True))
        logprobs[row, : lengths[row]] = torch.tensor(trajectory.logprobs).masked_fill(
            ~torch.tensor(mask), 0.0
        )
        for position, reward in _reward_positions(trajectory, mask):
            rewards[row, position] += reward
    action_mask[:, :1] = False  # the first token has no predictor
    several = any(turn.new_row for trajectory in trajectories for turn in trajectory.turns[1:])
    return Batch(
        tokens=tokens,
        lengths=torch.tensor(lengths, dtype=torch.int64),
        action_mask=action_mask,
        logprobs=logprobs,
        rewards=rewards,
        returns=torch.tensor([t.reward for t in trajectories], dtype=torch.float32),
        groups=torch.tensor(list(groups), dtype=torch.int64),
        advantages=torch.zeros(shape),
        weights=torch.zeros(shape),
        forced=forced & ~action_mask if forced.any() else None,
        labels=torch.tensor(labels) if any(labels := [_label(t.desirable) for t in trajectories]) else None,
        row_starts=_row_starts(trajectories, shape) if several else None,
    )


def _row_starts(trajectories: Sequence[Trajectory], shape: tuple[int, int]) -> Tensor:
    starts = torch.zeros(shape, dtype=torch.bool)
    for row, trajectory in enumerate(trajectories):
        starts[row, list(accumulate(map(len, trajectory.rows)))[:-1]] = True
    return starts


def _label(desirable: bool | None) -> int:
    return 0 if desirable is None else 1 if desirable else -1


def collate_groups(groups: Mapping[int, Group], mask_cut: bool = False) -> Batch:
    """The trajectories of groups, by the groups' numbers, and then those that are only measured."""
    members = [(t, number) for number, group in groups.items() for t in group.trajectories]
    members += [(t, -1) for group in groups.values() for t in group.mismatched]
    return collate([t for t, _ in members], [number for _, number in members], mask_cut)


def trained_mask(trajectory: Trajectory, mask_cut: bool, forced: bool = False) -> tuple[bool, ...]:
    """(T,) the action mask without the mistakes of demonstrations, and with or without cut actions and
    ``forced`` tokens. Of the reply after a mistake it has only what that reply changes: to learn the rest
    would teach to copy mistakes.

    >>> from agent_peft.types import Task, Turn
    >>> turns = Turn((1,), (2, 3), (-0.5, -0.5), cut=True), Turn((4,), (5,), (-0.5,))
    >>> trained_mask(Trajectory(Task("t"), turns), mask_cut=True)
    (False, False, False, False, True)
    """
    mask: list[bool] = []
    mistake: tuple[int, ...] | None = None
    for turn in trajectory.turns:
        is_trained = not (turn.mistake or (mask_cut and turn.cut))
        positions = range(len(turn.action)) if mistake is None else _changed(mistake, turn.action)
        mask += (False,) * len(turn.observation)
        sampled = (True,) * len(turn.action) if forced else turn.sampled
        mask += (is_trained and drawn and place in positions for place, drawn in enumerate(sampled))
        mistake = turn.action if turn.mistake else None
    return tuple(mask)


def _changed(mistake: Sequence[int], repair: Sequence[int]) -> range:
    """The positions of a repair from its first change to the token after its last one. If the repair only
    leaves tokens out, the token after them is all that can be learned. It is one range, so that `turn_starts`
    counts one turn.

    >>> _changed((7, 1, 2, 8, 9), (7, 3, 8, 9)), _changed((7, 1, 8, 9), (7, 8, 9))
    (range(1, 3), range(1, 2))
    """
    length = min(len(mistake), len(repair))
    start = next((i for i in range(length) if mistake[i] != repair[i]), length)
    end = next((i for i in range(length - start) if mistake[-1 - i] != repair[-1 - i]), length - start)
    return range(min(start, len(repair) - 1), len(repair) - max(end - 1, 0))


def turn_starts(actions: Tensor) -> Tensor:
    """(B, T) bool: where each run of an action's tokens begins. Such a run is a turn, since a message of the
    environment is between two of them.

    >>> turn_starts(torch.tensor([[False, True, False, True, True]])).tolist()
    [[False, True, False, True, False]]
    """
    starts = actions & ~actions.roll(1, dims=1)
    starts[:, :1] = actions[:, :1]
    return starts


def _reward_positions(trajectory: Trajectory, mask: Sequence[bool]) -> Iterator[tuple[int, float]]:
    """The position of each turn's reward: the last trained token sampled up to the end of that turn or, if
    there is none yet, the first one sampled later.
    """
    sampled = [t for t, is_sampled in enumerate(mask) if is_sampled and t > 0]
    end = 0
    for turn, reward in zip(trajectory.turns, trajectory.rewards, strict=bool(trajectory.rewards)):
        end += len(turn.observation) + len(turn.action)
        if sampled:
            yield sampled[max(bisect_left(sampled, end) - 1, 0)], reward
