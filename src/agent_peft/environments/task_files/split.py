"""The keys ``split`` and ``limit`` of every environment that reads a file or a hub id of tasks.

A split is written as in the ``datasets`` library: a name, and a slice of its rows in their order. A file has
one split, ``train``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

from pydantic import AfterValidator, Field

Row = TypeVar("Row")

FILE_SPLIT = "train"  # the name that the datasets library gives to the rows of a file
FORM = "write train[:90%], train[90%:], train[:100] or train[-100:]"

_SPLIT = re.compile(r"(\w+(?:[.-]\w+)*)(?:\[(-?\d+%?)?:(-?\d+%?)?\])?", re.ASCII)


@dataclass(frozen=True)
class Portion:
    """The rows that a split names. A bound is a row or a percentage of the rows, from the end if negative;
    empty is the first or the last row.

    >>> part, rest = Portion.parse("train[:75%]"), Portion.parse("train[75%:]")
    >>> part.of(["a", "b", "c"]), rest.of(["a", "b", "c"]), Portion.parse("train[-1:]").of(["a", "b"])
    (['a', 'b'], ['c'], ['b'])
    """

    name: str
    first: str
    last: str

    @classmethod
    def parse(cls, split: str) -> Portion:
        match = _SPLIT.fullmatch(split)
        if match is None:
            raise ValueError(f"{split!r:.60} is not a split; {FORM}")
        name, *bounds = match.groups(default="")
        if any(bound.endswith("%") and abs(int(bound[:-1])) > 100 for bound in bounds):
            raise ValueError(f"{split!r:.60} names more than 100%; {FORM}")
        return cls(name, *bounds)

    def of(self, rows: Sequence[Row]) -> Sequence[Row]:
        """The rows of this part, in their order."""
        return rows[_place(self.first or "0", len(rows)) : _place(self.last or "100%", len(rows))]


def _place(bound: str, rows: int) -> int:
    """The row of a bound, from 0 to ``rows``. Percentages are rounded as the datasets library does."""
    place = round(int(bound[:-1]) * rows / 100) if bound.endswith("%") else int(bound)
    return min(max(place + rows * (place < 0), 0), rows)


def _is_split(split: str | None) -> str | None:
    if split is not None:
        Portion.parse(split)
    return split


Split = Annotated[
    str | None,
    AfterValidator(_is_split),
    Field(
        description="part of the tasks, as the datasets library writes it: train[:90%] and train[90%:] share "
        "no task and leave none out; the only split of a file is train; null takes all tasks"
    ),
]
Limit = Annotated[
    int | None, Field(gt=0, description="maximum number of tasks, the first usable ones; null keeps all")
]


def check_split_of_file(split: str | None, is_file: bool = True) -> None:
    """Raise ValueError if a split has no effect on a file, or on generated tasks, which take none."""
    if split is None:
        return
    if not is_file:
        raise ValueError(
            "split is for a file of tasks; of generated ones generate.split names the part; leave it out"
        )
    if (name := Portion.parse(split).name) != FILE_SPLIT:
        raise ValueError(f"split: a file has no split {name!r}, its rows are called {FILE_SPLIT}; {FORM}")
