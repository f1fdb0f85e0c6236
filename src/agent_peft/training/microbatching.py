"""How a minibatch is cut into microbatches, and what happens where one of them does not fit into the
memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from agent_peft.batch import Batch
from agent_peft.out_of_memory import is_out_of_memory
from agent_peft.types import AgentPeftError

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Microbatching:
    """The rows of each microbatch: of at most ``tokens`` positions, and of fewer once the memory was too
    small for that.

    Args:
        tokens: ``microbatch_tokens``, the budget to start with.
        count: how many positions a forward over some trajectories computes.
    """

    def __init__(self, tokens: int, count: Callable[[Sequence[Sequence[int]]], int]) -> None:
        self.tokens, self.count = tokens, count
        self.halvings = 0
        self._computed: tuple[int, int] = (
            0,
            0,
        )  # trajectories and positions of the microbatch that was cut last

    def cut(self, batch: Batch, live: torch.Tensor) -> Iterator[list[int]]:
        """Live rows: groups side by side until the token budget is full; one that alone exceeds it is cut."""
        chosen: list[int] = []
        cost = 0
        groups: dict[int, list[int]] = {}
        for row, group in enumerate(batch.groups.tolist()):
            if live[row]:
                groups.setdefault(group, []).append(row)
        for rows in groups.values():
            for piece, more in self._pieces(batch, rows):
                if chosen and cost + more > self.tokens:
                    self._computed = len(chosen), cost
                    yield chosen
                    chosen, cost = [], 0
                chosen, cost = chosen + piece, cost + more
        if chosen:
            self._computed = len(chosen), cost
            yield chosen

    def _pieces(self, batch: Batch, rows: list[int]) -> Iterator[tuple[list[int], int]]:
        cost = self.count([batch.tokens[row, : int(batch.lengths[row])].tolist() for row in rows])
        if len(rows) > 1 and cost > self.tokens:
            half = len(rows) // 2
            yield from self._pieces(batch, rows[:half])
            yield from self._pieces(batch, rows[half:])
        else:
            yield rows, cost

    def within_memory(self, work: Callable[[], T]) -> T:
        """What ``work`` gives, which cuts its batch here. Out of memory, it starts over, with half the budget
        from then on: so nothing counts twice, if it starts from nothing. Ranks need not do so alike, if
        ``work`` does not wait for them.

        Raises:
            AgentPeftError: a single trajectory does not fit.
        """
        while True:
            try:
                return work()
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                self._halve(error)
            # here the error is gone, and with it the tensors of the frames that it held; nothing without a
            # GPU
            torch.cuda.empty_cache()

    def _halve(self, error: Exception) -> None:
        trajectories, positions = self._computed
        if trajectories <= 1:
            raise AgentPeftError(
                f"out of memory: one trajectory of {positions} tokens does not fit; set policy.activation_checkpointing=true or "
                "policy.dtype=auto, or lower sampling.max_tokens, engine.rows or policy.lora.rank"
            ) from error
        self.halvings += 1
        self.tokens = max(1, min(self.tokens, positions) // 2)
        logger.warning(
            "out of memory in a microbatch of %d tokens: going on with microbatch_tokens=%d",
            positions,
            self.tokens,
        )
