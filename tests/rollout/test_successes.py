"""The policy's own successes: a supervised stage on those of each step, and earlier ones in later steps."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from agent_peft.algorithms import GrpoConfig, PolicyGradient, RlooConfig, plain_return, score_function
from agent_peft.algorithms import sequence_mean as sequences
from agent_peft.batch import collate
from agent_peft.environments.arithmetic import ALPHABET
from agent_peft.environments.base import Environment, Episode
from agent_peft.policies.config import LoraSettings, ScratchConfig
from agent_peft.policies.loading import load_policy
from agent_peft.policies.policy import Policy
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.rollout.collector import Collection
from agent_peft.rollout.sources import Rollouts, Successes
from agent_peft.rollout.successes import EarlierSuccesses, ReplayConfig
from agent_peft.training.checks import TrustError
from agent_peft.training.stage import StageConfig
from agent_peft.training.step_metrics import describe
from agent_peft.training.trainer import Trainer
from agent_peft.types import Group, Message, Outcome, StepResult, StopReason, Task, Trajectory, Turn

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


# -- replayed successes --------------------------------------------------------------------------------------


def test_the_latest_different_successes_of_each_task_are_kept():
    earlier = EarlierSuccesses(keep=2, number=5, total=9)
    wrong = episode(9, Outcome.INCORRECT)
    earlier.add([Group(Task("t"), [episode(3), episode(4), episode(3), wrong])])
    earlier.add([Group(Task("t"), [episode(5)]), Group(Task("u"), [episode(7, task="u")])])
    earlier.add([Group(Task("t"), [replace(episode(6), replayed=True), wrong])])

    def joined(trajectory: Trajectory) -> list[int]:
        group = earlier.join(Group(trajectory.task, [trajectory]), Random(0))
        assert all(t.replayed for t in group.trajectories[1:])
        return sorted(t.turns[0].action[0] for t in group.trajectories[1:])

    assert joined(wrong) == [4, 5] and joined(replace(wrong, task=Task("u"))) == [7]
    assert joined(replace(wrong, task=Task("v"))) == []
    assert joined(episode(3)) == [], "nothing in the group would be compared with them"
    assert earlier.join(Group(Task("t"), []), Random(0)).trajectories == []
    earlier.add([Group(Task("t"), [episode(4)])])
    assert joined(wrong) == [4, 5]
    other = EarlierSuccesses(keep=2, number=1, total=9)
    other.from_json(earlier.to_json())
    assert other.to_json() == earlier.to_json()
    drawn = [other.join(Group(Task("t", ("s",)), [wrong]), Random(n)).trajectories[1] for n in range(9)]
    assert {t.turns[0].action for t in drawn} == {(4,), (5,)} and drawn[0].task.skills == ("s",)


def test_the_tasks_that_have_not_succeeded_for_longest_are_forgotten(tmp_path):
    """So a checkpoint does not grow with the number of tasks; also one from before there was a limit."""
    earlier = EarlierSuccesses(keep=2, number=5, total=3)
    without = EarlierSuccesses(keep=2, number=5, total=99)

    def kept(one: EarlierSuccesses) -> dict[str, list[int]]:
        return {
            task: [content["turns"][0]["action"][0] for content in episodes]
            for task, episodes in json.loads(one.to_json()).items()
        }

    for number, names in enumerate(["a", "b", "c", "a", "a", "d"]):
        for one in (earlier, without):
            one.add([Group(Task(name), [episode(number, task=name)]) for name in names])
        assert sum(map(len, kept(earlier).values())) <= 3
        again = EarlierSuccesses(keep=2, number=5, total=3)
        again.from_json(earlier.to_json())
        assert again.to_json() == earlier.to_json(), "the order is kept, too"
        again.from_json(without.to_json())
        assert again.to_json() == earlier.to_json()
    assert kept(earlier) == {"a": [3, 4], "d": [5]}
    sizes = [len(one.to_json()) for one in (earlier, without)]
    assert sizes[0] < sizes[1]


def replaying(algorithm: Any = "grpo", **keys: Any) -> StageConfig:
    return stage(algorithm, **{"replay": {"share": 0.34, "keep": 3}, **keys})


def test_they_join_the_groups_of_their_tasks_with_their_own_log_probabilities():
    trainer = Trainer(policy(), Even(), replaying())
    steps = list(trainer)
    first, later = steps[0], steps[1:]
    assert first.metrics["episodes_replayed"] == 0 < sum(s.metrics["episodes_replayed"] for s in later)
    seen = {(t.seed, t.turns) for t in first.trajectories}
    for step in later:
        replayed = [t for t in step.trajectories if t.replayed]
        assert step.metrics["episodes_replayed"] == len(replayed)
        assert all(t.outcome is Outcome.CORRECT and (t.seed, t.turns) in seen for t in replayed)
        for group in step.collection.groups:
            assert sum(t.replayed for t in group.trajectories) <= 2, "0.34 of 6"
            assert all(t.task == group.task for t in group.trajectories)
        fresh = [t for t in step.trajectories if not t.replayed]
        assert step.metrics["episodes"] == len(fresh) == 24
        assert step.metrics["success"] == sum(t.outcome == "correct" for t in fresh) / 24
        seen |= {(t.seed, t.turns) for t in fresh}


def test_a_microbatch_may_hold_replayed_episodes_alone():
    whole, cut = policy(), policy()
    list(Trainer(whole, Even(), replaying(microbatch_tokens=2000)))
    list(Trainer(cut, Even(), replaying(microbatch_tokens=4)))
    for one, other in zip(whole.trainable_parameters(), cut.trainable_parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_groups_without_variance_are_counted_without_them():
    wrong = [replace(episode(3 + i, Outcome.INCORRECT), rewards=(0.0,)) for i in range(4)]
    group = Group(Task("t"), [*wrong, replace(episode(6), replayed=True)])
    assert describe([group], Collection([group]))["zero_variance_groups"] == 1.0


@pytest.mark.parametrize("algorithm", [GrpoConfig(), RlooConfig()])
def test_the_ratio_of_a_replayed_episode_is_that_to_the_policy_that_sampled_it(algorithm):
    """The loss of a step equals one that is computed by hand from the log-probabilities on record."""
    steps, before = Trainer(policy(), Even(), replaying(algorithm)), []
    found = []
    for step in steps:
        before.append([p.detach().clone() for p in steps.policy.trainable_parameters()])
        found.append(step)
    place = next(n for n, step in enumerate(found) if step.metrics["episodes_replayed"])
    then, step = policy(), found[place]
    with torch.no_grad():
        for parameter, value in zip(then.trainable_parameters(), before[place - 1], strict=True):
            parameter.copy_(value)
    row = algorithm.build()
    groups = [number for number, group in enumerate(step.collection.groups) for _ in group.trajectories]
    batch, denominator = row.weigh(row.prepare(collate(step.trajectories, groups)))
    batch = replace(batch, weights=batch.weights / denominator)
    with torch.no_grad():
        output = then.forward(batch, SamplingConfig())
        loss, _ = row.loss(output, batch)
    assert step.metrics["loss"] == pytest.approx(float(loss), rel=1e-4, abs=1e-6)
    ratios = (output.logprobs - batch.logprobs).exp()
    old = batch.replayed[:, None] & batch.action_mask
    assert float((ratios[old] - 1).abs().max()) > 0.01
    assert float((ratios[~old & batch.action_mask] - 1).abs().max()) < 1e-4


def test_they_are_no_part_of_the_check_of_freshly_sampled_tokens(monkeypatch):
    """Which still finds a fault in those that are fresh."""
    for step in Trainer(policy(), Even(), replaying(optimizer={"learning_rate": 0.1})):
        assert step.metrics.get("mismatch_max", 0.0) < 1e-4
    trainer = Trainer(policy(), Even(), replaying())
    next(iter(trainer))
    collect = trainer.source.collect

    def wrong(t: Trajectory) -> Trajectory:
        turns = (replace(t.turns[0], logprobs=tuple(p - 0.2 for p in t.turns[0].logprobs)),)
        return t if t.replayed else replace(t, turns=turns)

    class Faulty:
        def collect(self, number: int) -> Collection:
            groups = collect(number).groups
            return Collection([Group(g.task, [wrong(t) for t in g.trajectories]) for g in groups])

    trainer.source = Faulty()
    with pytest.raises(TrustError, match="freshly sampled tokens differ"):
        list(trainer)


def test_with_dropout_they_keep_their_own_log_probabilities():
    acting = policy(lora=LoraSettings(rank=4, alpha=8, dropout=0.2))
    trainer = Trainer(acting, Even(), replaying())
    next(iter(trainer))
    collection = trainer.source.collect(1)
    trajectories = [t for group in collection.groups for t in group.trajectories]
    assert any(t.replayed for t in trajectories)
    batch = collate(trajectories, [0] * len(trajectories))
    trainer.gradients.begin_step(batch)
    masked = trainer.gradients._under_masks(batch, 7, None)
    assert torch.equal(masked.logprobs[batch.replayed], batch.logprobs[batch.replayed])
    assert not torch.equal(masked.logprobs[~batch.replayed], batch.logprobs[~batch.replayed])


@pytest.mark.parametrize(
    ("algorithm", "keys", "message"),
    [
        ("reinforce", {}, "replay has no effect on reinforce, which does not compare"),
        ("grpo", {"group_size": 2}, "replay.share: 0.34 of group_size: 2 is less than one episode"),
        ("grpo", {"replay": {"share": 0.5, "keep": 4, "total": 3}}, "keep: 4 of one task is more than total"),
    ],
)
def test_what_cannot_replay_is_one_line(algorithm, keys, message):
    with pytest.raises(ValueError, match=message):
        replaying(algorithm, **keys)
    assert ReplayConfig(share=0.5).episodes(8) == 4


class Uncorrected(GrpoConfig):
    def build(self) -> PolicyGradient:
        return PolicyGradient("own", plain_return, score_function, sequences, compares_groups=True)


def test_a_surrogate_without_a_ratio_cannot_correct():
    with pytest.raises(
        ValueError, match="replay needs a surrogate with the ratio to the policy that sampled"
    ):
        replaying(Uncorrected())


# -- after a kill --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "keys",
    [
        {"algorithm": "grpo", "replay": {"share": 0.34}, "refill": 1},
        {"algorithm": "grpo", "replay": {"share": 0.34, "total": 6}},
        {"algorithm": "grpo", "replay": {"share": 0.34}, "task_order": {"kind": "by_success", "low": 0.0}},
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
    if keys["algorithm"] == "grpo":
        assert sum(t.replayed for s in found for t in s.trajectories) > 0
        forgetful = Trainer(policy(), Even(), stage(**keys, steps=5))
        forgetful.load(tmp_path)
        assert isinstance(forgetful.source, Rollouts) and forgetful.source.earlier is not None
        forgetful.source.earlier.from_json("{}")
        assert next(iter(forgetful)).collection.groups != found[0].collection.groups


def test_a_checkpoint_from_before_the_key_begins_with_none(tmp_path):
    plain = Trainer(policy(), Even(), stage("grpo", steps=2))
    next(iter(plain))
    plain.save(tmp_path)
    assert "source" not in torch.load(tmp_path / "trainer.pt", weights_only=True)
    resumed = Trainer(policy(), Even(), replaying(steps=2))
    resumed.load(tmp_path)
    assert [s.metrics["episodes_replayed"] for s in resumed] == [0]
