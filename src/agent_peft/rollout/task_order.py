"""The order in which the steps of a stage go through the tasks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from agent_peft.files import MEGABYTE, parse_json, read_text
from agent_peft.lookup import alike
from agent_peft.seeding import generator
from agent_peft.types import AgentPeftError, Task

MAX_BYTES = 64 * MEGABYTE  # of a file of ids
MAX_ADVISED = 10_000  # ids among which a misspelled one is looked for


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


def tasks_in_order(tasks: Sequence[Task], path: Path) -> list[Task]:
    """The tasks whose ids a file lists, in its order: one id in a line, or a JSON list if it ends in .json.
    An id may stand in it several times, or not at all.

    Raises:
        AgentPeftError: the file cannot be read, is empty, or names a task that there is not.
    """
    places = _ids(path)
    wanted = {name for _, name in places}
    by_id = {task.id: task for task in tasks if task.id in wanted}
    for place, name in places:
        if name not in by_id:
            resembled = alike(name, (task.id for task in tasks)) if len(tasks) <= MAX_ADVISED else None
            advice = f"did you mean {resembled!r}?" if resembled else f"the first one is {tasks[0].id!r:.60}"
            raise AgentPeftError(f"{path}: {place}: there is no task {name!r:.60}; {advice}")
    return [by_id[name] for _, name in places]


def _ids(path: Path) -> list[tuple[str, str]]:
    """The ids in a file, each with its place."""
    text = read_text(path, "a file of task ids", MAX_BYTES)
    lines = enumerate(text.split("\n"), 1)  # an id may hold other line breaks
    ids = [(f"line {number}", line.strip()) for number, line in lines if line.strip()]
    if path.suffix == ".json":
        try:
            content = parse_json(text)
        except ValueError as error:
            raise AgentPeftError(f"{path}: is not JSON ({error}); give a list of task ids") from error
        if not isinstance(content, list) or not all(isinstance(name, str) for name in content):
            raise AgentPeftError(f"{path}: must be a list of task ids, which are texts")
        ids = [(f"item {number}", name) for number, name in enumerate(content)]
    if not ids:
        raise AgentPeftError(f"{path}: names no task; give the ids of tasks, one in a line")
    return ids
