"""The base class of every configuration, and validation errors in one line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from agent_peft.lookup import nearest
from agent_peft.types import AgentPeftError

AnyModel = TypeVar("AnyModel", bound=BaseModel)

# What a key may do when a run resumes: a ``free`` one decides how the run computes, what it keeps and what it
# measures, but never what it learns. An ``asked`` one decides what is learned, and changes only where the
# user asks for it. A ``fixed`` one belongs to what has been made already; another value of it is another run.
# A field declares its class as ``json_schema_extra``; else it has that of the section around it, at the top
# ``asked``.
Resume = Literal["free", "asked", "fixed"]
FREE: dict[str, JsonValue] = {"resume": "free"}
ASKED: dict[str, JsonValue] = {"resume": "asked"}
FIXED: dict[str, JsonValue] = {"resume": "fixed"}
FIXED_KIND: dict[str, JsonValue] = {"resume_kind": "fixed"}  # of a section: its ``kind`` is fixed


class Config(BaseModel):
    """A part of a configuration. It is frozen, its defaults are validated, and an unknown key is an error.

    >>> class Limits(Config):
    ...     rows: int = 64
    >>> Limits(rows=8).rows
    8
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class PublicConfig(Config):
    """A configuration that Python users make by calling its class. Bad keys raise ``AgentPeftError``. A
    section has ``Config`` instead: its errors need the key path of the whole configuration.

    >>> class Limits(PublicConfig):
    ...     rows: int = 64
    >>> Limits(row=8)
    Traceback (most recent call last):
    agent_peft.types.AgentPeftError: Limits.row: unknown key; did you mean 'rows'?
    """

    def __init__(self, /, **keys: Any) -> None:
        try:
            super().__init__(**keys)
        except ValidationError as error:
            raise AgentPeftError(first_error(error, type(self).__name__, type(self))) from error


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """The configuration classes that a type names, in their order.

    >>> models_in(tuple[Config, ...] | None)
    [<class 'agent_peft.config.Config'>]
    """
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in models_in(argument)]


def validated(
    config_class: type[AnyModel], keys: AnyModel | Mapping[str, Any] | None, place: str
) -> AnyModel:
    """Return the configuration of these keys, or the one that is given. ``place`` names it in messages.

    >>> class Limits(Config):
    ...     rows: int = 64
    >>> validated(Limits, {"rows": 8}, "limits").rows, validated(Limits, None, "limits").rows
    (8, 64)
    """
    if isinstance(keys, config_class):
        return keys
    try:
        return config_class.model_validate(dict(keys or {}))
    except ValidationError as error:
        raise AgentPeftError(first_error(error, place, config_class)) from error


def first_error(error: Any, place: str = "", model: type[BaseModel] | None = None) -> str:
    """Return the first error of a validation: its key path, the fault, and the number of further errors.

    Args:
        error: a ``ValidationError``, or anything else with its method ``errors``.
        place: the path of the content, in front of the key path.
        model: the class that refused the content; with it, an unknown key gets advice.

    >>> try:
    ...     Config(row=1)
    ... except ValueError as error:
    ...     print(first_error(error, "engine"))
    engine.row: Extra inputs are not permitted
    """
    # a misspelled key comes first: it explains the missing one, and the defaults that depend on that
    errors = [one for one in error.errors() if one["type"] != "default_factory_not_called"]
    first, *others = sorted(errors, key=lambda one: one["type"] != "extra_forbidden")
    message, models = first["msg"], [] if model is None else [model]
    if first["type"] == "value_error":
        message = str(first["ctx"]["error"])
    elif first["type"] == "missing":
        message = "is missing"
    elif first["type"] != "extra_forbidden" and models:
        message = mismatch(first["input"], [message])
    elif models:
        for part in first["loc"][:-1]:
            fields = [known.model_fields[part] for known in models if part in known.model_fields]
            models = [inner for field in fields for inner in models_in(field.annotation)] or models
        known = dict.fromkeys(name for inner in models for name in inner.model_fields)
        message = "unknown key; " + (nearest(first["loc"][-1], list(known)) if known else "there are no keys")
    where = ".".join(filter(None, (place, *(str(part)[:50] for part in first["loc"]))))
    more = f" (and {len(others)} more error{'s' * (len(others) > 1)})" if others else ""
    return f"{where}: {message}{more}" if where else f"{message}{more}"


def mismatch(value: Any, messages: Iterable[str]) -> str:
    """Return what a value must be, from pydantic's messages about it.

    >>> mismatch("few", ["Input should be a valid integer, unable to parse string as an integer"])
    'must be a whole number, got "few"'
    """
    expected = " or ".join(dict.fromkeys(map(_expected, messages)))
    text = json.dumps(value, default=str, ensure_ascii=False)
    return f"must be {expected}, got {text if len(text) <= 60 else text[:57] + '...'}"


def _expected(message: str) -> str:
    """The words after "must be", from a message of pydantic's."""
    expected = (
        message.removeprefix("Input should be ").removeprefix("Input is not ").split(", unable to parse")[0]
    )
    ours = {
        "a valid array": "a list",
        "an object": "a mapping",
        "a valid string": "a text",
        "a valid boolean": "true or false",
        "a valid integer": "a whole number",
        "a valid number": "a number",
        "String should have at least 1 character": "a text that is not empty",
    }
    return ours.get(expected, expected)
