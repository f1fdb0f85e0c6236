"""PPO in the loop: the same update however it is cut, epochs that end, and a critic that a resumed run
finds again.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch

from agent_peft.algorithms import PpoConfig
from agent_peft.batch import collate
from agent_peft.configuration.load import read_config
from agent_peft.configuration.yaml12 import dump
from agent_peft.policies.value_head import WEIGHTS
from agent_peft.runs import run as runs
from agent_peft.runs.run import train
from agent_peft.runs.targets import evaluate_target
from agent_peft.training.stage import StageConfig
from agent_peft.training.trainer import Trainer
from agent_peft.types import AgentPeftError, Task, Trajectory, Turn

from .conftest import assert_close

# Adam divides small gradients by themselves, noise and all
SMOOTH = {
    "learning_rate": 1e-2,
    "epsilon": 1e-2,
    "max_grad_norm": float("inf"),
}
PPO = {"kind": "ppo", "minibatches": 2, "update_epochs": 3, "value_learning_rate": 0.1}


def run(trainer: Trainer) -> list[dict[str, float]]:
    return [step.metrics for step in trainer]


# -- the same update however it is cut -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [
        PPO,
        {**PPO, "kl_coef": 0.1, "entropy_coef": 0.01, "value_trunk_gradient": False},
    ],
    ids=len,
)
def test_microbatches_and_padding_never_change_the_result(make_trainer, algorithm):
    whole = make_trainer(algorithm, microbatch_tokens=10**6, optimizer=SMOOTH)
    expected = run(whole)
    assert whole.parameters[-1] is whole.policy.value_head.weight
    assert whole.policy.value_head.weight.grad.abs().sum() > 1e-3
    for tokens, packing in ((1, True), (40, True), (40, False)):
        cut = make_trainer(algorithm, microbatch_tokens=tokens, optimizer=SMOOTH, policy={"packing": packing})
        found = run(cut)
        assert cut.policy.packing == packing
        assert_close([p.grad for p in cut.parameters], [p.grad for p in whole.parameters])
        assert_close(cut.parameters, whole.parameters)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)


def test_old_values_are_those_before_the_update(make_trainer):
    """A step of two updates: in the first nothing has moved, and the second measures against the same old
    values.
    """
    trainer = make_trainer({**PPO, "minibatches": 1, "update_epochs": 2, "value_clip": 1e-6}, steps=2)
    seen, update = [], trainer.update

    def watching(minibatch, on_policy):
        before = trainer.gradients.score(minibatch, trainer.policy.values)
        seen.append((update(minibatch, on_policy), minibatch.values, before))
        return seen[-1][0]

    trainer.update = watching
    run(trainer)
    first, second, third, _ = seen
    assert (first[0]["value_clip_fraction"], first[0]["clip_fraction"]) == (0.0, 0.0)
    assert first[0]["ratio"] == pytest.approx(1, abs=1e-5)
    assert second[0]["value_clip_fraction"] > 0.1
    assert torch.equal(first[1], second[1])
    assert not second[2].allclose(second[1], atol=1e-3)
    assert third[1].any(), "the next step starts from what the critic has learned"
    torch.testing.assert_close(third[1], third[2], atol=1e-5, rtol=0)


def test_the_head_learns_at_its_own_rate(make_trainer):
    trainer = make_trainer(
        {**PPO, "value_learning_rate": 0.25},
        optimizer={"learning_rate": 1e-3, "weight_decay": 0.1, "schedule": "linear"},
    )
    groups = trainer.optimizer.param_groups
    assert [(group["initial_lr"], group["weight_decay"]) for group in groups] == [(1e-3, 0.1), (0.25, 0.0)]
    assert groups[-1]["params"] == [trainer.policy.value_head.weight]
    found = run(trainer)
    assert 0 < found[-1]["learning_rate"] < 1e-3, "the policy's is shown, and follows its schedule"
    assert groups[-1]["lr"] == pytest.approx(250 * groups[0]["lr"])


# -- epochs --------------------------------------------------------------------------------------------------


def test_target_kl_ends_the_epochs_of_a_step(make_trainer):
    free = make_trainer({"kind": "ppo", "update_epochs": 5})
    assert [m["epochs_done"] for m in run(free)] == [5, 5]
    assert free.updates == 10
    held = make_trainer({"kind": "ppo", "update_epochs": 5, "target_kl": 1e-6})
    # the first epoch's only update is measured before it is made, on policy; the second sees that the policy
    # has moved
    assert [m["epochs_done"] for m in run(held)] == [2, 2]
    assert held.updates == 4
    minibatches = make_trainer({"kind": "ppo", "update_epochs": 5, "minibatches": 2, "target_kl": 1e-6})
    assert [m["epochs_done"] for m in run(minibatches)] == [1, 1]
    assert minibatches.updates == 4, "an epoch is finished before it is the last"


def test_target_kl_is_compared_with_the_mean_of_an_epoch(make_trainer):
    """And not with its last minibatch, which may be a small and an unusual one."""
    trainer = make_trainer({"kind": "ppo", "update_epochs": 4, "minibatches": 2, "target_kl": 0.1}, steps=1)
    measured, asked = iter([0.0, 0.15, 0.3, 0.05, 9.0, 9.0]), []
    update, is_done = trainer.update, trainer.algorithm.is_done
    trainer.update = lambda *given: update(*given) | {"approx_kl": next(measured)}
    trainer.algorithm.is_done = lambda found: asked.append(found["approx_kl"]) or is_done(found)
    (step,) = trainer
    assert asked == pytest.approx([0.075, 0.175])
    assert step.metrics["epochs_done"] == 2


def test_the_schedule_ends_with_the_stage_whatever_target_kl_leaves_out(make_trainer):
    schedule = {"learning_rate": 1e-2, "schedule": "linear"}
    algorithm = {"kind": "ppo", "update_epochs": 5, "target_kl": 1e-6}
    found = run(make_trainer(algorithm, steps=4, optimizer=schedule))
    assert [m["epochs_done"] for m in found] == [2] * 4
    updates = [(20 - step * 5 - epoch) / 20 for step in range(4) for epoch in range(2)]
    expected = [1e-2 * (one + other) / 2 for one, other in zip(updates[::2], updates[1::2], strict=True)]
    assert [m["learning_rate"] for m in found] == pytest.approx(expected)


def test_epochs_done_is_told_of_all(make_trainer):
    assert [
        m["epochs_done"] for m in run(make_trainer({"kind": "grpo", "kl_coef": 0.1, "update_epochs": 3}))
    ] == [3, 3]


def test_episodes_need_no_siblings(make_trainer):
    found = run(make_trainer(PPO, group_size=1, tasks_per_step=8))
    assert all(m["episodes"] == 8 and m["updates_skipped"] == 0 for m in found)
    assert (
        StageConfig.model_validate({"algorithm": {"kind": "ppo"}, "steps": 1, "group_size": 1}).group_size
        == 1
    )


def test_a_step_of_one_reward_still_teaches_the_critic(make_trainer):
    trainer = make_trainer(PPO, rewards={"incorrect": -1.0}, steps=4)
    found = run(trainer)
    assert all(m["zero_variance_groups"] == 1 for m in found)
    assert found[-1]["value_loss"] < found[0]["value_loss"] / 2
    assert all("explained_variance" not in m for m in found), "there is nothing to explain"


def test_a_key_without_effect_is_told_at_its_place(tmp_path):
    path = tmp_path / "c.yaml"
    algorithm = "algorithm: {kind: ppo, update_epochs: 1,\n target_kl: 1}\n"
    path.write_text(
        f"run_dir: r\npolicy: {{kind: pretrained, model: m}}\nenvironment: arithmetic\nsteps: 1\n{algorithm}"
    )
    with pytest.raises(
        AgentPeftError, match=r"c\.yaml:6: algorithm: target_kl has no effect with update_epochs: 1"
    ):
        read_config(path)


# -- what the critic learns ----------------------------------------------------------------------------------


def test_explained_variance_rises(make_trainer):
    """The reward is told by the prompt: a critic can know all of it, and a constant nothing."""
    trainer = make_trainer({"kind": "ppo", "value_learning_rate": 0.1})
    algorithm, policy = PpoConfig(normalize_advantages=False).build(), trainer.policy
    turns = [Turn((3, 5, 6, 4 + i % 2), (7 + i % 3, 8), (-1.0, -1.0)) for i in range(12)]
    batch = collate(
        [Trajectory(Task("t"), (turn,), rewards=(float(i % 2),)) for i, turn in enumerate(turns)], [0] * 12
    )
    batch = replace(batch, logprobs=policy.forward(batch, trainer.stage.sampling).logprobs.detach())
    curve = []
    for _ in range(45):
        prepared = algorithm.prepare(replace(batch, values=policy.values(batch)))
        curve.append(algorithm.observe(prepared)["explained_variance"])
        weighed, denominator = algorithm.weigh(prepared)
        loss, _ = algorithm.loss(
            policy.forward(weighed, trainer.stage.sampling, values=True),
            replace(weighed, weights=weighed.weights / denominator),
        )
        trainer.optimizer.zero_grad()
        loss.backward()
        trainer.optimizer.step()
    assert curve[0] == 0.0
    assert curve[-1] > 0.9
    assert curve[0] < curve[5] < curve[-1]


# -- checkpoints, stages, runs -------------------------------------------------------------------------------


def test_a_checkpoint_without_its_critic_is_refused(make_trainer, tmp_path):
    trainer = make_trainer(PPO)
    trainer.save(tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / WEIGHTS).unlink()
    with pytest.raises(AgentPeftError, match="critic"):
        make_trainer(PPO).load(tmp_path / "checkpoint")


def test_a_critic_goes_on_from_stage_to_stage(make_trainer):
    first = make_trainer(PPO)
    run(first)
    learnt = first.policy.value_head.weight.detach().clone()
    between = Trainer(first.policy, first.environment, make_trainer("sft").stage, first.engine, seed=1)
    assert all(p is not first.policy.value_head.weight for p in between.parameters)
    run(between)
    again = Trainer(first.policy, first.environment, first.stage, first.engine, seed=2)
    assert learnt.any()
    assert torch.equal(again.policy.value_head.weight, learnt)


@pytest.fixture
def config(tmp_path, policy_config):
    stages = [
        {"algorithm": {"kind": "sft"}, "steps": 1, "tasks_per_step": 4, "optimizer": {"learning_rate": 0.1}},
        {
            "algorithm": PPO,
            "steps": 3,
            "tasks_per_step": 4,
            "group_size": 2,
            "rewards": {"invalid_action": -0.5},
            "sampling": {"max_new_tokens": 3},
            "optimizer": {"learning_rate": 0.02},
        },
        {
            "algorithm": {"kind": "rloo"},
            "steps": 1,
            "tasks_per_step": 2,
            "group_size": 4,
            "sampling": {"max_new_tokens": 3},
        },
    ]
    content = {
        "run_dir": str(tmp_path / "run"),
        "policy": policy_config.model_dump(mode="json"),
        "environment": {"kind": "arithmetic", "digits": 1, "num_tasks": 10},
        "evaluation": {
            "environment": {"kind": "arithmetic", "digits": 1, "num_tasks": 4, "split": "heldout"},
            "sampling": {"max_new_tokens": 3},
        },
        "checkpoint": {"keep_last": 10},
        "stages": stages,
    }
    path = tmp_path / "config.yaml"
    path.write_text(dump(content))
    return read_config(path)[0]


def test_every_epoch_leaves_an_adapter_and_its_statistics(config):
    train(config)
    lines = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    folders = sorted((config.run_dir / "checkpoints").iterdir())
    assert [folder.name for folder in folders] == [f"step_{step:06d}" for step in range(1, 6)]
    for folder, line in zip(folders, lines, strict=True):
        assert {"adapter_config.json", "adapter_model.safetensors"} <= {
            path.name for path in folder.iterdir()
        }
        assert json.loads((folder / "training_stats.json").read_text()) == line
        assert "epochs_done" in line and ("reward" in line) == (line["stage"] != "sft")
    ppo = {
        "value_loss",
        "value_clip_fraction",
        "approx_kl",
        "clip_fraction",
        "surprisal",
        "explained_variance",
    }
    assert [ppo <= line.keys() for line in lines] == [False, True, True, True, False]
    assert [(folder / WEIGHTS).exists() for folder in folders] == [False, True, True, True, True]
    assert evaluate_target(config.run_dir, checkpoint="step_000003").summary


@pytest.mark.slow
def test_a_run_that_is_killed_resumes_to_the_same_bytes(config, monkeypatch, run_contents, tmp_path):
    train(config)
    expected = run_contents(config.run_dir)
    saved, done = runs.save_checkpoint, 0

    def killed(root, step, *more, **options):
        path = saved(root, step, *more, **options)
        if step == done:
            raise KeyboardInterrupt
        return path

    for done in (1, 2, 4):  # before the first step with a critic, between two, and after the last
        shutil.rmtree(config.run_dir)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(runs, "save_checkpoint", killed)
            train(config)
        train(config)
        found = run_contents(config.run_dir)
        assert found.keys() == expected.keys()
        assert [name for name in found if found[name] != expected[name]] == [], done
