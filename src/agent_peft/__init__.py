"""Agent-PEFT teaches language-model agents by letting them act.

The names below are what a Python program needs. Each is imported when it is first used, so that
``import agent_peft`` is fast and loads neither torch nor Transformers.

>>> import agent_peft as ap
>>> ap.load_environment("arithmetic", digits=1).tasks[0].skills
('addition',)
"""

from importlib import import_module

from agent_peft.version import __version__

TYPE_CHECKING = False  # as type checkers know it, without the time that typing takes to import
if TYPE_CHECKING:
    from typing import Any

    from agent_peft import testing
    from agent_peft.agents.datasets import create_rl_dataset, create_sft_dataset
    from agent_peft.agents.rewards import (
        MathRewardFunction,
        create_accuracy_reward,
        create_length_penalty_reward,
        create_step_reward,
        evaluate_rewards,
    )
    from agent_peft.agents.simple_agent import LLMConfig, SimpleAgent
    from agent_peft.agents.tool import RLTrainingTool
    from agent_peft.agents.training import TrainingConfig
    from agent_peft.agents.wrappers import GRPOTrainerWrapper, PPOTrainerWrapper, SFTTrainerWrapper
    from agent_peft.algorithms import Algorithm
    from agent_peft.configuration.loading import load_config
    from agent_peft.environments import Environment, EnvironmentConfig, Episode, load_environment
    from agent_peft.policies.engine import load_sampler
    from agent_peft.policies.generation import generate
    from agent_peft.policies.loading import load_policy
    from agent_peft.policies.policy import Policy
    from agent_peft.rollout.evaluation import evaluate
    from agent_peft.runs.observers import Observer
    from agent_peft.runs.reading import load_run
    from agent_peft.runs.run import train
    from agent_peft.runs.trackers import Tracker, load_tracker
    from agent_peft.training.stage import Stage
    from agent_peft.training.trainer import Step, Trainer
    from agent_peft.types import (
        AgentPeftError,
        InfrastructureError,
        Message,
        Outcome,
        StepResult,
        StopReason,
        Task,
        Trajectory,
    )

__all__ = [
    "AgentPeftError",
    "Algorithm",
    "Environment",
    "EnvironmentConfig",
    "Episode",
    "GRPOTrainerWrapper",
    "InfrastructureError",
    "LLMConfig",
    "MathRewardFunction",
    "Message",
    "Observer",
    "Outcome",
    "PPOTrainerWrapper",
    "Policy",
    "RLTrainingTool",
    "SFTTrainerWrapper",
    "SimpleAgent",
    "Stage",
    "Step",
    "StepResult",
    "StopReason",
    "Task",
    "Tracker",
    "Trainer",
    "TrainingConfig",
    "Trajectory",
    "__version__",
    "create_accuracy_reward",
    "create_length_penalty_reward",
    "create_rl_dataset",
    "create_sft_dataset",
    "create_step_reward",
    "evaluate",
    "evaluate_rewards",
    "generate",
    "load_config",
    "load_environment",
    "load_policy",
    "load_run",
    "load_sampler",
    "load_tracker",
    "testing",
    "train",
]

_HOMES = {  # name -> module:attribute, as imported above; a test compares the two
    "AgentPeftError": "types:AgentPeftError",
    "Algorithm": "algorithms:Algorithm",
    "Environment": "environments:Environment",
    "EnvironmentConfig": "environments:EnvironmentConfig",
    "Episode": "environments:Episode",
    "GRPOTrainerWrapper": "agents.wrappers:GRPOTrainerWrapper",
    "InfrastructureError": "types:InfrastructureError",
    "LLMConfig": "agents.simple_agent:LLMConfig",
    "MathRewardFunction": "agents.rewards:MathRewardFunction",
    "Message": "types:Message",
    "Observer": "runs.observers:Observer",
    "Outcome": "types:Outcome",
    "PPOTrainerWrapper": "agents.wrappers:PPOTrainerWrapper",
    "Policy": "policies.policy:Policy",
    "RLTrainingTool": "agents.tool:RLTrainingTool",
    "SFTTrainerWrapper": "agents.wrappers:SFTTrainerWrapper",
    "SimpleAgent": "agents.simple_agent:SimpleAgent",
    "Stage": "training.stage:Stage",
    "Step": "training.trainer:Step",
    "StepResult": "types:StepResult",
    "StopReason": "types:StopReason",
    "Task": "types:Task",
    "Tracker": "runs.trackers:Tracker",
    "Trainer": "training.trainer:Trainer",
    "TrainingConfig": "agents.training:TrainingConfig",
    "Trajectory": "types:Trajectory",
    "create_accuracy_reward": "agents.rewards:create_accuracy_reward",
    "create_length_penalty_reward": "agents.rewards:create_length_penalty_reward",
    "create_rl_dataset": "agents.datasets:create_rl_dataset",
    "create_sft_dataset": "agents.datasets:create_sft_dataset",
    "create_step_reward": "agents.rewards:create_step_reward",
    "evaluate": "rollout.evaluation:evaluate",
    "evaluate_rewards": "agents.rewards:evaluate_rewards",
    "generate": "policies.generation:generate",
    "load_config": "configuration.loading:load_config",
    "load_environment": "environments:load_environment",
    "load_policy": "policies.loading:load_policy",
    "load_run": "runs.reading:load_run",
    "load_sampler": "policies.engine:load_sampler",
    "load_tracker": "runs.trackers:load_tracker",
    "testing": "testing:",
    "train": "runs.run:train",
}


def __getattr__(name: str) -> "Any":
    """Import a public name when it is first used (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _HOMES[name].split(":")
    value = import_module(f"{__name__}.{module}")
    if attribute:
        value = getattr(value, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
