"""Our losses against the numbers of TRL 1.16's trainers, which ``benchmarks/trl_losses.py`` records: on the
same log-probabilities and rewards, loss and gradient of each token are equal, or differ as docs/trl.md
says.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agent_peft.algorithms import (
    Algorithm,
    AlgorithmConfig,
    CispoConfig,
    DapoConfig,
    DpoConfig,
    DrGrpoConfig,
    GrpoConfig,
    GspoConfig,
    KtoConfig,
    OrpoConfig,
    RlooConfig,
    SftConfig,
    SimpoConfig,
)
from agent_peft.algorithms.preference import Side, ipo
from agent_peft.batch import Batch, PolicyOutput, collate
from agent_peft.types import Task, Trajectory, Turn

ROOT = Path(__file__).parents[2]
RECORD = json.loads(Path(__file__).with_name("trl_1_16.json").read_text())
CASES, EPISODES = RECORD["cases"], RECORD["episodes"]
CLIPPED = {
    "grpo": GrpoConfig(clip_high=0.28),
    "grpo_delta": GrpoConfig(dual_clip=1.5),
    "grpo_kl": GrpoConfig(kl_coef=0.1),
    "dapo": DapoConfig(),
    "dr_grpo": DrGrpoConfig(constant_length=7),
    "gspo": GspoConfig(clip_low=0.02, clip_high=0.03),
    "cispo": CispoConfig(clip_high=0.5),
}


def trajectory(row: dict[str, Any]) -> Trajectory:
    """A row of the record, whose tokens with a mask of 0 are the environment's."""
    turns, observation, action = [], list(row["prompt"]), []
    for token, is_sampled in zip(row["completion"], row["mask"], strict=True):
        if is_sampled:
            action.append(token)
            continue
        if action:
            turns.append(Turn(tuple(observation), tuple(action), (0.0,) * len(action)))
            observation, action = [], []
        observation.append(token)
    turns.append(Turn(tuple(observation), tuple(action), (0.0,) * len(action)))
    return Trajectory(Task("t"), tuple(turns), rewards=(row["reward"],) + (0.0,) * (len(turns) - 1))


def spread(rows: Sequence[dict[str, Any]], values: Sequence[Sequence[float]]) -> Tensor:
    """(B, T) float64: the values of each row's completion, at its tokens."""
    longest = max(len(row["prompt"]) + len(row["completion"]) for row in rows)
    placed = torch.zeros(len(rows), longest, dtype=torch.float64)
    for line, row, numbers in zip(placed, rows, values, strict=True):
        first = len(row["prompt"])
        line[first : first + len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
    return placed


def batch_of(
    rows: Sequence[dict[str, Any]], groups: Sequence[int], logprobs: Any = None, reference: Any = None
) -> Batch:
    batch = collate([trajectory(row) for row in rows], groups)
    mask = batch.action_mask
    assert mask.sum() == sum(sum(row["mask"]) for row in rows)
    logprobs = torch.zeros(mask.shape) if logprobs is None else spread(rows, logprobs) * mask
    reference = None if reference is None else spread(rows, reference) * mask
    return replace(batch, logprobs=logprobs, reference_logprobs=reference)


def episodes(case: str, *, every_token: bool = False) -> Batch:
    """The batch of a case of policy gradients. RLOOTrainer trains every token of a completion."""
    rows = [{**row, "mask": [1] * len(row["mask"])} if every_token else row for row in EPISODES]
    sampler = "policy" if case == "rloo_on_policy" else "old"
    reference = [row["reference"] for row in rows] if CASES[case]["settings"].get("beta") else None
    return batch_of(rows, [row["group"] for row in rows], [row[sampler] for row in rows], reference)


def policy() -> Tensor:
    return spread(EPISODES, [row["policy"] for row in EPISODES])


def with_advantages(batch: Batch, case: str) -> Batch:
    """The batch with TRL's advantages in place of ours."""
    advantages = torch.tensor(CASES[case]["advantages"], dtype=torch.float64)
    return replace(batch, advantages=advantages[:, None] * batch.action_mask)


def computed(algorithm: Algorithm, batch: Batch, logprobs: Tensor) -> tuple[float, Tensor, dict[str, Any]]:
    """Loss, its gradient with respect to each token's log π, and metrics, of a batch that is prepared."""
    weighed, denominator = algorithm.weigh(batch)
    weighed = replace(weighed, weights=weighed.weights / denominator)
    leaf = logprobs.clone().requires_grad_()
    loss, metrics = algorithm.loss(PolicyOutput(leaf * batch.action_mask, None), weighed)
    loss.backward()
    return float(loss.detach()), leaf.grad, metrics


def assert_equal(ours: tuple[float, Tensor, Any], loss: float, gradient: Tensor) -> None:
    assert gradient.abs().max() > 1e-3
    assert ours[0] == pytest.approx(loss, rel=1e-6, abs=1e-7)
    torch.testing.assert_close(ours[1], gradient, rtol=1e-6, atol=1e-8)


def gradient_of(case: dict[str, Any], rows: Sequence[dict[str, Any]] = EPISODES) -> Tensor:
    return spread(rows, case["gradient"])


def test_the_record_names_its_command_and_trl():
    assert RECORD["versions"]["trl"].startswith("1.16.")
    program = RECORD["command"].split()[1]
    assert RECORD["command"] in (ROOT / program).read_text(encoding="utf-8")


@pytest.mark.parametrize("case", CLIPPED)
def test_loss_and_gradient_are_those_of_trl(case):
    algorithm = CLIPPED[case].build()
    batch = with_advantages(episodes(case), case)
    ours = computed(algorithm, batch, policy())
    clipped, ratio = ours[2]["clip_fraction"], (policy() - batch.logprobs).exp()[batch.action_mask]
    assert 0 < clipped / ours[2]["weight"] < 1 and (ratio - 1).abs().mean() > 0.05  # off policy, and clipped
    assert_equal(ours, CASES[case]["loss"], gradient_of(CASES[case]))


@pytest.mark.parametrize("case", [*CLIPPED, "grpo_kl_uncorrected", "grpo_empty"])
def test_advantages_differ_by_what_is_added_to_the_standard_deviation(case):
    """1e-6 here, 1e-4 there."""
    config: AlgorithmConfig = CLIPPED.get(case, GrpoConfig())
    batch = episodes(case)
    ours = config.build().prepare(batch).advantages.amax(1) + config.build().prepare(batch).advantages.amin(1)
    deviation = torch.stack([batch.returns[batch.groups == group].std() for group in batch.groups])
    theirs = torch.tensor(CASES[case]["advantages"])
    if case != "dr_grpo":
        theirs = theirs * (deviation + 1e-4) / (deviation + 1e-6)
    assert theirs[6:].tolist() == [0.0, 0.0, 0.0]  # the group without variance
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


def test_trl_can_leave_the_ratio_out_of_the_kl():
    """Ours is β ρ k3, as TRL's default. Its ``use_bias_correction_kl=False`` is β k3."""
    name = "grpo_kl_uncorrected"
    case, batch = CASES[name], with_advantages(episodes(name), name)
    ours = computed(GrpoConfig(kl_coef=0.1).build(), batch, policy())
    weights = batch.action_mask / batch.action_mask.sum(1, keepdim=True) / len(batch)
    rho, log_r = (policy() - batch.logprobs).exp(), batch.reference_logprobs - policy() * batch.action_mask
    k3 = log_r.expm1() - log_r
    loss = case["loss"] + float((0.1 * weights * (rho - 1) * k3).sum())
    gradient = gradient_of(case) + 0.1 * weights * (rho * -log_r + log_r.expm1())
    assert_equal(ours, loss, gradient)
    assert ours[0] != pytest.approx(case["loss"], rel=1e-3)


def test_trl_counts_a_trajectory_without_an_action_in_the_mean():
    case = CASES["grpo_empty"]
    rows = [{**row, "mask": [0] * len(row["mask"])} if n == 4 else row for n, row in enumerate(EPISODES)]
    batch = batch_of(rows, [row["group"] for row in rows], [row["old"] for row in rows])
    ours = computed(GrpoConfig().build(), with_advantages(batch, "grpo_empty"), policy())
    assert_equal(ours, 9 / 8 * case["loss"], 9 / 8 * gradient_of(case))


def test_trl_divides_a_minibatch_by_the_mean_number_of_tokens():
    """A third of all tokens of the step, where ours divides by the minibatch's own."""
    case, batch = CASES["dapo_minibatch"], with_advantages(episodes("dapo_minibatch"), "dapo_minibatch")
    first = batch.select(range(3))
    ours = computed(DapoConfig().build(), first, policy()[:3, : first.tokens.shape[1]])
    factor = float(batch.action_mask.sum() / 3 / first.action_mask.sum())
    assert abs(factor - 1) > 0.03
    gradient = gradient_of(case, EPISODES[:3])
    assert_equal(ours, factor * case["loss"], factor * gradient)


def test_rloo_on_policy_has_the_gradient_of_trl():
    case = CASES["rloo_on_policy"]
    algorithm = RlooConfig().build()
    batch = algorithm.prepare(episodes("rloo_on_policy", every_token=True))
    loss, gradient, _ = computed(algorithm, batch, policy())
    torch.testing.assert_close(gradient, gradient_of(case), rtol=1e-6, atol=1e-8)
    # the ratio is of each token here, and of the trajectory there, so the value differs by the lengths
    lengths, advantages = batch.action_mask.sum(1), torch.tensor(case["advantages"])
    assert case["loss"] == pytest.approx(float(-advantages.mean()), abs=1e-7)
    assert loss == pytest.approx(float(-(advantages * lengths).mean()), rel=1e-6)


def test_rloo_off_policy_weighs_tokens_where_trl_weighs_trajectories():
    case = CASES["rloo"]
    algorithm = RlooConfig().build()
    batch = algorithm.prepare(episodes("rloo", every_token=True))
    _, gradient, _ = computed(algorithm, batch, policy())
    log_ratio = (policy() - batch.logprobs) * batch.action_mask
    whole, advantages = log_ratio.sum(1).exp(), torch.tensor(case["advantages"], dtype=torch.float64)
    cut = ((whole > 1.2) & (advantages > 0)) | ((whole < 0.8) & (advantages < 0))
    assert cut.any() and not cut.all()
    expected = gradient * (-log_ratio).exp() * (whole * ~cut)[:, None]
    torch.testing.assert_close(gradient_of(case), expected, rtol=1e-6, atol=1e-8)


def test_the_kl_in_trls_reward_is_that_of_the_whole_trajectory():
    """It is taken off R before the group is compared. Here a token loses that of itself and of later ones."""
    case = CASES["rloo_kl"]
    batch = episodes("rloo_kl", every_token=True)
    batch = replace(batch, scored_logprobs=batch.logprobs)
    ours = RlooConfig(reward_kl_coef=0.1).build().prepare(batch).advantages
    kl = (batch.logprobs - batch.reference_logprobs) * batch.action_mask
    earlier = kl.cumsum(1) - kl
    totals = kl.sum(1).view(3, 3)
    others = ((totals.sum(1, keepdim=True) - totals) / 2).flatten()
    theirs = ours + 0.1 * (others[:, None] - earlier) * batch.action_mask
    expected = torch.tensor(case["advantages"], dtype=torch.float64)[:, None] * batch.action_mask
    torch.testing.assert_close(theirs, expected, rtol=1e-6, atol=1e-6)
    assert (ours - expected).abs().max() > 1e-3


# -- supervised and preference losses ------------------------------------------------------------------------


def part_of(case: str, number: int = 0) -> dict[str, Any]:
    return CASES[case]["microbatches"][number]


def pairs(case: str) -> tuple[Batch, Tensor]:
    part = part_of(case)
    rows = part["rows"]
    groups = [*range(len(rows) // 2)] * 2
    return batch_of(rows, groups, reference=part.get("reference")), spread(rows, part["policy"])


def test_sft_is_trls():
    part = part_of("sft")
    batch = batch_of(part["rows"], range(6))
    ours = computed(SftConfig().build(), batch, spread(part["rows"], part["policy"]))
    assert_equal(ours, part["loss"], gradient_of(part, part["rows"]))


def test_sft_over_microbatches_is_trls():
    """Both divide by the tokens of the whole minibatch."""
    parts = CASES["sft_halves"]["microbatches"]
    rows = [row for part in parts for row in part["rows"]]
    logprobs, gradient = (
        spread(rows, [line for part in parts for line in part[key]]) for key in ("policy", "gradient")
    )
    ours = computed(SftConfig().build(), batch_of(rows, range(6)), logprobs)
    assert_equal(ours, sum(part["loss"] for part in parts), gradient)


def test_dpo_is_trls():
    batch, logprobs = pairs("dpo")
    algorithm = DpoConfig(beta=0.3).build()
    ours = computed(algorithm, algorithm.prepare(batch), logprobs)
    part = part_of("dpo")
    assert_equal(ours, part["loss"], gradient_of(part, part["rows"]))


def test_trls_ipo_compares_means_over_tokens():
    """The paper's equation, and ours, compares log-ratios of whole replies."""
    part = part_of("ipo")
    batch, logprobs = pairs("ipo")
    leaf = logprobs.clone().requires_grad_()
    mask = batch.action_mask
    tokens = mask.sum(1)
    sides = [
        Side((leaf * mask).sum(1)[rows] / tokens[rows], tokens[rows], (reference / tokens)[rows])
        for reference in [batch.reference_logprobs.sum(1)]
        for rows in (slice(0, 3), slice(3, 6))
    ]
    loss = ipo(0.3)(*sides)[0].mean()
    loss.backward()
    assert_equal((float(loss.detach()), leaf.grad, {}), part["loss"], gradient_of(part, part["rows"]))
    algorithm = DpoConfig(beta=0.3, loss="ipo").build()
    assert computed(algorithm, algorithm.prepare(batch), logprobs)[0] != pytest.approx(part["loss"], rel=1e-2)


def kto_step(parts: Sequence[dict[str, Any]]) -> tuple[Batch, Tensor]:
    """The replies of the parts, and then their mismatched ones, as one step."""
    rows = [row for part in parts for row in part["rows"]]
    others = [row for part in parts for row in part["mismatched"]["rows"]]
    values = {
        key: [
            line
            for place in ("own", "mismatched")
            for part in parts
            for line in (part if place == "own" else part["mismatched"])[key]
        ]
        for key in ("policy", "reference")
    }
    groups = [*range(len(rows)), *[-1] * len(others)]
    batch = batch_of(rows + others, groups, values["policy"], values["reference"])
    return batch, spread(rows + others, values["policy"])


def kto(parts: Sequence[dict[str, Any]]) -> tuple[tuple[float, Tensor, Any], float]:
    algorithm = KtoConfig(beta=0.4, desirable_weight=1.5, undesirable_weight=0.75).build()
    batch, logprobs = kto_step(parts)
    own = algorithm.prepare(batch).select((batch.groups >= 0).nonzero()[:, 0].tolist())
    logprobs = logprobs[: len(own), : own.tokens.shape[1]]
    return computed(algorithm, own, logprobs), algorithm.observe(batch)["z0"]


def test_kto_is_trls():
    part = part_of("kto")
    ours, z0 = kto([part])
    assert z0 == pytest.approx(part["z0"], rel=1e-6) and z0 > 0
    assert_equal(ours, part["loss"], gradient_of(part, part["rows"]))


def test_trl_estimates_z0_in_each_microbatch():
    """Here it is of the whole step, so it is ours only where the step is the microbatch."""
    parts = CASES["kto_halves"]["microbatches"]
    for part in parts:
        ours, z0 = kto([part])
        assert z0 == pytest.approx(part["z0"], rel=1e-6)
        assert_equal(ours, part["loss"], gradient_of(part, part["rows"]))
    (loss, _, _), z0 = kto(parts)
    assert all(abs(z0 - part["z0"]) > 1e-3 for part in parts)
    assert loss != pytest.approx(sum(part["loss"] for part in parts) / 2, rel=1e-5)


def test_trls_orpo_imitates_prompts_too():
    """Its first term is one mean over all tokens of the chosen trajectories, the prompts and what the
    environment wrote included. The term of the odds ratio is ours.
    """
    part, rows = part_of("orpo"), part_of("orpo")["rows"]
    batch, logprobs = pairs("orpo")
    algorithm = OrpoConfig(odds_coef=0.6).build()
    loss, gradient, _ = computed(algorithm, algorithm.prepare(batch), logprobs)
    tokens = batch.action_mask[:3].sum(1)
    imitation = -((logprobs * batch.action_mask)[:3].sum(1) / tokens).mean()
    every = [value for line in [*part["policy_prompt"][:3], *part["policy"][:3]] for value in line]
    expected = loss - float(imitation) - sum(every) / len(every)
    assert part["loss"] == pytest.approx(expected, rel=1e-6)
    written = spread(rows, [[1.0] * len(row["completion"]) for row in rows])
    written[3:] = 0
    own = torch.zeros_like(gradient)
    own[:3] = batch.action_mask[:3] / tokens[:, None] / 3
    theirs = gradient + own - written / len(every)
    torch.testing.assert_close(gradient_of(part, rows), theirs, rtol=1e-6, atol=1e-8)


def test_simpo_is_trls():
    part = part_of("simpo")
    batch, logprobs = pairs("simpo")
    algorithm = SimpoConfig(beta=2.0, gamma=0.5).build()
    ours = computed(algorithm, algorithm.prepare(batch), logprobs)
    assert_equal(ours, part["loss"], gradient_of(part, part["rows"]))


def test_every_row_that_trl_has_is_in_the_table():
    page = (ROOT / "docs" / "trl.md").read_text(encoding="utf-8")
    section = page.split("\n## Comparison with TRL\n")[1].split("\n## ")[0]
    assert RECORD["command"] in section
    for kind in ("grpo", "dapo", "dr_grpo", "gspo", "cispo", "rloo", "sft", "dpo", "kto", "orpo", "simpo"):
        assert f"\n| `{kind}`" in section, kind
