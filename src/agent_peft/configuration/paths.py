"""The paths of a run's configuration: absolute in its directory, and the same places after a move."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel

from agent_peft.configuration import CONFIG, RECORD
from agent_peft.configuration.read import Layers
from agent_peft.configuration.run_config import TrainConfig, resolved
from agent_peft.configuration.yaml12 import Leaf, Node, Tree, plain
from agent_peft.policies.models.bundled import BUNDLED


def absolute(config: TrainConfig) -> dict[str, Any]:
    """As ``resolved``, with absolute paths: what a run directory holds, which may be read from any folder."""
    content = resolved(config)
    for keys, value in _paths_in(config):
        path, section = Path(value).expanduser(), content
        for key in keys[:-1]:
            section = section[key]
        if keys == ("run_dir",) or (exists(path) and str(value) not in BUNDLED):
            section[keys[-1]] = str(path.absolute())
    return content


MODELS = (("policy", "model"), ("teacher", "model"))  # a path, or the name of a model


def _paths_in(value: Any, keys: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], str | Path]]:
    if isinstance(value, BaseModel):
        for name, inner in value:
            yield from _paths_in(inner, (*keys, name))
    elif isinstance(value, tuple | list):
        for place, inner in enumerate(value):
            yield from _paths_in(inner, (*keys, place))
    elif isinstance(value, Path) or (isinstance(value, str) and keys[-2:] in MODELS):
        yield keys, value


def run_of(file: Path) -> Path | None:
    """The run directory whose configuration a file is; None if it belongs to none."""
    folder = file.parent
    is_run = (folder / RECORD).is_file() or (folder / "checkpoints").is_dir()
    return folder if file.name == CONFIG and is_run else None


def at_home(content: Layers) -> Layers:
    """The same content; of a run's configuration, as seen from where the run directory is now."""
    if (folder := run_of(Path(content.name))) is None:
        return content
    tree = relocated({**content.top, "stages": cast(list[Node], content.items or [])}, folder)
    items = cast(list[Tree], tree.pop("stages"))
    return replace(content, top=tree, items=items if content.items else None)


def relocated(tree: Tree, folder: Path) -> Tree:
    """The configuration in a run directory, as seen from where that directory is now, which becomes its
    ``run_dir``. A path that is gone and was below the project of that time becomes the same place below the
    project of now, if there is such a file or folder. Files of the run itself are those in ``folder``.
    """
    value = plain(tree["run_dir"]) if "run_dir" in tree else None
    then, now = Path(value) if isinstance(value, str) else folder, folder.absolute()
    parts = zip(reversed(then.parts), reversed(now.parts), strict=False)
    shared = len(list(takewhile(lambda pair: pair[0] == pair[1], parts)))
    old, new = (Path(*place.parts[: len(place.parts) - shared]) for place in (then, now))

    def moved(node: Node) -> Node:
        if isinstance(node, dict):
            return {key: moved(inner) for key, inner in node.items()}
        if isinstance(node, list):
            return [moved(inner) for inner in node]
        path = Path(node.value) if isinstance(node.value, str) else Path()
        if not path.is_absolute() or not path.is_relative_to(old):
            return node
        place, is_own = new / path.relative_to(old), path.is_relative_to(then)
        moves = exists(place) and (is_own or not exists(path))
        return Leaf(str(place), node.origin, node.path) if moves else node

    if then.is_absolute() and then != now:
        tree = {key: moved(node) for key, node in tree.items()}
    return {**tree, "run_dir": Leaf(str(folder), str(folder / CONFIG), "run_dir")}


def exists(path: Path) -> bool:
    """Whether this user may see such a file or folder. ``RUN:step_000012`` is one in a run directory."""
    return os.path.exists(path) or os.path.exists(path.parent / path.name.partition(":")[0])
