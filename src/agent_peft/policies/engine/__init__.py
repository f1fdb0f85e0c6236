"""The sampler of a policy, which ``load_sampler`` makes; the protocol ``base.Sampler`` describes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from agent_peft.config import validated
from agent_peft.policies.engine.base import (
    AnyEngine,
    EngineConfig,
    Sampler,
    ServerEngineConfig,
    VllmEngineConfig,
)

if TYPE_CHECKING:
    from agent_peft.policies.policy import Policy


def load_sampler(policy: Policy, config: AnyEngine | Mapping[str, Any] | None = None) -> Sampler:
    """A sampler in this process or on servers, which acts with the policy's present weights in every call.

    Args:
        config: the keys of ``engine`` in a run's configuration, such as ``{"rows": 8}``.
    """
    keys: Any = config
    kind = keys.get("kind") if isinstance(keys, Mapping) else getattr(keys, "kind", None)
    if kind == "server":
        from agent_peft.policies.engine.server import ServerSampler

        return ServerSampler(policy, validated(ServerEngineConfig, keys, "engine"))
    if kind == "vllm":
        from agent_peft.policies.engine.vllm import VllmSampler

        return VllmSampler(policy, validated(VllmEngineConfig, keys, "engine"))
    from agent_peft.policies.engine.local import LocalEngine

    return LocalEngine(policy, validated(EngineConfig, keys, "engine"))
