"""Every key of a configuration with its type, default and description, read from the classes themselves.

``python -m agent_peft.configuration.keys`` prints docs/configuration.md.
"""

from __future__ import annotations

import inspect
import json
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from agent_peft.algorithms import ALGORITHMS, AlgorithmConfig, algorithm_config_class
from agent_peft.config import Resume, models_in
from agent_peft.configuration.run_config import TrainConfig
from agent_peft.environments import ENVIRONMENTS, EnvironmentConfig, environment_config_class
from agent_peft.lookup import nearest
from agent_peft.training.stage import StageConfig
from agent_peft.types import AgentPeftError

TITLE = """# Keys of a configuration

This page lists every key with its type, its default and its meaning. `make docs` makes it from the classes
that check a configuration. `agent-peft explain --keys [PREFIX]` prints the same list, and `agent-peft explain
CONFIG` prints the values of one configuration and the origin of each. A key of a section is written with the
section's name: `optimizer: {learning_rate: 1e-4}` in a file, `optimizer.learning_rate=1e-4` on the command
line. `evaluation.environment` has the keys of `environment`.
"""
STAGES = """The keys of this section, and the sections below it, may stand at the top of a file, as defaults
of all stages, or in an item of `stages`, which overrides them."""
_NAMES = {
    int: "whole number",
    float: "number",
    str: "text",
    bool: "true or false",
    Path: "path",
    type(None): "null",
    Any: "any value",
}
_BOUNDS = (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))

CUSTOM = "custom"  # stands for every kind that a user's code defines
# base classes whose subclasses a kind names: our kinds, and the class of any kind
_TABLES: Mapping[type, tuple[Iterable[str], Callable[[object], type[BaseModel]]]] = {
    EnvironmentConfig: (ENVIRONMENTS, environment_config_class),
    AlgorithmConfig: (ALGORITHMS, algorithm_config_class),
}


def models_of(annotation: Any) -> dict[str, type[BaseModel]]:
    """The classes of a type's mappings, by their kind. A class without a kind has the kind ``""``.

    >>> list(models_of(AlgorithmConfig))[:2]
    ['reinforce', 'reinforce_plus_plus']
    """
    models = models_in(annotation)
    if len(models) == 1:
        ours, class_of = _TABLES.get(models[0], ([""], lambda _: models[0]))
        return {kind: class_of(kind) for kind in ours}
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


@dataclass(frozen=True)
class Key:
    """One key. ``path`` is how a user writes it; ``section`` also names the kind of each mapping on its way,
    such as ``environment:db_bench``.

    >>> next(key for key in all_keys() if key.path == "optimizer.learning_rate").default
    '0.0002'
    """

    section: str
    name: str
    field: FieldInfo
    default: str
    description: str

    @property
    def path(self) -> str:
        return path_of(f"{self.section}.{self.name}")

    @property
    def kind(self) -> str:
        return _kind_of(self.section)

    @property
    def type(self) -> str:
        bounds = (
            f"{sign} {json.dumps(bound)}"
            for name, sign in _BOUNDS
            for part in self.field.metadata
            if (bound := getattr(part, name, None)) is not None
        )
        name, null, _ = type_in_words(self.field.annotation).partition(" or null")
        return " ".join((name, *bounds)) + null


@dataclass(frozen=True)
class Section:
    """A mapping of a configuration: the class that checks it, and its keys."""

    name: str
    model: type[BaseModel]
    keys: Sequence[Key]


def sections() -> Iterator[Section]:
    """Every section, each before those inside it."""
    yield from _sections(TrainConfig, "", None)


def _sections(model: type[BaseModel], name: str, default: BaseModel | None) -> Iterator[Section]:
    defaults = {key: _default(field, default, key) for key, field in model.model_fields.items()}
    keys = (
        Key(name, key, field, _text(defaults[key]), describe_key(model, key))
        for key, field in model.model_fields.items()
    )
    yield Section(name, model, tuple(keys))
    for key, field in model.model_fields.items():
        for kind, inner in models_of(field.annotation).items():
            below = f"{name}.{key}".removeprefix(".") + (f":{kind}" if kind else "")
            yield from _sections(inner, below, defaults[key] if isinstance(defaults[key], inner) else None)


def all_keys(*prefixes: str) -> list[Key]:
    """The keys below some prefixes; all keys if there are none. A prefix is a key path or a kind. The keys of
    ``evaluation.environment``, which are those of ``environment``, are left out.

    >>> [key.name for key in all_keys("ranks")]
    ['timeout', 'allow_other_number']
    """
    keys = [
        key
        for section in sections()
        if not section.name.startswith("evaluation.environment")
        for key in section.keys
        if takes_value(key.field.annotation)
    ]
    names = dict.fromkeys(name for key in keys for name in (key.kind, *_parents(key.path)) if name)
    for prefix in prefixes:
        if path_of(prefix) not in names:
            top = [key for key in names if "." not in key]
            raise AgentPeftError(
                f"no key begins with {prefix!r}; {nearest(prefix, names if ':' in prefix else top)}"
            )
    wanted = {path_of(prefix) for prefix in prefixes}
    return [key for key in keys if not prefixes or wanted & {key.kind, *_parents(key.path)}]


def resume_class(path: str) -> Resume:
    """Whether a key may change when a run resumes (``config.Resume``); ``path`` is without ``stages.N``. A
    key that no class here knows, such as one of a user's environment, has the class of its section.

    >>> resume_class("engine.rows"), resume_class("algorithm.kind"), resume_class("algorithm.gamma")
    ('free', 'fixed', 'asked')
    """
    classes = _resume_classes()
    return next((classes[known] for known in _parents(path) if known in classes), "asked")


@cache
def _resume_classes() -> Mapping[str, Resume]:
    return dict(_classes_in(TrainConfig, "", "asked"))


def _classes_in(model: type[BaseModel], section: str, inherited: Resume) -> Iterator[tuple[str, Resume]]:
    for name, field in model.model_fields.items():
        declared: Any = field.json_schema_extra or {}
        path, own = f"{section}{name}", declared.get("resume", inherited)
        yield path, own
        for inner in models_of(field.annotation).values():
            yield from _classes_in(inner, "" if inner is StageConfig else f"{path}.", own)
        if "resume_kind" in declared:
            yield f"{path}.kind", declared["resume_kind"]


def takes_value(annotation: Any) -> bool:
    """Whether a type takes null, a text or a number, and not only mappings with keys of their own.

    >>> takes_value(TrainConfig | None), takes_value(tuple[TrainConfig, ...])
    (True, False)
    """
    parts = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    return not all(models_of(part) for part in parts)


def summary(model: type[BaseModel]) -> str:
    """The first paragraph of a class's docstring."""
    return " ".join((inspect.getdoc(model) or "").partition("\n\n")[0].split()).replace("``", "`")


def describe_key(model: type[BaseModel], key: str) -> str:
    """The description of a key of a class; of ``kind``, what that kind is. Nothing for an unknown key."""
    field = model.model_fields.get(key)
    description = field.description if field is not None else ""
    return " ".join((description or (summary(model) if key == "kind" else "")).split())


def description_of(config: BaseModel, path: str) -> str:
    """The description of a key, such as ``stages.0.steps``; nothing for a key that no class checks."""
    value: Any = config
    description = ""
    for part in path.split("."):
        if isinstance(value, BaseModel):
            description, value = describe_key(type(value), part), getattr(value, part, None)
        else:
            description = ""
            value = value[int(part)] if isinstance(value, Sequence) and part.isdecimal() else None
    return description


def path_of(name: str) -> str:
    """A key path as a user writes it, without kinds and without the ``stages`` around it.

    >>> path_of("stages.algorithm:ppo.gamma")
    'algorithm.gamma'
    """
    return re.sub(r":\w+", "", name).removeprefix(".").removeprefix("stages.")


def _kind_of(section: str) -> str:
    return "".join(re.findall(r":(\w+)", section)[-1:])


def type_in_words(annotation: Any) -> str:
    """A type as a user reads it.

    >>> type_in_words(tuple[str, ...] | None)
    'list of text or null'
    """
    arguments, origin = get_args(annotation), get_origin(annotation)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(type_in_words, arguments)))
    if origin is Literal:
        return " or ".join(map(json.dumps, arguments))
    if origin in (tuple, list):
        return "list of " + ", ".join(type_in_words(part) for part in arguments if part is not ...)
    if origin is dict or (isinstance(annotation, type) and issubclass(annotation, BaseModel | Mapping)):
        return "mapping"
    return _NAMES.get(annotation) or (type_in_words(arguments[0]) if arguments else str(annotation))


def markdown() -> str:
    """The page docs/configuration.md."""
    lines = [TITLE]
    for section in sections():
        if section.name.startswith("evaluation.environment"):
            continue
        path, kind = path_of(section.name) or "The top", _kind_of(section.name)
        lines.append(f"## {path}" + (f" (kind: {kind})" if kind else "") + "\n")
        lines.append(summary(section.model) + "\n")
        if section.name == "stages":
            lines.append(STAGES + "\n")
        keys = [key for key in section.keys if key.name != "kind"]
        if keys:
            lines += ["| key | type | default | what it does |", "|---|---|---|---|"]
            lines += [f"| `{key.name}` | {key.type} | {key.default} | {key.description} |" for key in keys]
            lines.append("")
    return "\n".join(lines)


def _default(field: FieldInfo, parent: BaseModel | None, name: str) -> Any:
    if parent is not None:
        return getattr(parent, name)
    return ... if field.default_factory is not None else field.default


def _text(default: Any) -> str:
    if default is PydanticUndefined:
        return "required"
    if default is ...:
        return "depends"
    if isinstance(default, BaseModel):
        return "its defaults"
    return json.dumps(default, default=str, ensure_ascii=False)


def _parents(path: str) -> Iterator[str]:
    """A path and all paths above it."""
    while path:
        yield path
        path = path.rpartition(".")[0]


if __name__ == "__main__":
    print(markdown(), end="")
