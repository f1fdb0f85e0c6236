"""All rows of the table, on a small softmax policy: token t has logits ``parameters[row, t]``."""

import json
from dataclasses import dataclass, replace

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from agent_peft.algorithms import (
    ALGORITHMS,
    AnyAlgorithm,
    DrGrpoConfig,
    GrpoConfig,
    ReinforceConfig,
    RlooConfig,
    SftConfig,
    averages,
)
from agent_peft.batch import Batch, collate
from agent_peft.types import AgentPeftError, Task, Trajectory, Turn

VOCABULARY = 5
REWARDS = (1.0, 0.0, 0.5, -0.25, 1.0, 1.0)
GROUPS = [0, 0, 0, 0, 1, 1]  # group 1 has no variance
CONFIGS = [
    ReinforceConfig(),
    ReinforceConfig(weighting="token_mean", entropy_coef=0.01, kl_coef=0.1),
    RlooConfig(kl_coef=0.1, update_epochs=2),
    GrpoConfig(),
    GrpoConfig(kl_coef=0.1, entropy_coef=0.01, clip_high=0.28),
    DrGrpoConfig(constant_length=16),
    SftConfig(),
]


@dataclass(frozen=True)
class Output:
    logprobs: Tensor
    entropy: Tensor | None


def forward(parameters: Tensor, batch: Batch) -> Output:
    log_softmax = parameters[: len(batch), : batch.tokens.shape[1]].log_softmax(-1)
    logprobs = log_softmax.gather(-1, batch.tokens[..., None]).squeeze(-1)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    return Output(logprobs * batch.action_mask, entropy * batch.action_mask)


def policy(seed: int, rows: int = 6, length: int = 20) -> Tensor:
    return torch.randn(rows, length, VOCABULARY, generator=torch.Generator().manual_seed(seed))


def rollout(parameters: Tensor) -> Batch:
    """Trajectories of one and of two turns and of different lengths, with the log-probabilities of
    ``parameters``.
    """
    trajectories = []
    for row, reward in enumerate(REWARDS):
        first = Turn((1,) * (row + 1), (2, 3), (0.0, 0.0))
        second = Turn((0, 4), tuple((row + k) % VOCABULARY for k in range(row)), (0.0,) * row)
        turns = (first, second) if row % 2 else (first,)
        trajectories.append(Trajectory(Task("t"), turns, rewards=(reward,) + (0.0,) * (len(turns) - 1)))
    batch = collate(trajectories, GROUPS)
    return replace(
        batch,
        logprobs=forward(parameters, batch).logprobs,
        reference_logprobs=forward(policy(9), batch).logprobs,
    )


def normalized(algorithm, batch):
    weighted, denominator = algorithm.weigh(algorithm.prepare(batch))
    return replace(weighted, weights=weighted.weights / denominator)


def loss_and_gradient(algorithm, batches, parameters, rows):
    """Sums of the microbatches' losses, metrics and gradients."""
    leaf = parameters.clone().requires_grad_()
    losses, metrics = 0.0, {}
    for batch, chosen in zip(batches, rows, strict=True):
        loss, shown = algorithm.loss(forward(leaf[chosen], batch), batch)
        loss.backward()
        losses += float(loss.detach())
        metrics = {name: metrics.get(name, 0.0) + value for name, value in shown.items()}
    return losses, leaf.grad, metrics


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.kind)
def test_microbatches_sum_to_the_minibatch(config):
    algorithm, moved = config.build(), policy(1)
    batch = normalized(algorithm, rollout(policy(0)))
    loss, gradient, metrics = loss_and_gradient(algorithm, [batch], moved, [list(range(6))])
    for rows in ([[0, 1, 2], [3, 4, 5]], [[5, 0], [1], [4, 3, 2]], [[i] for i in range(6)]):
        parts = loss_and_gradient(algorithm, [batch.select(r) for r in rows], moved, rows)
        assert parts[0] == pytest.approx(loss, rel=1e-6, abs=1e-6)
        torch.testing.assert_close(parts[1], gradient, atol=1e-6, rtol=1e-6)
        assert parts[2].keys() == metrics.keys()
        for name, value in metrics.items():
            torch.testing.assert_close(parts[2][name], value, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.kind)
def test_ranks_sum_to_the_minibatch(config):
    algorithm, moved = config.build(), policy(1)
    prepared, ranks = algorithm.prepare(rollout(policy(0))), [[0, 1, 2, 3], [4, 5]]
    weighted = [algorithm.weigh(prepared.select(rows)) for rows in ranks]
    denominator = sum(share for _, share in weighted)
    batches = [replace(batch, weights=batch.weights / denominator) for batch, _ in weighted]
    loss, gradient, _ = loss_and_gradient(algorithm, batches, moved, ranks)
    whole = config.build()
    expected = loss_and_gradient(whole, [normalized(whole, rollout(policy(0)))], moved, [list(range(6))])
    assert loss == pytest.approx(expected[0], rel=1e-6, abs=1e-6)
    torch.testing.assert_close(gradient, expected[1], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.kind)
def test_padding_changes_nothing(config):
    moved, batch = policy(1), rollout(policy(0))
    wider = replace(
        batch,
        **{
            name: torch.nn.functional.pad(getattr(batch, name), (0, 3))
            for name in ("tokens", "action_mask", "logprobs", "advantages", "weights", "reference_logprobs")
        },
    )
    results = []
    for one in (batch, wider):
        algorithm = config.build()
        results.append(loss_and_gradient(algorithm, [normalized(algorithm, one)], moved, [list(range(6))]))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6, abs=1e-6)
    torch.testing.assert_close(results[0][1], results[1][1], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.kind)
def test_tokens_of_the_environment_get_no_gradient(config):
    algorithm = config.build()
    batch = normalized(algorithm, rollout(policy(0)))
    _, gradient, _ = loss_and_gradient(algorithm, [batch], policy(1), [list(range(6))])
    touched = gradient[:, : batch.tokens.shape[1]].abs().sum(-1) > 0
    assert not touched[~batch.action_mask].any()
    assert touched[batch.action_mask].any()


@pytest.mark.parametrize("config", [c for c in CONFIGS if c.kind != "sft"], ids=lambda c: c.kind)
def test_on_policy_the_ratio_is_one_and_nothing_is_clipped(config):
    algorithm = config.build()
    batch = replace(rollout(policy(0)), reference_logprobs=rollout(policy(0)).logprobs)
    _, _, metrics = loss_and_gradient(algorithm, [normalized(algorithm, batch)], policy(0), [list(range(6))])
    shown = averages(metrics)
    assert shown["ratio"] == pytest.approx(1.0, abs=1e-6)  # whatever the weighting
    assert shown["clip_fraction"] == 0.0
    assert shown["approx_kl"] == 0.0
    assert ("kl" in shown) == algorithm.needs_reference
    assert shown.get("kl", 0.0) == 0.0


def test_metrics_off_policy_by_hand():
    algorithm = GrpoConfig(weighting="token_mean").build()
    batch = normalized(algorithm, rollout(policy(0)))
    shown = averages(loss_and_gradient(algorithm, [batch], policy(1), [list(range(6))])[2])
    mask = batch.action_mask
    log_ratio = (forward(policy(1), batch).logprobs - batch.logprobs)[mask]
    rho, advantages = log_ratio.exp(), batch.advantages[mask]
    cut = ((advantages > 0) & (rho > 1.2)) | ((advantages < 0) & (rho < 0.8))
    assert shown["ratio"] == pytest.approx(float(rho.mean()), rel=1e-5)
    assert shown["approx_kl"] == pytest.approx(float((rho - 1 - log_ratio).mean()), rel=1e-5)
    assert 0 < shown["clip_fraction"] == pytest.approx(float(cut.float().mean()), rel=1e-5)
    assert shown["surprisal"] == pytest.approx(
        float(-forward(policy(1), batch).logprobs[mask].mean()), rel=1e-5
    )
    assert shown["entropy"] == pytest.approx(float(forward(policy(1), batch).entropy[mask].mean()), rel=1e-5)


def test_grpo_by_its_formula():
    """Shao et al., 2024, equation 3, with the penalty's right gradient; trajectory by trajectory, without
    the code under test.
    """
    algorithm = GrpoConfig(kl_coef=0.1, entropy_coef=0.01, clip_low=0.1, clip_high=0.3).build()
    batch = rollout(policy(0))
    _, gradient, _ = loss_and_gradient(algorithm, [normalized(algorithm, batch)], policy(1), [list(range(6))])
    leaf = policy(1).requires_grad_()
    output, total = forward(leaf, batch), 0.0
    for row, (reward, group) in enumerate(zip(REWARDS, GROUPS, strict=True)):
        peers = torch.tensor([r for r, g in zip(REWARDS, GROUPS, strict=True) if g == group])
        advantage = (reward - peers.mean()) / (peers.std() + 1e-6)
        mask = batch.action_mask[row]
        lp, old, ref = (
            output.logprobs[row, mask],
            batch.logprobs[row, mask],
            batch.reference_logprobs[row, mask],
        )
        rho = (lp - old).exp()
        objective = torch.minimum(rho * advantage, rho.clamp(0.9, 1.3) * advantage)
        kl = rho.detach() * (lp - ref).square() / 2
        total = total - (objective - 0.1 * kl + 0.01 * output.entropy[row, mask]).mean() / len(REWARDS)
    total.backward()
    torch.testing.assert_close(gradient, leaf.grad, atol=1e-6, rtol=1e-4)


def test_reinforce_by_its_formula():
    algorithm = ReinforceConfig(baseline_start=0.25).build()
    batch = rollout(policy(0))
    loss, gradient, _ = loss_and_gradient(
        algorithm, [normalized(algorithm, batch)], policy(0), [list(range(6))]
    )
    leaf = policy(0).requires_grad_()
    by_hand = -((torch.tensor(REWARDS) - 0.25) * forward(leaf, batch).logprobs.sum(dim=1)).mean()
    by_hand.backward()
    assert loss == pytest.approx(float(by_hand.detach()), rel=1e-6)
    torch.testing.assert_close(gradient, leaf.grad)


def test_sft_is_cross_entropy():
    algorithm = SftConfig().build()
    batch = normalized(algorithm, rollout(policy(0)))
    loss, _, metrics = loss_and_gradient(algorithm, [batch], policy(1), [list(range(6))])
    logits, mask = policy(1)[:, : batch.tokens.shape[1]], batch.action_mask
    assert loss == pytest.approx(
        float(torch.nn.functional.cross_entropy(logits[mask], batch.tokens[mask])), rel=1e-6
    )
    assert averages(metrics)["surprisal"] == pytest.approx(loss, rel=1e-6)


def test_groups_without_variance_teach_nothing():
    algorithm = GrpoConfig().build()
    batch = normalized(algorithm, rollout(policy(0)))
    _, gradient, _ = loss_and_gradient(algorithm, [batch], policy(1), [list(range(6))])
    assert not gradient[4:].any() and gradient[:4].any() and gradient.isfinite().all()


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.kind)
def test_rows_without_advantage_may_be_left_out_exactly_where_the_algorithm_says_so(config):
    algorithm = config.build()
    batch = normalized(
        algorithm, replace(rollout(policy(0)), returns=torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 0.0]))
    )
    rows = [row for row in range(6) if batch.advantages[row].any()]
    _, whole, _ = loss_and_gradient(algorithm, [batch], policy(1), [list(range(6))])
    left = [] if not rows else [batch.select(rows)]
    _, part, _ = loss_and_gradient(algorithm, left, policy(1), [rows] if rows else [])
    same = part is not None and torch.allclose(whole, part, atol=1e-7)
    assert same == (not algorithm.learns_at_zero_advantage)


def test_a_momentum_of_one_leaves_the_baseline_out():
    algorithm, batch = ReinforceConfig(baseline_momentum=1).build(), rollout(policy(0))
    for _ in range(3):
        advantages = algorithm.prepare(batch).advantages
        assert torch.equal(
            advantages[batch.action_mask], batch.returns[:, None].expand_as(advantages)[batch.action_mask]
        )
    assert algorithm.state_dict() == {"baseline": 0.0}


def test_the_moving_average_survives_a_checkpoint():
    first, batch = ReinforceConfig().build(), rollout(policy(0))
    first.prepare(batch)
    second = ReinforceConfig().build()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert first.state_dict()["baseline"] != 0.0
    assert torch.equal(first.prepare(batch).advantages, second.prepare(batch).advantages)


@pytest.mark.parametrize(
    ("config", "state"),
    [(GrpoConfig(), {"baseline": 0.1}), (ReinforceConfig(), {}), (SftConfig(), {"baseline": 0.1})],
)
def test_the_state_of_another_algorithm_is_refused(config, state):
    with pytest.raises(AgentPeftError, match="checkpoint's algorithm state"):
        config.build().load_state_dict(state)


def test_a_missing_reference_is_not_silently_no_penalty():
    algorithm = GrpoConfig(kl_coef=0.1).build()
    batch = replace(normalized(algorithm, rollout(policy(0))), reference_logprobs=None)
    with pytest.raises(ValueError, match="reference"):
        algorithm.loss(forward(policy(1), batch), batch)


def test_a_missing_entropy_is_not_silently_no_bonus():
    algorithm = GrpoConfig(entropy_coef=0.1).build()
    batch = normalized(algorithm, rollout(policy(0)))
    with pytest.raises(ValueError, match="entropy"):
        algorithm.loss(replace(forward(policy(1), batch), entropy=None), batch)


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_the_union_of_configurations_and_the_table_agree(kind):
    needed = {"constant_length": 8} if kind == "dr_grpo" else {}
    config = TypeAdapter(AnyAlgorithm).validate_python({"kind": kind, **needed})
    assert type(config) is ALGORITHMS[kind]
    assert TypeAdapter(AnyAlgorithm).validate_python(config.model_dump()) == config
    algorithm = config.build()
    assert algorithm.kind == kind
    assert (algorithm.needs_reference, algorithm.needs_entropy, algorithm.on_policy) == (
        False,
        False,
        kind != "sft",
    )


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        ("reinforce", "clip_low"),
        ("reinforce", "update_epochs"),
        ("rloo", "clip_high"),
        ("grpo", "baseline_momentum"),
        ("sft", "kl_coef"),
    ],
)
def test_a_key_without_effect_is_an_unknown_key(kind, key):
    with pytest.raises(ValidationError, match="Extra inputs"):
        TypeAdapter(AnyAlgorithm).validate_python({"kind": kind, key: 1})


def test_epochs_and_minibatches_reach_the_trainer():
    algorithm = GrpoConfig(update_epochs=3, minibatches=4).build()
    assert (algorithm.update_epochs, algorithm.minibatches) == (3, 4)
