"""Where policies meet environments: tasks in, groups of trajectories out.

What a failing world counts must never be worth bringing about. A world that fails before the agent has acted
is nobody's doing: the episode is begun anew with another seed, and in the end left out. One that fails after
an action may be the agent's doing: the episode goes on only where a world of the same seed, in which the same
actions were replayed, says the same and then answers; else it is incorrect. So an agent that breaks its world
when it is about to fail gains nothing: neither the task, nor the seed, nor a token is drawn again. What
remains: a world that is not decided by its seed draws its own coins again when it is replayed, so an action
that breaks the world where such a coin falls badly, before any observation shows it, is tried up to
``ATTEMPTS`` times. An environment closes that by judging what an agent can break itself, instead of raising:
the OS interaction does, and the DB Bench.
"""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_peft.environments.base import Environment
from agent_peft.environments.contract import ContractError, place_of
from agent_peft.files import write_atomic
from agent_peft.policies.engine.base import EngineStatistics
from agent_peft.policies.engine.local import Engine
from agent_peft.policies.engine.schedule import Schedule
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.policies.tokenization import ChatTokenizer
from agent_peft.printable import printable
from agent_peft.rollout.conversation import EpisodeConversation
from agent_peft.rollout.rewards import RewardConfig, price
from agent_peft.seeding import derive
from agent_peft.types import AgentPeftError, Group, Outcome, StopReason, Task, Trajectory

logger = logging.getLogger(__name__)

NOTHING = EngineStatistics(0, 0, 0, 0)
ATTEMPTS = 3  # how often an episode is tried whose environment fails
TASKS_TOLD = 5  # a collection warns of no more than these
KINDS_TOLD = 20  # of defects, each of them once
FRAMES_TOLD, LINES_TOLD, LINE = 12, 60, 200  # of a traceback, and characters of a line


@dataclass(frozen=True)
class Collection:
    """What one trip collected. An episode whose world failed again and again before the agent had acted is in
    no group.

    ``failures`` counts the attempts that a failing world ended, those that were tried again included;
    ``defects`` counts the exceptions of other kinds that an environment or a reward term raised. ``schedule``
    has the late answers of each call of the engine, and so says how this rank's part can be repeated bit for
    bit.
    """

    groups: list[Group]
    failures: int = 0
    statistics: EngineStatistics = NOTHING
    defects: int = 0
    schedule: tuple[Schedule, ...] = ()

    @property
    def crashed(self) -> int:
        """How many episodes count as incorrect because their world failed after an action, and whenever
        the actions were replayed.
        """
        return sum(t.stop_reason is StopReason.CRASHED for group in self.groups for t in group.trajectories)


@dataclass(frozen=True)
class CollectionSchedule:
    """Of one collection on this rank: what is to be followed (None records a new one), and where what
    happened is written.
    """

    path: Path
    settings: dict[str, Any]
    followed: tuple[Schedule, ...] | None

    def write(self, schedule: Sequence[Schedule]) -> None:
        if schedule:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self.path, json.dumps({**self.settings, "calls": schedule}) + "\n")
        else:
            self.path.unlink(missing_ok=True)


class Collector:
    """Acts in one environment with one engine."""

    def __init__(self, environment: Environment, engine: Engine) -> None:
        self.environment, self.engine = environment, engine
        self._told: set[tuple[str, str]] = set()  # kinds of defects
        self._works = False  # an episode has ended otherwise than by a defect

    def collect(
        self,
        tasks: Sequence[Task],
        group_size: int,
        sampling: SamplingConfig,
        rewards: RewardConfig,
        seed: int,
        positions: Sequence[int] | None = None,
        schedule: Sequence[Schedule] | None = None,
    ) -> Collection:
        """``group_size`` episodes of each task, in the tasks' order. What an episode draws depends on its
        seed, which is that of the task's position, and on nothing around it. No more episodes are open at
        once than the engine has rows, and a few.

        Args:
            positions: of the tasks to collect, where other processes collect the rest; None takes all.
            schedule: that of an earlier collection of the same, to be followed.

        Raises:
            AgentPeftError: an episode cannot be begun, for a reason that is the user's to mend; or every
                episode of the first collection ended by a defect. After that, nothing that an environment
                raises when the agent acts ends a collection.
        """
        positions = range(len(tasks)) if positions is None else positions
        defects: list[BaseException] = []
        acting = (self.engine.policy.chat, defects, sampling.stop, sampling.max_tokens)
        conversations = {
            (position, member): EpisodeConversation(self.environment, tasks[position], *acting)
            for position in positions
            for member in range(group_size)
        }
        failures, statistics, recorded = 0, NOTHING, list[Schedule]()
        for attempt in range(ATTEMPTS):
            trying = {key: c for key, c in conversations.items() if attempt == 0 or c.failure is not None}
            if not trying:
                break
            for key, conversation in trying.items():
                if not conversation.turns:
                    conversation.seed = derive(seed, attempt, *key)
            followed = None if schedule is None else schedule[attempt] if attempt < len(schedule) else ()
            try:
                done = self.engine.generate(list(trying.values()), sampling, followed)
            finally:
                for conversation in trying.values():
                    conversation.close()
            statistics, recorded = statistics + done, [*recorded, done.schedule]
            failures += sum(c.failure is not None for c in trying.values())
        unanswered = [c for c in conversations.values() if c.failure is not None]
        crashed = [c for c in unanswered if c.turns]
        _warn(
            crashed,
            "the world failed after the agent's action, and again when the actions were replayed; it counts as incorrect",
        )
        _warn(
            [c for c in unanswered if not c.turns],
            "the world failed before the agent had acted; the episode is left out",
        )
        for conversation in crashed:
            conversation.end(Outcome.INCORRECT, StopReason.CRASHED)
        priced = {key: _priced(c, rewards) for key, c in conversations.items() if c.failure is None}
        self._works = self._works or any(not c.defective for c in conversations.values())
        if len(conversations) > 1 and not self._works:
            raise AgentPeftError(
                f"{self._whole(defects[0])}; every one of the first {len(conversations)} episodes ended by a defect"
            )
        self._tell(defects)
        groups = [
            Group(
                tasks[position],
                [priced[position, member] for member in range(group_size) if (position, member) in priced],
            )
            for position in positions
        ]
        return Collection(
            groups, failures, statistics, len(defects), tuple(recorded) if any(recorded) else ()
        )

    def _tell(self, defects: Sequence[BaseException]) -> None:
        """Each kind of defect once, with its traceback, however many episodes meet it."""
        for error in defects:
            kind = (type(error).__name__, _place(error))
            if kind in self._told or len(self._told) >= KINDS_TOLD:
                continue
            self._told.add(kind)
            logger.error(
                "%s: a defect; every episode in which the agent's action meets it counts as incorrect",
                self._whole(error),
            )
            if isinstance(error, ContractError):  # nothing was raised that a traceback could tell more of
                continue
            lines = "".join(traceback.format_exception(error, limit=-FRAMES_TOLD)).splitlines()
            for line in lines[-LINES_TOLD:]:
                logger.error("  %s", printable(line, LINE))

    def _whole(self, error: BaseException) -> str:
        """Where a defect was met first, what it is, and the line of the environment's that raised it."""
        where = printable(error.__notes__[0], LINE)
        if isinstance(error, AgentPeftError):
            return f"{where}: {printable(error, 2 * LINE)}"
        return f"{where}: {told(error)}, at {place_of(error, type(self.environment))}"


def _priced(conversation: EpisodeConversation, rewards: RewardConfig) -> Trajectory:
    """The trajectory with its rewards. A term that fails at what the agent said must not be worth bringing
    about: it is a defect.
    """
    try:
        return price(conversation.trajectory, rewards)
    except AgentPeftError as error:
        conversation.defect(error)
        conversation.end(Outcome.INCORRECT, StopReason.DEFECT)
        return price(conversation.trajectory, rewards.model_copy(update={"terms": ()}))


def _warn(conversations: Sequence[EpisodeConversation], what: str) -> None:
    """One line per task, and no more than a few."""
    tasks = {c.task.id: c for c in conversations}
    for task, conversation in list(tasks.items())[:TASKS_TOLD]:
        logger.warning("task %s: %s (%s)", printable(task, LINE), what, told(conversation.failure))
    if len(tasks) > TASKS_TOLD:
        logger.warning("%d more tasks: %s", len(tasks) - TASKS_TOLD, what)


def told(error: BaseException | None) -> str:
    """What went wrong, in one line."""
    try:
        return printable(f"{type(error).__name__}: {error}", LINE)
    except Exception:  # an error that cannot say what it is
        return type(error).__name__


def _place(error: BaseException) -> str:
    """Where it was raised; where its cause was, if it has one; the code that returned what it must not."""
    if isinstance(error, ContractError):
        return error.place
    frames = traceback.extract_tb((error.__cause__ or error).__traceback__, limit=-1)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def demonstrate(
    environment: Environment, task: Task, chat: ChatTokenizer, rewards: RewardConfig, seed: int
) -> Trajectory:
    """The trajectory of a task's demonstration, replayed in the environment: its observations are the real
    ones.

    Raises:
        AgentPeftError: the environment knows no demonstration of this task, or does not get through it.
    """
    actions = environment.demonstration(task)
    if actions is None:
        raise AgentPeftError(
            f"task {task.id}: the environment knows no demonstration, so a supervised stage cannot use it"
        )
    if (
        isinstance(actions, str)
        or not isinstance(actions, Sequence)
        or not all(isinstance(action, str) for action in actions)
    ):
        given = printable(repr(actions), 60)
        raise AgentPeftError(
            f"task {task.id}: its demonstration must be a list of texts, one for each turn; got {given}"
        )
    defects: list[BaseException] = []
    conversation = EpisodeConversation(environment, task, chat, defects)
    try:
        conversation.begin(seed)
        for action in () if conversation.failure else actions:
            tokens = chat.action_tokens(action)
            if conversation.act(tokens, [0.0] * len(tokens), room=1 << 30) is None:
                break
    finally:
        conversation.close()
    error = defects[0] if conversation.stop_reason is StopReason.DEFECT else conversation.failure
    if error is not None:
        place = f"{told(error)}, at {Path(_place(error)).name}"
        raise AgentPeftError(
            f"task {task.id}: the environment failed while its demonstration was replayed ({place})"
        ) from error
    for error in defects:
        logger.error("task %s: after its demonstration: %s", printable(task.id, LINE), told(error))
    if not conversation.over:
        raise AgentPeftError(f"task {task.id}: its demonstration does not end the episode")
    return price(conversation.trajectory, rewards)
