"""The sources of a step's trajectories, and a trainer that knows none of them by name."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import pytest
import torch

from agent_peft.algorithms import Algorithm, AlgorithmConfig
from agent_peft.environments.arithmetic import ALPHABET, Arithmetic, ArithmeticConfig
from agent_peft.environments.preferences import Preferences, PreferencesConfig
from agent_peft.policies.config import ScratchConfig
from agent_peft.policies.engine import load_sampler
from agent_peft.policies.loading import load_policy
from agent_peft.policies.policy import Policy
from agent_peft.ranks import ALONE
from agent_peft.rollout import pairs
from agent_peft.rollout.collector import Collection
from agent_peft.rollout.demonstrations import demonstrate
from agent_peft.rollout.rewards import RewardConfig
from agent_peft.rollout.sources import Demonstrations, Rollouts
from agent_peft.rollout.task_order import TaskOrder
from agent_peft.training.stage import StageConfig
from agent_peft.training.trainer import Trainer
from agent_peft.types import Group, Outcome, Task

TASKS = Arithmetic(ArithmeticConfig(digits=1, num_tasks=10))
SCRATCH = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}


def policy() -> Policy:
    return load_policy(ScratchConfig(architecture=SCRATCH, alphabet=ALPHABET, device="cpu"), seed=0)


def stage(algorithm, **keys) -> StageConfig:
    more = {"tasks_per_step": 4, "sampling": {"max_new_tokens": 3}, "optimizer": {"learning_rate": 1e-2}}
    return StageConfig.model_validate({"algorithm": algorithm, "steps": 2, **more, **keys})


class Pairs(Algorithm):
    """Odds of the first trajectory of a pair over the second one; a pair must be whole."""

    kind = "pairs"
    on_policy = False
    learns_at_zero_advantage = True
    keeps_groups_whole = True
    metrics = ("margin",)

    def weigh(self, minibatch):
        pairs = minibatch.groups.unique()
        return replace(minibatch, weights=minibatch.action_mask.float()), torch.tensor(float(len(pairs)))

    def loss(self, output, microbatch):
        assert all(len(rows) == 2 for rows in microbatch.rows_by_group().values()), "a pair was split"
        totals = (output.logprobs * microbatch.action_mask).sum(1)
        scale = microbatch.weights.max()  # 1 / the number of pairs
        rows = list(microbatch.rows_by_group().values())
        margins = torch.stack([totals[first] - totals[second] for first, second in rows])
        loss = -scale * torch.nn.functional.logsigmoid(margins).sum()
        return loss, {"weight": scale * len(rows), "margin": scale * margins.detach().sum()}


class PairsConfig(AlgorithmConfig):
    kind: str = "pairs"

    def build(self):
        return Pairs()


@dataclass(frozen=True)
class PairSource:
    """A demonstration, and the one of another task as if it were the worse answer."""

    policy: Policy
    order: TaskOrder

    def collect(self, step: int) -> Collection:
        groups = []
        for task in self.order.at(step):
            good = demonstrate(TASKS, task, self.policy.chat, RewardConfig(), seed=0)
            turn = good.turns[0]
            bad = replace(good, turns=(replace(turn, action=turn.action[::-1]),))
            groups.append(Group(task, [good, bad]))
        return Collection(groups)


def test_pairs_from_a_source_of_ones_own_are_learnt_and_never_split():
    curves = []
    for tokens in (1000, 1):  # all in one microbatch; each pair is larger than the budget
        acting = policy()
        source = PairSource(acting, TaskOrder(TASKS.tasks, 10, seed=0))
        keys = {"microbatch_tokens": tokens, "group_size": 1, "steps": 4, "tasks_per_step": 10}
        trainer = Trainer(acting, TASKS, stage(PairsConfig(), **keys), source=source)
        curves.append([step.metrics for step in trainer])
    whole, cut = curves
    assert [m["margin"] for m in whole] == pytest.approx([m["margin"] for m in cut], abs=1e-4)
    assert whole[-1]["margin"] > whole[0]["margin"] and whole[-1]["loss"] < whole[0]["loss"]


def test_the_pairs_of_a_table_are_learnt(tmp_path):
    rows = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": str(n)} for n in range(8)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    environment = Preferences(PreferencesConfig(tasks=tmp_path / "pairs.jsonl"))
    acting = policy()
    order = TaskOrder(environment.tasks, 4, seed=0)
    source = pairs.Pairs(environment, order, acting.chat, RewardConfig(), 0, ALONE)
    groups = source.collect(3).groups
    assert groups == source.collect(3).groups
    assert [group.task for group in groups] == order.at(3)
    for group in groups:
        chosen, rejected = group.trajectories
        assert [t.messages[-1].content for t in group.trajectories] == [
            group.task.content["chosen"],
            group.task.content["rejected"],
        ]
        assert (chosen.outcome, rejected.outcome) == (Outcome.CORRECT, Outcome.INCORRECT)
        assert chosen.turns[0].observation == rejected.turns[0].observation
        assert chosen.reward > rejected.reward
    keys = {"group_size": 1, "steps": 8, "tasks_per_step": 4}
    trainer = Trainer(acting, environment, stage(PairsConfig(), **keys), source=source)
    margins = [step.metrics["margin"] for step in trainer]
    assert margins[-1] > margins[0]


def test_the_trainer_takes_its_source_from_what_the_algorithm_learns_from():
    assert isinstance(Trainer(policy(), TASKS, stage("rloo")).source, Rollouts)
    assert isinstance(Trainer(policy(), TASKS, stage("sft")).source, Demonstrations)


@pytest.mark.parametrize("algorithm", ["rloo", "sft"])
def test_a_source_is_a_function_of_the_step(algorithm):
    """Asked for a later step first, and twice, it gives the same."""
    acting = policy()
    one, two = (Trainer(acting, TASKS, stage(algorithm)).source for _ in range(2))
    assert one.collect(3).groups == one.collect(3).groups == two.collect(3).groups
    assert one.collect(0).groups == two.collect(0).groups != one.collect(3).groups


def test_a_sampler_of_ones_own_is_used():
    acting = policy()
    sampler, calls = load_sampler(acting), []

    class Watched:
        chat = sampler.chat

        def generate(self, *arguments, **more):
            calls.append("generate")
            return sampler.generate(*arguments, **more)

        def score(self, *arguments, **more):
            calls.append("score")
            return sampler.score(*arguments, **more)

    steps = list(Trainer(acting, TASKS, stage("reinforce"), Watched()))
    plain = list(Trainer(policy(), TASKS, stage("reinforce")))
    assert {"generate", "score"} == set(calls)
    assert [step.metrics for step in steps] == [step.metrics for step in plain]
    assert len(steps[0].trajectories) == 4 * 8
    assert steps[0].trajectories[8] is steps[0].collection.groups[1].trajectories[0]


def test_an_order_is_a_function_of_the_step():
    tasks = [Task(str(number)) for number in range(10)]
    order, other = TaskOrder(tasks, 4, seed=0), TaskOrder(tasks, 4, seed=0)
    later = [task.id for task in order.at(7)]
    assert [task.id for task in other.at(0)] == [task.id for task in order.at(0)]
    assert [task.id for task in other.at(7)] == later
