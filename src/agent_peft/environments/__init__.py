"""Environments: tasks, and episodes that answer actions with facts. Torch is never loaded from here."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, SerializeAsAny, field_validator

from agent_peft.environments.arithmetic import Arithmetic, ArithmeticConfig
from agent_peft.environments.base import Environment, EnvironmentConfig, Episode
from agent_peft.environments.contract import build, check_tasks, configured
from agent_peft.environments.db_bench import DBBench, DBBenchConfig
from agent_peft.environments.gsm8k import GSM8K, GSM8KConfig
from agent_peft.environments.http.client import RemoteConfig, RemoteEnvironment
from agent_peft.environments.http.openenv import OpenEnv, OpenEnvConfig
from agent_peft.environments.os_interaction import OSInteraction, OSInteractionConfig
from agent_peft.lookup import find, may_import
from agent_peft.types import AgentPeftError

ENVIRONMENTS: dict[str, tuple[type[EnvironmentConfig], type[Environment]]] = {
    "arithmetic": (ArithmeticConfig, Arithmetic),
    "db_bench": (DBBenchConfig, DBBench),
    "gsm8k": (GSM8KConfig, GSM8K),
    "os_interaction": (OSInteractionConfig, OSInteraction),
    "openenv": (OpenEnvConfig, OpenEnv),
    "remote": (RemoteConfig, RemoteEnvironment),
}


def load_environment(config: EnvironmentConfig | Mapping[str, Any]) -> Environment:
    """The environment that a configuration describes.

    Args:
        config: one of the configurations of ``ENVIRONMENTS``, or a mapping with ``kind``. A kind
            ``"package.module:Class"`` names a subclass of ``Environment`` of the user's own, which is called
            with the rest of the mapping.

    Raises:
        AgentPeftError: there is no such kind, the mapping does not fit it, the environment cannot be loaded,
            or has no tasks.
    """
    settings: Mapping[str, Any] = config.model_dump() if isinstance(config, BaseModel) else config
    kind = settings.get("kind")
    if isinstance(kind, str) and ":" in kind:
        try:
            own = own_class(kind)
        except ValueError as error:
            raise AgentPeftError(f"environment kind {error}") from error
        return _checked(build(own, {key: value for key, value in settings.items() if key != "kind"}), kind)
    if kind not in ENVIRONMENTS:
        nearest = difflib.get_close_matches(str(kind), ENVIRONMENTS, 1, cutoff=0.0)[0]
        raise AgentPeftError(
            f"there is no environment of kind {kind!r}; did you mean {nearest!r}? (your own class: package.module:Class)"
        )
    config_class, environment_class = ENVIRONMENTS[kind]
    if not isinstance(config, config_class):
        config = configured(config_class, settings)
    environment: Environment = environment_class(config)  # type: ignore[call-arg]  # each class takes the configuration beside it
    return _checked(environment, kind)


def _checked(environment: Environment, kind: str) -> Environment:
    try:
        check_tasks(environment, kind)
    except BaseException:
        environment.close()
        raise
    return environment


def own_class(kind: str) -> type[Environment]:
    """The class that ``package.module:Class`` names. Nothing but a subclass of ``Environment`` is ever
    called.

    Raises:
        ValueError: there is none.
    """
    found = find(kind)
    if not (isinstance(found, type) and issubclass(found, Environment)):
        raise ValueError(f"{kind!r} is no subclass of agent_peft.environments.Environment; name one")
    return found


class OwnEnvironmentConfig(EnvironmentConfig):
    """Of a user's own environment, ``kind: "package.module:Class"``: the other keys are for the class to
    judge, when it is built.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    kind: str

    @field_validator("kind")
    @classmethod
    def _importable(cls, kind: str) -> str:
        if may_import(kind):
            own_class(kind)
        return kind


def environment_config_class(kind: object) -> type[EnvironmentConfig]:
    """The class that configures environments of this kind.

    Raises:
        ValueError: there is none.
    """
    if isinstance(kind, str) and ":" in kind:
        return OwnEnvironmentConfig
    if kind in ENVIRONMENTS:
        return ENVIRONMENTS[kind][0]
    kinds = f"{', '.join(ENVIRONMENTS)}, or your own as package.module:Class"
    near = difflib.get_close_matches(str(kind), ENVIRONMENTS, 1)
    advice = f"did you mean {near[0]!r}?" if near else f"give one of {kinds}"
    raise ValueError(
        f"names no kind; give one of {kinds}" if kind is None else f"there is no kind {kind!r}; {advice}"
    )


def _resolve_environment(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    found = environment_config_class(value.get("kind"))
    return found.model_validate_json(
        json.dumps(value, default=str), strict=True
    )  # its mistakes keep their places within ours


AnyEnvironment = Annotated[SerializeAsAny[EnvironmentConfig], BeforeValidator(_resolve_environment)]

__all__ = [
    "ENVIRONMENTS",
    "AnyEnvironment",
    "Environment",
    "EnvironmentConfig",
    "Episode",
    "load_environment",
    "own_class",
]
