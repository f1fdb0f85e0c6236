"""PPO: GAE against its definition, the losses against theirs, on a small softmax policy with a table of
values.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor
from torch.nn.functional import pad

from agent_peft.algorithms import PpoConfig, averages
from agent_peft.algorithms.advantages import generalized, moments, standardized
from agent_peft.algorithms.ppo import squared_error
from agent_peft.batch import Batch, collate
from agent_peft.configuration import yaml12
from agent_peft.types import AgentPeftError, Task, Trajectory, Turn

from .tables import VOCABULARY, forward, loss_and_gradient, normalized

REWARDS = (1.0, 0.0, 0.5, -0.25, 1.0, 1.0)
CONFIGS = [
    PpoConfig(),
    PpoConfig(
        gamma=0.9, gae_lambda=0.5, value_clip=None, normalize_advantages=False, weighting="sequence_sum"
    ),
    PpoConfig(kl_coef=0.1, entropy_coef=0.01, value_clip=0.05, weighting="sequence_mean"),
]


# -- advantages ----------------------------------------------------------------------------------------------


def slow_gae(rewards: list[float], values: list[float], gamma: float, gae_lambda: float) -> list[float]:
    """Equation 16 of Schulman et al. (2016), each sum written out, over one trajectory's sampled tokens."""
    values = [*values, 0.0]
    deltas = [rewards[t] + gamma * values[t + 1] - values[t] for t in range(len(rewards))]
    return [
        sum((gamma * gae_lambda) ** (k - t) * deltas[k] for k in range(t, len(deltas)))
        for t in range(len(deltas))
    ]


numbers = st.floats(-2, 2, width=32)
rows = st.lists(st.tuples(st.booleans(), numbers, numbers), min_size=1, max_size=12)
shares = st.floats(0, 1, width=32)


@settings(deadline=None)
@given(st.lists(rows, min_size=1, max_size=4), shares, shares)
def test_gae_is_its_definition_over_the_sampled_tokens(trajectories, gamma, gae_lambda):
    length = max(len(row) for row in trajectories)
    mask, rewards, values = (
        torch.tensor([[token[i] for token in row] + [filler] * (length - len(row)) for row in trajectories])
        for i, filler in enumerate((False, 9.0, 9.0))  # what is not sampled holds rubbish
    )
    found = generalized(rewards, values, mask, gamma, gae_lambda)
    assert not found[~mask].any()
    for b in range(len(trajectories)):
        here = mask[b]
        expected = slow_gae(rewards[b, here].tolist(), values[b, here].tolist(), gamma, gae_lambda)
        assert found[b, here].tolist() == pytest.approx(expected, abs=1e-5)


def two_turns() -> tuple[Batch, Tensor]:
    """o o a a | o o a: rewards 0.5 for the first turn, 2 for the second."""
    turns = (Turn((1, 2), (3, 4), (-1.0, -1.0)), Turn((5, 6), (7,), (-1.0,)))
    batch = collate([Trajectory(Task("t"), turns, rewards=(0.5, 2.0))], [0])
    return batch, torch.tensor([[99.0, 99.0, 0.25, 0.5, 99.0, 99.0, 1.0]])


def test_gae_of_two_turns_by_hand():
    batch, values = two_turns()
    found = generalized(batch.rewards, values, batch.action_mask, gamma=0.5, gae_lambda=0.5)
    # last: 2 - 1; before it, past the observation: 0.5 + 0.5 * 1 - 0.5, and a quarter of what follows; first:
    # 0.5 * 0.5 - 0.25, and so on
    assert found.tolist() == [[0, 0, 0.1875, 0.75, 0, 0, 1.0]]


def test_lambda_one_is_the_rewards_to_come_less_the_value():
    batch, values = two_turns()
    found = generalized(batch.rewards, values, batch.action_mask, gamma=1.0, gae_lambda=1.0)
    assert found.tolist() == [[0, 0, 2.5 - 0.25, 2.5 - 0.5, 0, 0, 2.0 - 1.0]]
    discounted = generalized(batch.rewards, values, batch.action_mask, gamma=0.5, gae_lambda=1.0)
    assert discounted[0, 2] == 0.5 * 0.5 + 0.25 * 2 - 0.25


def test_lambda_zero_trusts_the_critic_after_one_token():
    batch, values = two_turns()
    found = generalized(batch.rewards, values, batch.action_mask, gamma=1.0, gae_lambda=0.0)
    assert found.tolist() == [[0, 0, 0.5 - 0.25, 0.5 + 1.0 - 0.5, 0, 0, 2.0 - 1.0]]


def test_standardized_advantages_have_mean_0_and_spread_1_over_sampled_tokens():
    mask = torch.tensor([[True, True, False], [True, False, False]])
    found = standardized(torch.tensor([[1.0, 2.0, 0.0], [6.0, 0.0, 0.0]]), mask)
    # mean 3, deviations -2 -1 3, variance 14 / 3
    torch.testing.assert_close(found, torch.tensor([[-2.0, -1.0, 0.0], [3.0, 0.0, 0.0]]) / (14 / 3) ** 0.5)


def test_advantages_that_are_all_alike_become_zero():
    mask = torch.ones(3, 7, dtype=torch.bool)
    assert not standardized(torch.full((3, 7), 0.1), mask).any()
    assert not standardized(torch.zeros(0, 7), mask[:0]).any()  # a rank without a share


def test_what_is_standardized_is_the_step_of_all_ranks():
    advantages = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(4, 6, dtype=torch.bool)
    whole = standardized(advantages, mask)
    shares = [(advantages[:1], mask[:1]), (advantages[1:], mask[1:])]
    sums: list[list[Tensor]] = [[], []]  # what each rank gave, in its order
    for rank, share in enumerate(shares):
        moments(*share, sum_over_ranks=lambda x, rank=rank: sums[rank].append(x) or x)
    counts_and_totals = sums[0][0] + sums[1][0]
    mean = counts_and_totals[1] / counts_and_totals[0]
    spread = sum(((a - mean) ** 2).sum() for a, _ in shares)

    def over_both(own: Tensor) -> Tensor:
        return counts_and_totals if own.ndim else spread

    found = torch.cat([standardized(*share, sum_over_ranks=over_both) for share in shares])
    torch.testing.assert_close(found, whole)


# -- the loss ------------------------------------------------------------------------------------------------


def policy(seed: int) -> Tensor:
    return torch.randn(6, 20, VOCABULARY + 1, generator=torch.Generator().manual_seed(seed))


def rollout(seed: int = 0) -> Batch:
    """Trajectories of one and of two turns and of different lengths, as ``policy(seed)`` scores and values
    them.
    """
    trajectories = []
    for row, reward in enumerate(REWARDS):
        first = Turn((1,) * (row + 1), (2, 3), (0.0, 0.0))
        second = Turn((0, 4), tuple((row + k) % VOCABULARY for k in range(row)), (0.0,) * row)
        turns = (first, second) if row % 2 else (first,)
        trajectories.append(Trajectory(Task("t"), turns, rewards=(reward,) + (0.25,) * (len(turns) - 1)))
    batch = collate(trajectories, [0, 0, 0, 0, 1, 1])
    output = forward(policy(seed), batch)
    return replace(
        batch,
        logprobs=output.logprobs,
        scored_logprobs=output.logprobs,
        values=output.values,
        reference_logprobs=forward(policy(9), batch).logprobs,
    )


@pytest.mark.parametrize("config", CONFIGS, ids=["default", "plain", "penalized"])
def test_microbatches_sum_to_the_minibatch(config):
    algorithm, moved = config.build(), policy(1)
    batch = normalized(algorithm, rollout())
    loss, gradient, metrics = loss_and_gradient(algorithm, [batch], moved, [list(range(6))])
    assert gradient[..., -1].any(), "the critic learns"
    for parts in ([[0, 1, 2], [3, 4, 5]], [[5, 0], [1], [4, 3, 2]], [[i] for i in range(6)]):
        cut = loss_and_gradient(algorithm, [batch.select(r) for r in parts], moved, parts)
        assert cut[0] == pytest.approx(loss, rel=1e-6, abs=1e-6)
        torch.testing.assert_close(cut[1], gradient, atol=1e-6, rtol=1e-6)
        for name, value in metrics.items():
            torch.testing.assert_close(cut[2][name], value, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("config", CONFIGS, ids=["default", "plain", "penalized"])
def test_padding_changes_nothing(config):
    algorithm, batch = config.build(), rollout()
    long = (
        "tokens",
        "action_mask",
        "logprobs",
        "rewards",
        "advantages",
        "weights",
        "reference_logprobs",
        "scored_logprobs",
        "values",
    )
    wider = replace(batch, **{name: pad(getattr(batch, name), (0, 3)) for name in long})
    narrow, wide = (
        loss_and_gradient(algorithm, [normalized(algorithm, one)], policy(1), [list(range(6))])
        for one in (batch, wider)
    )
    assert narrow[0] == pytest.approx(wide[0], rel=1e-6)
    torch.testing.assert_close(narrow[1], wide[1], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("config", CONFIGS, ids=["default", "plain", "penalized"])
def test_tokens_of_the_environment_get_no_gradient(config):
    algorithm = config.build()
    batch = normalized(algorithm, rollout())
    _, gradient, _ = loss_and_gradient(algorithm, [batch], policy(1), [list(range(6))])
    touched = gradient[:, : batch.tokens.shape[1]].abs() > 0
    assert not touched[~batch.action_mask].any()
    assert touched[batch.action_mask].any(0).all(), "logits and values alike"


@pytest.mark.parametrize("config", CONFIGS, ids=["default", "plain", "penalized"])
def test_before_the_first_update_nothing_has_moved(config):
    algorithm = config.build()
    _, _, metrics = loss_and_gradient(
        algorithm, [normalized(algorithm, rollout())], policy(0), [list(range(6))]
    )
    shown = averages(metrics)
    assert shown["ratio"] == pytest.approx(1.0, abs=1e-6)
    assert (shown["approx_kl"], shown["clip_fraction"], shown["value_clip_fraction"]) == (0.0, 0.0, 0.0)


def test_the_loss_is_ppos_written_out():
    """Token by token, from the batch alone: -min(ρÂ, clip(ρ)Â) + c1 ½ max((V-T)², (clip(V)-T)²), and the
    mean over tokens.
    """
    algorithm = PpoConfig(normalize_advantages=False, value_coef=0.7).build()
    batch, moved = normalized(algorithm, rollout()), policy(1)
    output, expected, clips, count = forward(moved, batch), 0.0, 0, 0
    for b in range(6):
        steps = [t for t in range(batch.tokens.shape[1]) if batch.action_mask[b, t]]
        advantages = slow_gae(
            [float(batch.rewards[b, t]) for t in steps], [float(batch.values[b, t]) for t in steps], 1.0, 0.95
        )
        for t, advantage in zip(steps, advantages, strict=True):
            rho = float((output.logprobs[b, t] - batch.logprobs[b, t]).exp())
            old, new = float(batch.values[b, t]), float(output.values[b, t])
            target, bounded = old + advantage, old + min(max(new - old, -0.2), 0.2)
            expected -= min(rho * advantage, min(max(rho, 0.8), 1.2) * advantage)
            expected += 0.7 / 2 * max((new - target) ** 2, (bounded - target) ** 2)
            clips += (bounded - target) ** 2 > (new - target) ** 2
            count += 1
    loss, metrics = algorithm.loss(output, batch)
    assert float(loss) == pytest.approx(expected / count, rel=1e-5)
    assert 0 < clips < count
    assert averages(metrics)["value_clip_fraction"] == pytest.approx(clips / count)


def test_rounding_is_not_counted_as_a_clip():
    """In fp32, old + (values - old) is often not values."""
    values, old, targets = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0))
    assert (old + (values - old) != values).any()
    _, cut = squared_error(values, old, targets, 100.0)
    assert not cut.any()


def test_a_clipped_value_has_no_gradient_and_one_that_runs_away_has():
    values = torch.tensor([0.5, 0.1, 0.5], requires_grad=True)
    loss, cut = squared_error(values, torch.zeros(3), torch.tensor([1.0, 1.0, -1.0]), 0.2)
    loss.sum().backward()
    torch.testing.assert_close(values.grad, torch.tensor([0.0, -0.9, 1.5]))  # V - T where it still counts
    assert cut.tolist() == [True, False, False]
    free, nowhere = squared_error(values.detach(), torch.zeros(3), torch.tensor([1.0, 1.0, -1.0]), None)
    torch.testing.assert_close(free, torch.tensor([0.125, 0.405, 1.125]))
    assert not nowhere.any()


def test_targets_are_set_before_advantages_are_standardized():
    batch = rollout()
    plain, standard = (PpoConfig(normalize_advantages=flag).build().prepare(batch) for flag in (False, True))
    torch.testing.assert_close(standard.value_targets, plain.value_targets)
    torch.testing.assert_close(plain.value_targets, plain.advantages + batch.values)
    chosen = standard.advantages[batch.action_mask]
    assert (float(chosen.mean()), float(chosen.std(correction=0))) == (
        pytest.approx(0, abs=1e-6),
        pytest.approx(1, abs=1e-6),
    )


# -- what it says, and when it ends --------------------------------------------------------------------------


def test_explained_variance():
    algorithm, batch = PpoConfig().build(), rollout()
    returns = generalized(batch.rewards, torch.zeros_like(batch.rewards), batch.action_mask, 1.0, 1.0)

    def explained(values: Tensor) -> float:
        return algorithm.observe(algorithm.prepare(replace(batch, values=values)))["explained_variance"]

    assert explained(returns) == 1.0
    assert explained(torch.full_like(returns, 3.0) * batch.action_mask) == pytest.approx(0, abs=1e-6)
    assert explained(-returns) == pytest.approx(-3)
    assert explained((returns / 2 + 7) * batch.action_mask) == pytest.approx(0.75), (
        "a constant that is off explains as much"
    )
    alike = replace(batch, rewards=torch.zeros_like(batch.rewards))
    assert algorithm.observe(algorithm.prepare(alike)) == {}


def test_target_kl_ends_the_epochs():
    algorithm = PpoConfig(target_kl=0.02).build()
    assert not algorithm.is_done({"approx_kl": 0.02})
    assert algorithm.is_done({"approx_kl": 0.021})
    assert not algorithm.is_done({"updates_skipped": 1.0})
    assert not PpoConfig().build().is_done({"approx_kl": 1e9})


def test_what_it_needs():
    algorithm = PpoConfig(
        value_learning_rate=0.5, value_trunk_gradient=False, update_epochs=3, minibatches=2
    ).build()
    assert (algorithm.critic.learning_rate, algorithm.critic.detach) == (0.5, True)
    assert (
        algorithm.needs_reference,
        algorithm.needs_entropy,
        algorithm.learns_at_zero_advantage,
        algorithm.on_policy,
    ) == (
        False,
        False,
        True,
        True,
    )
    assert (algorithm.update_epochs, algorithm.minibatches) == (3, 2)
    assert PpoConfig(kl_coef=0.1).build().needs_reference
    assert PpoConfig(entropy_coef=0.1).build().needs_entropy


def test_the_page_shows_every_key_and_its_default():
    page = (Path(__file__).parents[2] / "docs" / "ppo.md").read_text(encoding="utf-8")
    shown = yaml12.plain(yaml12.parse(page.split("```yaml\n")[1].split("```")[0], "ppo.md"))
    assert shown["algorithm"] == PpoConfig().model_dump()


def test_without_values_it_says_so():
    algorithm, batch = PpoConfig().build(), rollout()
    with pytest.raises(ValueError, match="values"):
        algorithm.prepare(replace(batch, values=None))
    with pytest.raises(ValueError, match="values"):
        algorithm.loss(replace(forward(policy(1), batch), values=None), normalized(algorithm, batch))


def test_keys_without_effect_and_states_of_others_are_refused():
    with pytest.raises(ValidationError, match="target_kl has no effect with update_epochs: 1"):
        PpoConfig(update_epochs=1, target_kl=0.1)
    algorithm = PpoConfig().build()
    algorithm.load_state_dict(algorithm.state_dict())
    with pytest.raises(AgentPeftError, match="baseline"):
        algorithm.load_state_dict({"baseline": 1.0})
