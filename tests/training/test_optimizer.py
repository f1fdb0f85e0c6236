import math

import pytest
import torch
from pydantic import ValidationError

from agent_peft.training.optimizer import (
    MasterWeights,
    OptimizerConfig,
    build_optimizer,
    learning_rate_factor,
    restore_optimizer,
    rounded,
    set_rate,
)

CONFIG = OptimizerConfig(
    learning_rate=1e-2, weight_decay=0.1, warmup_steps=3, schedule="cosine", min_lr_ratio=0.1
)


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def train(model, optimizer, steps, total=10):
    rates = []
    for step in steps:
        inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        set_rate(optimizer, learning_rate_factor(CONFIG, total, step))
        optimizer.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def test_a_run_that_is_cut_and_resumed_is_the_same_to_the_bit(tmp_path):
    whole = network()
    rates = train(whole, build_optimizer(whole.parameters(), CONFIG), range(10))

    cut = network()
    optimizer = build_optimizer(cut.parameters(), CONFIG)
    first = train(cut, optimizer, range(4))
    torch.save([cut.state_dict(), optimizer.state_dict()], tmp_path / "state.pt")

    resumed = network()
    optimizer = build_optimizer(resumed.parameters(), CONFIG)
    weights, state = torch.load(tmp_path / "state.pt", weights_only=True)  # nothing needs unpickling
    resumed.load_state_dict(weights)
    restore_optimizer(optimizer, state)
    assert first + train(resumed, optimizer, range(4, 10)) == rates
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))


def test_rates_and_decay_are_those_of_the_present_configuration():
    model, critic = network(), torch.nn.Linear(2, 1)
    train(model, optimizer := build_optimizer(model.parameters(), CONFIG), range(4))
    changed = CONFIG.model_copy(update={"learning_rate": 0.5, "weight_decay": 0.0, "betas": (0.5, 0.5)})
    resumed = build_optimizer(model.parameters(), changed)
    restore_optimizer(resumed, optimizer.state_dict())
    set_rate(resumed, 0.5)
    for group in resumed.param_groups:
        assert (group["lr"], group["weight_decay"], group["betas"]) == (0.25, 0.0, (0.5, 0.5))
    assert {int(state["step"]) for state in resumed.state.values()} == {4}
    two_rates = build_optimizer(model.parameters(), CONFIG, [(list(critic.parameters()), 0.3)])
    set_rate(two_rates, 0.5)
    assert [group["lr"] for group in two_rates.param_groups] == [0.005, 0.005, 0.15]


def test_the_rate_warms_up_and_then_follows_a_cosine():
    rates = [1e-2 * learning_rate_factor(CONFIG, 10, number) for number in range(12)]
    cosine = [0.1 + 0.9 * (1 + math.cos(math.pi * i / 7)) / 2 for i in range(7)]
    assert rates == pytest.approx([1e-2 * factor for factor in (1 / 3, 2 / 3, 1.0, *cosine, 0.1, 0.1)])


def test_the_warm_up_counts_updates_that_were_made():
    config = OptimizerConfig(schedule="linear", warmup_steps=4)
    factors = [learning_rate_factor(config, 24, number, made) for number, made in ((3, 0), (9, 2), (14, 9))]
    assert factors == [0.25, 0.75, 0.5]
    assert learning_rate_factor(config, 24, 23, 1) == pytest.approx(0.05), "it still ends with the stage"


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("total", [1, 3, 8])
def test_the_rate_never_leaves_its_bounds_however_short_the_run(schedule, total):
    config = OptimizerConfig(schedule=schedule, warmup_steps=5)
    factors = [learning_rate_factor(config, total, number) for number in range(20)]
    assert all(0 <= factor <= 1 for factor in factors)
    assert factors[total - 1] > 0


def test_constant_stays():
    assert [learning_rate_factor(OptimizerConfig(), 5, number) for number in (0, 4, 100)] == [1.0, 1.0, 1.0]


def test_vectors_are_not_decayed_and_frozen_parameters_not_trained():
    model = network()
    model[0].weight.requires_grad_(False)
    optimizer = build_optimizer(model.parameters(), CONFIG)
    decayed = {
        tuple(p.shape): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]
    }
    assert decayed == {(1, 8): 0.1, (8,): 0.0, (1,): 0.0}


def test_nothing_to_train_is_an_error():
    with pytest.raises(ValueError, match="no parameter"):
        build_optimizer([torch.nn.Parameter(torch.zeros(2), requires_grad=False)], CONFIG)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_lr_ratio": 0.1}, "no effect with schedule: constant"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"momentum": 0.9}, "Extra inputs"),
        ({"learning_rate": -0.1}, "greater than or equal to 0"),
    ],
)
def test_a_mistaken_configuration_is_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        OptimizerConfig(**settings)


def test_a_resolved_configuration_reads_back():
    assert OptimizerConfig(**OptimizerConfig().model_dump()) == OptimizerConfig()


def narrow_network():
    model = network().bfloat16()
    masters = MasterWeights(model.parameters())
    return model, masters, build_optimizer(masters.parameters, OptimizerConfig(learning_rate=1e-5))


def narrow_step(model, masters, optimizer, step):
    inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(step)).bfloat16()
    for part in inputs.split(4):  # microbatches
        model(part).square().sum().backward()
        masters.take_gradients()
    optimizer.step()
    masters.publish()
    optimizer.zero_grad()


def test_updates_that_16_bits_would_round_away_add_up():
    model, masters, optimizer = narrow_network()
    wide = network().bfloat16().float()
    theirs = build_optimizer(wide.parameters(), OptimizerConfig(learning_rate=1e-5))
    start = [p.detach().clone() for p in masters.parameters]
    for step in range(30):
        narrow_step(model, masters, optimizer, step)
        wide(
            torch.randn(16, 4, generator=torch.Generator().manual_seed(step)).bfloat16().float()
        ).square().sum().backward()
        theirs.step()
        theirs.zero_grad()
    for before, copy, parameter, exact in zip(
        start, masters.parameters, model.parameters(), wide.parameters(), strict=True
    ):
        assert torch.equal(rounded(copy), parameter), "what acts is the copy, rounded"
        assert (copy - exact).norm() < 0.2 * (exact - before).norm(), "and the copy goes where fp32 goes"
    assert not torch.equal(start[0].bfloat16(), masters.parameters[0].bfloat16())


def test_without_copies_they_are_lost():
    """What the copies are for: AdamW on the 16-bit parameters themselves stands still."""
    model = network().bfloat16()
    start = [p.detach().clone() for p in model.parameters()]
    optimizer = build_optimizer(model.parameters(), OptimizerConfig(learning_rate=1e-5))
    for step in range(30):
        model(
            torch.randn(16, 4, generator=torch.Generator().manual_seed(step)).bfloat16()
        ).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    still = sum(int((before == p).sum()) for before, p in zip(start, model.parameters(), strict=True))
    assert still > 0.8 * sum(p.numel() for p in start)


def test_in_fp32_the_optimizer_holds_the_parameters_themselves():
    model = network()
    assert [id(p) for p in MasterWeights(model.parameters()).parameters] == [
        id(p) for p in model.parameters()
    ]


def test_copies_are_resumed_to_the_bit(tmp_path):
    whole, masters, optimizer = narrow_network()
    for step in range(4):
        narrow_step(whole, masters, optimizer, step)
        if step == 1:
            state = [whole.state_dict(), masters.state_dict(), optimizer.state_dict()]
            torch.save(state, tmp_path / "state.pt")
    cut, copies, again = narrow_network()
    for one, stored in zip((cut, copies, again), torch.load(tmp_path / "state.pt"), strict=True):
        one.load_state_dict(stored)
    for step in (2, 3):
        narrow_step(cut, copies, again, step)
    for ours, theirs in zip(copies.parameters, masters.parameters, strict=True):
        assert torch.equal(ours, theirs)


def test_rounding_is_right_on_average_and_keeps_what_has_not_moved():
    generator = torch.Generator().manual_seed(0)
    grid = torch.randn(1000, 1000, generator=generator).bfloat16()
    assert torch.equal(rounded(grid.float()), grid)
    assert torch.equal(rounded(torch.zeros(5)), torch.zeros(5).bfloat16())
    for step in (1e-5, -1e-5, 1e-4):
        moved = rounded(grid.float() + step).double() - grid.double()
        assert float(moved.mean()) == pytest.approx(step, rel=0.1), (
            "by nearest, next to none would have moved"
        )
        assert (moved.abs() <= grid.double().abs() / 64 + 2 * abs(step)).all(), (
            "and none by more than a step of the grid"
        )
    nearest = (grid.float() + 1e-5).bfloat16().double() - grid.double()
    assert abs(float(nearest.mean())) < 0.7e-5
