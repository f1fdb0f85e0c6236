"""The sampler of a policy, which ``load_sampler`` makes; the protocol ``base.Sampler`` describes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from agent_peft.config import validated
from agent_peft.policies.engine.base import EngineConfig, Sampler

if TYPE_CHECKING:
    from agent_peft.policies.policy import Policy


def load_sampler(policy: Policy, config: EngineConfig | Mapping[str, Any] | None = None) -> Sampler:
    """A sampler in this process, which acts with the policy's present weights in every call.

    Args:
        config: the keys of ``engine`` in a run's configuration, such as ``{"rows": 8}``.
    """
    from agent_peft.policies.engine.local import LocalEngine

    return LocalEngine(policy, validated(EngineConfig, config, "engine"))
