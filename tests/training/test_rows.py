"""Each row of a policy gradient in the loop: on policy it is on policy, and its keys have their effect."""

from __future__ import annotations

import pytest
import torch

from agent_peft.algorithms import ALGORITHMS
from agent_peft.environments import load_environment
from agent_peft.policies.config import LoraSettings, PretrainedConfig
from agent_peft.policies.engine import load_sampler
from agent_peft.policies.engine.base import EngineConfig
from agent_peft.policies.loading import load_policy
from agent_peft.training.stage import StageConfig
from agent_peft.training.step_metrics import mean_of
from agent_peft.training.trainer import Trainer
from agent_peft.types import AgentPeftError
from tests.conftest import case

REQUIRED = {"dr_grpo": {"constant_length": 3}}
ROWS = [kind for kind, config in ALGORITHMS.items() if config.__module__.endswith(".rows")]
POLICIES = {"lora": {}, "whole": {"lora": None}, "bfloat16": {"dtype": "bfloat16"}}
# a random policy is never right: what it is paid for is saying digits, and never less than 0
PRICES = {"incorrect": 0.5, "invalid_action": -0.5}


@pytest.mark.parametrize(
    ("kind", "policy"),
    [
        case(kind, policy, fast=number % len(POLICIES) == place, name=f"{kind}-{name}")
        for number, kind in enumerate(ROWS)
        for place, (name, policy) in enumerate(POLICIES.items())
    ],
)
def test_the_first_minibatch_is_on_policy(make_trainer, kind, policy):
    algorithm = {"kind": kind, **REQUIRED.get(kind, {})}
    keys = ALGORITHMS[kind].model_fields
    algorithm |= {key: 0.1 for key in ("kl_coef", "reward_kl_coef") if key in keys}
    (step,) = make_trainer(algorithm, steps=1, policy=policy, rewards=PRICES)
    shown, exact = step.metrics, "dtype" not in policy
    assert shown["updates_skipped"] == 0 and shown["gradient_norm"] > 0
    for name in ("ratio", "effective_sample_size"):
        assert shown[name] == pytest.approx(1, abs=1e-5 if exact else 0.02)
    for name in ("ratio_min", "ratio_max"):
        assert shown[name] == pytest.approx(1, abs=1e-4 if exact else 0.3)
    assert shown["approx_kl"] == pytest.approx(0, abs=1e-8 if exact else 0.005)
    assert shown["kl"] == pytest.approx(0, abs=1e-8 if exact else 0.005)
    if exact:
        assert shown["clip_fraction"] == 0


@pytest.mark.slow
def test_the_first_minibatch_of_a_real_model_is_on_policy(smollm2, real_dtype):
    """Episodes of two turns in a database, with an adapter that a supervised step has moved."""
    policy = load_policy(PretrainedConfig(model=str(smollm2), dtype=real_dtype, device="cpu"), 0)
    engine = load_sampler(policy, EngineConfig())
    environment = load_environment(
        {
            "kind": "db_bench",
            "generate": {"num_tasks": 8, "skills": ["insert"], "plain": True},
            "max_turns": 2,
        }
    )
    common = {"sampling": {"max_new_tokens": 12, "max_tokens": 320}, "optimizer": {"learning_rate": 1e-3}}
    sft = {"algorithm": "sft", "steps": 1, "tasks_per_step": 4, **common}
    list(Trainer(policy, environment, StageConfig.model_validate(sft), engine, seed=0))
    start = {n: p.detach().clone() for n, p in policy.model.named_parameters() if p.requires_grad}
    kinds = ({"kind": "grpo"}, {"kind": "gspo"}, {"kind": "rloo", "turn_discount": 0.9})
    for algorithm in kinds:  # ratios of tokens, of replies, and credit by turn
        with torch.no_grad():
            for name, parameter in policy.model.named_parameters():
                if name in start:
                    parameter.copy_(start[name])
        stage = {
            "algorithm": algorithm,
            "steps": 1,
            "tasks_per_step": 1,
            "group_size": 4,
            "rewards": {"incorrect": 0.5, "invalid_action": -0.1, "cut_action": -0.05},
            **common,
        }
        (step,) = Trainer(policy, environment, StageConfig.model_validate(stage), engine, seed=1)
        shown, close = step.metrics, 1e-4 if real_dtype == "float32" else 0.02
        assert shown["ratio"] == pytest.approx(1, abs=close), algorithm
        assert shown["approx_kl"] == pytest.approx(0, abs=close), algorithm
        assert real_dtype != "float32" or shown["clip_fraction"] == 0, algorithm


def test_the_extremes_of_a_step_are_those_of_all_its_updates():
    updates = [
        {"ratio_max": 1.5, "ratio_min": 0.9, "loss": 1.0},
        {"ratio_max": 1.1, "ratio_min": 0.5, "loss": 3.0},
    ]
    assert mean_of(updates) == {"ratio_max": 1.5, "ratio_min": 0.5, "loss": 2.0}


def test_a_reward_below_zero_is_told_to_maxrl_in_one_line(make_trainer):
    with pytest.raises(ValueError, match=r"rewards.\w+ is below 0; set it to 0"):
        make_trainer("maxrl", steps=1)
    penalty = {"kind": "length_penalty", "target_tokens": 1, "buffer_tokens": 1, "when": "always"}
    with pytest.raises(AgentPeftError, match=r"a return is -.*no price below 0") as told:
        list(make_trainer("maxrl", steps=1, rewards={"incorrect": 0.0, "terms": [penalty]}))
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("kind", ["reinforce_plus_plus", "ppo"])
@pytest.mark.parametrize(
    "policy",
    [
        {},
        {"lora": None},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "lora": None},
        {"lora": LoraSettings(rank=4, alpha=8, dropout=0.3)},
    ],
    ids=["lora", "whole", "lora-bfloat16", "whole-bfloat16", "dropout"],
)
def test_a_kl_in_the_reward_is_nothing_where_the_policy_is_its_reference(make_trainer, kind, policy):
    """Not even rounding, which advantages that are scaled to a standard deviation of 1 would learn from."""
    alike = {"incorrect": 0.0, "invalid_action": 0.0}
    algorithm = {"kind": kind, "reward_kl_coef": 0.1}
    trainer = make_trainer(algorithm, steps=1, policy=policy, rewards=alike, microbatch_tokens=24)
    before = [parameter.detach().clone() for parameter in trainer.policy.trainable_parameters()]
    (step,) = trainer
    assert not step.token_values.advantages.any()
    assert step.metrics["groups_with_signal"] == 0
    if kind == "ppo":  # which has a gradient of exactly 0, and so of its critic
        assert step.metrics["gradient_norm"] == 0
    else:
        assert step.metrics["updates_skipped"] == 1
    assert all(map(torch.equal, before, trainer.policy.trainable_parameters()))


def test_a_reward_with_a_kl_counts_groups_by_their_returns(make_trainer):
    """Also once the policy has left its reference, and each token has its own advantage."""
    algorithm = {"kind": "rloo", "reward_kl_coef": 0.1}
    *_, last = make_trainer(algorithm, steps=3, group_size=2, tasks_per_step=8, rewards=PRICES)
    assert 0 < last.metrics["groups_with_signal"] == 1 - last.metrics["zero_variance_groups"] < 1
    flat = last.token_values.advantages.split([len(t.tokens) for t in last.trajectories])
    assert all(advantages.any() for advantages in flat)


@pytest.mark.parametrize("algorithm", [{"kind": "reinforce_plus_plus"}, {"kind": "grpo", "kl_coef": 0.1}])
def test_without_a_kl_in_the_reward_nothing_is_scored_twice(make_trainer, algorithm):
    trainer = make_trainer(algorithm)
    batch = trainer.prepare(trainer.source.collect(0).groups)
    assert batch.scored_logprobs is None and batch.signal is None


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_kl_in_the_reward_holds_the_policy(make_trainer, policy_config, dropout):
    """Also with dropout, where each update has its own reference, and the reward that of the policy as it
    acts.
    """
    found = {}
    for coefficient in (1e-9, 30.0):
        algorithm = {"kind": "rloo", "reward_kl_coef": coefficient}
        lora = policy_config.lora.model_copy(update={"dropout": dropout})
        keys = {"steps": 4, "tasks_per_step": 8, "rewards": PRICES, "policy": {"lora": lora}}
        found[coefficient] = [step.metrics["kl"] for step in make_trainer(algorithm, **keys)]
    assert found[30.0][-1] < found[1e-9][-1] / 3, found
