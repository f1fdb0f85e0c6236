"""The sources of a configuration: a YAML file, a bundled one by its name, or a Python mapping."""

from __future__ import annotations

import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from agent_peft.configuration.yaml12 import Leaf, Node, Tree, parse, plain
from agent_peft.files import MEGABYTE, read_text
from agent_peft.lookup import nearest
from agent_peft.types import AgentPeftError

Source = str | PathLike[str] | Mapping[str, Any]

SHORT_FORMS = ("algorithm", "environment")  # a text there is a kind


def bundled_configs() -> dict[str, Path]:
    """The configurations that are installed with the package, by name."""
    package = Path(__file__).parent.parent
    folders = (package / "configs", package.parent.parent / "configs")  # in a wheel; in the repository
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.yaml"))}


def find_config(name: str | PathLike[str]) -> Path:
    """Return the file that a name stands for: a path, or the name of a bundled configuration.

    Raises:
        AgentPeftError: a name without a folder or a suffix is neither a file nor a bundled configuration.

    >>> find_config("quickstart").name, str(find_config("mine.yaml"))
    ('quickstart.yaml', 'mine.yaml')
    """
    path, bundled = Path(name), bundled_configs()
    if path.suffix or len(path.parts) != 1 or path.exists():
        return path
    if path.name not in bundled:
        raise AgentPeftError(
            f"{path}: there is no such file and no bundled configuration of this name; "
            f"{nearest(path, bundled.keys())}"
        )
    return bundled[path.name]


def read_tree(source: Source) -> tuple[str, Tree]:
    """Return the name of a source, for messages, and its content with the short forms written out.

    Raises:
        AgentPeftError: it cannot be read, or it is not a mapping.
    """
    if isinstance(source, Mapping):
        name, root = "configuration", tree_of(source, "configuration")
    else:
        path = find_config(source)
        name, root = str(path), parse(read_text(path, "a YAML file", MEGABYTE), str(path))
    if not isinstance(root, dict) or not root:
        empty = not isinstance(root, list) and plain(root) in (None, {})
        fault = "is empty" if empty else "is not a mapping of keys to values"
        raise AgentPeftError(
            f"{name}: {fault}; write at least run_dir, policy, environment, algorithm and steps"
        )
    return name, expand(root)


def tree_of(value: Any, origin: str, keys: tuple[str, ...] = ()) -> Node:
    """A Python value as if it had been parsed. Of a configuration object, the keys that were set."""
    if isinstance(value, BaseModel):
        names = (
            name for name in type(value).model_fields if name in value.model_fields_set or name == "kind"
        )
        value = {name: getattr(value, name) for name in names}
    if isinstance(value, Mapping):
        return {str(key): tree_of(inner, origin, (*keys, str(key))) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [tree_of(inner, origin, (*keys, str(place))) for place, inner in enumerate(value)]
    path = ".".join(keys)
    if isinstance(value, PathLike):
        value = str(value)
    if value is not None and not isinstance(value, str | int | float):
        raise AgentPeftError(
            f"{origin}: {path}: {value!r:.60} has no place in a configuration; give a text or number"
        )
    return Leaf(value, origin, path)


def expand(tree: Tree) -> Tree:
    """Write out the short forms: a text instead of a mapping with this ``kind``."""
    expanded = dict(tree)
    for key in SHORT_FORMS:
        node = expanded.get(key)
        if isinstance(node, Leaf) and isinstance(node.value, str):
            expanded[key] = {"kind": node}
    evaluation = expanded.get("evaluation")
    if isinstance(evaluation, dict):
        expanded["evaluation"] = expand(evaluation)
    return expanded


def stage_items(top: Tree, source: str) -> list[Tree] | None:
    """Remove ``stages`` from ``top`` and return its items; None if there is no such key."""
    if "stages" not in top:
        return None
    stages = top.pop("stages")
    if not isinstance(stages, list) or not stages:
        raise AgentPeftError(f"{source}: stages: expected a list of stages, got {json.dumps(plain(stages))}")
    items = []
    for place, item in enumerate(stages):
        if isinstance(item, Leaf) and isinstance(item.value, str):
            item = {"algorithm": {"kind": item}}
        if not isinstance(item, dict):
            raise AgentPeftError(
                f"{source}: stages.{place}: expected a mapping or an algorithm's name, "
                f"got {json.dumps(plain(item))}"
            )
        items.append(expand(item))
    return items
