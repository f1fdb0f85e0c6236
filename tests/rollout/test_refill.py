"""Constant groups are dropped, and others are collected in their place."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from agent_peft.environments.arithmetic import ALPHABET
from agent_peft.environments.base import Environment, Episode
from agent_peft.policies.config import ScratchConfig
from agent_peft.policies.engine import load_sampler, schedule
from agent_peft.policies.engine.base import Sampler
from agent_peft.policies.loading import load_policy
from agent_peft.policies.policy import Policy
from agent_peft.rollout.collector import Collection, CollectionSchedule
from agent_peft.rollout.sources import Rollouts, is_constant, other_tasks
from agent_peft.rollout.task_order import BySkillConfig, SkillOrder
from agent_peft.training.stage import StageConfig
from agent_peft.training.step_metrics import metrics_of
from agent_peft.training.trainer import Trainer
from agent_peft.types import (
    AgentPeftError,
    Group,
    InfrastructureError,
    Message,
    Outcome,
    StepResult,
    StopReason,
    Task,
    Trajectory,
)

ARCHITECTURE = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


class Sorts(Environment):
    """Tasks that every action solves ("easy"), that none solves ("hard"), and that most actions may or may
    not solve ("mixed"), in turns.
    """

    def __init__(self, sorts: Sequence[str] = ("easy", "hard", "mixed"), number: int = 24) -> None:
        self.sorts, self.number, self.delay = sorts, number, 0.0

    @property
    def tasks(self) -> list[Task]:
        sorts = [self.sorts[number % len(self.sorts)] for number in range(self.number)]
        return [Task(f"{sort} {number}", (sort,)) for number, sort in enumerate(sorts)]

    def episode(self, task: Task, seed: int) -> Episode:
        return SortsEpisode(task.skills[0], self.delay)


class SortsEpisode(Episode):
    def __init__(self, sort: str, delay: float) -> None:
        self.sort, self.delay = sort, delay

    def start(self) -> Sequence[Message]:
        time.sleep(random.random() * self.delay)
        return (Message("user", "1="),)

    def step(self, action: str) -> StepResult:
        time.sleep(random.random() * self.delay)
        correct = self.sort == "easy" or (self.sort == "mixed" and ord(action[:1] or "0") % 2 == 0)
        outcome = Outcome.CORRECT if correct else Outcome.INCORRECT
        return StepResult("", done=True, outcome=outcome, stop_reason=StopReason.FINISHED)

    def close(self) -> None:
        pass


@pytest.fixture
def acting() -> Policy:
    return load_policy(ScratchConfig(architecture=ARCHITECTURE, alphabet=ALPHABET, device="cpu"), 0)


def stage(algorithm: Any = "grpo", **keys: Any) -> StageConfig:
    more = {"tasks_per_step": 6, "group_size": 6, "sampling": {"max_new_tokens": 2}, "steps": 2}
    return StageConfig.model_validate(
        {"algorithm": algorithm, "optimizer": {"learning_rate": 1e-2}, **more, **keys}
    )


class Counted:
    """A sampler that notes how many conversations each call has."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler, self.chat, self.calls = sampler, sampler.chat, list[int]()
        self.score = sampler.score

    def generate(self, conversations: Any, *more: Any) -> Any:
        self.calls.append(len(conversations))
        return self.sampler.generate(conversations, *more)


def source(acting: Policy, environment: Environment | None = None, **keys: Any) -> tuple[Rollouts, list[int]]:
    sampler = Counted(load_sampler(acting))
    trainer = Trainer(acting, environment or Sorts(), stage(**keys), sampler)
    assert isinstance(trainer.source, Rollouts)
    return trainer.source, sampler.calls


def ids(groups: Sequence[Group]) -> list[str]:
    return [group.task.id for group in groups]


def test_constant_groups_are_dropped_and_only_as_many_others_are_collected(acting):
    refilled, calls = source(acting, refill=3)
    plain = source(acting)[0].collect(0)
    collection = refilled.collect(0)
    assert collection.groups[:6] == plain.groups and plain.dropped == () and plain.kept == plain.groups
    constant = [group for group in collection.groups if len({t.reward for t in group.trajectories}) == 1]
    assert list(collection.dropped) == [t for group in constant for t in group.trajectories]
    assert 0 < len(constant) < len(collection.groups)
    assert collection.kept == [group for group in collection.groups if group not in constant]
    # each round has as many groups as were missing before it
    groups, missing = list(collection.groups), 6
    for conversations in calls:
        assert conversations == 6 * missing > 0
        missing -= sum(not is_constant(group) for group in groups[:missing])
        groups = groups[conversations // 6 :]
    assert groups == [] and 2 <= len(calls) <= 4 and (missing == 0 or len(calls) == 4)
    assert len(collection.kept) == 6 - missing
    assert len(set(ids(collection.groups))) == len(collection.groups), "no task twice"
    assert collection.metrics == {
        "groups_refilled": sum(group in collection.kept for group in collection.groups[6:]),
        "episodes_dropped": 6 * len(constant),
    }
    assert collection.statistics.sampled == sum(
        t.num_action_tokens for group in collection.groups for t in group.trajectories
    )


def test_the_groups_are_a_function_of_seed_step_and_round(acting):
    one, two = source(acting, refill=2)[0], source(acting, refill=4)[0]
    first = one.collect(0)
    assert one.collect(1).groups != first.groups == one.collect(0).groups
    assert two.collect(0).groups[: len(first.groups)] == first.groups, "more rounds only add to it"
    seeds = [t.seed for group in first.groups for t in group.trajectories]
    assert len(set(seeds)) == len(seeds)


def test_after_the_last_round_the_step_goes_on_with_what_it_has(acting):
    environment = Sorts(("easy",) * 5 + ("mixed",))
    steps = list(Trainer(acting, environment, stage(refill=1, steps=3)))
    assert any(0 < len(step.collection.kept) < 6 for step in steps)
    for step in steps:
        assert len(step.collection.groups) == 12 - sum(not is_constant(g) for g in step.collection.groups[:6])
        assert step.metrics["groups_with_signal"] == (1 if step.metrics["updates_skipped"] == 0 else 0)


@pytest.mark.parametrize("minibatches", [1, 2])
def test_without_any_signal_nothing_is_learnt_and_nothing_fails(acting, minibatches):
    before = [parameter.clone() for parameter in acting.trainable_parameters()]
    grpo = {"kind": "grpo", "minibatches": minibatches}
    for step in Trainer(acting, Sorts(("easy", "hard")), stage(grpo, refill=2)):
        collection, metrics = step.collection, step.metrics
        assert len(collection.groups) == 18 and collection.kept == collection.groups[:minibatches]
        assert metrics["updates_skipped"] == 1 and metrics["groups_with_signal"] == 0
        assert metrics["groups_refilled"] == 0 and metrics["episodes_dropped"] == 6 * (18 - minibatches)
    assert all(map(torch.equal, acting.trainable_parameters(), before))


def test_the_metrics_of_episodes_are_of_all_that_were_collected(acting):
    """A share of the groups with a signal alone would be near a half, however good the policy is."""
    for step in Trainer(acting, Sorts(("easy", "easy", "mixed")), stage(refill=2)):
        everything = [t for group in step.collection.groups for t in group.trajectories]
        assert step.trajectories == everything and step.metrics["episodes"] == len(everything)
        assert step.metrics["success"] == sum(t.outcome == "correct" for t in everything) / len(everything)
        assert step.metrics["zero_variance_groups"] == pytest.approx(
            len(step.collection.dropped) / len(everything)
        )
        assert step.metrics["groups_with_signal"] == 1.0


def test_dropped_groups_have_no_part_in_the_update(acting):
    steps = Trainer(acting, Sorts(), stage(refill=2, steps=1))
    step = next(iter(steps))
    assert step.collection.dropped

    class Kept:
        def collect(self, step_number: int) -> Collection:
            return Collection(step.collection.kept)

    other = load_policy(ScratchConfig(architecture=ARCHITECTURE, alphabet=ALPHABET, device="cpu"), 0)
    alone = next(iter(Trainer(other, Sorts(), stage(steps=1), source=Kept())))
    assert all(map(torch.equal, acting.trainable_parameters(), other.trainable_parameters()))
    assert step.metrics["loss"] == alone.metrics["loss"]
    advantages = step.token_values.advantages
    lengths = [sum(len(t.tokens) for t in group.trajectories) for group in step.collection.groups]
    for group, part in zip(step.collection.groups, advantages.split(lengths), strict=True):
        assert bool(part.isnan().all()) == any(
            group.trajectories[0] is dropped for dropped in step.collection.dropped
        )


def test_the_names_of_the_metrics_are_known(acting):
    refilling = stage(refill=1, steps=3, until={"metric": "groups_refilled", "above": 99.0})
    names = {name for step in Trainer(acting, Sorts(), refilling) for name in step.metrics}
    assert names == set(refilling.metrics) - {"score"}
    assert set(refilling.metrics) - set(metrics_of(refilling.algorithm.facts)) == {
        "groups_refilled",
        "episodes_dropped",
    }
    with pytest.raises(ValueError, match=r"until\.metric: 'groups_refilled' is not a metric of this stage"):
        stage(until={"metric": "groups_refilled", "above": 1.0})


@pytest.mark.parametrize("kind", ["reinforce", "ppo", "sft"])
def test_it_is_refused_where_groups_are_not_compared(kind):
    size = {"group_size": 1} if kind == "sft" else {}
    with pytest.raises(ValueError, match=f"refill has no effect on {kind}, which does not compare"):
        stage(kind, refill=1, **size)


# -- from where the tasks come -------------------------------------------------------------------------------


def test_the_order_does_not_move(acting):
    plain, refilled = (
        [ids(step.collection.groups[:6]) for step in Trainer(acting, Sorts(), stage(refill=rounds, steps=4))]
        for rounds in (0, 3)
    )
    assert plain == refilled and len({task for step in plain for task in step}) == 24


def test_an_order_that_is_not_shuffled_gives_the_next_tasks(acting):
    collection = source(acting, refill=1, task_order="sequential")[0].collect(0)
    names = [task.id for task in Sorts().tasks]
    assert ids(collection.groups[:6]) == names[:6] and len(collection.groups) > 6
    assert set(ids(collection.groups[6:])) <= set(names[6:12])


def test_a_segment_of_one_skill_gives_tasks_of_that_skill():
    order = SkillOrder(Sorts().tasks, 2, 0, ("mixed", "hard"), steps=3)
    assert {task.skills for step in (0, 2) for task in order.pool(step)} == {("mixed",)}
    assert {task.skills for task in order.pool(3)} == {("hard",)} and len(order.pool(3)) == 8
    assert BySkillConfig(steps=3).settled(Sorts().tasks).skills == ("easy", "hard", "mixed")


def test_where_all_tasks_are_tried_they_are_tried_again(acting):
    """Their episodes are others."""
    refilled, calls = source(acting, Sorts(("mixed", "easy"), number=6), refill=2)
    collection = refilled.collect(0)
    assert len(calls) == 3 and len(collection.groups) > 6 and len(set(ids(collection.groups))) == 6


def test_what_counts_as_constant():
    def group(*rewards: float) -> Group:
        task = Task("t")
        return Group(task, [Trajectory(task, (), rewards=(reward,)) for reward in rewards])

    assert [is_constant(group(*rewards)) for rewards in ((1, 1, 1), (0, 1, 1), (0.5,), ())] == [
        True,
        False,
        True,
        True,
    ]
    assert is_constant(group(0.3, 0.1 + 0.2)), "one number in fp32, which a batch holds"
    assert not is_constant(group(float("nan"), 1.0))


# -- repeated to the bit -------------------------------------------------------------------------------------


def test_the_schedule_of_all_rounds_is_followed(acting, tmp_path, monkeypatch):
    for name in ("PATIENCE", "FIRST_PATIENCE"):
        monkeypatch.setattr(schedule, name, 0.0)
    environment, written = Sorts(), list[Any]()
    environment.delay = 0.05

    class Kept(CollectionSchedule):
        def write(self, calls: Any) -> None:
            written.append(tuple(calls))

    def collect(followed: Any) -> Collection:
        trainer = Trainer(
            acting,
            environment,
            stage(refill=2),
            schedule_of=lambda step: Kept(Path(tmp_path), {}, followed),
        )
        return trainer.source.collect(0)

    first = collect(None)
    assert len(written[0]) == 3 + 3 + 1 and all(written[0][place] for place in (0, 3, 6)), (
        "late in each round"
    )
    assert [t.turns for g in collect(written[0]).groups for t in g.trajectories] == [
        t.turns for g in first.groups for t in g.trajectories
    ]
    assert written[1] == written[0]


def test_a_step_without_episodes_is_one_line(acting):
    class Gone(Sorts):
        def episode(self, task: Task, seed: int) -> Episode:
            raise InfrastructureError("gone")

    with pytest.raises(AgentPeftError, match="no group of this step has 2 episodes left"):
        list(Trainer(acting, Gone(), stage(refill=2)))


def test_a_pool_that_holds_a_task_often_has_others():
    pool = [*[Task("a")] * 8, Task("b"), Task("c")]
    for seed in range(20):
        assert sorted(t.id for t in other_tasks(pool, [Task("a")], 2, random.Random(seed))) == ["b", "c"]
