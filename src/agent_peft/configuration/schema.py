"""The classes behind the keys of a configuration, by kind where there are several."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel

from agent_peft.algorithms import ALGORITHMS, AlgorithmConfig, algorithm_config_class
from agent_peft.config import models_in
from agent_peft.environments import ENVIRONMENTS, EnvironmentConfig, environment_config_class

CUSTOM = "custom"  # stands for every kind that a user's code defines

# base classes whose subclasses a kind names: their rows, and the class of any kind
_TABLES: Mapping[type, tuple[Mapping[str, type[BaseModel]], Callable[[object], type[BaseModel]]]] = {
    EnvironmentConfig: (
        {kind: environment.config_class for kind, environment in ENVIRONMENTS.items()},
        environment_config_class,
    ),
    AlgorithmConfig: (ALGORITHMS, algorithm_config_class),
}


def models_of(annotation: Any) -> dict[str, type[BaseModel]]:
    """The classes of a type's mappings, by their kind. A class without a kind has the kind ``""``.

    >>> list(models_of(AlgorithmConfig))[:2]
    ['reinforce', 'reinforce_plus_plus']
    """
    models = models_in(annotation)
    if len(models) == 1:
        return dict(_TABLES[models[0]][0]) if models[0] in _TABLES else {"": models[0]}
    kinds = (model.model_fields["kind"].default for model in models)
    return dict(zip((kind if isinstance(kind, str) else CUSTOM for kind in kinds), models, strict=True))


def model_of(annotation: Any, kind: object = None) -> type[BaseModel] | None:
    """The class of a type's mapping that has this kind; the first one if none has it."""
    models = models_in(annotation)
    if models and models[0] in _TABLES:
        try:
            return _TABLES[models[0]][1](kind)
        except ValueError:
            return None
    by_kind: Mapping[Any, type[BaseModel]] = models_of(annotation)
    return by_kind.get(kind) or next(iter(models), None)
