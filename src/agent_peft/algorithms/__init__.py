"""Algorithms: pure tensor mathematics. Each is a row of ``ALGORITHMS``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import Field

from agent_peft.algorithms.base import Algorithm, BaseAlgorithmConfig, Critic, Metrics, averages
from agent_peft.algorithms.policy_gradient import (
    DrGrpoConfig,
    GrpoConfig,
    PolicyGradient,
    ReinforceConfig,
    RlooConfig,
    dr_grpo,
    grpo,
    reinforce,
    rloo,
)
from agent_peft.algorithms.ppo import Ppo, PpoConfig, build_ppo
from agent_peft.algorithms.supervised import SftConfig, Supervised, sft
from agent_peft.batch import PolicyOutput

AlgorithmConfig = Annotated[
    ReinforceConfig | RlooConfig | GrpoConfig | DrGrpoConfig | PpoConfig | SftConfig,
    Field(discriminator="kind"),
]

ALGORITHMS: dict[str, tuple[type[BaseAlgorithmConfig], Callable[[Any], Algorithm]]] = {
    "reinforce": (ReinforceConfig, reinforce),
    "rloo": (RlooConfig, rloo),
    "grpo": (GrpoConfig, grpo),
    "dr_grpo": (DrGrpoConfig, dr_grpo),
    "ppo": (PpoConfig, build_ppo),
    "sft": (SftConfig, sft),
}


def build_algorithm(config: AlgorithmConfig) -> Algorithm:
    """The algorithm that a configuration names.

    >>> build_algorithm(GrpoConfig(kl_coef=0.01)).needs_reference
    True
    """
    return ALGORITHMS[config.kind][1](config)


__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "AlgorithmConfig",
    "BaseAlgorithmConfig",
    "Critic",
    "DrGrpoConfig",
    "GrpoConfig",
    "Metrics",
    "PolicyGradient",
    "PolicyOutput",
    "Ppo",
    "PpoConfig",
    "ReinforceConfig",
    "RlooConfig",
    "SftConfig",
    "Supervised",
    "averages",
    "build_algorithm",
]
