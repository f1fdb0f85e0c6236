"""The sources of a configuration: a YAML file, a bundled one by its name, or a Python mapping; and the files
that it ``extends``, whose keys come first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from agent_peft.configuration import bundled_configs
from agent_peft.configuration.merging import override, override_items
from agent_peft.configuration.yaml12 import Leaf, Node, Tree, leaves, parse, plain
from agent_peft.files import MEGABYTE, read_text
from agent_peft.lookup import nearest
from agent_peft.types import AgentPeftError

Source = str | PathLike[str] | Mapping[str, Any]

MAX_FILES = 50  # that one configuration extends
SHORT_FORMS = ("algorithm", "environment")  # a text there is a kind


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


@dataclass(frozen=True)
class Content:
    """The content of a source, with the files that it extends below it and the short forms written out.

    Attributes:
        name: of the source, for messages.
        top: its keys, without ``stages``.
        items: the items of ``stages``; None where the top is the only stage.
        inherited: the leaves of the files that it extends.
    """

    name: str
    top: Tree
    items: list[Tree] | None
    inherited: frozenset[Leaf] = frozenset()


def read_content(source: Source) -> Content:
    """Return the content of a source.

    Raises:
        AgentPeftError: it, or a file that it extends, cannot be read or is not a mapping; or a file extends
            itself.
    """
    if isinstance(source, Mapping):
        return _extended("configuration", tree_of(source, "configuration"), Path(), (), [])
    return _read(find_config(source), (), [])


def _read(path: Path, chain: tuple[Path, ...], read: list[Path]) -> Content:
    root = parse(read_text(path, "a YAML file", MEGABYTE), str(path))
    return _extended(str(path), root, path.parent, (*chain, path.resolve()), read)


def _extended(name: str, root: Node, folder: Path, chain: tuple[Path, ...], read: list[Path]) -> Content:
    """
    Args:
        folder: that of the file, to which the paths of ``extends`` are relative.
        chain: the files that extend each other down to this one, which is the last.
        read: all files so far that another one extends.
    """
    if not isinstance(root, dict) or not root:
        empty = not isinstance(root, list) and plain(root) in (None, {})
        fault = "is empty" if empty else "is not a mapping of keys to values"
        raise AgentPeftError(
            f"{name}: {fault}; write at least run_dir, policy, environment, algorithm and steps"
        )
    top = expand({key: node for key, node in root.items() if key != "extends"})
    content = Content(name, top, stage_items(top, name))
    base: Content | None = None
    for leaf in _names(root["extends"], name) if "extends" in root else ():
        read.append(_find(leaf, folder, chain))
        if len(read) > MAX_FILES:
            raise AgentPeftError(f"{leaf.origin}: extends: {MAX_FILES} files are the most; write some as one")
        other = _read(read[-1], chain, read)
        base = other if base is None else _onto(base, other)
    return content if base is None else _onto(base, content)


def _onto(base: Content, over: Content) -> Content:
    """``over`` on ``base``. A key of a stage at the top of ``over`` wins in every stage of ``base``."""
    items = over.items
    if items is None and base.items is not None:
        items = override_items(base.top, base.items, over.top)
    below = {leaf for tree in (base.top, *(base.items or ())) for _, leaf in leaves(tree)}
    top = override(base.top, over.top)
    return Content(over.name, top, items, base.inherited | over.inherited | below)


def _names(node: Node, source: str) -> list[Leaf]:
    """The leaves of ``extends``: a text, or a list of texts."""
    names = node if isinstance(node, list) else [node]
    for name in names:
        if not isinstance(name, Leaf) or not isinstance(name.value, str) or not name.value:
            origin = next((leaf.origin for _, leaf in leaves(name)), source)
            raise AgentPeftError(
                f"{origin}: extends: must be a file, the name of a bundled configuration, or a list of them, "
                f"got {json.dumps(plain(name))}"
            )
    return [name for name in names if isinstance(name, Leaf)]


def _find(leaf: Leaf, folder: Path, chain: tuple[Path, ...]) -> Path:
    """The file that an item of ``extends`` names, relative to the folder of the file that it stands in."""
    name = Path(str(leaf.value)).expanduser()
    path = folder / name
    if not path.is_file() and not name.suffix and len(name.parts) == 1:
        path = bundled_configs().get(name.name, path)
    fault = ""
    if not path.is_file():
        known = [*bundled_configs(), *(other.name for other in sorted(folder.glob("*.yaml")))]
        fault = f"there is no file {str(path)!r}; {nearest(name, known)}"
    elif path.resolve() in chain:
        circle = [*chain[chain.index(path.resolve()) :], path]
        fault = f"{' extends '.join(one.name for one in circle)}, a circle; remove one of them"
    if fault:
        raise AgentPeftError(f"{leaf.origin}: extends: {fault}")
    return path


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
