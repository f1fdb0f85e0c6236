"""The metrics of a step, their names, and what the trainer computes for each token. The names are known
before a stage runs, so that a configuration can be checked against them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from itertools import accumulate, pairwise

from agent_peft.algorithms import Algorithm
from agent_peft.batch import Batch
from agent_peft.lazy_torch import Tensor, torch
from agent_peft.ranks import EXTREMES, Ranks, merged
from agent_peft.rollout.collector import Collection
from agent_peft.rollout.sources import is_constant
from agent_peft.types import Group, Trajectory

logger = logging.getLogger(__name__)

NO_SIGNAL_STEPS = 10  # steps in a row without a signal, after which there is a warning
COUNTS = ("nonfinite_updates",)  # summed over the updates of a step; all others are averaged

# -- names: by the code that gives them. A test compares them with the metrics of real steps

SAMPLED = ("score", "reward", "success", "zero_variance_groups")  # of the policy's own episodes
EPISODE_METRICS = (
    "episodes",
    "turns",
    "action_tokens",
    "invalid_actions",
    "cut_actions",
    "truncated",
    "out_of_turns",
    "infrastructure_failures",
    "crashed",
    "defects",
    "row_halvings",
)
# of Trainer.update
UPDATE_METRICS = ("loss", "gradient_norm", "learning_rate", "updates_skipped", "nonfinite_updates")
LOOP_METRICS = ("epochs_done", "microbatch_halvings")  # Trainer.__iter__
# Trainer.observe, checks.Mismatch
SAMPLER_METRICS = ("groups_with_signal", "mismatch", "mismatch_max", "mismatch_k3", "surprisal")
LAG_METRICS = ("staleness",)  # Trainer.update
THINKING_METRICS = ("thoughts_cut",)  # describe, with sampling.max_thinking_tokens
SFT_METRICS = ("demonstrations_incorrect", "demonstrations_unsayable")  # DemonstrationCheck.count

# metric -> format of the one line about a step, in their order
OF_DEMONSTRATIONS = {"loss": ".4f", "accuracy": ".0%", "margin": ".3g", "gradient_norm": ".3g"}
# no loss: on policy its value is about 0 whether the agent does well or badly
OF_EPISODES = {"reward": ".3f", "success": ".1%", "groups_with_signal": ".0%", "gradient_norm": ".3g"}


def metrics_of(
    algorithm: Algorithm, source: Sequence[str] | None = None, samples: bool | None = None
) -> tuple[str, ...]:
    """The names of all metrics that a step of a stage may have. A step without an update has no loss, and no
    other metric that an update measures.

    Args:
        source: the metrics of the stage's source; None takes those of the demonstrations where the algorithm
            learns from them.
        samples: whether the stage learns from episodes of the policy; None: if the algorithm demands it.

    >>> from agent_peft.algorithms import SftConfig
    >>> "surprisal" in metrics_of(SftConfig().facts)
    True
    """
    return (
        *(SAMPLED if samples or (samples is None and algorithm.on_policy) else ()),
        *EPISODE_METRICS,
        *UPDATE_METRICS,
        *LOOP_METRICS,
        *(SAMPLER_METRICS if algorithm.on_policy else SFT_METRICS if source is None else ()),
        *(source or ()),
        *algorithm.metrics,
    )


class SignalCounter:
    """Counts the steps in a row without a signal, that is, without any advantage that is not zero, and warns
    of ``NO_SIGNAL_STEPS`` of them.
    """

    def __init__(self, warns: bool = True) -> None:
        self.warns, self.barren = warns, 0

    def count(self, share: float) -> dict[str, float]:
        """The metric of a step."""
        self.barren = 0 if share else self.barren + 1
        if self.barren == NO_SIGNAL_STEPS and self.warns:
            logger.warning(
                "%d steps in a row without a signal: no episode had another reward than those it is compared "
                "with, so nothing is learned; read the trajectories, then train on demonstrations first "
                "(sft), take easier tasks, or reward partial success (rewards)",
                NO_SIGNAL_STEPS,
            )
        return {"groups_with_signal": share}


# -- numbers -------------------------------------------------------------------------------------------------


def describe(
    groups: list[Group], collection: Collection, sampled: bool = True, thinking: bool = False
) -> dict[str, float]:
    """The metrics of a step's trajectories. Most are means or shares of trajectories.
    ``zero_variance_groups`` is a share of groups; ``invalid_actions``, ``cut_actions`` (ended by a token
    limit) and ``thoughts_cut`` are shares of turns. Failures are counts.

    Args:
        sampled: whether the policy has made the trajectories. The rewards of demonstrations do not measure
            it, so they are left out.
        thinking: whether thoughts have a limit.
    """
    trajectories: list[Trajectory] = [t for group in groups for t in group.trajectories]
    turns = sum(len(t.turns) for t in trajectories)

    def share(count: float) -> float:
        return count / len(trajectories)

    graded = any(t.score is not None for t in trajectories)
    rewarded = {
        **({"score": share(sum(t.score or 0.0 for t in trajectories))} if graded else {}),
        "reward": sum(t.reward for t in trajectories) / len(trajectories),
        "success": share(sum(t.outcome == "correct" for t in trajectories)),
        "zero_variance_groups": sum(len(g.trajectories) > 1 and is_constant(g) for g in groups) / len(groups),
    }
    return {
        **(rewarded if sampled else {}),
        "episodes": float(len(trajectories)),
        "turns": share(turns),
        "action_tokens": share(sum(t.num_action_tokens for t in trajectories)),
        "invalid_actions": sum(t.num_invalid for t in trajectories) / max(turns, 1),
        "cut_actions": sum(t.num_cut for t in trajectories) / max(turns, 1),
        **(
            {"thoughts_cut": sum(t.num_thoughts_cut for t in trajectories) / max(turns, 1)}
            if thinking
            else {}
        ),
        "truncated": share(sum(t.stop_reason == "token_limit" for t in trajectories)),
        "out_of_turns": share(sum(t.stop_reason == "turn_limit" for t in trajectories)),
        "infrastructure_failures": float(collection.failures),
        "crashed": float(collection.crashed),
        "defects": float(collection.defects),
        "row_halvings": float(collection.statistics.row_halvings),
    }


def surprisal(groups: Sequence[Group]) -> float:
    """The mean of -log p in nats over all tokens that the policy sampled in this step, by the sampler's
    log-probabilities. On policy it estimates the entropy.

    >>> from agent_peft.types import Task, Turn
    >>> episode = Trajectory(Task("t"), (Turn((1,), (2, 3), (-0.5, -0.25)),))
    >>> surprisal([Group(Task("t"), [episode])])
    0.375
    """
    turns = [turn for group in groups for t in group.trajectories for turn in t.turns]
    drawn = sum(len(turn.action) - len(turn.forced) for turn in turns)
    return -sum(sum(turn.logprobs) for turn in turns) / max(drawn, 1)


def headline(metrics: Mapping[str, float]) -> str:
    """The metrics to watch, on one line.

    >>> headline({"reward": 0.25, "success": 0.5, "loss": 0.001})
    'reward 0.250  success 50.0%'
    >>> headline({"episodes": 8.0, "loss": 1.25})
    'loss 1.2500'
    """
    formats = OF_EPISODES if "reward" in metrics else OF_DEMONSTRATIONS
    return "  ".join(
        f"{name.replace('_', ' ')} {metrics[name]:{form}}"
        for name, form in formats.items()
        if name in metrics
    )


def mean_of(records: list[Mapping[str, float]]) -> dict[str, float]:
    """Each metric's mean over the updates of a step that report it. Those of ``COUNTS`` are summed, and of
    extremes (…_min, …_max) the extreme is taken.
    """
    names = dict.fromkeys(name for record in records for name in record)
    values = {name: [record[name] for record in records if name in record] for name in names}
    return {
        name: reduce(partial(merged, name), numbers)
        if name.endswith(EXTREMES)
        else sum(numbers) / (1 if name in COUNTS else len(numbers))
        for name, numbers in values.items()
    }


@dataclass(frozen=True)
class TokenValues:
    """Numbers for the N tokens of a step's trajectories, which lie one after another.

    Attributes:
        advantages: (N,) fp32, zero where nothing was sampled; NaN where nothing is learned from: in
            trajectories that were dropped, and in a group that was left out, because failing environments
            had left too few episodes in it. None where the algorithm sets none.
        logprobs: (N,) fp32, the log-probabilities (nats) of the policy that acted, as the trainer computes
            them before the step's first update, zero where nothing was sampled; NaN in trajectories without a
            forward before that update: those without a gradient, and those of later minibatches. With a
            lag, they are those of the policy that the step begins with. None for demonstrations.
    """

    advantages: Tensor | None
    logprobs: Tensor | None


@dataclass(frozen=True)
class Step:
    """The result of one trip through the main loop."""

    number: int  # of the stage, from 0
    collection: Collection
    metrics: dict[str, float]
    token_values: TokenValues | None = field(default=None, kw_only=True)  # in the order of ``trajectories``

    @property
    def trajectories(self) -> list[Trajectory]:
        """All trajectories of the step, in the order of their groups."""
        return [trajectory for group in self.collection.groups for trajectory in group.trajectories]

    @property
    def summary(self) -> str:
        """The metrics to watch, on one line."""
        return headline(self.metrics)


def gather_values(
    ranks: Ranks,
    collected: Sequence[Group],
    compared: Sequence[Group],
    batch: Batch,
    logprobs: Tensor | None,
) -> TokenValues:
    """The values of all ranks' tokens, in the order of ``collected``. It is a collective.

    Args:
        compared: those of them that the step learns from, by the numbers in ``batch.groups``.
        logprobs: (B, T) of this rank's part; None for demonstrations.
    """
    lengths = [len(t.tokens) for group in collected for t in group.trajectories]
    starts = [0, *accumulate(lengths)]
    trajectories = (t for group in collected for t in group.trajectories)
    spans = {id(t): slice(*span) for t, span in zip(trajectories, pairwise(starts), strict=True)}
    real = torch.arange(batch.tokens.shape[1]) < batch.lengths[:, None]

    def spread(values: Tensor) -> Tensor:
        flat = torch.full((starts[-1],), math.nan)
        for trajectory in (t for group in compared for t in group.trajectories):
            flat[spans[id(trajectory)]] = 0.0
        for number, rows in batch.rows_by_group().items():
            if number < 0:  # only measured
                continue
            for trajectory, row in zip(compared[number].trajectories, rows, strict=True):
                # 0.0 + -0.0 is 0.0, on any number of ranks
                flat[spans[id(trajectory)]] += values[row][real[row]]
        return ranks.sum(flat)

    scored = None if logprobs is None else spread(logprobs)
    advantages = spread(batch.advantages)
    return TokenValues(
        advantages if scored is not None or bool(advantages.nan_to_num().any()) else None, scored
    )
