"""What is wrong with a configuration, in one line: where it was written, its key path, what is expected."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from agent_peft.configuration.run_config import TrainConfig
from agent_peft.configuration.yaml12 import Leaf, Node, leaves
from agent_peft.environments import environment_config_class
from agent_peft.environments.base import EnvironmentConfig
from agent_peft.training.stage import StageConfig

Keys = tuple[str, ...]


@dataclass(frozen=True)
class Written:
    """A configuration as it was written, and how its keys are to be told: without ``stages.0`` where
    ``one_stage`` stands at the top.
    """

    root: Node
    source: str
    one_stage: bool

    def find(self, keys: Keys) -> Node | None:
        node: Node | None = self.root
        for key in keys:
            node = _child(node, key)
        return node

    def keys(self, location: Sequence[int | str]) -> Keys:
        """A location of pydantic's without what it adds to tell the members of a union apart."""
        keys: Keys = ()
        node: Node | None = self.root
        for number, part in enumerate(location):
            child = _child(node, str(part))
            absent = number == len(location) - 1 and (
                isinstance(node, list) or (isinstance(node, dict) and str(part).isidentifier())
            )
            kind = _child(node, "kind")
            tag = isinstance(kind, Leaf) and kind.value == part  # of a mapping that is wrong as a whole
            if child is not None or (absent and not tag):
                keys, node = (*keys, str(part)), child
        return keys

    def path(self, keys: Keys) -> str:
        node = self.find(keys)
        if keys[:2] == ("stages", "0") and self.one_stage:
            keys = keys[2:]
        if isinstance(node, Leaf):
            for_one = keys[0] == "stages" and not node.path.startswith("stages.")
            return node.path + (f" (for {'.'.join(keys[:2])})" if for_one else "")
        return ".".join(keys)

    def place(self, keys: Keys) -> str:
        """``file:line: key.path``"""
        return ": ".join(part for part in (self.origin(keys), self.path(keys)) if part)

    def origin(self, keys: Keys) -> str:
        """``file:line`` of what stands at ``keys``; the file alone for the whole of it, for a stage, and
        for what is not there.
        """
        node = self.find(keys)
        if node is None or not keys or keys[:-1] == ("stages",):
            return self.source
        return next((leaf.origin for _, leaf in leaves(node)), self.source)


def explain_mistakes(error: ValidationError, written: Written) -> str:
    """The first mistake, and how many more there are."""
    found: dict[Keys, ErrorDetails] = {}
    for details in error.errors(include_url=False):
        if details["type"] != "default_factory_not_called":  # follows from another
            found.setdefault(written.keys(details["loc"]), details)
    keys, first = next(iter(found.items()))
    alike = [other["msg"] for other in error.errors(include_url=False) if written.keys(other["loc"]) == keys]
    nodes = ((place, written.find(place)) for place in found)
    others = (
        len({id(node) if isinstance(node, Leaf) else place for place, node in nodes}) - 1
    )  # a value may stand for several stages
    more = f" (and {others} more {'mistake' if others == 1 else 'mistakes'})" if others else ""
    return f"{_tell(keys, first, alike, written)}{more}"


def _tell(keys: Keys, details: ErrorDetails, messages: Sequence[str], written: Written) -> str:
    place, kind = written.place(keys), details["type"]
    if kind == "extra_forbidden":
        return f"{place}: unknown key; {_nearest(keys, written)}"
    if kind == "missing":
        return f"{written.place(keys)} is missing{_about(keys, written)}"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        known = (
            details["ctx"]["expected_tags"].replace("'", "")
            if "ctx" in details and "expected_tags" in details["ctx"]
            else ""
        )
        kinds = known or ", ".join(_kinds(_annotation(keys, written)))
        if kind == "union_tag_not_found":
            return f"{place}: names no kind; give one of {kinds}"
        given = str(details["ctx"]["tag"])
        near = difflib.get_close_matches(given.lower(), kinds.split(", "), 1)
        return f"{place}.kind: there is no {given!r}; {f'did you mean {near[0]!r}?' if near else f'give one of {kinds}'}"
    if kind == "value_error":
        message = str(details["ctx"]["error"])
        culprit = (
            *keys,
            *re.split(r"[^\w.]", message)[0].split("."),
        )  # a check of several keys names the wrong one first
        origin = written.origin(culprit if written.find(culprit) is not None else keys)
        return ": ".join(part for part in (origin, written.path(keys), message) if part)
    wanted = " or ".join(dict.fromkeys(_wanted(message) for message in messages))
    return f"{place}: must be {wanted}, got {_shown(details['input'])}"


def _wanted(message: str) -> str:
    """What goes after "must be", from a message of pydantic's."""
    wanted = (
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
    return ours.get(wanted, wanted)


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def _nearest(keys: Keys, written: Written) -> str:
    """The valid key that an unknown one resembles: of its own mapping, else of any."""
    parent, name = keys[:-1], keys[-1]
    at_top = not parent or (written.one_stage and parent == ("stages", "0"))
    models: list[type[BaseModel] | None] = [TrainConfig, StageConfig] if at_top else [_model(parent, written)]
    siblings = [field for model in models if model is not None for field in model.model_fields]
    node = written.find(keys)
    shown = node.path.rpartition(".")[0] if isinstance(node, Leaf) else written.path(parent)
    prefix = f"{shown}." if shown else ""
    near = difflib.get_close_matches(name, siblings, 1)
    if near:
        return f"did you mean {prefix}{near[0]}?"
    everywhere = {path.rsplit(".", 1)[-1]: path for path in reversed(list(_all_keys(written)))}
    near = difflib.get_close_matches(name, everywhere, 1, cutoff=0.8)
    if near:
        return f"did you mean {everywhere[near[0]]}?"
    return f"the keys here are {', '.join(sorted(siblings))}" if siblings else "there are no keys here"


def _all_keys(written: Written) -> Iterator[str]:
    def inside(model: type[BaseModel], keys: Keys, shown: Keys) -> Iterator[str]:
        for name in model.model_fields:
            if (model, name) == (TrainConfig, "stages"):
                yield from inside(StageConfig, ("stages", "0"), () if written.one_stage else ("stages", "0"))
                continue
            yield ".".join((*shown, name))
            below = _model((*keys, name), written)
            if below is not None:
                yield from inside(below, (*keys, name), (*shown, name))

    yield from inside(TrainConfig, (), ())


def _model(keys: Keys, written: Written) -> type[BaseModel] | None:
    """The class that the mapping at ``keys`` configures, where the kinds that were written tell."""
    models = _models(_annotation(keys, written)) if keys else [TrainConfig]
    given = _child(written.find(keys), "kind")
    kind = given.value if isinstance(given, Leaf) else None
    if models == [EnvironmentConfig]:
        try:
            return environment_config_class(kind)
        except ValueError:
            return None
    chosen = [
        model
        for model in models
        if kind is not None and "kind" in model.model_fields and model.model_fields["kind"].default == kind
    ]
    return next(iter(chosen or models), None)


def _annotation(keys: Keys, written: Written) -> Any:
    """The type of the value at ``keys``."""
    if keys and keys[-1].isdecimal():
        return _annotation(keys[:-1], written)
    model = _model(keys[:-1], written)
    field = model.model_fields.get(keys[-1]) if model is not None else None
    return field.annotation if field is not None else None


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models(argument)]


def _kinds(annotation: Any) -> list[str]:
    return [
        model.model_fields["kind"].default for model in _models(annotation) if "kind" in model.model_fields
    ]


def _about(keys: Keys, written: Written) -> str:
    model = _model(keys[:-1], written)
    field = model.model_fields.get(keys[-1]) if model is not None else None
    return f" ({field.description})" if field is not None and field.description else ""


def _child(node: Node | None, key: str) -> Node | None:
    if isinstance(node, dict):
        return node.get(key)
    if isinstance(node, list) and key.isdecimal() and int(key) < len(node):
        return node[int(key)]
    return None
