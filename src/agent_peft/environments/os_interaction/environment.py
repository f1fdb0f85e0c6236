"""OS interaction: an agent that types commands into a real shell, on a machine of its own."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from agent_peft.environments.base import Environment, EnvironmentConfig
from agent_peft.environments.os_interaction.episode import OSEpisode, Rules, SandboxKind, demonstrate
from agent_peft.environments.os_interaction.generator import generate
from agent_peft.environments.os_interaction.inspection import inspect_all
from agent_peft.environments.os_interaction.problems import SKILLS, Problem
from agent_peft.environments.os_interaction.protocol import ProtocolName
from agent_peft.environments.os_interaction.tasks import load_tasks, read_problem, task_of
from agent_peft.environments.task_files.reading import check_skills
from agent_peft.environments.task_files.replay import Rejection
from agent_peft.sandbox.base import SandboxLimits
from agent_peft.sandbox.build import missing
from agent_peft.types import AgentPeftError, Task

logger = logging.getLogger(__name__)

NEED_IDS = frozenset({"chown", "chgrp"})  # skills that need more users and groups than root's in the sandbox


class GenerateConfig(EnvironmentConfig):
    """Which tasks to make up; ``train`` and ``heldout`` share no name of a file, user or group, and no
    phrasing.
    """

    num_tasks: int = Field(gt=0, description="how many")
    seed: int = Field(0, description="another seed gives other tasks")
    skills: tuple[str, ...] = Field(SKILLS, min_length=1, description="they take turns")
    split: Literal["train", "heldout"] = Field("train", description="which share no name and no phrasing")
    combined: float = Field(
        0.25, ge=0, le=1, description="the share of tasks that ask for two or three things at once"
    )

    @field_validator("skills")
    @classmethod
    def _skills_are_known(cls, skills: tuple[str, ...]) -> tuple[str, ...]:
        check_skills(skills, SKILLS)
        return skills


class OSInteractionConfig(EnvironmentConfig):
    """The tasks (of a file in LifelongAgentBench's or AgentBench's format, or generated), the sandbox and the
    bounds of an episode.

    ``skills`` keeps the tasks whose primary skill (the rarest it needs) is named; ``limit`` keeps the first
    usable ones. ``replay`` tries every task when it is loaded; by default a file's are tried, and generated
    ones, which are tested, are not.
    """

    kind: Literal["os_interaction"] = "os_interaction"
    tasks: Path | None = Field(None, description="a file of tasks; this or generate")
    generate: GenerateConfig | None = Field(None, description="tasks to make up; this or tasks")
    skills: list[str] | None = Field(
        None, min_length=1, description="keeps the tasks whose primary skill is named; null: all"
    )
    limit: int | None = Field(None, gt=0, description="keeps the first so many that can be used; null: all")
    sandbox: SandboxKind = Field(
        "namespaces", description="each episode's machine; none is this machine itself"
    )
    limits: SandboxLimits = Field(default_factory=SandboxLimits, description="of one machine")
    protocol: ProtocolName = Field("act", description="how the agent writes a command")
    max_turns: int = Field(5, ge=2, description="replies, the finish included; the agent is told")
    max_observation_chars: int = Field(
        800, ge=100, description="of a command's output; the middle of what is longer is cut out"
    )
    command_timeout: float = Field(20.0, gt=0, description="seconds of one command of the agent")
    script_timeout: float = Field(
        30.0, gt=0, description="seconds of a task's initialization, and of its evaluation"
    )
    episode_seconds: float | None = Field(
        None,
        gt=0,
        description="seconds that all commands of an episode may take together, then it ends as a timeout; null: no clock",
    )
    replay: bool | None = Field(None, description="try every task when it is loaded; null: those of a file")
    replay_threads: int = Field(4, ge=1, le=64, description="tasks that are tried at a time")

    @field_validator("skills")
    @classmethod
    def _skills_are_known(cls, skills: list[str] | None) -> list[str] | None:
        check_skills(skills, SKILLS)
        return skills

    @model_validator(mode="after")
    def _one_source(self) -> OSInteractionConfig:
        if (self.tasks is None) == (self.generate is None):
            raise ValueError("set exactly one of tasks (a file) and generate")
        return self

    @property
    def rules(self) -> Rules:
        return Rules(
            self.sandbox,
            self.limits,
            self.protocol,
            self.max_turns,
            self.max_observation_chars,
            self.command_timeout,
            self.script_timeout,
            self.episode_seconds,
        )


class OSInteraction(Environment):
    """The environment. Tasks that cannot be used are in ``rejected``, with the cause."""

    def __init__(self, config: OSInteractionConfig) -> None:
        """Load the tasks, and replay them if the configuration says so.

        Raises:
            AgentPeftError: the file is wrong, or no task can be used.
        """
        self.config = config
        self._rules = config.rules
        replay = config.replay if config.replay is not None else config.tasks is not None
        source = str(config.tasks) if config.tasks is not None else "generated tasks"
        found = _load(config, source)
        usable: list[Task] = []
        rejected: list[Rejection] = []
        wanted = config.limit or len(found)
        step = (
            max(wanted, config.replay_threads) if replay else len(found)
        )  # so many are tried at once: with a limit, not all
        for begin in range(0, len(found), step):
            tried = found[begin : begin + step]
            causes = (
                [inspection.cause for inspection in inspect_all(tried, self._rules, config.replay_threads)]
                if replay
                else map(_unread, tried)
            )
            for task, cause in zip(tried, causes, strict=True):
                if len(usable) == wanted:
                    break
                if cause is None:
                    usable.append(task)
                else:
                    rejected.append(Rejection(task.id, cause))
            if len(usable) == wanted:
                break
        self.rejected: Sequence[Rejection] = tuple(rejected)
        self._tasks = tuple(usable)
        self._warned = False
        if rejected:
            shown = "; ".join(f"{rejection.id}: {rejection.cause}" for rejection in rejected[:3]) + (
                "; ..." if len(rejected) > 3 else ""
            )
            logger.warning(
                "os_interaction: %d of %d tasks cannot be used (%s)", len(rejected), len(found), shown
            )
        if not usable:
            raise AgentPeftError(f"{source}: no task can be used ({rejected[0].id}: {rejected[0].cause})")

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
        return OSEpisode(self._problem(task), self._rules, seed)

    def demonstration(self, task: Task) -> Sequence[str] | None:
        return demonstrate(self._problem(task), self._rules)

    def _warn(self) -> None:
        """Say what the sandboxes of this machine lack, and which tasks may need it."""
        for lack in (
            missing(self.config.sandbox) if self.config.sandbox != "none" else ()
        ):  # none warns for itself
            needing = [task.id for task in self._tasks if NEED_IDS.intersection(task.skills)]
            logger.warning(
                "os_interaction: the sandbox lacks %s; %d tasks may need it (%s)",
                lack,
                len(needing),
                ", ".join(needing),
            )

    def _problem(self, task: Task) -> Problem:
        return read_problem(task.id, task.content)


def _unread(task: Task) -> str | None:
    try:
        read_problem(task.id, task.content)
    except AgentPeftError as error:
        return str(error)
    return None


def _load(config: OSInteractionConfig, source: str) -> Sequence[Task]:
    if config.tasks is not None:
        tasks: Sequence[Task] = load_tasks(config.tasks)
    else:
        assert config.generate is not None  # the config was validated
        made = config.generate
        entries = generate(made.num_tasks, made.seed, made.skills, made.split, made.combined)
        tasks = [task_of(name, entry) for name, entry in entries.items()]
    if config.skills is not None:
        tasks = [task for task in tasks if task.skills and task.skills[0] in config.skills]
        if not tasks:
            raise AgentPeftError(
                f"{source}: no task has one of the skills {', '.join(config.skills)}; choose others"
            )
    return tasks
