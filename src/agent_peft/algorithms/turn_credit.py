"""Credit by turn: each turn learns from its own reward and those of later turns, compared with siblings
whose episodes were the same until then.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256

import torch
from torch import Tensor

from agent_peft.algorithms.advantages import Advantage
from agent_peft.batch import Batch, turn_starts


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
        begins = turn_starts(batch.action_mask)
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
