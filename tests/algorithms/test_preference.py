"""Preference losses against references in float64 that are written from the papers' equations, reply by
reply, on a small softmax policy: token t has logits ``parameters[row, t]``.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from agent_peft.algorithms import (
    AnyAlgorithm,
    DpoConfig,
    KtoConfig,
    OrpoConfig,
    SimpoConfig,
    averages,
)
from agent_peft.batch import Batch, PolicyOutput, collate, collate_groups
from agent_peft.types import AgentPeftError, Group, Task, Trajectory, Turn

VOCABULARY = 7
CONFIGS = [
    DpoConfig(beta=0.3),
    DpoConfig(beta=0.3, loss="ipo"),
    KtoConfig(beta=0.4, desirable_weight=1.5, undesirable_weight=0.75),
    OrpoConfig(odds_coef=0.6),
    SimpoConfig(beta=1.7, gamma=0.4),
]
PAIRS = [config for config in CONFIGS if config.kind != "kto"]


def name(config) -> str:
    return f"{config.kind}-{config.loss}" if isinstance(config, DpoConfig) else config.kind


def trajectory(opening: int, *actions: tuple[int, ...], reward: float = 0.0, mistake: int = -1) -> Trajectory:
    """Actions with an answer of the environment between them; that with number ``mistake`` is not learned."""
    turns = tuple(
        Turn(
            (1,) * opening if not number else (5, 6), action, (0.0,) * len(action), mistake=number == mistake
        )
        for number, action in enumerate(actions)
    )
    return Trajectory(Task("t"), turns, rewards=(reward,) + (0.0,) * (len(turns) - 1))


# ragged: one token, two turns, an action that is not learned
REPLIES = [
    (trajectory(2, (2, 3, 4), reward=1.0), trajectory(2, (4,))),
    (trajectory(4, (1, 2), (3, 3, 0), reward=1.0), trajectory(4, (2, 2), (1,), mistake=0)),
    (trajectory(1, (6,), reward=1.0), trajectory(1, (5, 5), (4, 3, 2, 1), (0,))),
]
MISMATCHED = [(trajectory(2, (5, 2)), trajectory(2, (1,), (4, 4))) for _ in REPLIES]


def parameters(seed: int, rows: int = 12) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 24, VOCABULARY, generator=generator, dtype=torch.float64)


def logprobs(weights: Tensor, batch: Batch, rows: list[int] | None = None) -> Tensor:
    rows = list(range(len(batch))) if rows is None else rows
    softmax = weights[rows][:, : batch.tokens.shape[1]].log_softmax(-1)
    return softmax.gather(-1, batch.tokens[..., None]).squeeze(-1) * batch.action_mask


def make_batch(mismatched: bool = True) -> Batch:
    groups = {
        number: Group(Task("t"), pair, other if mismatched else ())
        for number, (pair, other) in enumerate(zip(REPLIES, MISMATCHED, strict=True))
    }
    batch = collate_groups(groups)
    measured = (batch.groups < 0)[:, None]
    return replace(
        batch,
        logprobs=(logprobs(parameters(0), batch) * measured).float(),
        reference_logprobs=logprobs(parameters(1), batch).float(),
    )


def normalized(algorithm, batch: Batch) -> Batch:
    weighed, denominator = algorithm.weigh(own(batch))
    return replace(weighed, weights=weighed.weights / denominator)


def own(batch: Batch) -> Batch:
    return batch.select((batch.groups >= 0).nonzero()[:, 0].tolist())


def summed(algorithm, batches: list[Batch], rows: list[list[int]], weights: Tensor | None = None):
    """Loss, gradient and metrics, summed over microbatches."""
    leaf = (parameters(0) if weights is None else weights).float().requires_grad_()
    total, metrics = 0.0, {}
    for batch, places in zip(batches, rows, strict=True):
        loss, shown = algorithm.loss(PolicyOutput(logprobs(leaf, batch, places), None), batch)
        loss.backward()
        total += float(loss.detach())
        metrics = {key: metrics.get(key, 0.0) + value for key, value in shown.items()}
    return total, leaf.grad, metrics


# -- the papers, reply by reply ------------------------------------------------------------------------------


def replies(leaf: Tensor, batch: Batch, rows: range) -> list[Tensor]:
    """log π(token) of the learned tokens of each row."""
    found = []
    for row in rows:
        mask = batch.action_mask[row]
        tokens = batch.tokens[row][mask]
        positions = mask.nonzero()[:, 0]
        found.append(leaf[row, positions].log_softmax(-1)[range(len(tokens)), tokens])
    return found


def sigma(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def expected(config, leaf: Tensor, batch: Batch) -> Tensor:
    number = int((batch.groups >= 0).sum())
    policy = replies(leaf, batch, range(number))
    frozen = replies(parameters(1), batch, range(number))
    if config.kind == "kto":  # equation 8, z0 as in section 4.1
        others = range(number, len(batch))
        gaps = [
            float(p.sum() - r.sum())
            for p, r in zip(
                replies(parameters(0), batch, others), replies(parameters(1), batch, others), strict=True
            )
        ]
        z0 = max(0.0, sum(gaps) / len(gaps)) if gaps else 0.0
        losses = []
        for row in range(number):
            r = policy[row].sum() - frozen[row].sum()
            if row % 2 == 0:
                weight = config.desirable_weight
                losses.append(weight - weight * sigma(config.beta * (r - z0)))
            else:
                weight = config.undesirable_weight
                losses.append(weight - weight * sigma(config.beta * (z0 - r)))
        return torch.stack(losses).mean()
    losses = []
    for good, bad in zip(range(0, number, 2), range(1, number, 2), strict=True):
        if config.kind == "dpo":
            h = (policy[good].sum() - frozen[good].sum()) - (policy[bad].sum() - frozen[bad].sum())
            losses.append(
                -torch.log(sigma(config.beta * h))
                if config.loss == "sigmoid"
                else (h - 1 / (2 * config.beta)) ** 2
            )
        elif config.kind == "orpo":
            p_good, p_bad = torch.exp(policy[good].mean()), torch.exp(policy[bad].mean())
            ratio = (p_good / (1 - p_good)) / (p_bad / (1 - p_bad))
            losses.append(-torch.log(p_good) + config.odds_coef * -torch.log(sigma(torch.log(ratio))))
        else:
            margin = config.beta * policy[good].mean() - config.beta * policy[bad].mean()
            losses.append(-torch.log(sigma(margin - config.gamma)))
    return torch.stack(losses).mean()


@pytest.mark.parametrize("config", CONFIGS, ids=name)
@pytest.mark.parametrize("wider", [0, 3], ids=["padded", "padded more"])
def test_values_and_gradients_are_the_papers(config, wider):
    batch = make_batch(mismatched=config.kind == "kto")
    leaf = parameters(0).requires_grad_()
    value = expected(config, leaf, batch)
    value.backward()
    if wider:
        names = ("tokens", "action_mask", "logprobs", "advantages", "weights", "reference_logprobs")
        padded = {key: torch.nn.functional.pad(getattr(batch, key), (0, wider)) for key in names}
        batch = replace(batch, **padded)
    algorithm = config.build()
    prepared = normalized(algorithm, algorithm.prepare(batch))
    loss, gradient, _ = summed(algorithm, [prepared], [list(range(6))])
    assert loss == pytest.approx(float(value.detach()), rel=1e-6, abs=1e-6)
    torch.testing.assert_close(gradient.double(), leaf.grad, atol=1e-6, rtol=1e-6)
    masked = ~own(batch).action_mask[:, : prepared.tokens.shape[1]]
    assert not gradient[:6, : prepared.tokens.shape[1]][masked].any(), "the environment's tokens are learned"


@pytest.mark.parametrize("config", CONFIGS, ids=name)
def test_microbatches_and_ranks_sum_to_the_minibatch(config):
    """Two ranks, of which one has one pair, and each pair its own microbatch."""
    batch = make_batch(mismatched=config.kind == "kto")
    whole = config.build()
    value = summed(whole, [normalized(whole, whole.prepare(batch))], [list(range(6))])
    ranks = [[0, 1, 2, 3, 6, 7, 8, 9], [4, 5, 10, 11]]
    algorithms = [config.build() for _ in ranks]
    parts = [batch.select([row for row in rows if row < len(batch)]) for rows in ranks]

    def in_turn():
        """What each rank hands in, and then the sum to each."""
        tensors: list[Tensor] = []
        for algorithm, part in zip(algorithms, parts, strict=True):
            algorithm.prepare(part, lambda tensor: tensors.append(tensor) or tensor)
        return sum(tensors) if tensors else None

    total = in_turn()
    prepared = [a.prepare(p, lambda _: total) for a, p in zip(algorithms, parts, strict=True)]
    weighed = [a.weigh(own(p)) for a, p in zip(algorithms, prepared, strict=True)]
    denominator = sum(share for _, share in weighed)
    loss, gradient, metrics = 0.0, torch.zeros_like(value[1]), {}
    for algorithm, (part, _), rows in zip(algorithms, weighed, ranks, strict=True):
        part, rows = replace(part, weights=part.weights / denominator), [row for row in rows if row < 6]
        pairs = [list(range(first, first + 2)) for first in range(0, len(rows), 2)]
        found = summed(
            algorithm,
            [part.select(pair) for pair in pairs],
            [[rows[place] for place in pair] for pair in pairs],
        )
        loss, gradient = loss + found[0], gradient + found[1]
        metrics = {key: metrics.get(key, 0.0) + x for key, x in found[2].items()}
    assert loss == pytest.approx(value[0], abs=1e-6)
    torch.testing.assert_close(gradient, value[1], atol=1e-6, rtol=1e-6)
    assert averages(metrics) == pytest.approx(averages(value[2]), abs=1e-5)


def test_the_metrics_of_pairs_by_hand():
    batch = make_batch()
    algorithm = DpoConfig(beta=0.3).build()
    prepared = algorithm.prepare(batch.select(range(6)))
    assert {row: set(values[values != 0].tolist()) for row, values in enumerate(prepared.advantages)} == {
        row: {1.0 if row % 2 == 0 else -1.0} for row in range(6)
    }
    shown = averages(summed(algorithm, [normalized(algorithm, prepared)], [list(range(6))])[2])
    policy = [float(x.sum()) for x in replies(parameters(0), batch, range(6))]
    frozen = [float(x.sum()) for x in replies(parameters(1), batch, range(6))]
    rewards = [0.3 * (p - f) for p, f in zip(policy, frozen, strict=True)]
    margins = [rewards[place] - rewards[place + 1] for place in (0, 2, 4)]
    assert set(shown) == set(algorithm.metrics)
    assert shown == pytest.approx(
        {
            "reward_chosen": sum(rewards[::2]) / 3,
            "reward_rejected": sum(rewards[1::2]) / 3,
            "margin": sum(margins) / 3,
            "accuracy": sum(margin > 0 for margin in margins) / 3,
            "logprob_chosen": sum(policy[::2]) / 3,
            "logprob_rejected": sum(policy[1::2]) / 3,
        },
        abs=1e-5,
    )


def test_the_metrics_of_labels_by_hand():
    """The means of the two kinds are over their own number of replies, however many there are of each."""
    batch = make_batch()
    batch = replace(batch, returns=torch.tensor([1.0, 1.0, 1.0, 0.5, 0.2, 0.0, *[0.0] * 6]))
    algorithm = KtoConfig(beta=0.4, desirable_weight=3.0, undesirable_weight=2.0).build()
    prepared = algorithm.prepare(batch)
    shown = averages(summed(algorithm, [normalized(algorithm, prepared)], [list(range(6))])[2])
    policy = [float(x.sum()) for x in replies(parameters(0), batch, range(12))]
    frozen = [float(x.sum()) for x in replies(parameters(1), batch, range(12))]
    gaps = [p - f for p, f in zip(policy, frozen, strict=True)]
    z0 = max(0.0, sum(gaps[6:]) / 6)
    assert algorithm.observe(prepared) == {"z0": pytest.approx(z0, abs=1e-5), "balance": 1.5}
    assert set(shown) | {"z0", "balance"} == set(algorithm.metrics)
    rewards = [0.4 * gap for gap in gaps]
    right = [gap > z0 for gap in gaps[:3]] + [gap < z0 for gap in gaps[3:6]]
    assert shown == pytest.approx(
        {
            "accuracy": sum(right) / 6,
            "reward_chosen": sum(rewards[:3]) / 3,
            "reward_rejected": sum(rewards[3:6]) / 3,
            "margin": sum(rewards[:3]) / 3 - sum(rewards[3:6]) / 3,
            "logprob_chosen": sum(policy[:3]) / 3,
            "logprob_rejected": sum(policy[3:6]) / 3,
        },
        abs=1e-5,
    )


def test_the_balance_of_kto_counts_replies_and_their_weights():
    batch = make_batch()
    algorithm = KtoConfig(desirable_weight=4.0).build()
    for returns, balance in (([1.0, *[0.0] * 5], 0.8), ([1.0] * 2 + [0.0] * 4, 2.0), ([0.0] * 6, None)):
        prepared = algorithm.prepare(replace(batch, returns=torch.tensor([*returns, *[0.0] * 6])))
        assert algorithm.observe(prepared).get("balance") == (balance and pytest.approx(balance))


def test_the_kl_of_kto_is_never_negative_and_has_no_gradient():
    batch = make_batch()
    algorithm = KtoConfig().build()
    likelier = replace(batch, logprobs=batch.reference_logprobs + 0.5 * batch.action_mask)
    algorithm.prepare(likelier)
    assert float(algorithm.z0) == pytest.approx(0.5 * float(batch.action_mask[6:].sum()) / 6)
    algorithm.prepare(replace(batch, logprobs=batch.reference_logprobs - 0.5 * batch.action_mask))
    assert float(algorithm.z0) == 0.0
    algorithm.prepare(make_batch(mismatched=False))
    assert float(algorithm.z0) == 0.0, "there is nothing to measure it on"


# -- edges ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", PAIRS, ids=name)
def test_at_the_reference_the_loss_is_that_of_a_coin(config):
    """Equal replies, so every margin is 0."""
    same = trajectory(2, (3, 4))
    batch = collate([same, same], [0, 0])
    weights = parameters(0, 1).expand(2, -1, -1)
    frozen = logprobs(weights, batch).float()
    algorithm = config.build()
    prepared = normalized(algorithm, algorithm.prepare(replace(batch, reference_logprobs=frozen)))
    loss, gradient, metrics = summed(algorithm, [prepared], [[0, 1]], weights)
    shown = averages(metrics)
    assert (shown["margin"], shown["accuracy"]) == (0.0, 0.5)
    nll = -float(frozen.sum()) / 4
    at_zero = {
        "dpo-sigmoid": math.log(2),
        "dpo-ipo": (1 / 0.6) ** 2,
        "orpo": nll + 0.6 * math.log(2),
        "simpo": math.log(1 + math.exp(0.4)),
    }
    assert loss == pytest.approx(at_zero[name(config)], abs=1e-6)
    if config.kind != "orpo":  # which still learns the chosen one
        assert torch.allclose(gradient.sum(0), torch.zeros_like(gradient[0]), atol=1e-7)


@pytest.mark.parametrize("config", CONFIGS, ids=name)
@pytest.mark.parametrize(
    "empty",
    [trajectory(2, ()), trajectory(2, (3, 3), mistake=0)],
    ids=["an empty action", "only masked tokens"],
)
def test_a_reply_without_a_learnt_token_is_left_out(config, empty):
    """The pair with it, or it alone: the others are as if it were not there."""
    first, second = REPLIES[0], REPLIES[1]
    groups = {0: Group(Task("t"), first), 1: Group(Task("t"), [second[0], empty])}
    kept = [0, 1, 2] if config.kind == "kto" else [0, 1]
    results = []
    for members in (collate_groups(groups), collate_groups(groups).select(kept)):
        batch = replace(members, reference_logprobs=logprobs(parameters(1), members).float())
        algorithm = config.build()
        prepared = normalized(algorithm, algorithm.prepare(batch))
        loss, gradient, metrics = summed(algorithm, [prepared], [list(range(len(batch)))])
        results.append((loss, averages(metrics), gradient))
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-6) and math.isfinite(results[0][0])
    assert results[0][1] == pytest.approx(results[1][1], abs=1e-6)
    torch.testing.assert_close(results[0][2], results[1][2], atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("config", CONFIGS, ids=name)
def test_nothing_but_replies_without_a_learnt_token_gives_no_weight(config):
    empty = trajectory(2, (3, 3), mistake=0)
    batch = collate([empty, empty], [0, 0])
    algorithm = config.build()
    weighed, denominator = algorithm.weigh(
        algorithm.prepare(replace(batch, reference_logprobs=batch.logprobs))
    )
    assert float(denominator) == 0.0 and not weighed.weights.any()


def test_the_odds_of_a_certain_reply_are_finite():
    """A reply of one token with probability 1 in fp32, against one with a tiny probability."""
    batch = collate([trajectory(1, (2,)), trajectory(1, (3,))], [0, 0])
    weights = torch.zeros(2, 24, VOCABULARY)
    weights[0, 1, 2], weights[1, 1, 0] = 100.0, 80.0
    algorithm = OrpoConfig().build()
    loss, gradient, metrics = summed(
        algorithm, [normalized(algorithm, algorithm.prepare(batch))], [[0, 1]], weights
    )
    assert math.isfinite(loss) and gradient.isfinite().all()
    assert all(math.isfinite(value) for value in averages(metrics).values())


@pytest.mark.parametrize("config", CONFIGS, ids=name)
def test_a_probability_of_zero_shows_in_the_loss(config):
    """The trainer refuses an update whose loss is not finite; a loss that hides it would continue with it."""
    batch = own(make_batch())
    algorithm = config.build()
    prepared = normalized(algorithm, algorithm.prepare(batch))
    gone = logprobs(parameters(0), prepared).float()
    gone[0, int(prepared.action_mask[0].nonzero()[0])] = math.nan
    loss, _ = algorithm.loss(PolicyOutput(gone, None), prepared)
    assert not math.isfinite(float(loss))


@pytest.mark.parametrize("config", PAIRS, ids=name)
def test_a_group_that_is_no_pair_is_told(config):
    batch = own(make_batch()).select([0, 1, 2])
    with pytest.raises(AgentPeftError, match=rf"^{config.kind} learns from pairs, and group 1 has 1 traj"):
        config.build().prepare(batch)


@pytest.mark.parametrize("config", CONFIGS, ids=name)
def test_each_row_says_its_formula_and_its_paper(config):
    facts = config.facts
    assert "mean over" in facts.formula and "https://arxiv.org/abs/" in facts.paper
    assert facts.needs_reference == (config.kind in ("dpo", "kto"))
    assert facts.keeps_groups_whole == (config.kind != "kto")


@pytest.mark.parametrize(
    "keys",
    [
        {"kind": "dpo", "beta": 0.0},
        {"kind": "dpo", "loss": "hinge"},
        {"kind": "kto", "desirable_weight": 0.0},
        {"kind": "orpo", "odds_coef": -1.0},
        {"kind": "simpo", "gamma": -1.0},
        {"kind": "simpo", "loss": "ipo"},
    ],
)
def test_wrong_keys_are_refused(keys):
    with pytest.raises(ValidationError):
        TypeAdapter(AnyAlgorithm).validate_python(keys)
