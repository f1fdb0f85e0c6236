"""A policy is measured from Python in one line, and mistakes in the settings are one line, too."""

from __future__ import annotations

import json

import pytest

import agent_peft as ap
from agent_peft.environments.arithmetic import Arithmetic, ArithmeticConfig
from agent_peft.environments.gsm8k import GSM8K, GSM8KConfig
from agent_peft.rollout.evaluation import EvaluationConfig, settings_of
from agent_peft.rollout.rewards import RewardConfig


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


def test_rewards_are_those_that_are_given_and_the_episodes_are_kept(policy, environment):
    told = []
    prices = {"invalid_action": -0.5, "incorrect": 0.0, "terms": [{"kind": "format", "weight": 2.0}]}
    report = ap.evaluate(
        policy, environment, {"num_tasks": 4}, rewards=prices, on_episode=lambda: told.append(1)
    )
    trajectories = [t for group in report.groups for t in group.trajectories]
    assert len(told) == len(trajectories) == 4
    assert report.reward.value == pytest.approx(sum(t.reward for t in trajectories) / 4)
    for t in trajectories:
        assert t.reward == pytest.approx((t.outcome == "correct") + (-0.5 if t.num_invalid else 2.0))
    assert report.settings["rewards"]["invalid_action"] == -0.5
    with pytest.raises(ap.AgentPeftError, match=r"^rewards\.corect: unknown key; did you mean 'correct'\?$"):
        ap.evaluate(policy, environment, rewards={"corect": 1.0})


def test_what_was_measured_is_recorded(policy, environment):
    settings = ap.evaluate(policy, environment, {"num_tasks": 3}, seed=4).settings
    assert (settings["tasks"], settings["attempts"], settings["seed"]) == (3, 1, 4)
    assert settings["sampling"]["temperature"] == 0.0
    again = ap.evaluate(policy, Arithmetic(environment.config), {"num_tasks": 3}, seed=4).settings
    assert again == settings
    for others in ({"digits": 2}, {"seed": 9}, {"operation": "multiplication"}):
        other = Arithmetic(environment.config.model_copy(update=others))
        assert (
            ap.evaluate(policy, other, {"num_tasks": 3}).settings["tasks_digest"] != settings["tasks_digest"]
        )


def test_the_same_tasks_in_another_folder_are_the_same_environment(tmp_path):
    digests = set()
    for name, answer in (("a", "4"), ("b", "4"), ("c", "5")):
        path = tmp_path / name / "tasks.jsonl"
        path.parent.mkdir()
        path.write_text(json.dumps({"question": "2+2=", "answer": f"#### {answer}"}) + "\n")
        environment = GSM8K(GSM8KConfig(tasks=str(path)))
        config = EvaluationConfig(environment=environment.config)
        digests.add(settings_of(config, environment, 0, RewardConfig())["tasks_digest"])
    assert len(digests) == 2
