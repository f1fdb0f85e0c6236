"""DB Bench: questions about a table, and changes to it, in SQL."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import repeat

from agent_peft.environments.base import Environment, Inspection, TaskFiles
from agent_peft.environments.db_bench.config import DBBenchConfig, GenerateConfig
from agent_peft.environments.db_bench.episode import DBBenchEpisode, replies_of, run_gold
from agent_peft.environments.db_bench.generator import generate
from agent_peft.environments.db_bench.inspection import answer_of, inspect
from agent_peft.environments.db_bench.isolated import end_idle
from agent_peft.environments.db_bench.protocol import PROTOCOLS
from agent_peft.environments.db_bench.servers import accounts
from agent_peft.environments.db_bench.tasks import (
    SQLProblem,
    generated_task,
    is_agentbench,
    load_tasks,
    read_entry,
)
from agent_peft.environments.db_bench.variations import variations
from agent_peft.environments.task_files.download import HubSet, download
from agent_peft.environments.task_files.selection import load_selected, select_usable, up_to_limit
from agent_peft.types import AgentPeftError, Task

logger = logging.getLogger(__name__)

HUB_SET = HubSet(
    "csyq/LifelongAgentBench",
    {"entry_dict.json": "db_bench/*"},
    structured=frozenset(
        {"answer_info", "direct", "table_info", "column_info_list", "row_list", "skill_list"}
    ),
)


def _load(config: DBBenchConfig) -> Sequence[Task]:
    return load_selected(config, load_tasks, generate, generated_task)


def _inspect(config: DBBenchConfig) -> Iterator[tuple[str, Inspection]]:
    def inspections(tasks: Sequence[Task]) -> Iterator[tuple[Task, Inspection]]:
        return ((task, inspect(read_entry(task.id, task.content), config)) for task in tasks)

    usable: list[Task] = []
    for task, inspection in up_to_limit(config, inspections(_load(config))):
        yield task.id, inspection
        if inspection.cause is None:
            usable.append(task)
    for task, inspection in inspections(_variations(usable, config)):
        yield task.id, inspection


def _variations(tasks: Sequence[Task], config: DBBenchConfig) -> tuple[Task, ...]:
    return variations(tasks, config.variations, partial(answer_of, config=config))


class DBBench(Environment):
    """The environment. The tasks of a file are replayed when they are loaded; those that cannot be used are
    in ``rejected``.

    Generated tasks were tried on SQLite when they were made. There, each is replayed when it is first used,
    so that a run need not wait for tasks that it never reaches.
    """

    config_class = DBBenchConfig
    task_files = TaskFiles(generate, GenerateConfig, _inspect, partial(download, HUB_SET))

    def __init__(self, config: DBBenchConfig) -> None:
        self.config: DBBenchConfig = config
        self._lock = threading.Lock()
        self._problems: dict[str, SQLProblem] = {}  # of the tasks that were replayed
        tasks = _load(config)
        known_good = config.generate is not None and config.database == "sqlite"
        causes = repeat(None) if known_good else self._causes(tasks)
        self._tasks, self.rejected = select_usable(config, tasks, causes)
        made = _variations(self._tasks, config)  # each was replayed when it was made
        self._problems.update((task.id, read_entry(task.id, task.content)) for task in made)
        self._tasks += made
        self._by_id = {task.id: task for task in self._tasks}
        self._problem(self._tasks[0])  # limits under which none can be solved are an error at once
        results = [(task.content.get("answer_info") or {}).get("direct") or () for task in self._tasks]
        if long := sum(len(repr([*map(tuple, rows)])) > config.max_observation_chars for rows in results):
            logger.warning(
                "db_bench: the result of %d tasks is longer than max_observation_chars = %d, so the agent "
                "cannot read it in one turn",
                long,
                config.max_observation_chars,
            )
        answers = [task for task in self._tasks if is_agentbench(task.content)]
        if silent := [task.id for task in answers if self.demonstration(task) is None]:
            logger.warning(
                "db_bench: %d of AgentBench's questions have no demonstration, since their SQL does not give "
                "their answer (%s)",
                len(silent),
                ", ".join(silent),
            )

    @property
    def tasks(self) -> Sequence[Task]:
        return self._tasks

    def episode(self, task: Task, seed: int) -> DBBenchEpisode:
        return DBBenchEpisode(self._problem(task), self.config, seed)

    def demonstration(self, task: Task) -> Sequence[str] | None:
        """The gold SQL, and an answer with its rows."""
        problem = self._problem(task)
        executed, _ = run_gold(problem, self.config)
        return replies_of(problem, executed, PROTOCOLS[self.config.protocol])

    def reference(self, task: Task) -> str:
        """The gold SQL, and its answer."""
        problem = self._problem(task)
        answer = problem.labels or problem.direct
        return problem.sql if answer is None else f"{problem.sql}\n{list(answer)}".strip()

    def close(self) -> None:
        """End the processes and connections that wait for episodes. Running episodes continue."""
        end_idle()
        accounts.close_idle()

    def _causes(self, tasks: Sequence[Task]) -> Iterator[str | None]:
        for task in tasks:
            problem = self._problems[task.id] = read_entry(task.id, task.content)
            yield inspect(problem, self.config).cause

    def _problem(self, task: Task) -> SQLProblem:
        """The content of a task, which is replayed if it is ours and was not before."""
        known = self._by_id.get(task.id)
        if known is None or not (known is task or known.content == task.content):
            return read_entry(task.id, task.content)
        with self._lock:
            if task.id not in self._problems:
                problem = read_entry(task.id, task.content)
                if (cause := inspect(problem, self.config).cause) is not None:
                    raise AgentPeftError(
                        f"task {task.id}: the generated task cannot be used ({cause}); change the limits of "
                        "the environment, or write the tasks to a file with agent-peft generate, and set "
                        "tasks to it, which leaves out those that cannot be used"
                    )
                self._problems[task.id] = problem
            return self._problems[task.id]
