"""Environments: tasks, and episodes that answer actions with facts. Torch is never loaded from here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, SerializeAsAny, field_validator

from agent_peft.environments.base import (
    Environment,
    EnvironmentConfig,
    Episode,
    Inspection,
    Mistake,
    TaskFiles,
)
from agent_peft.environments.contract import check_ids, configured, construct
from agent_peft.lookup import Rows, find, may_import, nearest
from agent_peft.types import AgentPeftError

ENVIRONMENTS: Mapping[str, type[Environment]] = Rows(
    {
        "arithmetic": "agent_peft.environments.arithmetic:Arithmetic",
        "db_bench": "agent_peft.environments.db_bench:DBBench",
        "gsm8k": "agent_peft.environments.gsm8k:GSM8K",
        "questions": "agent_peft.environments.questions:Questions",
        "chat": "agent_peft.environments.chat:Chat",
        "preferences": "agent_peft.environments.preferences:Preferences",
        "gymnasium": "agent_peft.environments.games.gymnasium:Gymnasium",
        "reasoning_gym": "agent_peft.environments.games.reasoning_gym:ReasoningGym",
        "os_interaction": "agent_peft.environments.os_interaction:OSInteraction",
        "openenv": "agent_peft.environments.http.openenv:OpenEnv",
        "remote": "agent_peft.environments.http.remote:RemoteEnvironment",
    }
)
CUSTOM = "your own as package.module:Class"


def load_environment(
    environment: str | type[Environment] | EnvironmentConfig | Mapping[str, Any], /, **keys: Any
) -> Environment:
    """Load an environment with its tasks.

    Args:
        environment: a kind, which is a row of ``ENVIRONMENTS`` or ``"package.module:Class"``; a class of your
            own; or a whole configuration, as a mapping with ``kind`` or as an object.
        keys: keys of its configuration.

    >>> len(load_environment("arithmetic", digits=1, num_tasks=5).tasks)
    5
    """
    if isinstance(environment, str | type):
        settings: dict[str, Any] = {"kind": environment}
    else:
        settings = dict(environment if isinstance(environment, Mapping) else environment.model_dump())
    kind = settings.get("kind") or None
    loaded_class = named_class(kind)
    if isinstance(environment, loaded_class.config_class) and not keys:
        config = environment
    else:
        name = kind if isinstance(kind, str) else f"{loaded_class.__module__}:{loaded_class.__qualname__}"
        config = configured(loaded_class.config_class, {**settings, **keys, "kind": name})
    made = construct(loaded_class, config)
    try:
        check_ids(made)
    except BaseException:
        made.close()
        raise
    return made


def environment_class(kind: object) -> type[Environment]:
    """The class of a kind: a row, a class, or ``package.module:Class``; ValueError if there is none."""
    if isinstance(kind, str) and kind in ENVIRONMENTS:
        return ENVIRONMENTS[kind]
    if isinstance(kind, type) or (isinstance(kind, str) and ":" in kind):
        named = find(kind) if isinstance(kind, str) else kind
        if not (isinstance(named, type) and issubclass(named, Environment)):
            raise ValueError(f"{kind!r} is not a subclass of agent_peft.environments.Environment; name one")
        keys: object = named.config_class
        if not (isinstance(keys, type) and issubclass(keys, EnvironmentConfig)):
            raise ValueError(
                f"{kind!r}: its config_class is {keys!r:.80}; set it to a subclass of "
                "agent_peft.environments.EnvironmentConfig, or leave it out where there are no keys"
            )
        return named
    fault = "names no kind" if kind is None else f"there is no kind {kind!r}"
    raise ValueError(f"{fault}; {nearest(kind or '', ENVIRONMENTS.keys(), CUSTOM)}")


def named_class(kind: object) -> type[Environment]:
    """Return `environment_class(kind)`. An unknown kind raises `AgentPeftError`."""
    try:
        return environment_class(kind)
    except ValueError as error:
        raise AgentPeftError(f"environment: {error}") from error


class UncheckedEnvironmentConfig(EnvironmentConfig):
    """The configuration of a user's class that must not be imported: keys are checked when it is loaded."""

    model_config = ConfigDict(extra="allow")

    kind: str

    @field_validator("kind")
    @classmethod
    def _is_noted(cls, kind: str) -> str:
        may_import(kind)
        return kind


def environment_config_class(kind: object) -> type[EnvironmentConfig]:
    """The class that configures environments of a kind. Raises ValueError if there is no such kind."""
    if isinstance(kind, str) and ":" in kind and not may_import(kind):
        return UncheckedEnvironmentConfig
    return environment_class(kind).config_class


def _resolve_environment(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    config_class = environment_config_class(value.get("kind"))
    # JSON and strict: numbers are no texts here; its mistakes keep their places within ours
    return config_class.model_validate_json(json.dumps(value, default=str), strict=True)


AnyEnvironment = Annotated[SerializeAsAny[EnvironmentConfig], BeforeValidator(_resolve_environment)]

__all__ = [
    "ENVIRONMENTS",
    "AnyEnvironment",
    "Environment",
    "EnvironmentConfig",
    "Episode",
    "Inspection",
    "Mistake",
    "TaskFiles",
    "environment_class",
    "load_environment",
]
