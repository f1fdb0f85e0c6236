"""Environments whose tasks are the rows of a table (a file or a hub id). A subclass reads one row."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from agent_peft.environments.base import Environment, EnvironmentConfig
from agent_peft.environments.task_files.rows import (
    A_TABLE,
    TableSource,
    check_columns,
    check_split,
    read_table,
)
from agent_peft.environments.task_files.selection import part_of
from agent_peft.environments.task_files.split import Limit, Split
from agent_peft.types import AgentPeftError, Task


class TableConfig(EnvironmentConfig):
    tasks: TableSource = Field(description=f"{A_TABLE}, or a hub id such as owner/name")
    split: Split = None
    limit: Limit = None

    @model_validator(mode="after")
    def _split_fits(self) -> Self:
        check_split(self.tasks, self.split)
        return self

    @property
    def columns(self) -> Mapping[str, str]:
        """The columns that the table must have, by the keys that name them."""
        return {}


class TableEnvironment(Environment):
    """A row is a task. Its id is the name of the file or split, and the line: ``train:17``."""

    def __init__(self, config: TableConfig) -> None:
        self.config = config
        self._tasks = self.read(config.tasks, config.split)[: config.limit]

    @property
    def tasks(self) -> Sequence[Task]:
        return self._tasks

    def read(self, source: str | Path, split: str | None) -> Sequence[Task]:
        """The tasks of a split of a table; without a split, all of them."""
        name, rows = read_table(source, split)
        if not rows:
            raise AgentPeftError(f"{source}: holds no rows; give {A_TABLE}")
        check_columns(source, rows, self.config.columns)
        tasks: dict[str, Task] = {}
        places: dict[str, str] = {}
        for row in rows:
            place = f"{source}: {row.place}"
            task = self.task(f"{name}:{row.number}", row.content, place)
            if task.id in tasks:
                raise AgentPeftError(
                    f"{place}: the id {task.id!r:.50} is that of {places[task.id]}; give each row its own"
                )
            tasks[task.id], places[task.id] = task, row.place
        return part_of(tuple(tasks.values()), split, source)

    @abstractmethod
    def task(self, name: str, row: Mapping[str, Any], place: str) -> Task:
        """The task of a row. ``name`` is its default id; ``place`` (file and line) is for error messages."""
