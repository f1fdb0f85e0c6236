"""Where the trajectories of a step come from. The trainer knows this seam only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from agent_peft.environments.base import Environment
from agent_peft.environments.preferences import Preferences
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.policies.tokenization import ChatTokenizer
from agent_peft.ranks import Ranks
from agent_peft.rollout.collector import Collection, Collector, ScheduleOf
from agent_peft.rollout.demonstrations import DemonstrationCheck, demonstrate
from agent_peft.rollout.gathering import gather_collection
from agent_peft.rollout.rewards import RewardConfig
from agent_peft.rollout.task_order import TaskOrder
from agent_peft.seeding import derive
from agent_peft.types import Group


class Source(Protocol):
    """Gives each step its trajectories."""

    def collect(self, step: int) -> Collection:
        """The rewarded groups of a step: a pure function of the source's seed, the step and the policy.

        With several ranks it is a collective: every rank calls it, and every rank gets all groups.
        """
        ...


@dataclass(frozen=True)
class Rollouts:
    """Episodes of the policy itself, ``group_size`` of each task.

    Attributes:
        schedule_of: for a step, where its schedule is written, and the one to follow.
    """

    collector: Collector
    order: TaskOrder
    group_size: int
    sampling: SamplingConfig
    rewards: RewardConfig
    seed: int
    ranks: Ranks
    schedule_of: ScheduleOf | None = None

    def collect(self, step: int) -> Collection:
        tasks, seed = self.order.at(step), derive(self.seed, "rollout", step)
        schedule = self.schedule_of(step) if self.schedule_of else None
        collection = self.collector.collect(
            tasks,
            self.group_size,
            self.sampling,
            self.rewards,
            seed,
            self.ranks.share(range(len(tasks))),
            schedule.followed if schedule else None,
        )
        if schedule is not None:
            schedule.write(collection.schedule)
        return gather_collection(self.ranks, collection, tasks)


@dataclass(frozen=True)
class Demonstrations:
    """The demonstration of each task, replayed in its environment: groups of one trajectory."""

    environment: Environment
    order: TaskOrder
    chat: ChatTokenizer
    rewards: RewardConfig
    seed: int
    ranks: Ranks
    check: DemonstrationCheck

    def collect(self, step: int) -> Collection:
        tasks, seed = self.order.at(step), derive(self.seed, "rollout", step)
        groups = [
            Group(task, [demonstrate(self.environment, task, self.chat, self.rewards, seed)])
            for task in self.ranks.share(tasks)
        ]
        collection = gather_collection(self.ranks, Collection(groups), tasks)
        return replace(collection, metrics=self.check.count(collection.groups))


@dataclass(frozen=True)
class Pairs:
    """The chosen and the rejected reply of each task, in this order: groups of two trajectories."""

    environment: Preferences
    order: TaskOrder
    chat: ChatTokenizer
    rewards: RewardConfig
    seed: int
    ranks: Ranks

    def collect(self, step: int) -> Collection:
        tasks, seed = self.order.at(step), derive(self.seed, "rollout", step)
        groups = []
        for task in self.ranks.share(tasks):
            sides = (self.environment.demonstration(task), self.environment.rejection(task))
            replayed = (
                demonstrate(self.environment, task, self.chat, self.rewards, seed, actions)
                for actions in sides
            )
            groups.append(Group(task, list(replayed)))
        return gather_collection(self.ranks, Collection(groups), tasks)
