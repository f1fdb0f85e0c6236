"""Cuts a batch into microbatches, and into smaller ones where memory is short."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from agent_peft.batch import Batch
from agent_peft.hardware import is_out_of_memory
from agent_peft.types import AgentPeftError

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Microbatching:
    """Cuts a batch into microbatches of at most ``tokens`` positions, and of fewer once the memory was too
    small for that.

    Args:
        tokens: ``microbatch_tokens``, the budget to start with.
        count: sequences of tokens -> how many positions a forward over them computes.
        keeps_groups_whole: never split a group, because the loss compares its trajectories.
    """

    def __init__(
        self,
        tokens: int,
        count: Callable[[Sequence[Sequence[int]]], int],
        keeps_groups_whole: bool = False,
    ) -> None:
        self.tokens, self.count, self.keeps_groups_whole = tokens, count, keeps_groups_whole
        self.halvings = 0
        self._last = (0, 0)  # of the last microbatch: parts that could be cut apart, and positions

    def cut(self, batch: Batch, live: torch.Tensor) -> Iterator[list[int]]:
        """The rows of each microbatch: groups side by side until the token budget is full. A group that alone
        exceeds it is split, unless groups are kept whole.

        Args:
            live: (B,) bool, rows that need a forward. A group that is kept whole needs one if any row does.
        """
        rows, cost, parts = list[int](), 0, 0
        for piece, more in self._pieces(batch, live):
            if rows and cost + more > self.tokens:
                self._last = parts, cost
                yield rows
                rows, cost, parts = [], 0, 0
            parts += 1 if self.keeps_groups_whole else len(piece)
            rows, cost = rows + piece, cost + more
        if rows:
            self._last = parts, cost
            yield rows

    def _pieces(self, batch: Batch, live: torch.Tensor) -> Iterator[tuple[list[int], int]]:
        """Rows that go into one microbatch, and their positions."""
        for rows in batch.rows_by_group().values():
            if self.keeps_groups_whole and live[rows].any():
                yield rows, self._cost(batch, rows)
            elif not self.keeps_groups_whole and (rows := [row for row in rows if live[row]]):
                yield from self._split(batch, rows)

    def _split(self, batch: Batch, rows: list[int]) -> Iterator[tuple[list[int], int]]:
        cost = self._cost(batch, rows)
        if len(rows) > 1 and cost > self.tokens:
            half = len(rows) // 2
            yield from self._split(batch, rows[:half])
            yield from self._split(batch, rows[half:])
        else:
            yield rows, cost

    def _cost(self, batch: Batch, rows: list[int]) -> int:
        if batch.row_starts is not None:
            return self.count(batch.select(rows).rows.sequences)
        return self.count([batch.sequences[row] for row in rows])

    def within_memory(self, work: Callable[[], T]) -> T:
        """The result of ``work``, which cuts its batch with ``cut``. If it runs out of memory, it runs again
        from the start with half the token budget, which stays halved.

        ``work`` must reset its own state. It must not contain collectives, because ranks retry independently.
        """
        while True:
            try:
                return work()
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                self._halve(error)
            # the error is gone by now, and with it the tensors of the frames that it held
            torch.cuda.empty_cache()  # does nothing without a GPU

    def _halve(self, error: Exception) -> None:
        parts, positions = self._last
        if parts <= 1:
            raise AgentPeftError(
                f"out of memory: one {'group' if self.keeps_groups_whole else 'trajectory'} of {positions} "
                "tokens does not fit; set policy.activation_checkpointing=true or policy.dtype=auto, or "
                "lower sampling.max_tokens, engine.rows or policy.lora.rank"
            ) from error
        self.halvings += 1
        self.tokens = max(1, min(self.tokens, positions) // 2)
        logger.warning(
            "out of memory in a microbatch of %d tokens: continuing with microbatch_tokens=%d",
            positions,
            self.tokens,
        )
