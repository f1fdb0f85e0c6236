"""The limits of the quickstart leave room for the demonstrations of its tasks."""

import pytest
from transformers import AutoTokenizer

from agent_peft.configuration.load import load_config
from agent_peft.environments import load_environment
from agent_peft.policies.models import bundled
from agent_peft.policies.tokenization import ChatTokenizer
from agent_peft.rollout.demonstrations import demonstrate, unsayable_because
from agent_peft.rollout.rewards import RewardConfig


@pytest.mark.slow
def test_the_limits_of_the_quickstart_fit_its_tasks():
    folder = bundled.cached("smollm2-135m")
    if folder is None:
        pytest.skip("SmolLM2 is not in the cache")
    chat = ChatTokenizer(AutoTokenizer.from_pretrained(folder))
    config = load_config("quickstart")
    sampling = config.stages[0].sampling
    for settings in (config.environment, config.evaluation.environment):
        environment = load_environment(settings)
        try:
            made = [
                demonstrate(environment, task, chat, RewardConfig(), 0) for task in environment.tasks[:400]
            ]
        finally:
            environment.close()
        unsayable = {unsayable_because(trajectory, chat, sampling) for trajectory in made}
        assert made and unsayable == {None}
