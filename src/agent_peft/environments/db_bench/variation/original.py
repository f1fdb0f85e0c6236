"""What a variation is made of: a task, and a table to put it in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

from sqlglot import exp

from agent_peft.environments.db_bench.database import Cell, Table
from agent_peft.environments.db_bench.tasks import SQLProblem
from agent_peft.environments.db_bench.variation.question import DATE

LARGE = 1e15  # from here on, floats are no whole numbers
FUNCTIONS: Mapping[type[exp.Expr], Callable[[list[Any]], float]] = {
    exp.Sum: sum,
    exp.Avg: fmean,
    exp.Max: max,
    exp.Min: min,
}


class Unfit(Exception):
    """This variation would not say in words what its statement does."""


@dataclass(frozen=True)
class Original:
    """A task to vary, or a table to put it in."""

    problem: SQLProblem
    tree: exp.Expr

    @property
    def table(self) -> Table:
        return self.problem.table

    @cached_property
    def kinds(self) -> dict[str, str]:
        """What each column holds."""
        return {name: _kind(name, self.values(name)) for name in self.table.headers}

    @cached_property
    def used(self) -> tuple[str, ...]:
        """The columns of the statement, in order."""
        names = dict.fromkeys(node.name for node in self.tree.find_all(exp.Identifier))
        return tuple(name for name in names if name in self.table.headers)

    def values(self, column: str) -> list[Any]:
        i = self.table.headers.index(column)
        return [row[i] for row in self.table.rows if row[i] is not None]


def _kind(name: str, values: Sequence[Cell]) -> str:
    if values and all(isinstance(value, int | float) and abs(value) < LARGE for value in values):
        if set(values) <= {0, 1}:
            return "flag"
        return "id" if name.lower().endswith("id") else "year" if "year" in name.lower() else "number"
    if not values or not all(isinstance(value, str) for value in values):
        return "other"
    if all(DATE.fullmatch(str(value)[:10]) for value in values):
        return "date"
    return "category" if repeats(values) else "name"


def repeats(values: Sequence[Cell]) -> bool:
    """Whether a column is one to group by."""
    return len(set(values)) <= 0.6 * len(values)
