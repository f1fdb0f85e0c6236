"""The order in which the steps of a stage go through the tasks."""

from __future__ import annotations

from collections.abc import Sequence

from agent_peft.seeding import generator
from agent_peft.types import Task


class TaskOrder:
    """The tasks of each step: one pass after another over all tasks.

    Args:
        tasks: all tasks, of which there may be millions.
        per_step: how many tasks a step takes.
        seed: with ``shuffled``, decides the order, which is another one in each pass.

    >>> order = TaskOrder([Task("a"), Task("b"), Task("c")], per_step=2, seed=0, shuffled=False)
    >>> [[task.id for task in order.at(step)] for step in range(3)]
    [['a', 'b'], ['c', 'a'], ['b', 'c']]
    """

    def __init__(self, tasks: Sequence[Task], per_step: int, seed: int, shuffled: bool = True) -> None:
        self.tasks, self.per_step, self.seed, self.shuffled = tasks, per_step, seed, shuffled
        # the order of the last pass is kept: to shuffle many tasks costs more than a step
        self._pass: tuple[int, Sequence[int]] | None = None

    def at(self, step: int) -> list[Task]:
        """The tasks of a step, a pure function of seed and step."""
        tasks = []
        for position in range(step * self.per_step, (step + 1) * self.per_step):
            number, index = divmod(position, len(self.tasks))
            tasks.append(self.tasks[self._order(number)[index]])
        return tasks

    def _order(self, number: int) -> Sequence[int]:
        if not self.shuffled:
            return range(len(self.tasks))
        if self._pass is None or self._pass[0] != number:
            order = list(range(len(self.tasks)))
            generator(self.seed, "tasks", number).shuffle(order)
            self._pass = (number, order)
        return self._pass[1]
