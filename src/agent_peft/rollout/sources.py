"""Where the trajectories of a step come from. The trainer knows the protocol ``Source`` only.

Constant groups may give way to others: the dynamic sampling of DAPO (Yu et al., 2025, section 3.2,
https://arxiv.org/abs/2503.14476).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Protocol

from agent_peft.environments.base import Environment
from agent_peft.lazy_torch import torch
from agent_peft.policies.engine.schedule import Schedule
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.ranks import Ranks
from agent_peft.rollout.collector import ATTEMPTS, Collection, Collector, ScheduleOf, gather_collection
from agent_peft.rollout.demonstrations import DemonstrationCheck, demonstrate
from agent_peft.rollout.replays import Replays, ReplayWindow
from agent_peft.rollout.rewards import RewardConfig
from agent_peft.rollout.task_order import Order
from agent_peft.seeding import derive
from agent_peft.types import Group, InfrastructureError, Outcome, Task, Trajectory

if TYPE_CHECKING:
    from agent_peft.policies.tokenization import ChatTokenizer


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
            positions=self.ranks.share(range(len(tasks))),
            schedule=followed,
            replays=ReplayWindow(replays.latest(), number) if replays is not None and number else None,
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
        failures = list[InfrastructureError]()
        groups = [
            Group(task, [demonstrate(self.environment, task, self.chat, self.rewards, seed, None, failures)])
            for task in self.ranks.share(tasks)
        ]
        collection = gather_collection(self.ranks, Collection(groups, len(failures)), tasks)
        return replace(collection, metrics=self.check.count(collection.groups))


REFILL_METRICS = ("groups_refilled", "episodes_dropped")  # of ``drop_constant``


def is_constant(group: Group) -> bool:
    """Whether all episodes of a group have one return, as a batch holds it. A group that failing environments
    left with one episode, or none, is constant, too.
    """
    return len(torch.tensor([t.reward for t in group.trajectories], dtype=torch.float32).unique()) < 2  # type: ignore[no-untyped-call]


def other_tasks(pool: Sequence[Task], tried: Sequence[Task], number: int, random: Random) -> list[Task]:
    """``number`` tasks of the pool, drawn without replacement. Those that the step has tried come only where
    the pool has no others. They are fewer where the pool is smaller.

    >>> pool = [Task("a"), Task("b"), Task("c")]
    >>> sorted(task.id for task in other_tasks(pool, [Task("b")], 2, Random(0)))
    ['a', 'c']
    """
    ids = {task.id for task in tried}
    enough = number + sum(task.id in ids for task in pool)  # a pool may hold a task several times
    places = random.sample(range(len(pool)), min(len(pool), enough))
    return sorted((pool[place] for place in places), key=lambda task: task.id in ids)[:number]


def drop_constant(collection: Collection, first: int, fewest: int) -> Collection:
    """The collection with its constant groups dropped.

    Args:
        first: how many of its groups were collected before the first refill.
        fewest: as many groups are kept, the first constant ones where there are too few others, so that each
            minibatch has one.
    """
    signal = [group for group in collection.groups if not is_constant(group)]
    spare = [group for group in collection.groups if is_constant(group) and len(group.trajectories) > 1]
    kept = {id(group) for group in (*signal, *spare[: max(fewest - len(signal), 0)])}
    dropped = [t for group in collection.groups if id(group) not in kept for t in group.trajectories]
    metrics = {
        "groups_refilled": float(sum(not is_constant(group) for group in collection.groups[first:])),
        "episodes_dropped": float(len(dropped)),
    }
    return replace(collection, dropped=dropped, metrics={**collection.metrics, **metrics})


SUCCESS_METRICS = ("successes", "episodes_dropped")  # of ``only_successes``


def successes(group: Group) -> list[Trajectory]:
    """The correct episodes that were sampled for the group, each sequence of actions once."""
    correct = (t for t in group.trajectories if t.outcome is Outcome.CORRECT)
    return list({tuple(turn.action for turn in one.turns): one for one in correct}.values())


def only_successes(collection: Collection) -> Collection:
    """The collection with all but its successes dropped: the distinct ones of each task, as in rejection
    sampling fine-tuning (Yuan et al., 2023, section 3.3, https://arxiv.org/abs/2308.01825).
    """
    kept = {id(t) for group in collection.groups for t in successes(group)}
    dropped = [t for group in collection.groups for t in group.trajectories if id(t) not in kept]
    metrics = {"successes": float(len(kept)), "episodes_dropped": float(len(dropped))}
    return replace(collection, dropped=dropped, metrics=metrics)
