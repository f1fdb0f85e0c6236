"""The policy's own successes of a step, to learn from."""

from __future__ import annotations

from dataclasses import replace

from agent_peft.rollout.collector import Collection
from agent_peft.types import Group, Outcome, Trajectory

METRICS = ("successes", "episodes_dropped")  # of ``only_successes``


def successes(group: Group) -> list[Trajectory]:
    """The correct episodes that were sampled for the group, each sequence of actions once."""
    correct = (t for t in group.trajectories if t.outcome is Outcome.CORRECT)
    return list({_actions(trajectory): trajectory for trajectory in correct}.values())


def only_successes(collection: Collection) -> Collection:
    """The collection with all but its successes dropped: the distinct ones of each task, as in rejection
    sampling fine-tuning (Yuan et al., 2023, section 3.3, https://arxiv.org/abs/2308.01825).
    """
    kept = {id(t) for group in collection.groups for t in successes(group)}
    dropped = [t for group in collection.groups for t in group.trajectories if id(t) not in kept]
    metrics = {"successes": float(len(kept)), "episodes_dropped": float(len(dropped))}
    return replace(collection, dropped=dropped, metrics=metrics)


def _actions(trajectory: Trajectory) -> tuple[tuple[int, ...], ...]:
    return tuple(turn.action for turn in trajectory.turns)
