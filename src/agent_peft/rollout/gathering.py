"""What each rank collected, as one collection on all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agent_peft.policies.engine.base import EngineStatistics
from agent_peft.ranks import Ranks
from agent_peft.rollout.collector import NOTHING, Collection
from agent_peft.types import Group, Message, Outcome, StopReason, Task, Trajectory, Turn


def gather_collection(ranks: Ranks, mine: Collection, tasks: Sequence[Task]) -> Collection:
    """The groups that each rank collected of its share of ``tasks``, as one collection in the tasks'
    order: the same on all ranks.
    """
    if ranks.world == 1:
        return mine
    groups: dict[int, Group] = {}
    failures, defects, statistics = 0, 0, NOTHING
    written = {
        "groups": [[_written(t) for t in group.trajectories] for group in mine.groups],
        "failures": mine.failures,
        "defects": mine.defects,
        "statistics": vars(mine.statistics) | {"schedule": ()},  # each rank keeps its own
    }
    for rank, found in enumerate(ranks.gather_objects(written)):
        positions = Ranks(rank, ranks.world).share(range(len(tasks)))
        for position, trajectories in zip(positions, found["groups"], strict=True):
            groups[position] = Group(tasks[position], [_read(tasks[position], t) for t in trajectories])
        failures += found["failures"]
        defects += found["defects"]
        statistics += EngineStatistics(**found["statistics"])
    return Collection([groups[position] for position in range(len(tasks))], failures, statistics, defects)


def _written(trajectory: Trajectory) -> dict[str, Any]:
    """All but the task, which every rank has."""
    own = {name: value for name, value in vars(trajectory).items() if name != "task"}
    return {
        **own,
        "turns": [vars(turn) for turn in trajectory.turns],
        "messages": [vars(message) for message in trajectory.messages],
    }


def _read(task: Task, written: Mapping[str, Any]) -> Trajectory:
    turns = tuple(Turn(**_tuples(turn)) for turn in written["turns"])
    messages = tuple(Message(**message) for message in written["messages"])
    facts = {"outcome": Outcome(written["outcome"]), "stop_reason": StopReason(written["stop_reason"])}
    return Trajectory(**{**_tuples(written), **facts, "task": task, "turns": turns, "messages": messages})


def _tuples(written: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in written.items()}
