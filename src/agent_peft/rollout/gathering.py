"""Joining the collections of all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agent_peft.policies.engine.base import EngineStatistics
from agent_peft.ranks import Ranks
from agent_peft.rollout.collector import NOTHING, Collection
from agent_peft.types import Group, Message, Outcome, StopReason, Task, Trajectory, Turn


def gather_collection(ranks: Ranks, mine: Collection, tasks: Sequence[Task]) -> Collection:
    """One collection from those of all ranks, in the order of ``tasks``. It is a collective, and its result
    is the same on every rank.
    """
    if ranks.world_size == 1:
        return mine
    groups: dict[int, Group] = {}
    failures, defects, statistics = 0, 0, NOTHING
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
        "turns": [vars(turn) for turn in trajectory.turns],
        "messages": [vars(message) for message in trajectory.messages],
    }


def trajectory_from_json(task: Task, content: Mapping[str, Any]) -> Trajectory:
    """Take back what ``trajectory_to_json`` gave."""
    turns = tuple(Turn(**_tuples(turn)) for turn in content["turns"])
    messages = tuple(Message(**message) for message in content["messages"])
    facts = {"outcome": Outcome(content["outcome"]), "stop_reason": StopReason(content["stop_reason"])}
    return Trajectory(**{**_tuples(content), **facts, "task": task, "turns": turns, "messages": messages})


def _tuples(content: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in content.items()}
