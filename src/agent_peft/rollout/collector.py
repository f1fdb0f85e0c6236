"""Policies act in environments: tasks in, groups of trajectories out.

An agent must never gain by making its environment fail. A failure before the agent has acted is not its
doing: the episode starts again with another seed and, if it still fails, is left out. A failure after an
action may be the agent's doing. The episode then continues only if a second episode with the same seed, in
which the same actions are replayed, gives the same observations and then answers; otherwise it is incorrect.
So an agent that breaks its environment when it is about to fail gains nothing: neither the task, nor the
seed, nor a token is drawn again. One gap remains. An environment with randomness that its seed does not
decide draws it again in a replay, so an action that breaks the environment after a bad draw, before any
observation shows it, is tried up to ``ATTEMPTS`` times. An environment closes this gap by grading such an
action instead of raising, as OS interaction and DB Bench do.
"""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agent_peft.environments.base import OUTCOMES, Environment
from agent_peft.environments.contract import ContractError, place_of
from agent_peft.files import write_atomic
from agent_peft.policies.engine.base import EngineStatistics, Sampler
from agent_peft.policies.engine.schedule import Schedule
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.printable import printable
from agent_peft.ranks import Ranks
from agent_peft.rollout.conversation import EpisodeConversation
from agent_peft.rollout.replays import ReplayWindow
from agent_peft.rollout.rewards import RewardConfig, price
from agent_peft.seeding import derive
from agent_peft.types import AgentPeftError, Group, Message, Outcome, StopReason, Task, Trajectory, Turn

logger = logging.getLogger(__name__)

ATTEMPTS = 3  # of an episode whose environment fails
MAX_TASKS_IN_WARNINGS = 5  # of one collection
MAX_REFERENCE = 4000  # characters
MAX_KINDS = 20  # of defects, each of which is logged once
MAX_FRAMES, MAX_LINES, LINE = 12, 60, 200  # of a traceback, and characters of a line


@dataclass(frozen=True)
class Collection:
    """The groups of one step. An episode whose environment failed in every attempt before the agent had acted
    is in no group.

    Attributes:
        failures: how many attempts a failing environment ended, including those that were repeated.
        defects: how many other exceptions an environment or a reward term raised.
        schedule: the late answers of each call of the sampler, with which this rank's part can be repeated
            bit for bit.
        metrics: of the source, for the step's record.
        dropped: those of the groups' trajectories that nothing is learned from.
        lag: how many steps before its own step it was sampled, before that step's update.
    """

    groups: list[Group]
    failures: int = 0
    statistics: EngineStatistics = field(default_factory=EngineStatistics)
    defects: int = 0
    schedule: tuple[Schedule, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    dropped: Sequence[Trajectory] = ()
    lag: int = 0

    def __add__(self, later: Collection) -> Collection:
        """The groups of two collections of one step, without their schedules and metrics."""
        return Collection(
            [*self.groups, *later.groups],
            self.failures + later.failures,
            self.statistics + later.statistics,
            self.defects + later.defects,
        )

    @property
    def kept(self) -> list[Group]:
        """The groups without what is dropped. One of which nothing is left is left out."""
        if not self.dropped:
            return self.groups
        dropped = {id(trajectory) for trajectory in self.dropped}
        rest = [(g.task, [t for t in g.trajectories if id(t) not in dropped]) for g in self.groups]
        return [Group(task, trajectories) for task, trajectories in rest if trajectories]

    @property
    def crashed(self) -> int:
        """How many episodes count as incorrect because their environment failed after an action, and again in
        every replay.
        """
        return sum(t.stop_reason is StopReason.CRASHED for group in self.groups for t in group.trajectories)


@dataclass(frozen=True)
class CollectionSchedule:
    """The sampling schedule of one collection on this rank.

    Attributes:
        followed: the schedule to repeat; None records a new one.
    """

    path: Path
    settings: dict[str, Any]
    followed: tuple[Schedule, ...] | None

    def write(self, schedule: Sequence[Schedule]) -> None:
        if schedule:
            write_atomic(self.path, json.dumps({**self.settings, "calls": schedule}) + "\n", unlinked=2)
        else:
            self.path.unlink(missing_ok=True)


ScheduleOf = Callable[[int], CollectionSchedule | None]  # of a step


class Collector:
    """Acts in one environment with one sampler.

    Args:
        on_episode: called at the end of each episode, from any thread.
    """

    def __init__(
        self, environment: Environment, engine: Sampler, on_episode: Callable[[], None] | None = None
    ) -> None:
        if environment.measures != OUTCOMES:
            raise AgentPeftError(
                f"{type(environment).__name__} has no outcome to grade, so its episodes cannot be rewarded; "
                "learn from its demonstrations with sft"
            )
        self.environment, self.engine, self.on_episode = environment, engine, on_episode
        self._logged: set[tuple[str, str]] = set()  # kinds of defects
        self._works = False  # an episode has ended without a defect
        self._cut = False  # a warning was logged that every episode of a step was cut

    def collect(
        self,
        tasks: Sequence[Task],
        group_size: int,
        sampling: SamplingConfig,
        rewards: RewardConfig,
        seed: int,
        positions: Sequence[int] | None = None,
        schedule: Sequence[Schedule] | None = None,
        replays: ReplayWindow | None = None,
    ) -> Collection:
        """Collect ``group_size`` episodes of each task, in the order of the tasks. The tokens that an episode
        draws depend on its seed alone, which is derived from the position of its task. The number of open
        episodes is at most the number of the sampler's rows, plus a few.

        Args:
            positions: of the tasks to collect here, while other processes collect the rest; None takes all.
            schedule: that of an earlier collection with the same arguments, to repeat.
            replays: earlier episodes to show before each task.
        """
        positions = range(len(tasks)) if positions is None else positions
        defects: list[BaseException] = []
        seconds = getattr(getattr(self.engine, "config", None), "environment_seconds", None)
        conversations = {
            (position, member): EpisodeConversation(
                self.environment,
                tasks[position],
                self.engine.chat,
                defects,
                stop=sampling.stop,
                max_tokens=sampling.max_tokens,
                on_end=self.on_episode,
                replays=replays,
                seconds=seconds,
                max_thinking_tokens=sampling.max_thinking_tokens,
            )
            for position in positions
            for member in range(group_size)
        }
        failures, statistics, recorded = 0, EngineStatistics(), list[Schedule]()
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
            "the environment failed after the agent's action, and again when the actions were replayed; "
            "the episode counts as incorrect",
        )
        _warn(
            [c for c in unanswered if not c.turns],
            "the environment failed before the agent had acted; the episode is left out",
        )
        for conversation in crashed:
            conversation.end(Outcome.INCORRECT, StopReason.CRASHED)
        priced = {key: _priced(c, rewards) for key, c in conversations.items() if c.failure is None}
        self._works = self._works or any(not c.defective for c in conversations.values())
        if len(conversations) > 1 and not self._works:
            raise AgentPeftError(
                f"{self._whole(defects[0])}; every one of the first {len(conversations)} episodes ended by a "
                "defect"
            )
        self._log(defects)
        self._check_limits(list(priced.values()), sampling)
        groups = []
        for position in positions:
            of_task = [priced[key] for member in range(group_size) if (key := (position, member)) in priced]
            reference = self._reference(tasks[position]) if of_task else None
            groups.append(Group(tasks[position], [replace(t, reference=reference) for t in of_task]))
        return Collection(
            groups=groups,
            failures=failures,
            statistics=statistics,
            defects=len(defects),
            schedule=tuple(recorded) if any(recorded) else (),
        )

    def _reference(self, task: Task) -> str | None:
        """What would have been right. It is for people: where the environment's code fails, there is none."""
        try:
            reference = self.environment.reference(task)
        except Exception:
            return None
        return reference[:MAX_REFERENCE] if isinstance(reference, str) else None

    def _check_limits(self, trajectories: Sequence[Trajectory], sampling: SamplingConfig) -> None:
        """Warn, once, of a step in which a limit cut every episode."""
        reasons = {t.stop_reason for t in trajectories}
        limits = []
        if StopReason.TOKEN_LIMIT in reasons:
            limits.append(f"sampling.max_tokens: {sampling.max_tokens} (tokens of an episode)")
        if StopReason.TURN_LIMIT in reasons:
            turns = getattr(getattr(self.environment, "config", None), "max_turns", None)
            limits.append("the environment's limit on turns" + (f", max_turns: {turns}" if turns else ""))
        cut = reasons <= {StopReason.TOKEN_LIMIT, StopReason.TURN_LIMIT}
        if not cut and all(
            t.outcome is not Outcome.CORRECT and t.turns and t.turns[-1].cut for t in trajectories
        ):
            limits, cut = [f"sampling.max_new_tokens: {sampling.max_new_tokens} (tokens of an action)"], True
        if cut and len(trajectories) > 1 and not self._cut:
            self._cut = True
            logger.warning(
                "all %d episodes were cut by %s; raise it, or see with agent-peft show what takes so long",
                len(trajectories),
                " and ".join(limits),
            )

    def _log(self, defects: Sequence[BaseException]) -> None:
        """Log each kind of defect once, with its traceback, however many episodes meet it."""
        for error in defects:
            kind = (type(error).__name__, origin_of(error))
            if kind in self._logged or len(self._logged) >= MAX_KINDS:
                continue
            self._logged.add(kind)
            logger.error(
                "%s: a defect; every episode in which the agent's action meets it counts as incorrect",
                self._whole(error),
            )
            if isinstance(error, ContractError):  # it was not raised, so it has no traceback
                continue
            lines = "".join(traceback.format_exception(error, limit=-MAX_FRAMES)).splitlines()
            for line in lines[-MAX_LINES:]:
                logger.error("  %s", printable(line, LINE))

    def _whole(self, error: BaseException) -> str:
        """Where a defect came up first, its error, and the line of the environment that raised it."""
        where = printable(error.__notes__[0], LINE)
        if isinstance(error, AgentPeftError):
            return f"{where}: {printable(error, 2 * LINE)}"
        return f"{where}: {error_line(error)}, at {place_of(error, type(self.environment))}"


def _priced(conversation: EpisodeConversation, rewards: RewardConfig) -> Trajectory:
    """The trajectory with its rewards. A reward term that fails is a defect, by which no agent gains."""
    try:
        return price(conversation.trajectory, rewards)
    except AgentPeftError as error:
        conversation.defect(error)
        conversation.end(Outcome.INCORRECT, StopReason.DEFECT)
        return price(conversation.trajectory, rewards.model_copy(update={"terms": ()}))


def _warn(conversations: Sequence[EpisodeConversation], what: str) -> None:
    """Warn in one line for each task, of a few of them."""
    tasks = {c.task.id: c for c in conversations}
    for task, conversation in list(tasks.items())[:MAX_TASKS_IN_WARNINGS]:
        logger.warning("task %s: %s (%s)", printable(task, LINE), what, error_line(conversation.failure))
    if len(tasks) > MAX_TASKS_IN_WARNINGS:
        logger.warning("%d more tasks: %s", len(tasks) - MAX_TASKS_IN_WARNINGS, what)


def error_line(error: BaseException | None) -> str:
    """An error in one line."""
    try:
        return printable(f"{type(error).__name__}: {error}", LINE)
    except Exception:  # from its __str__
        return type(error).__name__


def origin_of(error: BaseException) -> str:
    """``file:line`` where an error, or its cause, was raised; for a broken contract, of the code that broke
    it.
    """
    if isinstance(error, ContractError):
        return error.place
    frames = traceback.extract_tb((error.__cause__ or error).__traceback__, limit=-1)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def gather_collection(ranks: Ranks, mine: Collection, tasks: Sequence[Task]) -> Collection:
    """One collection from those of all ranks, in the order of ``tasks``. It is a collective, and its result
    is the same on every rank.
    """
    if ranks.world_size == 1:
        return mine
    groups: dict[int, Group] = {}
    failures, defects, statistics = 0, 0, EngineStatistics()
    content = {
        "groups": [[trajectory_to_json(t) for t in group.trajectories] for group in mine.groups],
        "failures": mine.failures,
        "defects": mine.defects,
        "statistics": vars(mine.statistics) | {"schedule": ()},  # each rank keeps its own
    }
    for rank, part in enumerate(ranks.gather_objects(content)):
        positions = Ranks(rank, ranks.world_size).share(range(len(tasks)))
        for position, trajectories in zip(positions, part["groups"], strict=True):
            groups[position] = Group(
                tasks[position], [trajectory_from_json(tasks[position], t) for t in trajectories]
            )
        failures += part["failures"]
        defects += part["defects"]
        statistics += EngineStatistics(**part["statistics"])
    return Collection([groups[position] for position in range(len(tasks))], failures, statistics, defects)


def trajectory_to_json(trajectory: Trajectory) -> dict[str, Any]:
    """All but the task."""
    return {
        **{name: value for name, value in vars(trajectory).items() if name != "task"},
        # without what few turns have, as in the files of earlier versions
        "turns": [
            {key: value for key, value in vars(turn).items() if key not in ("forced", "new_row") or value}
            for turn in trajectory.turns
        ],
        "messages": [message.to_json() for message in trajectory.messages],
    }


def trajectory_from_json(task: Task, content: Mapping[str, Any]) -> Trajectory:
    """Take back what ``trajectory_to_json`` gave."""
    turns = tuple(Turn(**_tuples(turn)) for turn in content["turns"])
    messages = tuple(Message.from_json(message) for message in content["messages"])
    facts = {"outcome": Outcome(content["outcome"]), "stop_reason": StopReason(content["stop_reason"])}
    return Trajectory(**{**_tuples(content), **facts, "task": task, "turns": turns, "messages": messages})


def _tuples(content: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in content.items()}
