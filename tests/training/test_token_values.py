"""What a step tells about each token: its advantage, and its log-probability before the first update."""

from __future__ import annotations

import math

import pytest
import torch

from agent_peft.batch import collate_groups
from agent_peft.policies.config import LoraSettings
from agent_peft.ranks import ALONE, Ranks
from agent_peft.training.step_metrics import gather_values
from agent_peft.types import Group, Task, Trajectory, Turn


def rows_of(step, values):
    """The flat values, cut into the step's trajectories."""
    return torch.split(values, [len(t.tokens) for t in step.trajectories])


def masks(step):
    return [torch.tensor(t.action_mask) for t in step.trajectories]


@pytest.mark.parametrize("changes", [{}, {"microbatch_tokens": 16}, {"policy": {"packing": False}}], ids=str)
def test_a_step_tells_advantages_and_log_probabilities_of_its_policy(make_trainer, changes):
    groups = {"tasks_per_step": 8, "group_size": 2}
    trainer, twin = (make_trainer("grpo", **groups, **changes) for _ in range(2))
    step = next(iter(trainer))
    rewards = torch.tensor([t.reward for t in step.trajectories]).view(8, 2)
    expected = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)
    live = (rewards != rewards[:, :1]).any(1).repeat_interleave(2).tolist()
    assert any(live) and not all(live)
    batch = collate_groups(dict(enumerate(step.collection.groups)))
    with torch.no_grad():  # by the policy that sampled, which the twin still is
        policy = twin.policy.forward(batch, twin.stage.sampling).logprobs
    for row, (mask, advantages, logprobs) in enumerate(
        zip(
            masks(step),
            rows_of(step, step.token_values.advantages),
            rows_of(step, step.token_values.logprobs),
            strict=True,
        )
    ):
        advantage = expected.flatten()[row] if live[row] else 0.0
        assert torch.allclose(advantages, advantage * mask, atol=1e-3)
        if live[row]:
            assert torch.allclose(logprobs, policy[row, : len(mask)], atol=1e-5)
            assert (logprobs[mask] < 0).all() and not logprobs[~mask].any()
        else:  # a group without signal needs no forward
            assert logprobs.isnan().all()


def test_later_minibatches_come_after_an_update(make_trainer):
    algorithm = {"kind": "ppo", "update_epochs": 2, "minibatches": 2}
    step = next(iter(make_trainer(algorithm)))
    scored = [not row.isnan().any() for row in rows_of(step, step.token_values.logprobs)]
    groups = [scored[start : start + 4] for start in range(0, 16, 4)]
    assert sorted(map(all, groups)) == [False, False, True, True] == sorted(map(any, groups))
    advantages = rows_of(step, step.token_values.advantages)
    assert all(row[mask].any() for row, mask in zip(advantages, masks(step), strict=True))


def test_under_dropout_they_are_those_without_masks(make_trainer):
    lora = LoraSettings(rank=4, dropout=0.5)
    trainer = make_trainer("ppo", policy={"lora": lora})
    for parameter in trainer.parameters:  # a fresh adapter is zero, and so are its dropped units
        torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(0))
    step = next(iter(trainer))
    sampled = torch.cat([torch.tensor(t.logprobs) for t in step.trajectories])
    assert torch.allclose(step.token_values.logprobs, sampled, atol=1e-4)


def test_demonstrations_have_neither(make_trainer):
    step = next(iter(make_trainer("sft")))
    assert step.token_values.logprobs is None and step.token_values.advantages is None


# -- several ranks -------------------------------------------------------------------------------------------


class Recording(Ranks):
    """A rank of two that keeps what it would have summed."""

    parts: list

    def sum(self, tensor):
        self.parts.append(tensor)
        return tensor


def test_the_ranks_together_tell_what_one_would():
    def group(name, lengths):
        task = Task(name)
        return Group(task, [Trajectory(task, (Turn((1,), (2,) * n, (-1.0,) * n),)) for n in lengths])

    collected = [group("a", [2, 1]), group("lost", []), group("lonely", [3]), group("b", [1, 4])]
    compared = [collected[0], collected[3]]

    def values_of(ranks, numbers):
        batch = collate_groups({number: compared[number] for number in numbers})
        lengths = batch.lengths[:, None]
        batch.advantages.copy_(-lengths * batch.action_mask)  # -0.0 off the mask
        return gather_values(ranks, collected, compared, batch, batch.logprobs * lengths)

    alone = values_of(ALONE, [0, 1])
    by_hand = [0, -3, -3, 0, -2, *[math.nan] * 4, 0, -2, 0, -5, -5, -5, -5]
    assert alone.advantages.tolist() == pytest.approx(by_hand, nan_ok=True)
    assert alone.logprobs.tolist() == pytest.approx(by_hand, nan_ok=True)
    assert not torch.signbit(alone.advantages[alone.advantages == 0]).any()
    ranks = [Recording(rank, 2) for rank in (0, 1)]
    for one in ranks:
        object.__setattr__(one, "parts", [])
        values_of(one, [one.rank])
    for number, whole in enumerate((alone.logprobs, alone.advantages)):
        total = sum(one.parts[number] for one in ranks)
        assert torch.equal(total.nan_to_num(7), whole.nan_to_num(7))
