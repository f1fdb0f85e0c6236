"""The order in which the steps of a stage go through the tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, get_args

from pydantic import Discriminator, Field, Tag

from agent_peft.config import Config
from agent_peft.files import MEGABYTE, parse_json, read_text
from agent_peft.lookup import alike, nearest
from agent_peft.seeding import derive, generator
from agent_peft.types import AgentPeftError, Task

MAX_BYTES = 64 * MEGABYTE  # of a file of ids
MAX_ADVISED = 10_000  # ids among which a misspelled one is looked for
OrderName = Literal["shuffle", "sequential"]
ORDER_NAMES = get_args(OrderName)  # any other text is a file


class BySkillConfig(Config):
    """One skill after another, in segments of equal length. A task counts by its first skill; tasks without
    one are left out. A segment shuffles its tasks, and a longer one takes them again in another order.
    """

    kind: Literal["by_skill"] = "by_skill"
    steps: int = Field(ge=1, description="steps of the segment of each skill")
    skills: tuple[str, ...] | None = Field(
        default=None,
        min_length=1,
        description="the skills in their order, where one may come again; null takes all, in the order in "
        "which the tasks first show them",
    )

    def settled(self, tasks: Sequence[Task]) -> BySkillConfig:
        """The same order with its skills named."""
        known = list(dict.fromkeys(task.skills[0] for task in tasks if task.skills))
        if not known:
            raise AgentPeftError("task_order: by_skill needs tasks with skills, and these have none")
        for skill in self.skills or ():
            if skill not in known:
                raise AgentPeftError(
                    f"task_order.skills: {skill!r:.60} is the first skill of no task; {nearest(skill, known)}"
                )
        return self.model_copy(update={"skills": self.skills or tuple(known)})


def _tag(value: Any) -> str:
    if isinstance(value, str | Path):
        return "name" if value in ORDER_NAMES else "file"
    return "by_skill" if isinstance(value, Config | Mapping) else "file"


AnyOrder = Annotated[
    Annotated[OrderName, Tag("name")]
    | Annotated[BySkillConfig, Tag("by_skill")]
    | Annotated[Path, Tag("file")],
    Discriminator(_tag),
]


class Order(Protocol):
    """Decides which tasks a step takes."""

    def at(self, step: int) -> list[Task]: ...

    def pool(self, step: int) -> Sequence[Task]:
        """The tasks of which some may take the place of the step's own."""
        ...


class TaskOrder:
    """The tasks of each step: one pass after another over all tasks.

    Args:
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
        return [self.task(position) for position in range(step * self.per_step, (step + 1) * self.per_step)]

    def pool(self, step: int) -> Sequence[Task]:
        """All tasks; those of this step and the next one where the order is not shuffled."""
        return self.tasks if self.shuffled else [*self.at(step), *self.at(step + 1)]

    def task(self, position: int) -> Task:
        """The task at a position, counted from the first pass on."""
        number, index = divmod(position, len(self.tasks))
        return self.tasks[self._order(number)[index]]

    def _order(self, number: int) -> Sequence[int]:
        if not self.shuffled:
            return range(len(self.tasks))
        if self._pass is None or self._pass[0] != number:
            order = list(range(len(self.tasks)))
            generator(self.seed, "tasks", number).shuffle(order)
            self._pass = (number, order)
        return self._pass[1]


class SkillOrder:
    """Segments of ``steps`` steps, each with the tasks of one skill. The last one is followed by the first.

    >>> tasks = [Task("i", ("insert",)), Task("u", ("update",)), Task("v", ("update",))]
    >>> order = SkillOrder(tasks, 1, seed=0, skills=("update", "insert"), steps=2)
    >>> [order.at(step)[0].skills[0] for step in range(5)]
    ['update', 'update', 'insert', 'insert', 'update']
    """

    def __init__(
        self, tasks: Sequence[Task], per_step: int, seed: int, skills: Sequence[str], steps: int
    ) -> None:
        of_skill: dict[str, list[Task]] = {skill: [] for skill in skills}
        for task in tasks:
            if task.skills and task.skills[0] in of_skill:
                of_skill[task.skills[0]].append(task)
        self.skills, self.steps = tuple(skills), steps
        self._orders = {
            skill: TaskOrder(of, per_step, derive(seed, "skill", skill)) for skill, of in of_skill.items()
        }

    def at(self, step: int) -> list[Task]:
        """The tasks of a step, a pure function of seed and step. A skill that comes again continues with the
        tasks that it has not taken yet.
        """
        order, inside = self._inside(step)
        return order.at(inside)

    def pool(self, step: int) -> Sequence[Task]:
        """All tasks of the step's skill."""
        order, inside = self._inside(step)
        return order.pool(inside)

    def _inside(self, step: int) -> tuple[TaskOrder, int]:
        """The order of the step's skill, and the step's number in it."""
        segment, inside = divmod(step, self.steps)
        trip, place = divmod(segment, len(self.skills))
        skill = self.skills[place]
        earlier = trip * self.skills.count(skill) + self.skills[:place].count(skill)
        return self._orders[skill], earlier * self.steps + inside


def length_of_trip(order: AnyOrder, tasks: Sequence[Task], per_step: int) -> int:
    """How many tasks one trip takes."""
    if isinstance(order, BySkillConfig):
        return len(order.settled(tasks).skills or ()) * order.steps * per_step
    return len(tasks_in_order(tasks, order)) if isinstance(order, Path) else len(tasks)


def order_of(order: AnyOrder, tasks: Sequence[Task], per_step: int, seed: int) -> Order:
    """The order that a stage's ``task_order`` describes."""
    if isinstance(order, BySkillConfig):
        return SkillOrder(tasks, per_step, seed, order.settled(tasks).skills or (), order.steps)
    if isinstance(order, Path):
        tasks = tasks_in_order(tasks, order)
    return TaskOrder(tasks, per_step, seed, shuffled=order == "shuffle")


def tasks_in_order(tasks: Sequence[Task], path: Path) -> list[Task]:
    """The tasks whose ids a file lists, in its order: one id in a line, or a JSON list if it ends in .json.
    An id may stand in it several times, or not at all.
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
