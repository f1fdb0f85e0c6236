"""The content of a configuration before it is checked: a file (or a mapping), the files that it ``extends``,
and overrides, merged key by key. Each value is a ``Leaf``, which keeps its origin through every merge.

- ``algorithm: grpo`` is short for ``{kind: grpo}``, and so is ``environment: db_bench``. An item ``sft`` of
  ``stages`` is short for ``{algorithm: {kind: sft}}``.
- ``extends: other.yaml`` (or a list, or bundled names; relative to the file that names it) puts the keys of
  those files first. The keys of this file win as overrides do: mappings merge key by key, ``stages`` and
  other lists replace those below as a whole, a key of a stage at the top wins in every stage.
- Where an override or a file above gives a mapping another ``kind``, the keys that both kinds have stay.
- ``steps`` and ``epochs`` replace each other.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from agent_peft.configuration import bundled_configs
from agent_peft.configuration.keys import model_of
from agent_peft.configuration.run_config import TrainConfig
from agent_peft.configuration.yaml12 import MAX_DEPTH, Leaf, Node, Tree, leaves, parse, plain
from agent_peft.files import MEGABYTE, read_text
from agent_peft.lookup import nearest
from agent_peft.training.stage import StageConfig
from agent_peft.types import AgentPeftError

logger = logging.getLogger(__name__)

Source = str | PathLike[str] | Mapping[str, Any]
Overrides = Sequence[str] | Mapping[str, Any]  # KEY=VALUE, or values by key path
Models = Sequence[type[BaseModel] | None]  # the classes whose keys a mapping may have

MAX_FILES = 50  # that one configuration extends
SHORT_FORMS = ("algorithm", "environment")  # a text there is a kind
COMMAND_LINE, ARGUMENT = "command line", "argument"  # origins of overrides
ALTERNATIVES: Mapping[str, str] = {"steps": "epochs", "epochs": "steps"}  # of a stage
TOP: Models = (TrainConfig, StageConfig)


@dataclass(frozen=True)
class Layers:
    """The content of a source on the files that it extends, with the short forms written out.

    Attributes:
        name: the name of the source, for messages.
        top: its keys, without ``stages``.
        items: the items of ``stages``; None where the top is the only stage.
        inherited: the leaves of the files that it extends.
    """

    name: str
    top: Tree
    items: list[Tree] | None
    inherited: frozenset[Leaf] = frozenset()


def find_config(name: str | PathLike[str]) -> Path:
    """Return the file of a name: a path, or a bundled configuration where it has no folder and no suffix.

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


def read_source(source: Source) -> Layers:
    """Read a source and all files that it extends."""
    if isinstance(source, Mapping):
        return _extended("configuration", tree_of(source, "configuration"), Path(), (), [])
    return _read(find_config(source), (), [])


def _read(path: Path, chain: tuple[Path, ...], read: list[Path]) -> Layers:
    root = parse(read_text(path, "a YAML file", MEGABYTE), str(path))
    return _extended(str(path), root, path.parent, (*chain, path.resolve()), read)


def _extended(name: str, root: Node, folder: Path, chain: tuple[Path, ...], read: list[Path]) -> Layers:
    """``folder`` is that of the file, ``chain`` the files that extend each other down to this one, ``read``
    all files so far that another one extends.
    """
    if not isinstance(root, dict) or not root:
        empty = not isinstance(root, list) and plain(root) in (None, {})
        fault = "is empty" if empty else "is not a mapping of keys to values"
        raise AgentPeftError(
            f"{name}: {fault}; write at least run_dir, policy, environment, algorithm and steps"
        )
    top = _expanded({key: node for key, node in root.items() if key != "extends"})
    content = Layers(name, top, _pop_stages(top, name))
    base: Layers | None = None
    for leaf in _extended_names(root["extends"], name) if "extends" in root else ():
        read.append(_find_extended(leaf, folder, chain))
        if len(read) > MAX_FILES:
            raise AgentPeftError(f"{leaf.origin}: extends: {MAX_FILES} files are the most; write some as one")
        other = _read(read[-1], chain, read)
        base = other if base is None else _onto(base, other)
    return content if base is None else _onto(base, content)


def _onto(base: Layers, over: Layers) -> Layers:
    items = over.items
    if items is None and base.items is not None:
        items = [override(item, stage_keys(over.top), TOP) for item in base.items]
    below = {leaf for tree in (base.top, *(base.items or ())) for _, leaf in leaves(tree)}
    return Layers(
        over.name, override(base.top, over.top, TOP), items, base.inherited | over.inherited | below
    )


def _extended_names(node: Node, source: str) -> list[Leaf]:
    names = node if isinstance(node, list) else [node]
    for name in names:
        if not isinstance(name, Leaf) or not isinstance(name.value, str) or not name.value:
            origin = next((leaf.origin for _, leaf in leaves(name)), source)
            raise AgentPeftError(
                f"{origin}: extends: must be a file, the name of a bundled configuration, or a list of them, "
                f"got {json.dumps(plain(name))}"
            )
    return [name for name in names if isinstance(name, Leaf)]


def _find_extended(leaf: Leaf, folder: Path, chain: tuple[Path, ...]) -> Path:
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
        fields = type(value).model_fields
        value = {name: getattr(value, name) for name in fields if name in {*value.model_fields_set, "kind"}}
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


def _expanded(tree: Tree) -> Tree:
    """Write out the short forms: a text instead of a mapping with this ``kind``."""
    expanded = dict(tree)
    for key in SHORT_FORMS:
        node = expanded.get(key)
        if isinstance(node, Leaf) and isinstance(node.value, str):
            expanded[key] = {"kind": node}
    if isinstance(evaluation := expanded.get("evaluation"), dict):
        expanded["evaluation"] = _expanded(evaluation)
    return expanded


def _pop_stages(top: Tree, source: str) -> list[Tree] | None:
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
        items.append(_expanded(item))
    return items


def stage_keys(tree: Tree) -> Tree:
    """The keys at the top of a tree that belong to stages."""
    return {key: node for key, node in tree.items() if key in StageConfig.model_fields}


# -- merging -------------------------------------------------------------------------------------------------

# the mappings that an override gives another kind, by key path: the keys that both kinds have, and the others
Switches = dict[str, tuple[list[str], list[str]]]


def override(base: Tree, over: Tree, models: Models = (), switches: Switches | None = None) -> Tree:
    """As ``merged``, of keys of a stage: ``steps`` and ``epochs`` replace each other.

    >>> of = lambda text: parse(text, "x")
    >>> base = of("{steps: 9, environment: {kind: arithmetic, digits: 2, num_tasks: 5}}")
    >>> plain(override(base, of("{epochs: 2, environment: {kind: openenv, url: 'http://a'}}"), TOP))
    {'environment': {'kind': 'openenv', 'num_tasks': 5, 'url': 'http://a'}, 'epochs': 2}
    """
    replaced = {ALTERNATIVES.get(key) for key, node in over.items() if plain(node) is not None}
    kept = {key: node for key, node in base.items() if key not in replaced}
    return merge_trees(kept, over, models, switches)


def merge_trees(base: Tree, over: Tree, models: Models = (), switches: Switches | None = None) -> Tree:
    """Return ``over`` on ``base``, merged key by key. A mapping of another kind replaces the one below it.
    ``models``: the classes of the trees. With them, the keys below that the class of the other kind has stay.
    ``switches``: is filled with the mappings of another kind.

    >>> of = lambda text: parse(text, "x")
    >>> base = of("{algorithm: {kind: grpo, clip_low: 0.1}}")
    >>> plain(merge_trees(base, of("{algorithm: {kind: rloo}}")))
    {'algorithm': {'kind': 'rloo'}}
    >>> plain(merge_trees(base, of("{algorithm: {kl_coef: 1}}")))
    {'algorithm': {'kind': 'grpo', 'clip_low': 0.1, 'kl_coef': 1}}
    """
    merged = {**base, **over}
    for key in base.keys() & over.keys():
        below, above = base[key], over[key]
        if isinstance(below, dict) and isinstance(above, dict):
            model = _model_at(models, key, above if "kind" in above else below)
            kind = below.get("kind")
            if isinstance(kind, Leaf) and "kind" in above and plain(above["kind"]) != kind.value:
                shared = _shared(below, model)
                kept, dropped = (
                    [name for name in below if (name in shared) == stays and name not in above]
                    for stays in (True, False)
                )
                if switches is not None and (kept or dropped):
                    switches.setdefault(kind.path.removesuffix(".kind"), (kept, dropped))
                below = {**shared, "kind": above["kind"]}
            merged[key] = merge_trees(below, above, [model], switches)
        elif key == "kind" and plain(below) == plain(above):
            merged[key] = below  # repeating it overrides nothing
    return merged


def _model_at(models: Models, key: str, tree: Tree) -> type[BaseModel] | None:
    """The class of a key's mapping; None if no class, or only code that must not be imported, defines it."""
    kind = tree.get("kind")
    fields = (model.model_fields for model in models if model is not None)
    annotations = (known[key].annotation for known in fields if key in known)
    return next((model_of(one, kind.value if isinstance(kind, Leaf) else None) for one in annotations), None)


def _shared(tree: Tree, model: type[BaseModel] | None) -> Tree:
    """The keys of a mapping that a class has, too, and so on inside them."""
    fields = model.model_fields if model is not None else {}
    shared = {name: node for name, node in tree.items() if name in fields}
    for name, node in shared.items():
        inner = _model_at([model], name, node) if isinstance(node, dict) else None
        if isinstance(node, dict) and inner is not None:
            shared[name] = _shared(node, inner)
    return shared


# -- overrides -----------------------------------------------------------------------------------------------


def read_overrides(overrides: Overrides, num_stages: int) -> tuple[Tree, list[Tree]]:
    """The overrides of the top (and so of all stages), and those of each stage."""
    general: Tree = {}
    specific: list[Tree] = [{} for _ in range(num_stages)]
    origin = ARGUMENT if isinstance(overrides, Mapping) else COMMAND_LINE
    for text, keys, node in parse_overrides(overrides, origin):
        if keys[0] != "stages":
            general = merge_trees(general, _expanded(nested(keys, node)))
            continue
        place = int(keys[1]) if len(keys) > 2 and keys[1].isdecimal() else None
        if place is None:
            raise AgentPeftError(
                f"{origin}: {text!r}: name one stage and one of its keys, such as stages.0.steps=10"
            )
        if place >= num_stages:
            raise AgentPeftError(
                f"{origin}: stages.{place} is out of range: the last stage is stages.{num_stages - 1}"
            )
        specific[place] = merge_trees(specific[place], _expanded(nested(keys[2:], node)))
    return general, specific


def parse_overrides(
    overrides: Overrides, origin: str, short_forms: Sequence[str] = SHORT_FORMS
) -> Iterator[tuple[str, tuple[str, ...], Node]]:
    """Each override as the user wrote it, with its key path and its value. The last of equal keys wins."""
    seen: dict[tuple[str, ...], str] = {}
    for item in overrides.items() if isinstance(overrides, Mapping) else _last_of_each(overrides):
        text, value = (item, None) if isinstance(item, str) else item
        name, equals, yaml = text.partition("=")
        keys = tuple(name.strip().split("."))
        if bool(equals) != isinstance(item, str) or not all(keys) or len(keys) > MAX_DEPTH:
            raise AgentPeftError(
                f"{text!r}: an override is written key=value without blanks, such as "
                "optimizer.learning_rate=1e-4"
            )
        is_text = isinstance(item, str)
        node = parse(yaml, origin, keys, lines=False) if is_text else tree_of(value, origin, keys)
        # an environment may have a key named environment, which is not a short form
        short = keys[-1] in short_forms and keys[-2:-1] != ("environment",)
        if short and isinstance(node, Leaf) and isinstance(node.value, str):
            keys = (*keys, "kind")
        for other, other_text in seen.items():
            if keys[: len(other)] == other[: len(keys)]:
                raise AgentPeftError(
                    f"{origin}: {other_text!r} and {text!r} set the same key; give one of them"
                )
        seen[keys] = text
        yield text, keys, node


def _last_of_each(texts: Sequence[str]) -> list[str]:
    last: dict[str, str] = {}
    for text in texts:
        name = text.partition("=")[0].strip()
        before = last.pop(name, text)
        if before != text:
            logger.warning("%s: %r replaces %r", COMMAND_LINE, text, before)
        last[name] = text
    return list(last.values())


def nested(keys: Sequence[str], node: Node) -> Tree:
    """A tree with one value at a key path."""
    for key in reversed(keys[1:]):
        node = {key: node}
    return {keys[0]: node}
