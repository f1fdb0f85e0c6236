"""Actions that a limit on tokens ended: counted in each step, told on disk, and not learned from where that
is asked for.
"""

from __future__ import annotations

import json

import pytest
import torch

from agent_peft.configuration.run_config import TrainConfig, resolved
from agent_peft.runs.trajectories import write_trajectories
from agent_peft.training.stage import StageConfig
from agent_peft.training.trainer import Trainer


def cut(trainer: Trainer, trajectory) -> list[bool]:
    return [turn.action[-1] not in trainer.policy.chat.end_of_turn for turn in trajectory.turns]


def test_every_step_says_how_many_there_were(make_trainer, tmp_path):
    trainer = make_trainer("grpo", steps=2, sampling={"max_new_tokens": 2})
    for step in trainer:
        trajectories = [t for group in step.collection.groups for t in group.trajectories]
        expected = [any(cut(trainer, t)) for t in trajectories]
        assert 0 < sum(expected) < len(expected)
        assert step.metrics["cut_actions"] == sum(expected) / len(expected)
        assert step.metrics["truncated"] == 0.0, "the environment ended these episodes itself"
        path = write_trajectories(tmp_path, step.number, "grpo", step.collection.groups)
        lines = path.read_text().splitlines()
        assert [json.loads(line)["cut_turns"] for line in lines] == [[0] * one for one in expected]


def test_they_can_be_priced(make_trainer):
    plain, priced = (
        next(iter(make_trainer("grpo", rewards=prices))) for prices in ({}, {"cut_action": -0.5})
    )
    assert priced.metrics["reward"] == pytest.approx(
        plain.metrics["reward"] - 0.5 * plain.metrics["cut_actions"]
    )
    assert plain.metrics["cut_actions"] > 0


@pytest.mark.parametrize("algorithm", ["reinforce", "rloo", "grpo", "dr_grpo", "ppo"])
def test_masked_they_give_no_gradient(make_trainer, algorithm):
    """That of a step is the one of a step in which only the others had a weight."""
    kind = {"kind": algorithm, **({"constant_length": 3} if algorithm == "dr_grpo" else {})}
    settings = {
        "steps": 1,
        "sampling": {"max_new_tokens": 2},
        "rewards": {"cut_action": -0.5},
        "optimizer": {"learning_rate": 1e-3},
    }
    masked, plain = make_trainer(kind, mask_cut_actions=True, **settings), make_trainer(kind, **settings)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    compute = masked.gradients.compute

    def record(weighed, *rest):
        seen.append((weighed.weights, weighed.action_mask))
        return compute(weighed, *rest)

    masked.gradients.compute = record
    (step,) = list(masked)
    trajectories = [t for group in step.collection.groups for t in group.trajectories]
    weights, mask = seen[0]
    for row, trajectory in enumerate(trajectories):
        assert bool(weights[row].any()) == bool(mask[row].any()) == (not cut(masked, trajectory)[0])
    (other,) = list(plain)
    assert (
        step.collection.groups == other.collection.groups
        and step.metrics["reward"] == other.metrics["reward"]
    ), "they are priced"
    assert step.metrics["gradient_norm"] != other.metrics["gradient_norm"]


@pytest.mark.parametrize(
    "algorithm", ["grpo", "ppo", {"kind": "grpo", "weighting": "token_mean", "kl_coef": 0.1}]
)
def test_a_step_in_which_all_are_cut_updates_nothing(make_trainer, algorithm):
    trainer = make_trainer(
        algorithm,
        steps=1,
        mask_cut_actions=True,
        sampling={"max_new_tokens": 1},
        rewards={"cut_action": -0.5},
    )
    trainer.policy.chat.end_of_turn = frozenset()
    before = [p.clone() for p in trainer.parameters]
    (step,) = list(trainer)
    assert (step.metrics["cut_actions"], step.metrics["updates_skipped"]) == (1.0, 1.0)
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.parameters, strict=True))


def test_where_nothing_is_sampled_the_mask_is_refused(make_trainer, policy_config, tmp_path):
    with pytest.raises(ValueError, match="mask_cut_actions has no effect on sft"):
        StageConfig.model_validate({"algorithm": {"kind": "sft"}, "steps": 1, "mask_cut_actions": True})
    content = {"run_dir": tmp_path, "policy": policy_config, "environment": {"kind": "arithmetic"}}
    config = TrainConfig.model_validate(
        {**content, "stages": [{"algorithm": {"kind": kind}, "steps": 1} for kind in ("sft", "grpo")]}
    )
    assert ["mask_cut_actions" in stage for stage in resolved(config)["stages"]] == [False, True]


def test_halvings_of_the_rows_are_counted(make_trainer, monkeypatch):
    trainer = make_trainer("grpo", steps=2)
    forward = trainer.policy.read

    def read(tokens, **inputs):
        if tokens.shape[0] > 9:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return forward(tokens, **inputs)

    monkeypatch.setattr(trainer.policy, "read", read)
    assert [step.metrics["row_halvings"] for step in trainer] == [1.0, 0.0], (
        "of the 16 rows that a step has, and for good"
    )
