"""Groups without a signal, and others in their place: the dynamic sampling of DAPO (Yu et al., 2025, section
3.2, https://arxiv.org/abs/2503.14476).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import torch

from agent_peft.rollout.collector import Collection
from agent_peft.types import Group, Task

METRICS = ("groups_refilled", "episodes_dropped")  # of ``drop_constant``


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
