"""Where the trajectories of a step come from. The trainer knows this seam only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Protocol

from agent_peft.environments.base import Environment
from agent_peft.policies.engine.schedule import Schedule
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.policies.tokenization import ChatTokenizer
from agent_peft.ranks import Ranks
from agent_peft.rollout.collector import ATTEMPTS, Collection, Collector, ScheduleOf
from agent_peft.rollout.demonstrations import DemonstrationCheck, demonstrate
from agent_peft.rollout.gathering import gather_collection
from agent_peft.rollout.refill import drop_constant, is_constant, other_tasks
from agent_peft.rollout.replays import Replays, ReplayWindow
from agent_peft.rollout.rewards import RewardConfig
from agent_peft.rollout.successes import only_successes
from agent_peft.rollout.task_order import Order
from agent_peft.seeding import derive
from agent_peft.types import Group, Task


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
        replays: the run's successful episodes, to which those of each step are added. Each episode is shown
            the latest ``replay_in_prompt`` of the steps before.
        refill: rounds in which other groups are collected in the place of constant ones, which are dropped.
            Their tasks are drawn from the pool of the step, and do not move the order. 0 drops none.
        fewest: groups that are never dropped.
    """

    collector: Collector
    order: Order
    group_size: int
    sampling: SamplingConfig
    rewards: RewardConfig
    seed: int
    ranks: Ranks
    schedule_of: ScheduleOf | None = None
    replays: Replays | None = None
    replay_in_prompt: int = 0
    refill: int = 0
    fewest: int = 1

    def collect(self, step: int) -> Collection:
        schedule = self.schedule_of(step) if self.schedule_of else None
        calls = list[Schedule]()  # ``ATTEMPTS`` for each round, but as many as there were for the last one
        tasks, seed = self.order.at(step), derive(self.seed, "rollout", step)
        first, collection, groups = len(tasks), Collection([]), list[Group]()
        for number in range(1 + self.refill):
            if number:
                missing = first - sum(not is_constant(group) for group in groups)
                if not missing:
                    break
                seed, tried = derive(self.seed, "refill", step, number), [group.task for group in groups]
                tasks = other_tasks(self.order.pool(step), tried, missing, Random(seed))
            calls += [()] * (number * ATTEMPTS - len(calls))
            followed = schedule.followed if schedule else None
            mine = self._collect(tasks, seed, None if followed is None else followed[len(calls) :][:ATTEMPTS])
            calls += mine.schedule
            part = gather_collection(self.ranks, mine, tasks)
            collection += part
            groups += part.groups
        if schedule is not None:
            schedule.write(calls if any(calls) else ())
        if self.replays is not None:
            self.replays.add(collection.groups, self.collector.engine.chat)
        return drop_constant(collection, first, self.fewest) if self.refill else collection

    def _collect(self, tasks: Sequence[Task], seed: int, followed: tuple[Schedule, ...] | None) -> Collection:
        """This rank's part of a round."""
        number, replays = self.replay_in_prompt, self.replays
        return self.collector.collect(
            tasks,
            self.group_size,
            self.sampling,
            self.rewards,
            seed,
            self.ranks.share(range(len(tasks))),
            followed,
            ReplayWindow(replays.latest(), number) if replays is not None and number else None,
        )


@dataclass(frozen=True)
class Successes:
    """Episodes of the policy itself, of which all but the successes are dropped."""

    rollouts: Rollouts

    def collect(self, step: int) -> Collection:
        return only_successes(self.rollouts.collect(step))


@dataclass(frozen=True)
class Demonstrations:
    """The demonstration of each task, replayed in its environment: groups of one trajectory."""

    environment: Environment
    order: Order
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
