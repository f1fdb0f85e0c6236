"""OS interaction: an agent that types commands into a real shell, on its own machine."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial

from agent_peft.environments.base import Environment, Inspection, TaskFiles
from agent_peft.environments.os_interaction.config import OSGenerateConfig, OSInteractionConfig
from agent_peft.environments.os_interaction.episode import OSEpisode, demonstrate
from agent_peft.environments.os_interaction.generator import generate
from agent_peft.environments.os_interaction.inspection import inspect_all
from agent_peft.environments.os_interaction.problems import Matches
from agent_peft.environments.os_interaction.tasks import load_tasks, read_problem, task_of
from agent_peft.environments.task_files.download import HubSet, download
from agent_peft.environments.task_files.selection import load_selected, select_usable, up_to_limit
from agent_peft.sandbox.build import missing
from agent_peft.types import AgentPeftError, Task

logger = logging.getLogger(__name__)

# Skills that need more users and groups than root's in the sandbox: the inspection of an `exit` executes the
# agent's script as another user
NEED_IDS = frozenset({"chown", "chgrp", "exit"})
STRUCTURED = ("initialization_command_item", "evaluation_info", "evaluation_command_item")
HUB_SET = HubSet(
    "csyq/LifelongAgentBench",
    {"entry_dict.json": "os_interaction/*"},
    structured=frozenset({*STRUCTURED, "ground_truth_command_item", "skill_list"}),
)


def _load(config: OSInteractionConfig) -> Sequence[Task]:
    return load_selected(config, load_tasks, generate, task_of)


def _inspect(config: OSInteractionConfig) -> Iterator[tuple[str, Inspection]]:
    tasks = _load(config)
    replayed = zip(tasks, _replays(config, tasks), strict=True)
    return ((task.id, inspection) for task, inspection in up_to_limit(config, replayed))


class OSInteraction(Environment):
    """The environment. Tasks that cannot be used are in ``rejected``, with the cause."""

    config_class = OSInteractionConfig
    task_files = TaskFiles(generate, OSGenerateConfig, _inspect, partial(download, HUB_SET))

    def __init__(self, config: OSInteractionConfig) -> None:
        self.config: OSInteractionConfig = config
        tasks = _load(config)
        replays = config.replay if config.replay is not None else config.tasks is not None
        replayed = (inspection.cause for inspection in _replays(config, tasks))
        causes = replayed if replays else map(_cause_of_reading, tasks)
        self._tasks, self.rejected = select_usable(config, tasks, causes)
        self._warned = False

    @property
    def tasks(self) -> Sequence[Task]:
        return self._tasks

    @property
    def sandboxed(self) -> bool:
        return self.config.sandbox != "none"

    def episode(self, task: Task, seed: int) -> OSEpisode:
        if not self._warned:
            self._warned = True
            self._warn()
        return OSEpisode(read_problem(task.id, task.content), self.config, seed)

    def demonstration(self, task: Task) -> Sequence[str] | None:
        return demonstrate(read_problem(task.id, task.content), self.config)

    def reference(self, task: Task) -> str | None:
        """The expected answer, or the gold commands, which are not run."""
        problem = read_problem(task.id, task.content)
        expected = problem.evaluation.answer if isinstance(problem.evaluation, Matches) else None
        return problem.gold if expected is None else expected

    def _warn(self) -> None:
        """Warn of capabilities that this machine's sandboxes lack, and name the tasks that may need them."""
        # the sandbox "none" has its own warning
        for lack in missing(self.config.sandbox) if self.config.sandbox != "none" else ():
            needing = [task.id for task in self._tasks if NEED_IDS.intersection(task.skills)]
            logger.warning(
                "os_interaction: the sandbox lacks %s; %d tasks may need it (%s)",
                lack,
                len(needing),
                ", ".join(needing),
            )


def _replays(config: OSInteractionConfig, tasks: Sequence[Task]) -> Iterator[Inspection]:
    """Replay tasks, as many at once as a limit asks for, and not all of them."""
    step = max(config.limit or len(tasks), config.replay_threads)
    for begin in range(0, len(tasks), step):
        yield from inspect_all(tasks[begin : begin + step], config)


def _cause_of_reading(task: Task) -> str | None:
    try:
        read_problem(task.id, task.content)
    except AgentPeftError as error:
        return str(error)
    return None
