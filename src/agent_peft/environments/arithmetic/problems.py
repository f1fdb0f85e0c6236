"""The problems, the held-out ones among them, and their order: all by index
arithmetic, so no list is ever made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, overload

from agent_peft.seeding import derive
from agent_peft.types import Task

Split = Literal["train", "heldout"]

HELDOUT = 5  # one problem in so many is held out
_ROUNDS = 6
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Permutation:
    """The numbers below ``size`` in an order that ``seed`` decides, each computed as it is asked for.

    A Feistel network on two numbers below ⌈√size⌉, walked until it lands below ``size`` (Black and Rogaway,
    2002, sections 3 and 4).

    >>> sorted(map(Permutation(5, seed=0), range(5)))
    [0, 1, 2, 3, 4]
    """

    size: int
    seed: int

    @cached_property
    def _keys(self) -> tuple[int, ...]:
        return tuple(derive(self.seed, "permutation", number) for number in range(_ROUNDS))

    @cached_property
    def _radix(self) -> int:
        return math.isqrt(self.size - 1) + 1

    def __call__(self, index: int) -> int:
        radix = self._radix
        while True:
            left, right = divmod(index, radix)
            for key in self._keys:
                # a finalizer as of splitmix64, with a key
                mixed = ((right ^ key) * 0x9E3779B97F4A7C15) & _MASK
                mixed = ((mixed ^ mixed >> 32) * 0xD6E8FEB86659FD93) & _MASK
                left, right = right, (left + (mixed ^ mixed >> 32)) % radix
            index = left * radix + right
            if index < self.size:
                return index


def count_problems(digits: int, split: Split) -> int:
    """The number of ordered pairs of ``digits``-digit operands in a split. A fifth of all is held out."""
    return _operands(digits) ** 2 // HELDOUT * (1 if split == "heldout" else HELDOUT - 1)


def operands_of(digits: int, split: Split, index: int) -> tuple[int, int]:
    """Problem ``index`` of a split, in a fixed order that is as good as random.

    Pairs of operands come in twos that are never parted: ``(a, b)`` with ``(b, a)``, one giving the other
    away, and ``(a, a)`` with another such pair. These twos are shuffled once and for all, and each fifth is
    held out, whatever the seed or the operation.
    """
    count = _operands(digits)
    two, second = divmod(index, 2)
    place = two * HELDOUT if split == "heldout" else two + two // (HELDOUT - 1) + 1
    difference, a = divmod(_TWOS[digits](place), count)
    half = count // 2  # the number of operands is even
    if difference:  # 1 … half - 1, around the circle of operands: the other way around it is more than half
        b = (a + difference) % count
    elif a >= half:
        b = a - half
    else:
        a = b = a + half * second
    low = 0 if digits == 1 else 10 ** (digits - 1)
    return (low + b, low + a) if second else (low + a, low + b)


def _operands(digits: int) -> int:
    return 10 if digits == 1 else 9 * 10 ** (digits - 1)


_TWOS = {
    digits: Permutation(_operands(digits) ** 2 // 2, derive(0, "arithmetic", "heldout", digits))
    for digits in range(1, 10)
}


@dataclass(frozen=True)
class Problems(Sequence[Task]):
    """The tasks of a split, in an order that ``seed`` decides; those of another length are the beginning of
    the same order.

    With operands of several lengths, these take turns; the short ones, of which there are few, run out first.
    """

    skill: str
    symbol: str
    digits: tuple[int, int]  # the shortest and the longest operands
    split: Split
    seed: int
    indices: range

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> Problems: ...
    def __getitem__(self, index: int | slice) -> Task | Problems:
        if isinstance(index, slice):
            return replace(self, indices=self.indices[index])
        digits, number = self._turn(self.indices[index])
        a, b = operands_of(digits, self.split, self._orders[digits](number))
        skill = self.skill if self.digits[0] == self.digits[1] else f"{self.skill}_{digits}_digits"
        return Task(id=f"{a}{self.symbol}{b}", skills=(skill,), content={"a": a, "b": b})

    def __len__(self) -> int:
        return len(self.indices)

    @cached_property
    def _orders(self) -> dict[int, Permutation]:
        low, high = self.digits
        return {
            length: Permutation(
                count_problems(length, self.split), derive(self.seed, "arithmetic", self.split, length)
            )
            for length in range(low, high + 1)
        }

    def _turn(self, index: int) -> tuple[int, int]:
        """The digits of task ``index``, and how many such tasks came before it."""
        (low, high), used = self.digits, 0
        for shortest in range(low, high):
            lengths = high + 1 - shortest
            rounds = count_problems(shortest, self.split) - used  # until the shortest run out
            if index < rounds * lengths:
                return shortest + index % lengths, used + index // lengths
            index -= rounds * lengths
            used += rounds
        return high, used + index
