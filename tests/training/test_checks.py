"""Each check that is always on fires on the fault it is for, and none on a run without one."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from agent_peft.batch import Batch
from agent_peft.environments import load_environment
from agent_peft.policies import adapters, policy
from agent_peft.policies.config import LoraSettings
from agent_peft.policies.engine import local, weights
from agent_peft.policies.loading import load_policy
from agent_peft.policies.policy import Policy
from agent_peft.training import checks
from agent_peft.training import trainer as trainer_module
from agent_peft.training.trainer import Trainer
from agent_peft.types import AgentPeftError, TrustError
from tests.conftest import case

TWO_LAYERS = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}


def run(trainer: Trainer) -> list[dict[str, float]]:
    return [step.metrics for step in trainer]


def stops(trainer: Trainer, match: str) -> None:
    """The run ends in one line."""
    with pytest.raises(TrustError, match=match) as raised:
        run(trainer)
    assert "\n" not in str(raised.value)


@contextmanager
def without_adapter(policy: Policy, way: str, adapter: bool = True):
    """What ``sampling_weights`` would be if the adapter never reached the sampler."""
    with torch.no_grad(), policy.model.disable_adapter():
        yield


# -- a run without a fault -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "algorithm",
    ["reinforce", "rloo", "grpo", {"kind": "grpo", "kl_coef": 0.1, "entropy_coef": 0.01}],
    ids=str,
)
def test_nothing_fires_without_a_fault(make_trainer, algorithm):
    found = run(make_trainer(algorithm, steps=4))
    assert all(m["ratio"] == pytest.approx(1, abs=1e-5) for m in found)
    assert all(m["clip_fraction"] == 0 and m["approx_kl"] < 1e-8 for m in found)
    assert all(m["updates_skipped"] == 0 for m in found)


@pytest.mark.parametrize(
    "sampling",
    [{"top_p": 0.9}, {"top_k": 5}, {"temperature": 0.7, "top_p": 0.8, "top_k": 6}, {"temperature": 1.5}],
    ids=str,
)
def test_nothing_fires_under_any_sampling(make_trainer, sampling):
    found = run(make_trainer("grpo", steps=4, tasks_per_step=8, sampling={"max_new_tokens": 3, **sampling}))
    assert all(m["ratio"] == pytest.approx(1, abs=1e-4) for m in found if not m["updates_skipped"])
    assert sum(not m["updates_skipped"] for m in found) >= 2


@pytest.mark.parametrize(
    "policy",
    [{"dtype": "bfloat16"}, {"packing": False}, {"lora": None}, {"dtype": "bfloat16", "lora": None}],
    ids=str,
)
def test_nothing_fires_for_any_kind_of_policy(make_trainer, policy):
    found = run(make_trainer("grpo", steps=4, policy=policy))
    assert [m["updates_skipped"] for m in found] == [0] * 4


def test_nothing_fires_over_many_turns(make_trainer):
    """A random policy in DB Bench: long prompts, several turns, observations in between."""
    alphabet = "".join(map(chr, range(32, 127))) + "\n"
    base = make_trainer(
        "rloo",
        policy={
            "alphabet": alphabet,
            "architecture": {**make_trainer().policy.base.config.to_dict(), "max_position_embeddings": 8192},
        },
        tasks_per_step=2,
        rewards={"invalid_action": -0.1},
        sampling={"max_new_tokens": 6, "max_tokens": 6000},
    )
    environment = load_environment({"kind": "db_bench", "generate": {"num_tasks": 2}, "max_turns": 3})
    trainer = Trainer(base.policy, environment, base.stage, base.engine, seed=0)
    steps = list(trainer)
    assert max(len(t.turns) for step in steps for g in step.collection.groups for t in g.trajectories) > 1


def test_the_canary_is_the_beginning_of_a_trajectory(make_trainer, monkeypatch):
    """It was the end, cut out of its context: the quickstart stopped at its 17th update with nothing
    wrong. After an `<|im_end|>` in second place SmolLM2's hidden states are 24,000 large, and what fp32
    rounds off them is more than the tolerance.
    """
    scored: list[list[int]] = []
    own = local.LocalEngine.score

    def score(self, tokens, *rest, **more):
        scored.append(tokens)
        return own(self, tokens, *rest, **more)

    trainer = make_trainer("grpo", steps=1, sampling={"max_new_tokens": 12})
    monkeypatch.setattr(local.LocalEngine, "score", score)
    monkeypatch.setattr(checks, "CANARY_TOKENS", 4)
    (step,) = trainer
    trajectories = [t for group in step.collection.groups for t in group.trajectories]
    assert len(trajectories[0].tokens) > 4
    assert scored == [list(trajectories[0].tokens[:4])]


def test_a_first_step_without_variance_is_no_fault(make_trainer):
    """The only gradient is the penalty's, which is zero where the policy is its own reference: the adapter
    rightly stays zero.
    """
    trainer = make_trainer({"kind": "grpo", "kl_coef": 0.1}, rewards={"incorrect": 0.0})
    found = run(trainer)
    assert [m["gradient_norm"] for m in found] == pytest.approx([0, 0], abs=1e-6)


# -- rounding to 16 bits is no fault, whatever its size ------------------------------------------------------


@pytest.mark.parametrize("temperature", [case(0.3, fast=False), case(0.1, fast=True)])
def test_rounding_is_measured_at_the_temperature_of_the_stage(make_trainer, temperature):
    """They are of logits / T, whose rounding is 1 / T as large: 4 of 10 fresh policies stopped."""
    mismatch = 0.0
    for seed in (1, 2, 4):  # of these policies, most stopped
        trainer = make_trainer(
            {"kind": "reinforce", "baseline_momentum": None},
            policy={"dtype": "bfloat16", "architecture": TWO_LAYERS},
            seed=seed,
            steps=1,
            sampling={"max_new_tokens": 6, "temperature": temperature},
        )
        (metrics,) = run(trainer)
        mismatch = max(mismatch, metrics["mismatch"])
    assert mismatch > trainer.policy.rounding, "so without the measurement a run stops"


class ExactSampler:
    """Computes in fp32, so its scores are not rounded; with the adapter of the policy times ``strength``."""

    def __init__(self, policy: Policy, strength: float = 1.0) -> None:
        self.policy, self.strength = policy, strength

    def score(self, tokens, sampling, adapter=True):
        self.scale(self.strength)
        with nullcontext() if adapter else self.policy.model.disable_adapter():
            scores = self.policy.exact_logprobs(checks._whole(tokens), sampling)[0, 1:].tolist()
        self.scale(1 / self.strength)
        return scores

    def scale(self, by: float) -> None:
        for name, parameter in self.policy.model.named_parameters():
            if "lora_B" in name:
                parameter.data.mul_(by)


def grow(policy: Policy, size: float, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in policy.model.named_parameters():
        if "lora_B" in name:
            parameter.data += size * torch.randn(parameter.shape, generator=generator)


def test_rounding_is_measured_with_the_present_weights(make_trainer):
    """A large adapter makes logits large, and with them their rounding."""
    lora = LoraSettings(rank=8, alpha=256)
    policy = make_trainer(policy={"dtype": "bfloat16", "architecture": TWO_LAYERS, "lora": lora}).policy
    canary = checks.Canary(policy, ExactSampler(policy))
    canary.before_update([1 + i % 12 for i in range(60)])
    apart = []
    for seed in range(10):
        grow(policy, 1.0, seed)
        canary.after_update([])
        sampler, own = canary.last
        apart.append(float((sampler - own).abs().mean()))
    assert max(apart) > policy.rounding, "so without the measurement a run stops"


@pytest.mark.parametrize("strength", [1.0, 0.9])
@pytest.mark.parametrize("since", ["the last update", "the adapter was zero"])
def test_changes_that_are_only_rounding_are_no_fault_and_a_tenth_is_one(make_trainer, since, strength):
    """The trainer rounds and the sampler does not: of a change below rounding, the sampler shows none.

    It is how learned tokens look. The change since the adapter was zero is larger, and shows a tenth.
    """
    policy = make_trainer(policy={"dtype": "bfloat16", "architecture": TWO_LAYERS}).policy
    if since == "the last update":
        grow(policy, 0.02)
    canary = checks.Canary(policy, ExactSampler(policy, strength))
    canary.before_update([1 + i % 12 for i in range(60)])
    apart = []
    for update in range(6):
        grow(policy, 1e-5, seed=update)
        before = canary.last
        canary.after_update([])
        (sampler, own), (sampler_then, own_then) = canary.last, before
        apart.append(checks.slope_if_significant(sampler - sampler_then, own - own_then))
    assert any(slope is not None for slope in apart), "so without the measurement a run stops"
    grow(policy, 0.1)
    if strength == 1.0:
        canary.after_update([])
    else:
        with pytest.raises(TrustError, match="the sampler does not act with the weights"):
            canary.after_update([])


def test_a_resumed_run_follows_the_same_tokens(make_trainer):
    """A run stopped at a step that it passed when it was resumed: the tokens were not saved."""
    policy = {"dtype": "bfloat16"}
    whole = make_trainer(policy=policy)
    run(whole)
    state = whole.state_dict()
    resumed = make_trainer(policy=policy)
    resumed.load_state_dict(state)
    assert resumed.canary.tokens == whole.canary.tokens != []
    assert torch.equal(resumed.canary.first[1], whole.canary.first[1])
    assert "canary" not in make_trainer().state_dict()


# -- the sampler does not act with the trainer's weights -----------------------------------------------------


def test_an_adapter_that_never_reaches_the_sampler(make_trainer, monkeypatch):
    """Unseen in the first rollout, where the adapter is zero; found by the canary right after the first
    update.
    """
    monkeypatch.setattr(local, "sampling_weights", without_adapter)
    trainer = make_trainer()
    stops(trainer, "the sampler does not act with the weights that were just updated")
    assert trainer.updates == 1


def test_without_the_canary_the_next_rollout_tells(make_trainer, monkeypatch):
    monkeypatch.setattr(local, "sampling_weights", without_adapter)
    monkeypatch.setattr(checks.Canary, "after_update", lambda canary, tokens: None)
    trainer = make_trainer("reinforce")
    stops(trainer, "log-probabilities of freshly sampled tokens differ from the sampler's")
    assert trainer.updates == 1


def test_a_stale_adapter_in_the_sampler(make_trainer, monkeypatch):
    """As if the folded weights of the first rollout were kept: the sampler is one adapter behind."""
    original, kept = weights.merged_lora, {}

    @contextmanager
    def stale(model):
        modules = {name: layer for name, layer in model.named_modules() if name.endswith("lora_B.default")}
        current = {name: layer.weight.detach().clone() for name, layer in modules.items()}
        kept.update({name: weight for name, weight in current.items() if name not in kept})
        for name, layer in modules.items():
            layer.weight.data.copy_(kept[name])
        try:
            with original(model):
                yield
        finally:
            for name, layer in modules.items():
                layer.weight.data.copy_(current[name])

    monkeypatch.setattr(weights, "merged_lora", stale)
    stops(make_trainer(), "the sampler does not act with the weights that were just updated")


def test_an_adapter_folded_at_half_its_strength(make_trainer, monkeypatch):
    delta = weights.delta_of
    monkeypatch.setattr(weights, "delta_of", lambda layer: delta(layer) / 2)
    stops(make_trainer(), "the sampler does not act with the weights that were just updated")


def test_tokens_without_an_alternative_teach_nothing_and_that_is_no_fault(make_trainer):
    """Under top-k 1 each log-probability is 0, whatever the weights are."""
    algorithm = {"kind": "reinforce", "baseline_momentum": 1}
    trainer = make_trainer(algorithm, steps=2, sampling={"max_new_tokens": 3, "top_k": 1})
    steps = list(trainer)
    assert len(steps) == 2 and not trainer.learning


# -- the trainer takes the tokens for something else ---------------------------------------------------------


@pytest.mark.parametrize("shift", [-1, 1])
@pytest.mark.parametrize("truncating", [{}, {"top_p": 0.9}], ids=str)
def test_a_loss_mask_off_by_one(make_trainer, monkeypatch, shift, truncating):
    collate = trainer_module.collate_groups

    def shifted(*given) -> Batch:
        batch = collate(*given)
        mask = batch.action_mask.roll(shift, dims=1)
        mask[:, 0] = False
        return replace(batch, action_mask=mask)

    monkeypatch.setattr(trainer_module, "collate_groups", shifted)
    trainer = make_trainer(sampling={"max_new_tokens": 3, **truncating})
    stops(trainer, "the loss mask")
    assert trainer.updates == 0


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_mask_off_by_one_beside_a_certain_token(shift):
    """In 16 bits, the mean of the log-probabilities does not show it."""
    mask = torch.tensor([[False, False, True, True, True, False]])
    sampled = torch.tensor([[0.0, 0.0, -0.5, -1.0, -0.5, 0.0]])
    checks.assert_mask(mask, sampled)
    with pytest.raises(TrustError, match="the loss mask leaves out tokens"):
        checks.assert_mask(mask.roll(shift, dims=1), sampled)


@pytest.mark.parametrize(
    ("drawn", "scored"),
    [
        ({}, {"temperature": 0.9}),
        ({"temperature": 0.7}, {"temperature": 1.0}),
        ({"top_p": 0.9}, {"top_p": 1.0}),
        ({}, {"top_k": 4}),
    ],
    ids=str,
)
def test_another_distribution_in_the_trainer(make_trainer, monkeypatch, drawn, scored):
    trainer = make_trainer(sampling={"max_new_tokens": 3, **drawn})
    forward = trainer.policy.forward
    monkeypatch.setattr(
        trainer.policy,
        "forward",
        lambda batch, sampling, **options: forward(batch, sampling.model_copy(update=scored), **options),
    )
    stops(trainer, "the sampling distribution")
    assert trainer.updates == 0


def test_weights_that_move_between_rollout_and_update(make_trainer):
    trainer = make_trainer("reinforce")
    collect = trainer.source.collect

    def drifting(step):
        collection = collect(step)
        with torch.no_grad():
            trainer.policy.head.weight.mul_(1.05)
        return collection

    trainer.source = SimpleNamespace(collect=drifting)
    stops(trainer, "differ from the sampler's")


def test_log_probabilities_that_are_no_numbers(make_trainer):
    trainer = make_trainer("reinforce")
    collect = trainer.source.collect

    def spoiling(step):
        collection = collect(step)
        with torch.no_grad():
            trainer.policy.head.weight[0, 0] = float("nan")
        return collection

    trainer.source = SimpleNamespace(collect=spoiling)
    stops(trainer, "by nan nats")


# -- the adapter does not start at zero, or never leaves it --------------------------------------------------


def test_an_adapter_that_is_not_zero_at_the_start(policy_config, monkeypatch):
    attach = adapters.attach

    def planting(model, settings, seed):
        adapted = attach(model, settings, seed)
        factor = next(p for name, p in adapted.named_parameters() if "lora_B" in name)
        with torch.no_grad():
            factor[0, 0] = 1e-8
        return adapted

    monkeypatch.setattr(policy.adapters, "attach", planting)
    with pytest.raises(TrustError, match="the adapter is not zero at step 0: 1 elements of"):
        load_policy(policy_config, 0)


def test_the_first_output_is_the_base_models(policy_config):
    tokens = torch.tensor([[1, 2, 3, 4]])
    base = load_policy(policy_config.model_copy(update={"lora": None}), 0)
    fresh = load_policy(policy_config, 0)
    with torch.no_grad():
        assert torch.equal(base.model(input_ids=tokens).logits, fresh.model(input_ids=tokens).logits)


@pytest.mark.parametrize("algorithm", ["grpo", "sft"])
def test_an_adapter_whose_gradient_vanishes(make_trainer, algorithm):
    trainer = make_trainer(algorithm)
    for parameter in trainer.parameters:
        parameter.register_hook(torch.zeros_like)
    stops(trainer, "the adapter's delta is still zero after the first update")
    assert trainer.updates == 1


def test_an_optimizer_that_holds_other_parameters(make_trainer):
    trainer = make_trainer("sft")
    for group in trainer.optimizer.param_groups:
        group["params"] = [torch.nn.Parameter(p.detach().clone()) for p in group["params"]]
    stops(trainer, "the adapter's delta is still zero after the first update")


@pytest.mark.parametrize("algorithm", ["grpo", "sft"])
def test_log_probabilities_that_are_detached(make_trainer, monkeypatch, algorithm):
    """The seeds' bug: LoRA never trained."""
    trainer = make_trainer(algorithm)
    forward = trainer.policy.forward

    def detached(batch, sampling, **options):
        output = forward(batch, sampling, **options)
        return replace(output, logprobs=output.logprobs.detach())

    monkeypatch.setattr(trainer.policy, "forward", detached)
    stops(trainer, "no gradient")


def test_nothing_to_train_is_told(make_trainer):
    trainer = make_trainer("sft")
    for parameter in trainer.parameters:
        parameter.requires_grad_(False)
    with pytest.raises((AgentPeftError, ValueError), match="no parameter requires a gradient"):
        Trainer(trainer.policy, trainer.environment, trainer.stage, trainer.engine, seed=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_the_first_update_does_not_change(make_trainer, dtype):
    """Where everything is trained, there is no delta to look at."""
    trainer = make_trainer("sft", policy={"lora": None, "dtype": dtype}, optimizer={"learning_rate": 1e-30})
    stops(trainer, "the first update has changed no weight")


@pytest.mark.slow
def test_in_bfloat16_all_weights_learn_as_in_fp32(make_trainer):
    """A learning rate of 1e-5 moves no bf16 weight by itself: it does where fp32 copies are what is
    trained.
    """
    fallen = {}
    for dtype in ("float32", "bfloat16"):
        trainer = make_trainer(
            "sft", policy={"lora": None, "dtype": dtype}, steps=40, optimizer={"learning_rate": 1e-5}
        )
        surprisals = [m["surprisal"] for m in run(trainer)]
        fallen[dtype] = sum(surprisals[:10]) - sum(surprisals[-10:])
    assert fallen["float32"] > 0
    assert fallen["bfloat16"] == pytest.approx(fallen["float32"], rel=0.25)


@pytest.mark.parametrize(("tilt", "num_unlikely", "alarms"), [(0.0, 24, 0), (0.08, 1000, 40)])
def test_a_few_unlikely_tokens_of_a_certain_policy_are_no_temperature(tilt, num_unlikely, alarms):
    """Rounding in 16 bits is larger where a token is unlikely. At a surprisal of 0.05 a few tokens decide."""
    seen = 0
    for seed in range(40):
        drawn = torch.Generator().manual_seed(seed)
        sampler = -torch.rand(2000, generator=drawn, dtype=torch.float64) * 0.02
        sampler[:num_unlikely] -= 0.5 + 6 * torch.rand(num_unlikely, generator=drawn, dtype=torch.float64)
        rounding = torch.randn(2000, generator=drawn, dtype=torch.float64)
        trainer = sampler * (1 + tilt) + rounding * torch.where(sampler < -0.1, -0.1 * sampler, 0.001)
        order = torch.randperm(2000, generator=drawn)
        mismatch = checks.Mismatch()
        mismatch.add(trainer[order], sampler[order])
        slope, error = mismatch.slope
        seen += abs(slope) > checks.MIN_TEMPERATURE_SLOPE + checks.SIGMAS * error
    assert seen == alarms
