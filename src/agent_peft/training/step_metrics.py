"""What a step says in numbers, and the names of these numbers: known before a stage runs, so that a
configuration can be judged by them.
"""

from __future__ import annotations

from collections.abc import Mapping

from agent_peft.algorithms import Algorithm
from agent_peft.rollout.collector import Collection
from agent_peft.types import Group, Trajectory

COUNTS = ("nonfinite_updates",)  # of the updates of a step; of all else the mean is shown

# -- names: those of each function below, or of the code that is named. A test compares them with what steps g

DESCRIBED = (
    "reward",
    "success",
    "episodes",
    "turns",
    "action_tokens",
    "invalid_actions",
    "cut_actions",
    "truncated",
    "out_of_turns",
    "zero_variance_groups",
    "infrastructure_failures",
    "crashed",
    "defects",
    "row_halvings",
)
UPDATED = ("loss", "gradient_norm", "learning_rate", "updates_skipped", "nonfinite_updates")  # Trainer.update
LOOPED = ("epochs_done", "microbatch_halvings")  # Trainer.__iter__
ROLLED_OUT = (
    "groups_with_signal",
    "mismatch",
    "mismatch_max",
    "mismatch_k3",
)  # Trainer.observe, trust.Mismatch
DEMONSTRATED = ("demonstrations_incorrect", "demonstrations_unsayable")  # DemonstrationCheck.count


def metrics_of(algorithm: Algorithm) -> tuple[str, ...]:
    """All metrics that a step of a stage may have. One without an update has no loss, and nothing else that
    is measured by one.

    >>> from agent_peft.algorithms import SftConfig, build_algorithm
    >>> "surprisal" in metrics_of(build_algorithm(SftConfig()))
    True
    """
    return (
        *DESCRIBED,
        *UPDATED,
        *LOOPED,
        *(ROLLED_OUT if algorithm.on_policy else DEMONSTRATED),
        *algorithm.metrics,
    )


# -- numbers -------------------------------------------------------------------------------------------------


def describe(groups: list[Group], collection: Collection) -> dict[str, float]:
    """A step's trajectories in numbers. Shares are of trajectories, but for ``zero_variance_groups``, of
    groups, and of turns for ``invalid_actions`` and ``cut_actions`` (ended by a limit on tokens). Failures
    are counted.
    """
    trajectories: list[Trajectory] = [t for group in groups for t in group.trajectories]
    turns = sum(len(t.turns) for t in trajectories)

    def share(count: int) -> float:
        return count / len(trajectories)

    return {
        "reward": sum(t.reward for t in trajectories) / len(trajectories),
        "success": share(sum(t.outcome == "correct" for t in trajectories)),
        "episodes": float(len(trajectories)),
        "turns": share(turns),
        "action_tokens": share(sum(t.num_action_tokens for t in trajectories)),
        "invalid_actions": sum(t.num_invalid for t in trajectories) / max(turns, 1),
        "cut_actions": sum(t.num_cut for t in trajectories) / max(turns, 1),
        "truncated": share(sum(t.stop_reason == "token_limit" for t in trajectories)),
        "out_of_turns": share(sum(t.stop_reason == "turn_limit" for t in trajectories)),
        "zero_variance_groups": sum(
            len({t.reward for t in g.trajectories}) == 1 for g in groups if len(g.trajectories) > 1
        )
        / len(groups),
        "infrastructure_failures": float(collection.failures),
        "crashed": float(collection.crashed),
        "defects": float(collection.defects),
        "row_halvings": float(collection.statistics.row_halvings),
    }


def mean_of(records: list[Mapping[str, float]]) -> dict[str, float]:
    """Means of what the updates of one step reported, each over those that reported it; ``COUNTS`` are
    added up.
    """
    names = dict.fromkeys(name for record in records for name in record)
    values = {name: [record[name] for record in records if name in record] for name in names}
    return {name: sum(found) / (1 if name in COUNTS else len(found)) for name, found in values.items()}
