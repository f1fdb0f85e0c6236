"""The usable tasks of a configuration: from a file or a generator, by skill, replayed, up to a limit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import AfterValidator, Field, model_validator

from agent_peft.environments.base import Environment, EnvironmentConfig, Inspection
from agent_peft.environments.digests import shared_ids
from agent_peft.environments.task_files.split import Limit, Portion, Split, check_split_of_file
from agent_peft.lookup import nearest
from agent_peft.types import AgentPeftError, Task

logger = logging.getLogger(__name__)

NUM_SHOWN = 3  # rejections in a warning
SPLITS = "split: train[:90%] and split: train[90%:]"


class TaskSourceConfig(EnvironmentConfig):
    """The base of configurations whose tasks come from a file or a generator."""

    tasks: Path | None = Field(None, description="file of tasks; set this or generate")
    generate: Any = Field(None, description="tasks to generate; set this or tasks")
    skills: list[str] | None = Field(
        None, min_length=1, description="keeps the tasks whose primary skill is in this list; null keeps all"
    )
    split: Split = None
    limit: Limit = None

    @model_validator(mode="after")
    def _names_tasks(self) -> Self:
        if (self.tasks is None) == (self.generate is None):
            raise ValueError("set exactly one of tasks (a file) and generate")
        check_split_of_file(self.split, is_file=self.tasks is not None)
        return self


def skills_among(known: Sequence[str]) -> AfterValidator:
    """The check of a key, for ``Annotated[list[str] | None, skills_among(SKILLS)]``."""

    def check(skills: Sequence[str] | None) -> Sequence[str] | None:
        for skill in skills or ():
            if skill not in known:
                raise ValueError(f"{skill!r} is not a skill here; {nearest(skill, known)}")
        return skills

    return AfterValidator(check)


@dataclass(frozen=True)
class Rejection:
    """A task that cannot be used, and the cause.

    >>> Rejection("7", "the gold SQL fails: no such function: STDDEV").id
    '7'
    """

    id: str
    cause: str


def load_selected(
    config: TaskSourceConfig,
    read: Callable[[Path], Sequence[Task]],
    generate: Callable[..., Mapping[str, Any]],
    task_of: Callable[[str, Any], Task],
) -> Sequence[Task]:
    """The tasks of the part of the file, or of the generator, whose primary skill the configuration keeps."""
    if config.tasks is not None:
        tasks = part_of(read(config.tasks), config.split, config.tasks)
    else:
        tasks = [task_of(*item) for item in generate(**dict(config.generate or ())).items()]
    if config.skills is None:
        return tasks
    tasks = [task for task in tasks if task.skills and task.skills[0] in config.skills]
    if not tasks:
        skills = ", ".join(config.skills)
        raise AgentPeftError(f"{_source(config)}: no task has one of the skills {skills}; choose others")
    return tasks


def part_of(tasks: Sequence[Task], split: str | None, source: Path | str) -> Sequence[Task]:
    """The tasks that a split names, at least one. ``source`` is the file or hub id, for the message."""
    part = tasks if split is None else Portion.parse(split).of(tasks)
    if not part:
        raise AgentPeftError(
            f"{source}: split: {split} holds none of its {len(tasks)} tasks; give another part"
        )
    return part


def warn_of_shared_tasks(training: Environment, heldout: Environment, number: int | None = None) -> None:
    """Warn in one line that an evaluation of the first ``number`` tasks measures tasks of training."""
    if shared := shared_ids(training, heldout, number):
        logger.warning(
            "evaluation: %d of its %d tasks are tasks of training, too (first %.60s); give environment and "
            "evaluation.environment different tasks: %s, or another file, seed or split",
            len(shared),
            len(heldout.tasks[:number]),
            shared[0],
            SPLITS,
        )


def select_usable(
    config: TaskSourceConfig, tasks: Sequence[Task], causes: Iterable[str | None]
) -> tuple[tuple[Task, ...], tuple[Rejection, ...]]:
    """Return the first ``config.limit`` usable tasks, and the rejections before them. ``causes`` has, for
    each task, why it cannot be used, or None. No more of them are consumed than are needed.
    """
    usable: list[Task] = []
    rejected: list[Rejection] = []
    for task, cause in zip(tasks, causes, strict=False):
        if cause is not None:
            rejected.append(Rejection(task.id, cause))
            continue
        usable.append(task)
        if len(usable) == config.limit:
            break
    if not usable:
        first = rejected[0]
        raise AgentPeftError(f"{_source(config)}: no task can be used ({first.id}: {first.cause})")
    if rejected:
        causes_shown = [f"{rejection.id}: {rejection.cause}" for rejection in rejected[:NUM_SHOWN]]
        ellipsis = ["..."] * (len(rejected) > NUM_SHOWN)
        logger.warning(
            "%s: %d of %d tasks cannot be used (%s)",
            config.kind,
            len(rejected),
            len(tasks),
            "; ".join(causes_shown + ellipsis),
        )
    return tuple(usable), tuple(rejected)


def up_to_limit(
    config: TaskSourceConfig, inspections: Iterable[tuple[Task, Inspection]]
) -> Iterator[tuple[Task, Inspection]]:
    """The inspections up to the ``config.limit``-th usable task."""
    usable = 0
    for task, inspection in inspections:
        yield task, inspection
        usable += inspection.cause is None
        if usable == config.limit:
            return


def _source(config: TaskSourceConfig) -> str:
    return str(config.tasks) if config.tasks is not None else "generated tasks"
