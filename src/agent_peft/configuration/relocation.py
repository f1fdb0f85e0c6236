"""The configuration of a run directory, wherever that directory lies now.

Its relative paths begin in the folder where the run was started. ``run.json`` holds what they led to there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

from agent_peft.configuration.yaml12 import Leaf, Node, Tree
from agent_peft.environments import environment_config_class
from agent_peft.files import MEGABYTE, check_tree, parse_json, read_text
from agent_peft.rollout.task_order import ORDER_NAMES
from agent_peft.types import AgentPeftError

CONFIG = "config.yaml"
RECORD = "run.json"
REMOVED = {"replay"}  # keys of a stage that an earlier version wrote as null into every run
TRACKERS = "trackers"  # the folder of a run for what trackers write
FOLDERS = ("checkpoints", "evaluations", "schedule", "start", TRACKERS, "trajectories")
# in the order of their removal: as long as the configuration is there, the folder belongs to that run
FILES = ("metrics.jsonl", "timing.jsonl", "stopped.json", "log.txt", "origin.json", "digests.json", CONFIG)


def check_run_files(folder: Path) -> None:
    """Check a run directory before a library or we read its files: it may come from a stranger.

    Raises:
        AgentPeftError: a link, a pipe, a device or a socket is where a run has a file or a folder, a folder
            where it has a file, or a file where it has a folder.
    """
    for name in (*FOLDERS, *FILES, RECORD):
        path = folder / name
        check_tree(path, depth=1 if name == TRACKERS else 8)  # W&B makes links in its own folder
        if os.path.lexists(path) and path.is_dir() != (name in FOLDERS):
            raise AgentPeftError(f"{path}: is {'a' if path.is_dir() else 'no'} folder; remove it")


def run_of(file: Path) -> Path | None:
    """The run directory whose configuration a file is; None if it belongs to none."""
    folder = file.parent
    is_run = (folder / RECORD).is_file() or (folder / "checkpoints").is_dir()
    return folder if file.name == CONFIG and is_run else None


def settle_paths(file: Path, top: Tree, stages: Sequence[Node], overrides: Tree | None = None) -> None:
    """Change the trees of a run directory's configuration so that its paths lead where they led when the run
    was started, as seen from the current folder. ``run_dir`` becomes the directory itself. Other files stay
    as they are.

    Args:
        stages: the items of ``stages``.
        overrides: what will replace values of ``top``. None checks nothing.

    Raises:
        AgentPeftError: ``policy.model`` was a folder or a file, and is gone.
    """
    from agent_peft.policies.models.start import START  # which loads torch

    if (folder := run_of(file)) is None:
        return
    for stage in stages:
        if isinstance(stage, dict):
            for key in REMOVED & stage.keys():
                if isinstance(leaf := stage[key], Leaf) and leaf.value is None:
                    del stage[key]
    stated = _text(top.get("run_dir"))
    recorded, root = read_record(folder).get("paths"), _root(folder, stated)
    recorded = recorded if isinstance(recorded, dict) else {}
    if stated is None or Path(stated).expanduser().resolve() != folder.resolve():
        top["run_dir"] = Leaf(str(folder), str(file), "run_dir")
    for section, name, key in _places({**top, "stages": stages}, recorded):
        value, leaf = _text(section[name]), section[name]
        if value is None:
            continue
        here = Path(value).expanduser()
        before = str(here) if here.is_absolute() else recorded.get(key)
        known = [Path(place) for place in (before, root and root / here) if isinstance(place, str | Path)]
        place = next((place for place in known if _exists(place)), None)
        if place is None and section is top.get("policy") and (folder / START).is_dir():
            continue  # the run has its own copy
        if place is None and isinstance(before, str) and not _exists(here):
            place = Path(before)  # which the error names
            if key == "policy.model" and overrides is not None and not _sets(overrides, key):
                raise AgentPeftError(
                    f"{file}: policy.model {value!r} was at {before} when the run was started, and nothing "
                    "is there; add policy.model= with its place now"
                )
        if place is not None and place.resolve() != here.resolve():
            section[name] = Leaf(str(place), leaf.origin, leaf.path) if isinstance(leaf, Leaf) else str(place)


def paths_of(content: Mapping[str, Any]) -> dict[str, str]:
    """The relative paths of a resolved configuration that lead somewhere, by key, as absolute paths."""
    values = ((key, _text(section[name])) for section, name, key in _places(content))
    return {
        key: str(Path(value).absolute())
        for key, value in values
        if value is not None and not Path(value).is_absolute() and _exists(Path(value))
    }


def read_record(folder: Path) -> dict[str, Any]:
    """The content of a run's ``run.json``; nothing where there is none or it is damaged."""
    with suppress(AgentPeftError, ValueError):
        content = parse_json(read_text(folder / RECORD, "a JSON file", 16 * MEGABYTE, unlinked=1))
        if isinstance(content, dict):
            return content
    return {}


def _places(
    content: Mapping[str, Any], recorded: Mapping[str, str] | None = None
) -> Iterator[tuple[Any, str, str]]:
    """Each mapping of a configuration with the name and the key path of a path in it. Those that were
    recorded are paths, even if the class that says so must not be imported now.
    """
    evaluation = content.get("evaluation")
    sections = {
        "policy": content.get("policy"),
        "engine": content.get("engine"),
        "environment": content.get("environment"),
        "evaluation.environment": evaluation.get("environment") if isinstance(evaluation, dict) else None,
    }
    for path, section in sections.items():
        if not isinstance(section, dict):
            continue
        names = {"policy": ["model", "adapter"], "engine": ["schedule"]}.get(path)
        if names is None:
            names = _path_fields(_text(section.get("kind")))
            names += [key.removeprefix(f"{path}.") for key in recorded or () if key.startswith(f"{path}.")]
        for name in dict.fromkeys(names):
            if name in section:
                yield section, name, f"{path}.{name}"
    for number, stage in enumerate(content.get("stages") or ()):
        if isinstance(stage, dict) and _text(stage.get("task_order")) not in (None, *ORDER_NAMES):
            yield stage, "task_order", f"stages.{number}.task_order"
        if isinstance(stage, dict) and isinstance(stage.get("episodes_of"), dict):
            yield stage["episodes_of"], "run", f"stages.{number}.episodes_of.run"


def _path_fields(kind: str | None) -> list[str]:
    """The keys of an environment whose type is a path."""
    with suppress(ValueError, AgentPeftError):  # an unknown kind is reported by the checks of the values
        fields = environment_config_class(kind).model_fields
        return [name for name, field in fields.items() if _names_path(field.annotation)]
    return []


def _names_path(annotation: Any) -> bool:
    return annotation is Path or any(_names_path(part) for part in get_args(annotation))


def _exists(path: Path) -> bool:
    """Whether there is such a file or folder that this user may see. ``RUN:step_000012`` is one in a run
    directory.
    """
    return os.path.exists(path) or os.path.exists(path.parent / path.name.partition(":")[0])


def _root(folder: Path, run_dir: str | None) -> Path | None:
    """The folder that ``run_dir`` is relative to, if the end of its path is still the same."""
    if run_dir is None or Path(run_dir).expanduser().is_absolute() or not (parts := Path(run_dir).parts):
        return None
    place = folder.resolve().parts
    return Path(*place[: -len(parts)]) if place[-len(parts) :] == parts else None


def _sets(tree: Tree, key: str) -> bool:
    node: Any = tree
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return node is not None


def _text(node: Any) -> str | None:
    value = node.value if isinstance(node, Leaf) else node
    return value if isinstance(value, str) and value and "\0" not in value else None
