"""Errors of a configuration in one line: the place of a value, its key path, and what is expected."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from agent_peft.config import mismatch
from agent_peft.configuration.keys import model_of, models_of
from agent_peft.configuration.run_config import TrainConfig
from agent_peft.configuration.yaml12 import Leaf, Node, leaves
from agent_peft.lookup import alike, nearest
from agent_peft.training.stage import StageConfig

Keys = tuple[str, ...]


@dataclass(frozen=True)
class Document:
    """A configuration with the origin of each value. With ``one_stage`` the keys of the stage stand at the
    top, so messages leave out ``stages.0``.
    """

    root: Node
    source: str
    one_stage: bool

    def at(self, keys: Keys) -> Node | None:
        node: Node | None = self.root
        for key in keys:
            node = child(node, key)
        return node

    def keys(self, location: Sequence[int | str]) -> Keys:
        """A location of pydantic's, without the parts that it adds to tell the members of a union apart."""
        keys: Keys = ()
        node: Node | None = self.root
        for number, part in enumerate(location):
            below = child(node, str(part))
            absent = number == len(location) - 1 and (
                isinstance(node, list) or (isinstance(node, dict) and str(part).isidentifier())
            )
            kind = child(node, "kind")
            tag = isinstance(kind, Leaf) and kind.value == part  # of a mapping that is wrong as a whole
            if below is not None or (absent and not tag):
                keys, node = (*keys, str(part)), below
        return keys

    def path(self, keys: Keys) -> str:
        node = self.at(keys)
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
        """``file:line`` of the node at ``keys``; the file alone for a stage, a whole, and where none is."""
        node = self.at(keys)
        if node is None or not keys or keys[:-1] == ("stages",):
            return self.source
        return next((leaf.origin for _, leaf in leaves(node)), self.source)

    def model(self, keys: Keys) -> type[BaseModel] | None:
        """The class that configures the mapping at ``keys``, as far as the kinds in the document tell."""
        if not keys:
            return TrainConfig
        kind = child(self.at(keys), "kind")
        return model_of(self.annotation(keys), kind.value if isinstance(kind, Leaf) else None)

    def field(self, keys: Keys) -> FieldInfo | None:
        model = self.model(keys[:-1])
        return model.model_fields.get(keys[-1]) if model is not None else None

    def annotation(self, keys: Keys) -> Any:
        """The type of the value at ``keys``."""
        if keys and keys[-1].isdecimal():
            return self.annotation(keys[:-1])
        field = self.field(keys) if keys else None
        return field.annotation if field is not None else None


def config_error(error: ValidationError, document: Document) -> str:
    """Return the first error, and the number of further errors."""
    details_by_keys: dict[Keys, ErrorDetails] = {}
    messages: dict[Keys, list[str]] = {}
    for details in error.errors(include_url=False):
        keys = document.keys(details["loc"])
        messages.setdefault(keys, []).append(details["msg"])
        if details["type"] != "default_factory_not_called":  # follows from another error
            details_by_keys.setdefault(keys, details)
    keys, first = next(iter(details_by_keys.items()))
    nodes = ((place, document.at(place)) for place in details_by_keys)
    # a value may stand for several stages
    others = len({id(node) if isinstance(node, Leaf) else place for place, node in nodes}) - 1
    more = f" (and {others} more {'error' if others == 1 else 'errors'})" if others else ""
    return f"{_message(keys, first, messages[keys], document)}{more}"


def _message(keys: Keys, details: ErrorDetails, messages: Sequence[str], document: Document) -> str:
    place, kind = document.place(keys), details["type"]
    if kind == "extra_forbidden":
        return f"{place}: unknown key; {_advice(keys, document)}"
    if kind == "missing":
        field = document.field(keys)
        about = f" ({field.description})" if field is not None and field.description else ""
        return f"{place} is missing{about}"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        kinds = list(models_of(document.annotation(keys)))
        if kind == "union_tag_not_found":
            return f"{place}: names no kind; {nearest('', kinds)}"
        tag = str(details["ctx"]["tag"])
        return f"{place}.kind: there is no {tag!r}; {nearest(tag, kinds)}"
    if kind == "value_error":
        message = str(details["ctx"]["error"])
        # a check of several keys names the wrong one first
        culprit = (*keys, *re.split(r"[^\w.]", message)[0].split("."))
        origin = document.origin(culprit if document.at(culprit) is not None else keys)
        return ": ".join(part for part in (origin, document.path(keys), message) if part)
    return f"{place}: {mismatch(details['input'], messages)}"


def _advice(keys: Keys, document: Document) -> str:
    """The valid key that an unknown one resembles, in its own mapping or else anywhere."""
    parent, name = keys[:-1], keys[-1]
    at_top = not parent or (document.one_stage and parent == ("stages", "0"))
    models: list[type[BaseModel] | None] = [TrainConfig, StageConfig] if at_top else [document.model(parent)]
    siblings = [field for model in models if model is not None for field in model.model_fields]
    node = document.at(keys)
    section = node.path.rpartition(".")[0] if isinstance(node, Leaf) else document.path(parent)
    below = {field: f"{section}.{field}" if section else field for field in siblings}
    everywhere = {path.rsplit(".", 1)[-1]: path for path in reversed(list(_all_paths(document)))}
    for paths in (below, everywhere):
        if alike(name, paths) is not None:
            return nearest(name, paths)
    return f"the keys here are {', '.join(sorted(siblings))}" if siblings else "there are no keys here"


def _all_paths(document: Document) -> Iterator[str]:
    def inside(model: type[BaseModel], keys: Keys, path: Keys) -> Iterator[str]:
        for name in model.model_fields:
            if (model, name) == (TrainConfig, "stages"):
                stage = ("stages", "0")
                yield from inside(StageConfig, stage, () if document.one_stage else stage)
                continue
            yield ".".join((*path, name))
            below = document.model((*keys, name))
            if below is not None:
                yield from inside(below, (*keys, name), (*path, name))

    yield from inside(TrainConfig, (), ())


def child(node: Node | None, key: str) -> Node | None:
    """The part of a node at a key, or at a place in a list."""
    if isinstance(node, dict):
        return node.get(key)
    if isinstance(node, list) and key.isdecimal() and int(key) < len(node):
        return node[int(key)]
    return None
