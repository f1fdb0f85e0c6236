"""The policy's own successes, to learn from: those of a step alone, or those of earlier steps once more."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from random import Random

from pydantic import Field, model_validator

from agent_peft.config import Config
from agent_peft.rollout.collector import Collection
from agent_peft.rollout.gathering import trajectory_from_json, trajectory_to_json
from agent_peft.types import Group, Outcome, Task, Trajectory

METRICS = ("successes", "episodes_dropped")  # of ``only_successes``


def successes(group: Group) -> list[Trajectory]:
    """The correct episodes that were sampled for the group, each sequence of actions once."""
    correct = (t for t in group.trajectories if t.outcome is Outcome.CORRECT and not t.replayed)
    return list({_actions(trajectory): trajectory for trajectory in correct}.values())


def only_successes(collection: Collection) -> Collection:
    """The collection with all but its successes dropped: the distinct ones of each task, as in rejection
    sampling fine-tuning (Yuan et al., 2023, section 3.3, https://arxiv.org/abs/2308.01825).
    """
    kept = {id(t) for group in collection.groups for t in successes(group)}
    dropped = [t for group in collection.groups for t in group.trajectories if id(t) not in kept]
    metrics = {"successes": float(len(kept)), "episodes_dropped": float(len(dropped))}
    return replace(collection, dropped=dropped, metrics=metrics)


class ReplayConfig(Config):
    """Successes of earlier steps join the groups of their tasks. The advantage compares them with the new
    episodes, and the ratio to the log-probabilities that they were sampled with corrects for their age.
    """

    share: float = Field(
        gt=0, le=1, description="replayed episodes that join a group at most, as a share of group_size"
    )
    keep: int = Field(
        default=4,
        ge=1,
        description="successes of each task that are kept: the latest ones of the stage with different "
        "actions; they are in memory and in every checkpoint",
    )
    total: int = Field(
        default=4096,
        ge=1,
        description="successes of all tasks that are kept at most; the tasks whose last success is the "
        "oldest are forgotten first",
    )

    @model_validator(mode="after")
    def _keeps_those_of_a_task(self) -> ReplayConfig:
        if self.total < self.keep:
            raise ValueError(
                f"keep: {self.keep} of one task is more than total: {self.total} of all; raise total"
            )
        return self

    def episodes(self, group_size: int) -> int:
        """How many join a group.

        >>> ReplayConfig(share=0.3).episodes(10)
        3
        """
        return int(self.share * group_size + 1e-9)


class EarlierSuccesses:
    """The latest successes of the latest tasks, with the log-probabilities that they were sampled with. All
    ranks add the same groups.

    Args:
        keep: of each task.
        number: how many join a group at most.
        total: of all tasks, at least ``keep``.
    """

    def __init__(self, keep: int, number: int, total: int) -> None:
        self.keep, self.number, self.total = keep, number, total
        # by the task's id; oldest first, and so are the tasks, by their last success
        self._episodes: dict[str, list[Trajectory]] = {}

    def join(self, group: Group, random: Random) -> Group:
        """The group with successes of its task, drawn without replacement. A group that has no episode, or
        none but successes, stays as it is: nothing in it would be compared with them.
        """
        kept = self._episodes.get(group.task.id, [])
        if all(t.outcome is Outcome.CORRECT for t in group.trajectories) or not kept:
            return group
        drawn = random.sample(kept, min(self.number, len(kept)))
        replayed = (replace(t, task=group.task, replayed=True) for t in drawn)
        return Group(group.task, [*group.trajectories, *replayed])

    def add(self, groups: Sequence[Group]) -> None:
        for group in groups:
            if latest := successes(group):
                actions = {_actions(trajectory) for trajectory in latest}
                others = [t for t in self._episodes.pop(group.task.id, []) if _actions(t) not in actions]
                self._episodes[group.task.id] = [*others, *latest][-self.keep :]
        self._forget()

    def _forget(self) -> None:
        number = sum(map(len, self._episodes.values()))
        while number > self.total:
            number -= len(self._episodes.pop(next(iter(self._episodes))))

    def to_json(self) -> str:
        return json.dumps(
            {task: [trajectory_to_json(t) for t in kept] for task, kept in self._episodes.items()}
        )

    def from_json(self, text: str) -> None:
        """Take these episodes instead. Their tasks have ids alone, until they join a group."""
        self._episodes = {
            task: [trajectory_from_json(Task(task), content) for content in kept][-self.keep :]
            for task, kept in json.loads(text).items()
        }
        self._forget()


def _actions(trajectory: Trajectory) -> tuple[tuple[int, ...], ...]:
    return tuple(turn.action for turn in trajectory.turns)
