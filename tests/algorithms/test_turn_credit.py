"""Credit by turn, against a reference that goes turn by turn in float64, and by enumeration."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from agent_peft.algorithms import GrpoConfig, PolicyGradientConfig, ReinforceConfig, RlooConfig
from agent_peft.algorithms.advantages import Turns
from agent_peft.algorithms.policy_gradient import PolicyGradient
from agent_peft.algorithms.surrogates import ratio, sequence_sum
from agent_peft.batch import Batch, PolicyOutput, collate
from agent_peft.rollout.collector import Collection
from agent_peft.rollout.rewards import RewardConfig, price
from agent_peft.seeding import derive, generator
from agent_peft.training.step_metrics import describe
from agent_peft.types import Group, Outcome, Task, Trajectory, Turn
from tests.conftest import case

Compare = Callable[[float, Sequence[float]], float]


def leave_one_out(own: float, others: Sequence[float]) -> float:
    return own - sum(others) / len(others)


def centered(own: float, others: Sequence[float]) -> float:
    return own - (own + sum(others)) / (1 + len(others))


def normalized(own: float, others: Sequence[float]) -> float:
    values = torch.tensor([own, *others], dtype=torch.float64)
    return float((own - values.mean()) / (values.std() + 1e-6))


COMPARISONS: dict[str, Compare] = {
    "leave_one_out": leave_one_out,
    "group_centered": centered,
    "group_normalized": normalized,
}


def episodes(seed: int, groups: int = 3, size: int = 5) -> tuple[list[Trajectory], list[int]]:
    """Ragged groups whose siblings share turns, as there are two tokens. Some have no action at all."""
    random = generator(derive(seed, "episodes"))

    draw = random.randrange
    trajectories, numbers = [], []
    for group, _ in itertools.product(range(groups), range(size)):
        turns = []
        for turn in range(draw(5) and 1 + draw(4)):
            observation = (1, 2, group) if turn == 0 else (draw(2),)
            action = tuple(draw(2) for _ in range(1 + draw(2)))
            turns.append(Turn(observation, action, (-0.5,) * len(action), cut=draw(6) == 0))
        turns = turns or [Turn((1, 2, group), (), ())]
        rewards = tuple(draw(9) / 8 for _ in turns)
        trajectories.append(Trajectory(Task(str(group)), tuple(turns), rewards=rewards))
        numbers.append(group)
    return trajectories, numbers


def turns_of(trajectory: Trajectory, discount: float) -> list[tuple[range, tuple[int, ...], float]]:
    """Of each turn with tokens: its positions, the tokens before it, and its return."""
    places, end = [], 0
    for turn in trajectory.turns:
        start, end = end + len(turn.observation), end + len(turn.observation) + len(turn.action)
        if turn.action:
            places.append(range(start, end))
    returns = [0.0] * len(places)
    for k in range(len(places)):
        returns[k] = sum(discount ** (m - k) * trajectory.rewards[m] for m in range(k, len(places)))
    return [(place, trajectory.tokens[: place.start], r) for place, r in zip(places, returns, strict=True)]


def reference(batch: Batch, trajectories: Sequence[Trajectory], compare: Compare, discount: float) -> Tensor:
    advantages = torch.zeros(batch.tokens.shape, dtype=torch.float64)
    for i, (trajectory, group) in enumerate(zip(trajectories, batch.groups.tolist(), strict=True)):
        siblings = [t for j, t in enumerate(trajectories) if j != i and int(batch.groups[j]) == group]
        peers, parted = list[float](), 0
        for k, (place, history, own) in enumerate(turns_of(trajectory, discount)):
            if k == 0:
                firsts = [turns_of(t, discount)[:1] for t in siblings]
                others = [
                    first[0][2] if first else t.reward for first, t in zip(firsts, siblings, strict=True)
                ]
            else:
                others = [r for t in siblings for _, h, r in turns_of(t, discount)[1:] if h == history]
            if others:
                peers, parted = others, k
            worth = sum(trajectory.rewards[parted:k]) + own  # rewards since the last common turn, and to come
            advantages[i, place.start : place.stop] = compare(worth, peers)
    return advantages


@pytest.mark.parametrize("discount", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("advantage", COMPARISONS)
@pytest.mark.parametrize("seed", range(5))
def test_each_turn_is_compared_with_the_siblings_of_its_history(seed, advantage, discount):
    trajectories, groups = episodes(seed)
    batch = collate(trajectories, groups)
    row = PolicyGradientConfig(advantage=advantage, turn_discount=discount).build()
    expected = reference(batch, trajectories, COMPARISONS[advantage], discount)
    assert (expected != 0).any()
    torch.testing.assert_close(row.prepare(batch).advantages.double(), expected, rtol=1e-5, atol=2e-6)


def test_the_episodes_of_these_tests_share_turns_and_part():
    """Otherwise the test above would compare first turns alone."""
    trajectories, groups = episodes(0)
    histories = [
        (group, history)
        for trajectory, group in zip(trajectories, groups, strict=True)
        for _, history, _ in turns_of(trajectory, 1.0)[1:]
    ]
    counts = [histories.count(history) for history in histories]
    assert min(counts) == 1 and max(counts) > 1


@pytest.mark.parametrize("kind", [RlooConfig, GrpoConfig])
def test_without_shared_turns_and_with_one_reward_it_is_the_row_itself(kind):
    turns = [Turn((1,), (2 + n,), (-0.5,)) for n in range(4)]
    second = Turn((1,), (9, 9), (-0.5, -0.5))
    rewards = ((0.0, 1.0), (0.0, 0.0), (0.0, 0.5), (0.0, 1.0))
    batch = collate(
        [Trajectory(Task("t"), (turn, second), rewards=r) for turn, r in zip(turns, rewards, strict=True)],
        [0] * 4,
    )
    assert torch.equal(
        kind(turn_discount=1.0).build().prepare(batch).advantages, kind().build().prepare(batch).advantages
    )


def test_reinforce_takes_the_rewards_to_come_by_hand():
    turns = (Turn((1,), (2, 3), (-0.5, -0.5)), Turn((4,), (5,), (-0.5,)))
    batch = collate([Trajectory(Task("t"), turns, rewards=(1.0, 2.0))], [0])
    row = ReinforceConfig(turn_discount=0.5, baseline_momentum=0.5, baseline_start=1.0).build()
    assert row.prepare(batch).advantages.tolist() == [[0.0, 1.0, 1.0, 0.0, 1.0]]
    assert row.state_dict() == {"baseline": 1.5}  # half of 1, and half of the turns' mean of 2


def test_two_ranks_prepare_what_one_does():
    trajectories, groups = episodes(1, groups=4)
    whole = collate(trajectories, groups)
    config = PolicyGradientConfig(advantage="leave_one_out", turn_discount=0.9, minibatches=2)
    prepared = config.build().prepare(whole).advantages
    for rows in (range(10), range(10, 20)):
        part = config.build().prepare(whole.select(rows)).advantages
        torch.testing.assert_close(part, prepared[list(rows), : part.shape[1]])


@pytest.mark.parametrize("config", [RlooConfig(turn_discount=0.9), ReinforceConfig(turn_discount=0.9)])
def test_a_batch_without_a_turn_has_no_advantage(config):
    empty = [Trajectory(Task("t"), (Turn((1, 2), (), ()),), rewards=(1.0,)) for _ in range(2)]
    row = config.build()
    assert not row.prepare(collate(empty, [0, 0])).advantages.any()
    assert row.state_dict().get("baseline", 0.0) == 0.0


def scored(firsts: Sequence[int], scores: Sequence[Sequence[float]]) -> list[Trajectory]:
    """Episodes that part at their first actions, and are priced by the score alone."""
    made = []
    for first, own in zip(firsts, scores, strict=True):
        turns = tuple(
            Turn((1,), (first if number == 0 else 9,), (-0.5,), score=score)
            for number, score in enumerate(own)
        )
        episode = Trajectory(Task("t"), turns, outcome=Outcome.INCORRECT, score=own[-1])
        made.append(price(episode, RewardConfig(correct=0.0, incorrect=0.0, score=10.0)))
    return made


SEVENTHS = [[1 / 7, 3 / 7, 5 / 7], [2 / 7, 3 / 7, 4 / 7, 5 / 7], [6 / 7, 5 / 7], [5 / 7]]


@pytest.mark.parametrize("config", [GrpoConfig(turn_discount=1.0), GrpoConfig()], ids=["turns", "episodes"])
def test_equal_returns_on_different_paths_are_no_signal(config):
    random = generator(derive(0, "paths"))
    for _ in range(50):
        own = [[random.random() for _ in range(random.randrange(3))] + [0.7] for _ in range(8)]
        for scores, members in ((SEVENTHS, 4), (own, 8)):
            group = scored(range(2, 2 + members), scores)
            assert not config.build().prepare(collate(group, [0] * members)).advantages.any()
            described = describe([Group(Task("t"), group)], Collection([]))
            assert described["zero_variance_groups"] == 1


def test_without_a_common_turn_it_is_the_row_itself_also_with_rewards_of_turns():
    rewards = ((-0.1, 1.0), (0.0, 1.0), (0.0, 1.0), (0.0, 1.0))
    group = [
        Trajectory(Task("t"), (Turn((1,), (2 + i,), (-0.5,)), Turn((1,), (9,), (-0.5,))), rewards=own)
        for i, own in enumerate(rewards)
    ]
    batch = collate(group, [0] * 4)
    advantages = RlooConfig(turn_discount=1.0).build().prepare(batch).advantages
    assert advantages[0].tolist() == pytest.approx([0, -0.1, 0, -0.1])
    assert torch.equal(advantages, RlooConfig().build().prepare(batch).advantages)


def test_a_masked_turn_is_no_turn():
    turns = tuple(Turn((1,), (2 + i,), (-0.5,), cut=i == 1) for i in range(3))
    episode = Trajectory(Task("t"), turns, rewards=(0.0, 0.0, 1.0))
    returns = [Turns.of(collate([episode], [0], mask), 0.5).returns.tolist() for mask in (False, True)]
    assert returns == [[0.25, 0.5, 1.0], [0.5, 1.0]]


def test_an_advantage_of_ones_own_is_that_of_turns_too():
    batch = collate([Trajectory(Task("t"), (Turn((1,), (2,), (-0.5,)),), rewards=(1.0,))], [0])
    for discount in (None, 1.0):
        row = PolicyGradient(
            "own", lambda returns, groups: returns - 5, ratio, sequence_sum, turn_discount=discount
        )
        assert row.prepare(batch).advantages.tolist() == [[0.0, -4.0]]


def test_a_rate_of_success_has_no_turns():
    with pytest.raises(ValidationError, match="turn_discount: advantage mean_normalized"):
        PolicyGradientConfig(advantage="mean_normalized", turn_discount=1.0)


def test_one_ratio_for_a_trajectory_has_no_turns():
    with pytest.raises(ValidationError, match="turn_discount: surrogate sequence_clipped has one ratio"):
        PolicyGradientConfig(surrogate="sequence_clipped", turn_discount=1.0)


def test_explain_says_what_a_turn_learns_from():
    assert RlooConfig(turn_discount=0.9).facts.formula == (
        "mean over trajectories of the tokens' sum of -ρ Â; Â = R - mean of the others of its group; "
        "R = Σ 0.9^k r_k over the turn and those after it; its group = siblings with the same tokens before "
        "the turn"
    )
    assert "siblings" not in ReinforceConfig(turn_discount=0.9).facts.formula


# -- by enumeration ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rewards", "variances"),
    [
        ({(0, 0): (0.0, 0.1), (0, 1): (0.0, 0.0), (1, 0): (2.0, 0.4), (1, 1): (2.0, 0.6)}, 0.633),
        ({(0, 0): (0.0, 1.0), (0, 1): (0.0, 0.0), (1, 0): (0.0, 0.0), (1, 1): (0.0, 2.0)}, 1.253),
    ],
    ids=["the first turn decides", "the second turn decides"],
)
@pytest.mark.parametrize(
    ("discount", "size"),
    [case(1.0, 4, fast=True), case(0.5, 2, fast=True), case(0.5, 4, fast=False), case(0.0, 2, fast=True)],
)
def test_it_is_unbiased_and_its_variance_is_lower_where_the_history_decides(
    rewards, variances, discount, size
):
    """Two turns of two actions each, and groups of four or two: the exact mean and variance of the gradient,
    over all 256 or 16 groups that the policy may sample. Fewer siblings are compared at the second turn,
    which costs variance where the first turn tells nothing of the return.
    """
    theta = torch.tensor([0.3, -0.4, 0.8], dtype=torch.float64)  # of the first action, and of the second's

    def log_policy(parameters: Tensor, path: tuple[int, int]) -> tuple[Tensor, Tensor]:
        places = (0, 1 + path[0])
        return tuple(
            torch.nn.functional.logsigmoid(parameters[place] * (1 if action else -1))
            for place, action in zip(places, path, strict=True)
        )

    paths = list(itertools.product((0, 1), repeat=2))
    chance = {path: float(sum(log_policy(theta, path)).exp()) for path in paths}

    leaf = theta.clone().requires_grad_()
    expected = torch.zeros((), dtype=torch.float64)
    for path in paths:  # Σ_k log π(a_k) G_k, whose gradient is wanted
        first, second = log_policy(leaf, path)
        now, later = rewards[path]
        expected = expected + chance[path] * (first * (now + discount * later) + second * later)
    (truth,) = torch.autograd.grad(expected, leaf)

    def moments(config: RlooConfig) -> tuple[Tensor, float]:
        row = config.build()
        mean, square = torch.zeros(3, dtype=torch.float64), 0.0
        for group in itertools.product(paths, repeat=size):
            trajectories = []
            for path in group:
                logs = [float(x) for x in log_policy(theta, path)]
                turns = (Turn((5,), (path[0],), (logs[0],)), Turn((6,), (path[1],), (logs[1],)))
                trajectories.append(Trajectory(Task("t"), turns, rewards=rewards[path]))
            batch = collate(trajectories, [0] * size)
            batch, denominator = row.weigh(row.prepare(batch))
            batch = replace(batch, weights=batch.weights / denominator)
            leaf = theta.clone().requires_grad_()
            now = torch.stack([torch.stack(log_policy(leaf, path)) for path in group])
            logprobs = torch.zeros(size, 4, dtype=torch.float64).index_put(
                (torch.arange(size)[:, None], torch.tensor([[1, 3]])), now
            )
            loss, _ = row.loss(PolicyOutput(logprobs, None), batch)
            (gradient,) = torch.autograd.grad(-loss, leaf)
            p = torch.tensor([chance[path] for path in group], dtype=torch.float64).prod()
            mean += p * gradient
            square += float(p * gradient.square().sum())
        return mean, square - float(mean.square().sum())

    by_turn, variance = moments(RlooConfig(turn_discount=discount))
    torch.testing.assert_close(by_turn, truth, rtol=0, atol=1e-6)
    if discount == 1:
        by_episode, whole_variance = moments(RlooConfig())
        torch.testing.assert_close(by_episode, truth, rtol=0, atol=1e-6)
        assert variance / whole_variance == pytest.approx(variances, rel=0.01)
