"""DB Bench: questions about a table, and changes to it, in SQL."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial

from agent_peft.environments.base import Environment, Inspection, TaskFiles
from agent_peft.environments.db_bench.config import DBBenchConfig, GenerateConfig
from agent_peft.environments.db_bench.episode import DBBenchEpisode, demonstrate
from agent_peft.environments.db_bench.fork_server import end_idle
from agent_peft.environments.db_bench.generator import generate
from agent_peft.environments.db_bench.inspection import inspect
from agent_peft.environments.db_bench.tasks import SQLProblem, load_tasks, read_entry, task_of
from agent_peft.environments.task_files.download import HubSet, download
from agent_peft.environments.task_files.selection import load_selected, select_usable
from agent_peft.types import Task

logger = logging.getLogger(__name__)

HUB_SET = HubSet(
    "csyq/LifelongAgentBench",
    {"entry_dict.json": "db_bench/*"},
    structured=frozenset(
        {"answer_info", "direct", "table_info", "column_info_list", "row_list", "skill_list"}
    ),
)


def _load(config: DBBenchConfig) -> Sequence[Task]:
    return load_selected(config, load_tasks, generate, task_of)


def _inspect(config: DBBenchConfig) -> Iterator[tuple[str, Inspection]]:
    for task in _load(config):
        yield task.id, inspect(read_entry(task.id, task.content), config)


class DBBench(Environment):
    """The environment. Every task is replayed when it is loaded; those that cannot be used are in
    ``rejected``.
    """

    config_class = DBBenchConfig
    task_files = TaskFiles(generate, GenerateConfig, _inspect, partial(download, HUB_SET))

    def __init__(self, config: DBBenchConfig) -> None:
        """Load and replay the tasks.

        Raises:
            AgentPeftError: the file is wrong, or no task can be used.
        """
        self.config: DBBenchConfig = config
        tasks = _load(config)
        self._problems: dict[str, tuple[Task, SQLProblem]] = {}
        self._tasks, self.rejected = select_usable(config, tasks, self._causes(tasks))
        problems = [self._problems[task.id][1] for task in self._tasks]
        results = [problem.direct for problem in problems if problem.direct is not None]
        if long := sum(len(repr(list(direct))) > config.max_observation_chars for direct in results):
            logger.warning(
                "db_bench: the result of %d tasks is longer than max_observation_chars = %d, so the agent "
                "cannot read it in one turn",
                long,
                config.max_observation_chars,
            )

    @property
    def tasks(self) -> Sequence[Task]:
        return self._tasks

    def episode(self, task: Task, seed: int) -> DBBenchEpisode:
        return DBBenchEpisode(self._problem(task), self.config, seed)

    def demonstration(self, task: Task) -> Sequence[str] | None:
        return demonstrate(self._problem(task), self.config)

    def close(self) -> None:
        """End the processes that wait for episodes. Running episodes continue."""
        end_idle()

    def _causes(self, tasks: Sequence[Task]) -> Iterator[str | None]:
        for task in tasks:
            problem = read_entry(task.id, task.content)
            self._problems[task.id] = task, problem
            yield inspect(problem, self.config).cause

    def _problem(self, task: Task) -> SQLProblem:
        known, problem = self._problems.get(task.id, (None, None))
        if known is not None and problem is not None and (known is task or known.content == task.content):
            return problem
        return read_entry(task.id, task.content)
