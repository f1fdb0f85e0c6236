"""From rewards to advantages: how much better an episode went than expected. They are of trajectories (B,),
of tokens (B, T) with a critic, or of turns.

With credit by turn, each turn learns from its own reward and those of later turns, compared with siblings
whose episodes were the same until then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import Literal

from agent_peft.algorithms.base import SumOverRanks, one_rank
from agent_peft.batch import Batch, turn_starts
from agent_peft.lazy_torch import Tensor, torch
from agent_peft.types import AgentPeftError

Advantage = Callable[[Tensor, Tensor], Tensor]  # (returns, groups) -> advantages
AdvantageName = Literal[
    "plain_return", "leave_one_out", "group_centered", "group_normalized", "mean_normalized"
]


def plain_return(returns: Tensor, groups: Tensor) -> Tensor:
    """Â = R (Williams, 1992)."""
    return returns


def leave_one_out(returns: Tensor, groups: Tensor) -> Tensor:
    """Â_i = R_i - mean of the others' R in its group (RLOO: Ahmadian et al., 2024, section 3.3).

    >>> leave_one_out(torch.tensor([1.0, 0.0, 0.5]), torch.tensor([0, 0, 0])).tolist()
    [0.75, -0.75, 0.0]
    """
    deviation, _, count = _within_groups(returns, groups)
    return (deviation * count / (count - 1)).to(returns.dtype)  # R_i - (S - R_i)/(G-1) = (R_i - S/G) G/(G-1)


def group_centered(returns: Tensor, groups: Tensor) -> Tensor:
    """Â_i = R_i - mean of its group (Dr. GRPO: Liu et al., 2025, section 3.2)."""
    return _within_groups(returns, groups)[0].to(returns.dtype)


def group_normalized(returns: Tensor, groups: Tensor, epsilon: float = 1e-6) -> Tensor:
    """Â_i = (R_i - mean of its group) / (std of its group + epsilon) (GRPO: Shao et al., 2024, section
    4.1.2).

    The standard deviation is the unbiased one (G - 1), as in ``torch.std`` and other implementations. A group
    without variance gets 0.
    """
    deviation, variance, _ = _within_groups(returns, groups)
    return (deviation / (variance.sqrt() + epsilon)).to(returns.dtype)


def mean_normalized(returns: Tensor, groups: Tensor, epsilon: float = 1e-6) -> Tensor:
    """Â_i = (R_i - mean of its group) / (mean of its group + epsilon) (MaxRL: Tajwar et al., 2026).
    With rewards of 0 and 1, a task that succeeds one time in ten counts ten times as much as with
    ``group_centered``, as in the gradient of the logarithm of its success rate. A group without a success
    gets 0.
    """
    if (returns < 0).any():
        raise AgentPeftError(
            f"a return is {float(returns.min()):g}, and this algorithm divides by a group's mean return, as "
            "a rate of success: set rewards.incorrect: 0 and no price below 0"
        )
    deviation, _, _ = _within_groups(returns, groups)
    return (deviation / (returns.double() - deviation + epsilon)).to(returns.dtype)


def _within_groups(returns: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each return's deviation from its group's mean, its group's variance (G - 1) and its group's size; (B,)
    fp64 each.

    In fp64 the mean of equal fp32 returns is exact, so that a group without variance deviates by exactly 0
    and not by a rounding error, which a division by epsilon would blow up.
    """
    numbers, index = torch.unique(groups, return_inverse=True)
    returns = returns.double()

    def per_group(values: Tensor, divisor: Tensor) -> Tensor:
        return (returns.new_zeros(len(numbers)).index_add(0, index, values) / divisor)[index]

    count = torch.bincount(index, minlength=len(numbers)).double()
    if (count < 2).any():
        raise AgentPeftError(
            f"group {int(numbers[count < 2][0])} has one trajectory, and this algorithm compares those of a "
            "group with each other: collect groups of two or more, or train with kind: reinforce"
        )
    deviation = returns - per_group(returns, count)
    return deviation, per_group(deviation.square(), count - 1), count[index]


def generalized(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, gae_lambda: float) -> Tensor:
    """Â_t = Σ_l (γ λ)^l δ_{t+l} with δ_t = r_t + γ V(s_{t+1}) - V(s_t) (GAE: Schulman et al., 2016, equation
    16).

    The steps of the process are a trajectory's *sampled* tokens. Observations are skipped, so γ and λ count
    sampled tokens, and V(s_{t+1}) after a turn's last token is the value at the next turn's first. After the
    last token V is 0, also where the episode was cut off: the reward for that stop reason states what it is
    worth. λ = 1 gives the discounted rewards to come, minus the value.

    Args:
        rewards, values: (B, T); values[t] is V of tokens[:t]. Only entries under the mask are read.
        mask: (B, T) bool, the sampled tokens.

    Returns:
        (B, T), zero off the mask.

    >>> rewards, values = torch.tensor([[0.0, 0.0, 9.0, 1.0]]), torch.tensor([[0.0, 0.5, 9.0, 0.25]])
    >>> mask = torch.tensor([[False, True, False, True]])
    >>> generalized(rewards, values, mask, gamma=1.0, gae_lambda=0.5).tolist()
    [[0.0, 0.125, 0.0, 0.75]]
    """
    advantages = torch.zeros_like(values, dtype=torch.float64)
    next_value = advantages.new_zeros(len(values))  # V(s_{t+1})
    advantage = advantages.new_zeros(len(values))  # Â_{t+1}
    for t in reversed(mask.any(0).nonzero().flatten().tolist()):
        here, value = mask[:, t], values[:, t].double()
        delta = rewards[:, t].double() + gamma * next_value - value
        advantage = torch.where(here, delta + gamma * gae_lambda * advantage, advantage)
        next_value = torch.where(here, value, next_value)
        advantages[:, t] = advantage * here
    return advantages.to(values.dtype)


def standardized(
    advantages: Tensor, mask: Tensor, sum_over_ranks: SumOverRanks = one_rank, epsilon: float = 1e-8
) -> Tensor:
    """(Â - mean) / (std + epsilon) (B, T) over the sampled tokens of a step, of all ranks; 0 where all are
    equal.
    """
    mean, variance = moments(advantages, mask, sum_over_ranks)
    return ((advantages.double() - mean) / (variance.sqrt() + epsilon) * mask).to(advantages.dtype)


def moments(values: Tensor, mask: Tensor, sum_over_ranks: SumOverRanks = one_rank) -> tuple[Tensor, Tensor]:
    """Mean and variance (biased; fp64 scalars) of ``values`` (B, T) under ``mask``, over all ranks. Equal
    values have a variance of exactly 0.
    """
    masked = values[mask].double()
    count, total = sum_over_ranks(torch.stack([masked.new_tensor(len(masked)), masked.sum()]))
    mean = total / count.clamp(min=1)
    deviation = masked - mean
    return mean, sum_over_ranks(deviation.square().sum()) / count.clamp(min=1)


@dataclass
class MovingAverageBaseline:
    """Â = R - b, then b ← m b + (1 - m) mean(R). It has state: ``value`` belongs in the checkpoint.

    >>> baseline = MovingAverageBaseline(momentum=0.9)
    >>> baseline.subtract(torch.tensor([1.0, 0.0])).tolist(), round(baseline.value, 3)
    ([1.0, 0.0], 0.05)
    """

    momentum: float
    value: float = 0.0

    def subtract(self, returns: Tensor, sum_over_ranks: SumOverRanks = one_rank) -> Tensor:
        """``returns`` minus the baseline before they move it. The mean that moves it is over all ranks, so
        all of them have the same baseline.
        """
        advantages = returns - self.value
        total = sum_over_ranks(
            torch.stack([returns.double().sum(), returns.new_tensor(len(returns), dtype=torch.float64)])
        )
        if total[1]:  # a step may have no turn
            self.value = self.momentum * self.value + (1 - self.momentum) * float(total[0] / total[1])
        return advantages


@dataclass(frozen=True)
class Turns:
    """The U turns of a batch, those of a trajectory one after another. A turn without a sampled token is
    none.

    >>> from agent_peft.batch import collate
    >>> from agent_peft.types import Task, Trajectory, Turn
    >>> turns = Turn((1,), (2,), (-0.5,)), Turn((3,), (4, 5), (-0.5, -0.5))
    >>> batch = collate([Trajectory(Task("t"), turns, rewards=(1.0, 2.0))], groups=[0])
    >>> Turns.of(batch, discount=0.5).returns.tolist()
    [2.0, 2.0]
    """

    batch: Batch
    discount: float  # γ per turn
    rows: Tensor  # (U,) int64: their trajectories
    starts: Tensor  # (U,) int64: the positions of their first sampled tokens
    numbers: Tensor  # (B, T) int64: each sampled token's turn, from 0
    returns: Tensor  # (U,) fp32: Σ_l γ^l r_{k+l} of turn k

    @classmethod
    def of(cls, batch: Batch, discount: float) -> Turns:
        """The turns, with their returns under a ``discount`` γ per turn."""
        begins = turn_starts(batch.actions)
        rows, starts = begins.nonzero(as_tuple=True)
        numbers = (begins.flatten().cumsum(0) - 1).view(begins.shape)
        returns = torch.zeros(len(rows), dtype=torch.float64, device=begins.device)
        returns.index_add_(0, numbers[batch.action_mask], batch.rewards[batch.action_mask])
        for turn in range(len(rows) - 2, -1, -1):
            if rows[turn] == rows[turn + 1]:
                returns[turn] += discount * returns[turn + 1]
        return cls(batch, discount, rows, starts, numbers, returns.to(batch.returns.dtype))

    def compared(self, advantage: Advantage) -> Tensor:
        """(U,) advantages, each turn's among those of its siblings that begin with the same tokens.

        All first turns of a group are compared, also that of a trajectory without one, which has its return.
        A later turn that has no sibling left is compared with those of the turn at which it parted from the
        last one: its return, and the rewards since then, take the place of that turn's return. No advantage
        depends on what its turn does but through the turn's own return, so ``leave_one_out`` stays unbiased.
        """
        first = torch.ones_like(self.rows, dtype=torch.bool)
        first[1:] = self.rows[1:] != self.rows[:-1]
        histories = self._histories(first)
        shared = ~first & (torch.bincount(histories, minlength=1)[histories] > 1)
        # what is compared: of each trajectory the first turn, and then each shared turn
        at_first = self.batch.returns.index_put((self.rows[first],), self.returns[first])
        returns = torch.cat([at_first, self.returns[shared]])
        peers = torch.cat([self.batch.groups, -2 - histories[shared]])
        places = self.rows.clone()
        places[shared] = len(at_first) + torch.arange(int(shared.sum()), device=places.device)
        advantages = advantage(returns, peers)[places]
        own = 0.0
        for turn in (~(first | shared)).nonzero().flatten().tolist():
            if self.discount == 1:  # the rewards since that turn and this return are that turn's return
                advantages[turn] = advantages[turn - 1]
                continue
            if first[turn - 1] or shared[turn - 1]:
                own = float(self.returns[turn - 1])
            own += (1 - self.discount) * float(self.returns[turn])
            places[turn] = place = places[turn - 1]
            among = (peers == peers[place]).nonzero().flatten()
            replaced = torch.where(among == place, own, returns[among])
            advantages[turn] = advantage(replaced, peers[among])[among == place]
        return advantages

    def _histories(self, first: Tensor) -> Tensor:
        """(U,) a number for each turn, equal for those of one group with the same tokens before them."""
        tokens, groups = self.batch.tokens.cpu().numpy(), self.batch.groups.tolist()
        numbers: dict[tuple[int, bool, bytes], int] = {}
        histories, read, before = [], sha256(), 0
        turns = zip(self.rows.tolist(), self.starts.tolist(), first.tolist(), strict=True)
        for row, start, is_first in turns:
            if is_first:
                read, before = sha256(), 0
            read.update(tokens[row, before:start].tobytes())
            before = start
            histories.append(numbers.setdefault((groups[row], is_first, read.digest()), len(numbers)))
        return torch.tensor(histories, dtype=torch.int64, device=self.rows.device)

    def per_token(self, advantages: Tensor) -> Tensor:
        """(B, T) the advantages (U,) of the tokens' turns, 0 off the mask."""
        spread = torch.zeros_like(self.batch.advantages)
        spread[self.batch.action_mask] = advantages[self.numbers[self.batch.action_mask]]
        return spread
