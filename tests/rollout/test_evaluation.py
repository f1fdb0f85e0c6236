"""A policy is measured from Python in one line, and mistakes in the settings are one line, too."""

from __future__ import annotations

import pytest

import agent_peft as ap
from agent_peft.environments.arithmetic import Arithmetic, ArithmeticConfig
from agent_peft.rollout.evaluation import EvaluationConfig


@pytest.fixture
def policy(policy_config):
    return ap.load_policy(policy_config)


@pytest.fixture
def environment():
    return Arithmetic(ArithmeticConfig(digits=1, num_tasks=5))


def test_a_policy_is_enough_and_is_measured_greedily(policy, environment):
    report = ap.evaluate(policy, environment)
    assert report.summary.endswith(" on 5 tasks")
    assert report.attempts == 5
    config = EvaluationConfig(environment=environment.config)
    assert config.sampling.temperature == 0
    assert ap.evaluate(ap.load_sampler(policy), environment, config, seed=7) == report, "no seed matters"


def test_a_mapping_has_the_keys_of_a_single_evaluation(policy, environment):
    settings = {"attempts": 4, "num_tasks": 2, "sampling": {"temperature": 1.0, "max_new_tokens": 3}}
    report = ap.evaluate(policy, environment, settings, seed=1)
    assert (report.attempts, report.success.tasks, list(report.pass_at)) == (8, 2, [1, 2, 4])
    whole = EvaluationConfig.model_validate({"environment": environment.config, **settings})
    assert ap.evaluate(policy, environment, whole, seed=1) == report


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attempt": 2}, r"^evaluation\.attempt has no effect here; did you mean 'attempts'\?$"),
        ({"at": ["start"]}, r"^evaluation\.at has no effect here; "),
        ({"environment": {"kind": "arithmetic"}}, r"^evaluation\.environment has no effect here; "),
        ({"attempts": 0}, r"^evaluation\.attempts: "),
        ({"attempts": 2}, r"attempts: 2 has no effect at sampling\.temperature: 0"),
        ({"sampling": {"max_new_token": 3}}, r"^evaluation\.sampling\.max_new_token: unknown key; did you"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_mistake_is_one_line(policy, environment, settings, message):
    with pytest.raises(ap.AgentPeftError, match=message) as raised:
        ap.evaluate(policy, environment, settings)
    assert "\n" not in str(raised.value)
