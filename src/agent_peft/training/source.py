"""The source that a stage learns from."""

from __future__ import annotations

from agent_peft.environments.base import Environment
from agent_peft.policies.engine.base import Sampler
from agent_peft.ranks import Ranks
from agent_peft.rollout.collector import Collector, ScheduleOf
from agent_peft.rollout.demonstrations import DemonstrationCheck
from agent_peft.rollout.pairs import EpisodePairs, Pairs, read_groups
from agent_peft.rollout.replays import Replays
from agent_peft.rollout.sources import Demonstrations, Rollouts, Source, Successes
from agent_peft.rollout.task_order import order_of
from agent_peft.training.stage import StageConfig


def build_source(
    stage: StageConfig,
    environment: Environment,
    sampler: Sampler,
    seed: int,
    ranks: Ranks,
    schedule_of: ScheduleOf | None = None,
    replays: Replays | None = None,
) -> Source:
    """Make the source of a stage: episodes of the policy, its successes, preferences, or demonstrations."""
    facts, chat, rewards = stage.algorithm.facts, sampler.chat, stage.rewards
    if facts.preferences is not None and stage.episodes_of is not None:
        return EpisodePairs(
            read_groups(stage.episodes_of, chat, rewards),
            per_step=stage.tasks_per_step,
            seed=seed,
            form=facts.preferences,
            place=f"episodes_of.run: {stage.episodes_of.run}",
        )
    order = order_of(stage.task_order, environment.tasks, stage.tasks_per_step, seed)
    if stage.samples:
        rollouts = Rollouts(
            collector=Collector(environment, sampler),
            order=order,
            group_size=stage.group_size,
            sampling=stage.sampling,
            rewards=rewards,
            seed=seed,
            ranks=ranks,
            schedule_of=schedule_of,
            replays=replays,
            replay_in_prompt=stage.replay_in_prompt,
            refill=stage.refill,
            fewest=facts.minibatches,
        )
        return rollouts if facts.on_policy else Successes(rollouts)
    replayed = (environment, order, chat, rewards, seed, ranks)
    if facts.preferences is not None:
        return Pairs(*replayed, form=facts.preferences)
    return Demonstrations(*replayed, check=DemonstrationCheck(chat, stage.sampling, warns=ranks.is_main))
