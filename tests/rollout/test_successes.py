"""The policy's own successes: a supervised stage on those of each step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from agent_peft.batch import collate
from agent_peft.environments.arithmetic import ALPHABET
from agent_peft.environments.base import Environment, Episode
from agent_peft.policies.config import ScratchConfig
from agent_peft.policies.loading import load_policy
from agent_peft.policies.policy import Policy
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.rollout.collector import Collection
from agent_peft.rollout.sources import Successes
from agent_peft.training.stage import StageConfig
from agent_peft.training.trainer import Trainer
from agent_peft.types import Message, Outcome, StepResult, StopReason, Task, Trajectory, Turn

ARCHITECTURE = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


class Even(Environment):
    """An action is correct if the code of its first character is even; ``hopeless`` makes all wrong."""

    def __init__(self, number: int = 4, hopeless: bool = False) -> None:
        self.number, self.hopeless = number, hopeless

    @property
    def tasks(self) -> list[Task]:
        return [Task(f"t{number}", ("even",), {"prompt": f"{number}="}) for number in range(self.number)]

    def episode(self, task: Task, seed: int) -> Episode:
        return EvenEpisode(task.content["prompt"], self.hopeless)


class EvenEpisode(Episode):
    def __init__(self, prompt: str, hopeless: bool) -> None:
        self.prompt, self.hopeless = prompt, hopeless

    def start(self) -> list[Message]:
        return [Message("user", self.prompt)]

    def step(self, action: str) -> StepResult:
        correct = not self.hopeless and ord(action[:1] or "1") % 2 == 0
        outcome = Outcome.CORRECT if correct else Outcome.INCORRECT
        return StepResult("", done=True, outcome=outcome, stop_reason=StopReason.FINISHED)

    def close(self) -> None:
        pass


def policy(**keys: Any) -> Policy:
    return load_policy(ScratchConfig(architecture=ARCHITECTURE, alphabet=ALPHABET, device="cpu", **keys), 0)


def stage(algorithm: Any, **keys: Any) -> StageConfig:
    more = {"tasks_per_step": 4, "group_size": 6, "sampling": {"max_new_tokens": 2}, "steps": 4}
    return StageConfig.model_validate(
        {"algorithm": algorithm, "optimizer": {"learning_rate": 1e-2}, **more, **keys}
    )


def episode(action: int, outcome: Outcome = Outcome.CORRECT, task: str = "t") -> Trajectory:
    return Trajectory(Task(task), (Turn((1,), (action,), (-0.5,)),), outcome=outcome, rewards=(1.0,))


def same_weights(one: Policy, two: Policy) -> bool:
    return all(map(torch.equal, one.trainable_parameters(), two.trainable_parameters()))


# -- rejection sampling --------------------------------------------------------------------------------------


def test_a_supervised_stage_learns_from_the_distinct_successes_of_the_policy():
    acting = policy()
    trainer = Trainer(acting, Even(), stage("sft", learn_from="successes", steps=1))
    assert isinstance(trainer.source, Successes)
    step = next(iter(trainer))
    sampled = Trainer(policy(), Even(), stage("grpo", steps=1)).source.collect(0)
    assert step.collection.groups == sampled.groups, "it samples as a policy gradient does"
    kept = [t for group in step.collection.kept for t in group.trajectories]
    correct = [t for t in step.trajectories if t.outcome is Outcome.CORRECT]
    actions = {(t.task.id, t.turns[0].action) for t in correct}
    assert {(t.task.id, t.turns[0].action) for t in kept} == actions
    assert 0 < len(kept) == len(actions) < len(correct) < len(step.trajectories), "some are twice, some wrong"
    assert step.metrics["successes"] == len(kept)
    assert step.metrics["episodes_dropped"] == len(step.trajectories) - len(kept)
    assert step.metrics["success"] == len(correct) / len(step.trajectories)
    assert step.token_values.advantages is None and step.token_values.logprobs is None

    # the loss is the cross-entropy of the kept ones alone
    with torch.no_grad():
        output = policy().forward(collate(kept, range(len(kept))), SamplingConfig())
    tokens = sum(t.num_action_tokens for t in kept)
    assert step.metrics["loss"] == pytest.approx(-float(output.logprobs.sum()) / tokens, rel=1e-5)

    class Kept:
        def collect(self, number: int) -> Collection:
            return Collection(step.collection.kept)

    other = policy()
    list(Trainer(other, Even(), stage("sft", group_size=1, steps=1), source=Kept()))
    assert same_weights(acting, other)


def test_the_loss_is_of_the_whole_distribution_however_it_was_sampled():
    keys: dict[str, Any] = {"learn_from": "successes", "steps": 1}
    sampling = {"max_new_tokens": 2, "temperature": 0.5, "top_k": 8}
    step = next(iter(Trainer(policy(), Even(), stage("sft", **keys, sampling=sampling))))
    kept = [t for group in step.collection.kept for t in group.trajectories]
    with torch.no_grad():
        output = policy().forward(collate(kept, range(len(kept))), SamplingConfig())
    tokens = sum(t.num_action_tokens for t in kept)
    assert step.metrics["loss"] == pytest.approx(-float(output.logprobs.sum()) / tokens, rel=1e-5)
    greedy = {"max_new_tokens": 2, "temperature": 0.0}
    list(Trainer(policy(), Even(), stage("sft", **keys, sampling=greedy)))


def test_it_raises_the_success():
    learning = stage("sft", learn_from="successes", steps=10, optimizer={"learning_rate": 0.05})
    rates = [step.metrics["success"] for step in Trainer(policy(), Even(), learning)]
    assert sum(rates[-3:]) / 3 > sum(rates[:3]) / 3 + 0.2


def test_without_a_success_nothing_is_learnt_and_a_warning_says_so(caplog):
    acting = policy()
    steps = list(Trainer(acting, Even(hopeless=True), stage("sft", learn_from="successes", steps=10)))
    assert same_weights(acting, policy())
    for step in steps:
        assert step.metrics["updates_skipped"] == 1 and step.metrics["successes"] == 0
        assert step.metrics["groups_with_signal"] == 0 and "loss" not in step.metrics
        assert step.metrics["episodes"] == step.metrics["episodes_dropped"] == 24
    assert "10 steps in a row without a signal" in caplog.text


def test_the_names_of_its_metrics_are_known():
    learning = stage("sft", learn_from="successes")
    names = {name for step in Trainer(policy(), Even(), learning) for name in step.metrics}
    assert names == set(learning.metrics) - {"score"}


def test_its_keys_are_those_of_a_stage_that_samples():
    assert (
        StageConfig.model_validate({"algorithm": "sft", "steps": 1, "learn_from": "successes"}).group_size
        == 8
    )
    assert stage("sft", learn_from="successes", mask_cut_actions=True, replay_in_prompt=2).samples
    with pytest.raises(ValueError, match="group_size has no effect on sft, which learns from demonstrations"):
        stage("sft")
    with pytest.raises(ValueError, match="learn_from has no effect on grpo, which learns from the policy's"):
        stage("grpo", learn_from="successes")


# -- after a kill --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "keys",
    [
        {"algorithm": "grpo", "refill": 1},
        {"algorithm": "sft", "learn_from": "successes"},
    ],
)
def test_a_stage_goes_on_to_the_bit(keys, tmp_path):
    """From the files of a checkpoint."""
    whole = Trainer(policy(), Even(), stage(**keys, steps=5))
    expected = []
    for step in whole:
        expected.append(step)
        if step.number == 2:
            whole.save(tmp_path)
    resumed = Trainer(policy(), Even(), stage(**keys, steps=5))
    resumed.load(tmp_path)
    found = list(resumed)
    assert [s.number for s in found] == [3, 4]
    assert [s.collection.groups for s in found] == [s.collection.groups for s in expected[3:]]
    assert [s.metrics for s in found] == [s.metrics for s in expected[3:]]
    assert same_weights(whole.policy, resumed.policy)
