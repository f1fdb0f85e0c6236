"""Where the trajectories of a step come from. The trainer knows this seam only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from agent_peft.environments.base import Environment
from agent_peft.environments.preferences import Preferences
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.policies.tokenization import ChatTokenizer
from agent_peft.ranks import Ranks
from agent_peft.rollout.collector import Collection, Collector, ScheduleOf
from agent_peft.rollout.demonstrations import DemonstrationCheck, demonstrate
from agent_peft.rollout.gathering import gather_collection
from agent_peft.rollout.replays import Replays, ReplayWindow
from agent_peft.rollout.rewards import RewardConfig
from agent_peft.rollout.task_order import Order, SuccessOrder
from agent_peft.seeding import derive
from agent_peft.types import Group


class Source(Protocol):
    """Gives each step its trajectories."""

    def collect(self, step: int) -> Collection:
        """The rewarded groups of a step: a pure function of the source's seed, the step, the policy and, if
        it is a ``StatefulSource``, its state.

        With several ranks it is a collective: every rank calls it, and every rank gets all groups.
        """
        ...


@runtime_checkable
class StatefulSource(Source, Protocol):
    """A source whose steps depend on the steps before. Its state is in every checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """Numbers and texts in dicts and lists; the same on all ranks. Empty where there is nothing to save,
        which is then not loaded either.
        """
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class Rollouts:
    """Episodes of the policy itself, ``group_size`` of each task.

    Attributes:
        schedule_of: for a step, where its schedule is written, and the one to follow.
        replays: the run's successful episodes, to which those of each step are added. Each episode is shown
            the latest ``replay_in_prompt`` of the steps before.
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

    def collect(self, step: int) -> Collection:
        tasks, seed = self.order.at(step), derive(self.seed, "rollout", step)
        schedule = self.schedule_of(step) if self.schedule_of else None
        number, replays = self.replay_in_prompt, self.replays
        collection = self.collector.collect(
            tasks,
            self.group_size,
            self.sampling,
            self.rewards,
            seed,
            self.ranks.share(range(len(tasks))),
            schedule.followed if schedule else None,
            ReplayWindow(replays.latest(), number) if replays is not None and number else None,
        )
        if schedule is not None:
            schedule.write(collection.schedule)
        collection = gather_collection(self.ranks, collection, tasks)
        if isinstance(self.order, SuccessOrder):
            self.order.learn(collection.groups)
        if replays is not None:
            replays.add(collection.groups, self.collector.engine.chat)
        return collection

    def state_dict(self) -> dict[str, Any]:
        return self.order.state_dict() if isinstance(self.order, SuccessOrder) else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if isinstance(self.order, SuccessOrder):
            self.order.load_state_dict(state)


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


@dataclass(frozen=True)
class Pairs:
    """The chosen and the rejected reply of each task, in this order: groups of two trajectories."""

    environment: Preferences
    order: Order
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
