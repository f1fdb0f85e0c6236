"""All rows of the table, on a small softmax policy: token t has logits ``parameters[row, t]``."""

import itertools
import json
import math
from dataclasses import replace

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from agent_peft.algorithms import (
    ALGORITHMS,
    AnyAlgorithm,
    CispoConfig,
    DapoConfig,
    DrGrpoConfig,
    GrpoConfig,
    GspoConfig,
    MaxrlConfig,
    PolicyGradient,
    PolicyGradientConfig,
    ReinforceConfig,
    ReinforcePlusPlusConfig,
    RlooConfig,
    SftConfig,
    averages,
    clipped,
    sequence_mean,
)
from agent_peft.algorithms.surrogates import k1, to_go
from agent_peft.batch import Batch, collate
from agent_peft.types import AgentPeftError, Task, Trajectory, Turn

from .tables import VOCABULARY, forward, loss_and_gradient, normalized

REWARDS = (1.0, 0.0, 0.5, 0.25, 1.0, 1.0)
GROUPS = [0, 0, 0, 0, 1, 1]  # group 1 has no variance
CONFIGS = [
    ReinforceConfig(),
    ReinforceConfig(weighting="token_mean", entropy_coef=0.01, kl_coef=0.1),
    RlooConfig(kl_coef=0.1, update_epochs=2),
    GrpoConfig(),
    GrpoConfig(kl_coef=0.1, entropy_coef=0.01, clip_high=0.28),
    DrGrpoConfig(constant_length=16),
    ReinforcePlusPlusConfig(reward_kl_coef=0.1),
    DapoConfig(dual_clip=3.0, reward_kl_coef=0.1),
    GspoConfig(clip_low=0.1, clip_high=0.1),
    CispoConfig(),
    MaxrlConfig(),
    PolicyGradientConfig(surrogate="band", advantage="leave_one_out", weighting="turn_mean"),
    SftConfig(),
]


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
    logprobs = forward(parameters, batch).logprobs
    return replace(
        batch,
        logprobs=logprobs,
        scored_logprobs=logprobs,
        reference_logprobs=forward(policy(9), batch).logprobs,
    )


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
            name: torch.nn.functional.pad(value, (0, 3))
            for name, value in vars(batch).items()
            if value is not None and value.ndim == 2
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
    for name in ("ratio", "ratio_min", "ratio_max", "effective_sample_size"):
        assert shown[name] == pytest.approx(1.0, abs=1e-6)  # whatever the weighting
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
    assert (shown["ratio_min"], shown["ratio_max"]) == pytest.approx((float(rho.min()), float(rho.max())))
    share = float(rho.mean()) ** 2 / float(rho.square().mean())
    assert share < 0.9 and shown["effective_sample_size"] == pytest.approx(share, rel=1e-5)
    assert shown["approx_kl"] == pytest.approx(float((rho - 1 - log_ratio).mean()), rel=1e-5)
    assert 0 < shown["clip_fraction"] == pytest.approx(float(cut.float().mean()), rel=1e-5)
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
        lp = output.logprobs[row, mask]
        old = batch.logprobs[row, mask]
        ref = batch.reference_logprobs[row, mask]
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


@pytest.mark.parametrize(
    "returned",
    [
        lambda returns: returns[:, None],
        lambda returns: returns.mean(),
        lambda returns: returns[:1],
        lambda returns: returns[None],
        lambda returns: returns.tolist(),
    ],
)
@pytest.mark.parametrize(
    "keys", [{}, {"turn_discount": 0.5}, {"turn_discount": 0.5, "compares_groups": True}]
)
def test_an_advantage_of_another_shape_is_not_silently_broadcast(returned, keys):
    surrogate = clipped(0.2, 0.2)
    own = PolicyGradient("own", lambda returns, groups: returned(returns), surrogate, sequence_mean, **keys)
    with pytest.raises(AgentPeftError, match=r"^the advantage of own returned .* belongs: one number for"):
        own.prepare(rollout(policy(0)))


@pytest.mark.parametrize(
    "returned",
    [
        lambda loss: (loss.mean(), loss > 0),
        lambda loss: (loss.sum(1), loss > 0),
        lambda loss: (loss, False),
        lambda loss: loss,
    ],
)
def test_a_surrogate_of_another_shape_is_not_silently_broadcast(returned):
    def surrogate(logprobs, sampled, advantages, mask):
        return returned(-advantages * logprobs * mask)

    own = PolicyGradient("own", lambda returns, groups: returns, surrogate, sequence_mean)
    batch = normalized(own, rollout(policy(0)))
    with pytest.raises(AgentPeftError, match=r"^the surrogate returned .* belongs: the loss per token, and"):
        own.loss(forward(policy(1), batch), batch)


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
    assert not algorithm.needs_entropy
    if algorithm.on_policy:
        assert not algorithm.needs_reference, "the KL is off by default"


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        ("reinforce", "clip_low"),
        ("reinforce", "update_epochs"),
        ("rloo", "clip_high"),
        ("grpo", "baseline_momentum"),
        ("cispo", "clip_low"),
        ("gspo", "weighting"),
        ("reinforce_plus_plus", "kl_coef"),
        ("sft", "kl_coef"),
    ],
)
def test_a_key_without_effect_is_an_unknown_key(kind, key):
    with pytest.raises(ValidationError, match="Extra inputs"):
        TypeAdapter(AnyAlgorithm).validate_python({"kind": kind, key: 1})


def test_epochs_and_minibatches_reach_the_trainer():
    algorithm = GrpoConfig(update_epochs=3, minibatches=4).build()
    assert (algorithm.update_epochs, algorithm.minibatches) == (3, 4)


# -- the parts as keys ---------------------------------------------------------------------------------------

PRESETS = [
    (ReinforceConfig(), {"advantage": "plain_return", "baseline": "moving_average"}),
    (ReinforceConfig(baseline_momentum=None, weighting="token_mean"), {"advantage": "plain_return"}),
    (RlooConfig(kl_coef=0.1), {"advantage": "leave_one_out", "surrogate": "ratio", "kl_coef": 0.1}),
    (GrpoConfig(dual_clip=3.0), {"dual_clip": 3.0}),
    (DapoConfig(), {"clip_high": 0.28, "weighting": "token_mean"}),
    (DrGrpoConfig(constant_length=9), {"advantage": "group_centered", "weighting": "constant_length"}),
    (GspoConfig(), {"surrogate": "sequence_clipped"}),
    (CispoConfig(), {"surrogate": "truncated", "clip_high": 4.0, "weighting": "token_mean"}),
    (MaxrlConfig(), {"advantage": "mean_normalized", "surrogate": "ratio", "weighting": "sequence_sum"}),
    (
        ReinforcePlusPlusConfig(reward_kl_coef=0.1),
        {"advantage": "plain_return", "baseline": "batch_normalized", "reward_kl_coef": 0.1},
    ),
]
WEIGHTING_OF = {"reinforce": "sequence_sum", "rloo": "sequence_sum"}


@pytest.mark.parametrize(("row", "parts"), PRESETS, ids=lambda part: getattr(part, "kind", ""))
def test_a_row_is_a_preset_of_the_parts(row, parts):
    """The same formula, loss, gradient and metrics."""
    keys = {"weighting": getattr(row, "weighting", "sequence_mean"), **parts}
    if row.kind == "reinforce":
        keys["surrogate"] = "score_function"
    if row.kind == "dr_grpo":
        keys["constant_length"] = 9
    results = []
    for config in (row, PolicyGradientConfig(**keys)):
        algorithm = config.build()
        batch = normalized(algorithm, rollout(policy(0)))
        results.append((algorithm.formula, *loss_and_gradient(algorithm, [batch], policy(1), [range(6)])))
    (formula, loss, gradient, metrics), (formula_2, loss_2, gradient_2, metrics_2) = results
    assert formula == formula_2 and loss == loss_2 and metrics == metrics_2
    assert torch.equal(gradient, gradient_2)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"surrogate": "ratio", "clip_low": 0.1}, "clip_low has no effect with surrogate: ratio"),
        ({"surrogate": "truncated", "clip_low": 0.1}, "clip_low has no effect with surrogate: truncated"),
        ({"surrogate": "band", "dual_clip": 3.0}, "dual_clip has no effect with surrogate: band"),
        ({"clip_high": None}, "clip_high: surrogate clipped needs a number"),
        ({"baseline_momentum": 0.5}, "baseline_momentum belongs to baseline: moving_average"),
        ({"weighting": "constant_length"}, "constant_length belongs to weighting: constant_length"),
        ({"constant_length": 5}, "constant_length belongs to weighting: constant_length"),
        ({"baseline": "moving_average"}, "has no effect on advantage: group_normalized, whose mean is 0"),
        ({"surrogate": "score_function", "update_epochs": 2}, "right only for the policy that acted"),
        ({"surrogate": "clip"}, "Input should be 'score_function'"),
    ],
)
def test_parts_that_do_not_fit_are_told(keys, told):
    with pytest.raises(ValidationError, match=told):
        PolicyGradientConfig(**keys)


def test_a_baseline_start_without_a_baseline_is_told():
    with pytest.raises(ValidationError, match="baseline_start has no effect with baseline_momentum: null"):
        ReinforceConfig(baseline_momentum=None, baseline_start=0.5)
    assert ReinforceConfig(baseline_momentum=None).build().state_dict() == {}


def test_the_parts_take_the_limits_of_their_surrogate():
    for surrogate, limits in {"band": (0.5, 4.0), "truncated": (None, 1.0), "ratio": (None, None)}.items():
        config = PolicyGradientConfig(surrogate=surrogate)
        assert (config.clip_low, config.clip_high) == limits
        assert PolicyGradientConfig(**config.model_dump()) == config, "a resolved configuration reads back"


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_every_row_says_its_formula(kind):
    facts = ALGORITHMS[kind](**({"constant_length": 8} if kind == "dr_grpo" else {})).facts
    assert facts.formula
    assert facts.paper or kind == "sft"


def test_the_formula_has_the_numbers_of_the_keys():
    config = DapoConfig(dual_clip=3.0, kl_coef=0.1, reward_kl_coef=0.2, entropy_coef=0.01)
    assert config.facts.formula == (
        "mean over tokens of (min(-min(ρ Â, clip(ρ, 0.8, 1.28) Â), -3 Â where Â < 0) + 0.1 KL(π ‖ reference) "
        "- 0.01 entropy); Â = (R - mean of its group) / (std of its group + 1e-6) - 0.2 KL(π_sampled ‖ "
        "reference) from the token on"
    )


# -- the KL in the reward ------------------------------------------------------------------------------------


def test_the_kl_in_the_reward_by_hand():
    algorithm, batch = RlooConfig(reward_kl_coef=0.5).build(), rollout(policy(0))
    plain = RlooConfig().build().prepare(batch).advantages
    found = algorithm.prepare(batch).advantages
    for row, mask in enumerate(batch.action_mask):
        log_ratio = (batch.logprobs - batch.reference_logprobs)[row, mask]
        to_go = torch.stack([log_ratio[t:].sum() for t in range(len(log_ratio))])
        torch.testing.assert_close(found[row, mask], plain[row, mask] - 0.5 * to_go)
    assert not found[~batch.action_mask].any()
    assert algorithm.needs_reference and not algorithm.learns_at_zero_advantage


def test_the_kl_in_the_reward_has_the_gradient_of_the_kl():
    """Over all sequences of two tokens, E_π[Σ_t KL to go · ∇ log π_t] is ∇ KL(π ‖ reference)."""
    logits = torch.randn(2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits.requires_grad_()
    other = torch.randn(2, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64).log_softmax(-1)
    now = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad((now.exp() * (now - other)).sum(), logits, retain_graph=True)
    mask, total = torch.ones(1, 2, dtype=torch.bool), torch.zeros((), dtype=torch.float64)
    for pair in itertools.product(range(3), repeat=2):
        index = torch.tensor(pair)[:, None]
        logprobs, reference = (x.gather(1, index)[:, 0][None] for x in (now, other))
        cost = to_go(k1(logprobs.detach(), reference), mask)
        total = total + logprobs.sum().exp().detach() * (cost * logprobs).sum()
    (estimated,) = torch.autograd.grad(total, logits)
    torch.testing.assert_close(estimated, exact)


def test_a_missing_reference_is_not_silently_no_kl_in_the_reward():
    with pytest.raises(ValueError, match="reference"):
        RlooConfig(reward_kl_coef=0.1).build().prepare(replace(rollout(policy(0)), reference_logprobs=None))


@pytest.mark.parametrize("config", [RlooConfig, ReinforcePlusPlusConfig])
def test_the_kl_in_the_reward_is_no_signal_of_a_group(config):
    """It moves all tokens, and says nothing of which episode was better."""
    batch = rollout(policy(0))
    alike = replace(batch, returns=torch.full_like(batch.returns, 0.1))
    for one in (batch, alike):
        plain = config().build().prepare(one)
        priced = config(reward_kl_coef=0.5).build().prepare(one)
        assert plain.signal is None and priced.advantages.any()
        assert torch.equal(priced.signal, (plain.advantages != 0).any(1))
    assert not priced.signal.any()


def test_advantages_of_a_step_are_normalized_over_its_tokens():
    algorithm, batch = ReinforcePlusPlusConfig().build(), rollout(policy(0))
    prepared = algorithm.prepare(batch)
    tokens = batch.returns[:, None].expand_as(batch.rewards)[batch.action_mask].double()
    expected = (tokens - tokens.mean()) / tokens.std(correction=0)
    torch.testing.assert_close(prepared.advantages[batch.action_mask].double(), expected, atol=1e-6, rtol=0)
    assert algorithm.observe(prepared) == {"advantage_std": pytest.approx(1.0)}


def test_the_step_shows_the_baseline_and_the_spread_of_advantages():
    algorithm, batch = ReinforceConfig().build(), rollout(policy(0))
    prepared = algorithm.prepare(batch)
    shown = algorithm.observe(prepared)
    assert shown["baseline"] == pytest.approx(0.1 * sum(REWARDS) / 6)
    spread = prepared.advantages[batch.action_mask].std(correction=0)
    assert shown["advantage_std"] == pytest.approx(float(spread))


# -- where nothing can be computed ---------------------------------------------------------------------------

RL = [config for config in CONFIGS if config.kind != "sft"]


def prepared_and_loss(config, batch, parameters=None):
    algorithm = config.build()
    batch = normalized(algorithm, batch)
    parameters = policy(1) if parameters is None else parameters
    return loss_and_gradient(algorithm, [batch], parameters, [range(len(batch))])


@pytest.mark.parametrize("config", RL, ids=lambda c: c.kind)
def test_equal_rewards_teach_nothing_but_what_no_group_says(config):
    """0.1 is not exact: a sum of it must not leave a rounding error that is divided by a vanishing std."""
    batch = replace(rollout(policy(0)), returns=torch.full((6,), 0.1))
    keys = {"kl_coef": 0.0, "reward_kl_coef": 0.0, "entropy_coef": 0.0}
    config = config.model_copy(update={key: 0.0 for key in keys if hasattr(config, key)})
    advantages = config.build().prepare(batch).advantages
    assert bool(advantages.any()) == (config.kind == "reinforce")
    assert advantages.isfinite().all()


@pytest.mark.parametrize("config", RL, ids=lambda c: c.kind)
def test_a_group_of_one_is_refused_where_groups_are_compared(config):
    algorithm = config.build()
    batch = replace(rollout(policy(0)), groups=torch.tensor([0, 0, 0, 0, 1, 2]))
    if algorithm.compares_groups:
        with pytest.raises(AgentPeftError, match="group 1 has one trajectory"):
            algorithm.prepare(batch)
    else:
        assert algorithm.prepare(batch).advantages.isfinite().all()


@pytest.mark.parametrize("config", RL, ids=lambda c: c.kind)
def test_a_trajectory_without_a_sampled_token_has_no_gradient(config):
    batch = rollout(policy(0))
    mask = batch.action_mask.clone()
    mask[1] = False
    batch = replace(
        batch,
        action_mask=mask,
        logprobs=batch.logprobs * mask,
        reference_logprobs=batch.reference_logprobs * mask,
    )
    loss, gradient, metrics = prepared_and_loss(config, batch)
    assert math.isfinite(loss) and gradient.isfinite().all()
    assert not gradient[1].any() and gradient.any()
    assert all(math.isfinite(value) for value in averages(metrics).values())


@pytest.mark.parametrize("config", RL, ids=lambda c: c.kind)
def test_only_masked_tokens_leave_no_live_row(config):
    batch = rollout(policy(0))
    nothing = torch.zeros_like(batch.logprobs)
    batch = replace(
        batch,
        action_mask=torch.zeros_like(batch.action_mask),
        logprobs=nothing,
        reference_logprobs=nothing,
    )
    weighed = normalized(config.build(), batch)
    assert not (weighed.weights.abs().sum(1) > 0).any(), "so the trainer skips the update"


@pytest.mark.parametrize("config", RL, ids=lambda c: c.kind)
def test_a_reward_that_is_no_number_reaches_the_loss(config):
    """Where the trainer refuses it, instead of learning from the others as if it were not there."""
    batch = rollout(policy(0))
    loss, _, _ = prepared_and_loss(config, replace(batch, returns=torch.tensor([math.nan, *REWARDS[1:]])))
    assert math.isnan(loss)


@pytest.mark.parametrize("config", RL, ids=lambda c: c.kind)
def test_a_token_that_has_become_impossible_is_no_silent_step(config):
    """Its probability is 0, so its log is -inf: what divides or multiplies by that is not finite, and the
    trainer refuses the step; what reads the ratio, 0, continues.
    """
    algorithm, batch = config.build(), rollout(policy(0))
    batch = normalized(algorithm, batch)
    output = forward(policy(1), batch)
    logprobs = output.logprobs.clone()
    row, token = batch.action_mask.nonzero()[0].tolist()
    logprobs[row, token] = -math.inf
    leaf = logprobs.requires_grad_()
    loss, _ = algorithm.loss(replace(output, logprobs=leaf), batch)
    loss.backward()
    goes_on = config.kind in ("rloo", "grpo", "dr_grpo", "dapo", "gspo", "maxrl", "policy_gradient")
    goes_on = goes_on or config.kind == "reinforce_plus_plus"
    finite = bool(loss.isfinite()) and bool(leaf.grad.isfinite().all())
    assert finite == (goes_on and not algorithm.kl_coef)


def test_a_ratio_without_bound_is_outside_of_a_band():
    algorithm = PolicyGradientConfig(surrogate="band").build()
    assert isinstance(algorithm, PolicyGradient)
    leaf = torch.tensor([[0.0, -1.0]], requires_grad=True)
    loss, cut = algorithm.surrogate(
        leaf, torch.tensor([[-1e4, -1.0]]), torch.ones(1, 2), torch.ones(1, 2).bool()
    )
    loss.sum().backward()
    assert cut.tolist() == [[True, False]]
    assert leaf.grad.tolist() == [[0.0, -1.0]]
