"""DB Bench: questions about a table, and changes to it, in SQL."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from agent_peft.environments.base import Environment, EnvironmentConfig
from agent_peft.environments.db_bench.episode import DBBenchEpisode, Rules, demonstrate
from agent_peft.environments.db_bench.fork_server import end_idle
from agent_peft.environments.db_bench.generator import GENERATED_SKILLS, generate
from agent_peft.environments.db_bench.inspection import inspect
from agent_peft.environments.db_bench.syntax import SKILLS
from agent_peft.environments.db_bench.tasks import Problem, load_tasks, read_entry, task_of
from agent_peft.environments.task_files.reading import check_skills
from agent_peft.environments.task_files.replay import Rejection
from agent_peft.types import AgentPeftError, Task

logger = logging.getLogger(__name__)


class GenerateConfig(EnvironmentConfig):
    """Which tasks to make up; ``train`` and ``heldout`` share no table name and no phrasing."""

    num_tasks: int = Field(gt=0, description="how many")
    seed: int = Field(0, description="another seed gives other tasks")
    skills: tuple[str, ...] = Field(GENERATED_SKILLS, min_length=1, description="they take turns")
    split: Literal["train", "heldout"] = Field("train", description="which share no name and no phrasing")

    @field_validator("skills")
    @classmethod
    def _skills_are_known(cls, skills: tuple[str, ...]) -> tuple[str, ...]:
        check_skills(skills, GENERATED_SKILLS)
        return skills


class DBBenchConfig(EnvironmentConfig):
    """The tasks (of a file in LifelongAgentBench's format, or generated) and the bounds of an episode.

    ``skills`` keeps the tasks whose primary skill (`syntax.primary_skill`) is named; ``limit`` keeps the
    first usable ones.
    """

    kind: Literal["db_bench"] = "db_bench"
    tasks: Path | None = Field(None, description="a file of tasks; this or generate")
    generate: GenerateConfig | None = Field(None, description="tasks to make up; this or tasks")
    database: Literal["sqlite"] = Field("sqlite", description="what runs the SQL")
    skills: list[str] | None = Field(
        None, min_length=1, description="keeps the tasks whose primary skill is named; null: all"
    )
    limit: int | None = Field(None, gt=0, description="keeps the first so many that can be used; null: all")
    max_turns: int = Field(3, ge=2, description="replies, the answer included; the agent is told")
    max_observation_chars: int = Field(
        400, ge=40, description="of a statement's result; what is longer is cut"
    )
    statement_seconds: float = Field(2.0, gt=0, description="of one statement")
    statement_steps: int = Field(
        20_000_000, gt=0, description="of SQLite's machine, of one statement: the same on every machine"
    )
    episode_seconds: float | None = Field(
        None,
        gt=0,
        description="seconds that all statements of an episode may take together, then it ends as a timeout; null: no clock",
    )

    @field_validator("skills")
    @classmethod
    def _skills_are_known(cls, skills: list[str] | None) -> list[str] | None:
        check_skills(skills, SKILLS)
        return skills

    @model_validator(mode="after")
    def _one_source(self) -> DBBenchConfig:
        if (self.tasks is None) == (self.generate is None):
            raise ValueError("set exactly one of tasks (a file) and generate")
        return self

    @property
    def rules(self) -> Rules:
        return Rules(
            self.database,
            self.max_turns,
            self.max_observation_chars,
            self.statement_seconds,
            self.statement_steps,
            self.episode_seconds,
        )


class DBBench(Environment):
    """The environment. Every task is replayed when it is loaded; those that cannot be used are in
    ``rejected``.
    """

    def __init__(self, config: DBBenchConfig) -> None:
        """Load and replay the tasks.

        Raises:
            AgentPeftError: the file is wrong, or no task can be used.
        """
        self.config = config
        self._rules = config.rules
        self._problems: dict[str, tuple[Task, Problem]] = {}
        rejected = []
        found = _load(config)
        for task in found:
            if len(self._problems) == config.limit:
                break
            problem = read_entry(task.id, task.content)
            cause = inspect(problem, self._rules).cause
            if cause is None:
                self._problems[task.id] = (task, problem)
            else:
                rejected.append(Rejection(task.id, cause))
        self.rejected: Sequence[Rejection] = tuple(rejected)
        self._tasks = tuple(task for task, _ in self._problems.values())
        results = [problem.direct for _, problem in self._problems.values() if problem.direct is not None]
        if long := sum(len(repr(list(direct))) > config.max_observation_chars for direct in results):
            logger.warning(
                "db_bench: the result of %d tasks is longer than max_observation_chars = %d, so the agent cannot read it in one turn",
                long,
                config.max_observation_chars,
            )
        if rejected:
            shown = "; ".join(f"{rejection.id}: {rejection.cause}" for rejection in rejected[:3]) + (
                "; ..." if len(rejected) > 3 else ""
            )
            logger.warning(
                "db_bench: %d of %d tasks cannot be used on %s (%s)",
                len(rejected),
                len(found),
                config.database,
                shown,
            )
        if not self._tasks:
            raise AgentPeftError(
                f"{_source(config)}: no task can be used on {config.database} ({rejected[0].id}: {rejected[0].cause})"
            )

    @property
    def tasks(self) -> Sequence[Task]:
        return self._tasks

    def episode(self, task: Task, seed: int) -> DBBenchEpisode:
        return DBBenchEpisode(self._problem(task), self._rules, seed)

    def demonstration(self, task: Task) -> Sequence[str] | None:
        return demonstrate(self._problem(task), self._rules)

    def close(self) -> None:
        """End the processes that wait for episodes. The episodes that are running go on."""
        end_idle()

    def _problem(self, task: Task) -> Problem:
        known, problem = self._problems.get(task.id, (None, None))
        if known is not None and problem is not None and (known is task or known.content == task.content):
            return problem
        return read_entry(task.id, task.content)


def _source(config: DBBenchConfig) -> str:
    return str(config.tasks) if config.tasks is not None else "generated tasks"


def _load(config: DBBenchConfig) -> Sequence[Task]:
    if config.tasks is not None:
        tasks: Sequence[Task] = load_tasks(config.tasks)
    else:
        assert config.generate is not None  # the config was validated
        wanted = config.generate
        entries: Mapping[str, Any] = generate(wanted.num_tasks, wanted.seed, wanted.skills, wanted.split)
        tasks = [task_of(name, entry) for name, entry in entries.items()]
    if config.skills is not None:
        tasks = [task for task in tasks if task.skills and task.skills[0] in config.skills]
        if not tasks:
            raise AgentPeftError(
                f"{_source(config)}: no task has one of the skills {', '.join(config.skills)}; choose others"
            )
    return tasks
