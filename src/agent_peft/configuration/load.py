"""From the content of a configuration and overrides to a ``TrainConfig``, and back.

- The keys of a stage may be at the top, as defaults of all stages. An item of ``stages`` overrides them.
  Mappings are merged key by key; a mapping of another ``kind`` replaces the whole mapping. Without ``stages``
  the top is the only stage.
- ``evaluation.sampling`` takes the limits (max_new_tokens, max_tokens, stop) that it does not set from the
  stage that it follows.
- Defaults that have no effect on a stage are not passed to it (``training.stage.UNUSED``). In the stage's
  item they are errors, and so is a default that no stage uses. Those of a file that this one extends are left
  out.
- An override of a top-level stage key wins in every stage (``steps=3`` makes a short run), one of
  ``stages.1.KEY`` in one stage. On the command line its value is YAML.
- Relative paths are relative to the current folder. In a run directory they are absolute.
- YAML is 1.2 (see ``yaml12``) and types are strict: ``"3"`` is not a number, ``yes`` is not a truth value.
- A name such as ``quickstart``, without a folder or suffix, is a bundled configuration if it is not a file.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from os import PathLike
from pathlib import Path
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError

from agent_peft.algorithms import AlgorithmConfig, AnyAlgorithm
from agent_peft.configuration.errors import Document, child, config_error
from agent_peft.configuration.fitting import fit_adapter, fit_lengths
from agent_peft.configuration.paths import at_home, exists, run_of
from agent_peft.configuration.read import (
    COMMAND_LINE,
    TOP,
    Layers,
    Overrides,
    Source,
    Switches,
    merge_trees,
    nested,
    override,
    parse_overrides,
    read_overrides,
    read_source,
    stage_keys,
    tree_of,
)
from agent_peft.configuration.run_config import TrainConfig, resolved
from agent_peft.configuration.yaml12 import Leaf, Node, Tree, dump, leaves, parse, plain
from agent_peft.environments import ENVIRONMENTS
from agent_peft.files import write_atomic
from agent_peft.policies.engine.base import EngineConfig, ServerEngineConfig, VllmEngineConfig
from agent_peft.policies.models.start import START
from agent_peft.training.stage import unused_keys
from agent_peft.types import AgentPeftError

logger = logging.getLogger(__name__)

_ALGORITHM: TypeAdapter[AlgorithmConfig] = TypeAdapter(AnyAlgorithm)

ENGINES = (EngineConfig, ServerEngineConfig, VllmEngineConfig)
# The keys that have an effect on a command that does not train; one stands for all keys below it.
EFFECTIVE: Mapping[str, tuple[str, ...]] = {
    "evaluate": (
        *("seed", "threads", "policy.model", "policy.device", "policy.dtype"),
        # nothing is recorded, so no schedule is followed
        *(f"engine.{key}" for engine in ENGINES for key in engine.model_fields if key != "schedule"),
        *(f"evaluation.{key}" for key in ("environment", "attempts", "num_tasks", "sampling")),
    ),
    "merge": ("policy.model", "policy.device"),
    "serve": ("environment", "evaluation.environment"),
}


@dataclass(frozen=True)
class Provenance:
    """The origin of each value that is not a default, by its key path in the resolved configuration.

    >>> Provenance("q.yaml", {"stages.0.steps": "q.yaml:3"}).of("stages.0.steps")
    'q.yaml:3'
    """

    source: str
    origins: Mapping[str, str]

    def of(self, path: str) -> str:
        """``file:line``, ``command line`` or ``default``."""
        inside = (origin for key, origin in self.origins.items() if key == path or key.startswith(path + "."))
        return next(inside, "default")


def load_config(source: Source, /, **overrides: Any) -> TrainConfig:
    """Return the run that a configuration describes.

    Args:
        source: a YAML file, the name of a bundled configuration, or a mapping with the keys of such a file.
        overrides: keys and values that replace those of ``source``. A mapping is merged key by key.

    >>> config = load_config("quickstart", seed=1, optimizer={"learning_rate": 1e-4})
    >>> config.seed, [stage.optimizer.learning_rate for stage in config.stages]
    (1, [0.0001, 0.0001])
    """
    return read_config(source, overrides)[0]


def read_config(
    source: Source,
    overrides: Overrides = (),
    *,
    check_files: bool = True,
    warn: bool = True,
    on_checked: Callable[[], None] | None = None,
) -> tuple[TrainConfig, Provenance]:
    """Return the run that a configuration describes, and the origin of each value. An error names the place
    and the key.

    Args:
        source: as of ``load_config``.
        overrides: texts such as ``optimizer.learning_rate=1e-4``, or a mapping from key paths to values. Two
            overrides of one key are an error.
        check_files: whether the files that the run reads must exist.
        warn: whether to log which keys of ``source`` an override of a ``kind`` keeps and drops.
        on_checked: called when all keys and files are checked, before torch and Transformers are imported to
            read the model's configuration.
    """
    content = at_home(read_source(source))
    general, specific = read_overrides(overrides, len(content.items or [{}]))
    return _load(content, general, specific, check_files, warn, on_checked)


def load_for_evaluation(
    path: Path,
    overrides: Sequence[str],
    tasks: Path | None,
    attempts: int | None,
    effective: Sequence[str] = EFFECTIVE["evaluate"],
) -> TrainConfig:
    """Read the configuration of a run for a command that measures it. Where the file has no ``evaluation``,
    the tasks of training are measured.

    Args:
        tasks: a task file that replaces the tasks of the evaluation.
        attempts: short for ``evaluation.attempts``.
        effective: the keys that an override may set.
    """
    content = at_home(read_source(path))
    general, specific = read_overrides(overrides, len(content.items or [{}]))
    given = [leaf.path for tree in (general, *specific) for _, leaf in leaves(tree)]
    training, evaluation = content.top.get("environment"), content.top.get("evaluation")
    measures_training = not isinstance(evaluation, dict)
    if not isinstance(evaluation, dict):
        if isinstance(training, dict) and isinstance(over := general.get("environment"), dict):
            training = override(content.top, {"environment": over}, TOP)["environment"]
        evaluation = {} if training is None else {"environment": training}
    if tasks is not None and isinstance(environment := evaluation.get("environment"), dict):
        others = ("generate", "split")  # where the other tasks come from
        environment = {key: node for key, node in environment.items() if key not in others}
        evaluation = {**evaluation, "environment": environment}
    content = replace(content, top={**content.top, "evaluation": evaluation})
    for key, value in (("evaluation.attempts", attempts), ("evaluation.environment.tasks", tasks)):
        if value is None:
            continue
        if key in given:
            raise AgentPeftError(
                f"{COMMAND_LINE}: --{key.rpartition('.')[2]} and {key} set the same key; give one of them"
            )
        general = merge_trees(
            general, nested(key.split("."), tree_of(value, COMMAND_LINE, tuple(key.split("."))))
        )
    config = _load(content, general, specific)[0]
    _refuse_ineffective("evaluate", given, (*effective, "environment") if measures_training else effective)
    if "seed" in given and config.policy.kind == "scratch":
        raise AgentPeftError(
            f"{COMMAND_LINE}: seed decides the weights of policy.kind: scratch, too, which would be others; "
            "leave it out"
        )
    sources = [key for key in given if key.startswith(("environment.tasks", "environment.generate"))]
    if tasks is not None and measures_training and sources:
        raise AgentPeftError(
            f"{COMMAND_LINE}: {sources[0]} and --tasks both say where the tasks are; give one of them"
        )
    return config


def refuse_ineffective(command: str, overrides: Sequence[str], effective: Sequence[str]) -> None:
    """Check that every override (``KEY=VALUE``) has an effect on a command: that it sets one of the keys
    ``effective``, or a key below or around one of them.
    """
    for text in overrides:
        name, _, value = text.partition("=")
        path = tuple(name.strip().split("."))
        node = parse(value, COMMAND_LINE, path, lines=False)
        _refuse_ineffective(command, (leaf.path for _, leaf in leaves(node)), effective)


def _refuse_ineffective(command: str, keys: Iterable[str], effective: Sequence[str]) -> None:
    def has_effect(key: str) -> bool:
        return any(f"{key}.".startswith(f"{one}.") or f"{one}.".startswith(f"{key}.") for one in effective)

    for key in keys:
        if has_effect(key):
            continue
        advice = "leave it out"
        below = key[key.find("sampling") :] if "sampling" in key.split(".") else key
        if command == "merge":
            advice = "with --evaluate it may have; add that, or leave the key out"
        elif command == "evaluate" and has_effect(f"evaluation.{below}"):
            advice = f"set evaluation.{below}, or leave it out"
        raise AgentPeftError(f"{COMMAND_LINE}: {key} has no effect on {command}; {advice}")


def parse_keys(texts: Sequence[str]) -> dict[str, Any]:
    """Return ``key=value`` arguments of a command as a mapping; a value is YAML.

    >>> parse_keys(["num_tasks=3", "generate.skills=[insert, delete]"])
    {'num_tasks': 3, 'generate': {'skills': ['insert', 'delete']}}
    """
    tree: Tree = {}
    for _, keys, node in parse_overrides(texts, COMMAND_LINE, short_forms=()):
        tree = merge_trees(tree, nested(keys, node))
    return cast(dict[str, Any], plain(tree))


# -- from leaves to values -----------------------------------------------------------------------------------


def _load(
    content: Layers,
    general: Tree,
    specific: Sequence[Tree],
    check_files: bool = True,
    warn: bool = True,
    on_checked: Callable[[], None] | None = None,
) -> tuple[TrainConfig, Provenance]:
    switches: Switches = {}
    top, over = (
        {key: node for key, node in tree.items() if key not in stage_keys(tree)}
        for tree in (content.top, general)
    )
    root = override(top, over, TOP, switches)
    root["stages"] = cast(list[Node], _merge_stages(content, general, specific, switches))
    document = Document(root, content.name, one_stage=content.items is None)
    try:  # as JSON, where pydantic is strict and a list may still be a tuple, and a text a path
        config = TrainConfig.model_validate_json(json.dumps(plain(root)), strict=True)
    except ValidationError as error:
        raise AgentPeftError(config_error(error, document)) from error
    begun = run_of(Path(content.name)) is not None
    if check_files:
        _check_files(config, document, begun)
    if on_checked is not None:
        on_checked()
    config, adapted = fit_adapter(config) if check_files and not begun else (config, {})
    config, origins = fit_lengths(config, document)
    origins |= adapted
    for where, leaf in leaves(root):
        key = ".".join(where)
        for_all = key.startswith("stages.") and not leaf.path.startswith("stages.") and not document.one_stage
        origins[key] = leaf.origin + (", for all stages" if for_all else "")
    for key in config.evaluation.inherited if config.evaluation is not None else ():
        origins[f"evaluation.sampling.{key}"] = "the stage that it follows"
    for path, (kept, dropped) in switches.items() if warn else ():
        keeps = f"keeps {', '.join(kept)}" if kept else ""
        drops = f"drops {', '.join(dropped)}" if dropped else ""
        logger.warning(
            "%s: %s has another kind than in %s; of its other keys there it %s",
            COMMAND_LINE,
            path,
            content.name,
            " and ".join(filter(None, (keeps, drops))),
        )
    return config, Provenance(content.name, origins)


def _merge_stages(content: Layers, general: Tree, specific: Sequence[Tree], switches: Switches) -> list[Tree]:
    """Merge each stage from the defaults at the top, its item, the overrides of all stages and its own. A key
    without an effect is refused where its stage or every stage has no use for it, and else left out.
    """
    defaults, over = stage_keys(content.top), stage_keys(general)
    stages: list[Tree] = []
    unused: list[Mapping[str, str]] = []
    used: set[Leaf] = set()

    def refuse(trees: Iterable[Tree], key: str, who: str, reason: str, where: str = "") -> None:
        for tree in trees:
            node = reduce(child, key.split("."), cast("Node | None", tree))
            for _, leaf in leaves(node) if node is not None else ():
                if leaf not in content.inherited and leaf.path.startswith(where):
                    raise AgentPeftError(_no_effect(leaf, f"{who} {reason}"))

    for place, (item, own) in enumerate(zip(content.items or [{}], specific, strict=True)):
        from_file = override(defaults, item)
        stage = override(from_file, override(over, own), TOP, switches)
        reasons = _unused(stage)
        for key, reason in reasons.items():
            refuse((item, own), key, f"stages.{place}", reason, where="stages.")
        used |= {leaf for _, leaf in leaves(_without(from_file, reasons))}
        stages.append(_without(stage, reasons))
        unused.append(reasons)
    for key, reason in unused[0].items():
        if all(key in reasons for reasons in unused):
            refuse((defaults, over, *specific), key, "every stage", reason)
    for _, leaf in leaves(defaults):
        if leaf not in used and leaf not in content.inherited:
            raise AgentPeftError(_no_effect(leaf, "every stage sets its own"))
    return stages


def _no_effect(leaf: Leaf, reason: str) -> str:
    return f"{leaf.origin}: {leaf.path} has no effect, because {reason}; remove it"


def _unused(stage: Tree) -> Mapping[str, str]:
    try:
        algorithm = _ALGORITHM.validate_json(json.dumps(plain(stage.get("algorithm", {}))), strict=True)
    except ValidationError:  # reported later, with its place
        return {}
    return unused_keys(algorithm, plain(stage.get("learn_from", Leaf("demonstrations", "", ""))))


def _without(tree: Tree, keys: Iterable[str]) -> Tree:
    for key in keys:
        name, _, inner = key.partition(".")
        below = tree.get(name)
        if not inner:
            tree = {other: node for other, node in tree.items() if other != name}
        elif isinstance(below, dict):
            tree = {**tree, name: _without(below, [inner])}
    return tree


def _check_files(config: TrainConfig, document: Document, begun: bool) -> None:
    """Check that the task files of the built-in environments exist, and the adapter to start from; of a run
    that has begun also the model. Only the class of a custom environment knows what its paths are for.
    """
    places: list[tuple[str, Any]] = [("environment", config.environment)]
    if not (config.run_dir / START).is_dir():  # else the run has a copy of what it started from
        places.insert(0, ("policy", config.policy))
    if config.evaluation is not None:
        places.append(("evaluation.environment", config.evaluation.environment))
    for prefix, model in places:
        if prefix != "policy" and model.kind not in ENVIRONMENTS:
            continue
        for name, value in model:
            of_model = (prefix, name) == ("policy", "model") and begun and Path(value).is_absolute()
            if (isinstance(value, Path) or of_model) and not exists(Path(value)):
                where = document.place((*prefix.split("."), name))
                advice = f"add {prefix}.{name}= with its place now" if begun else f"seen from {Path.cwd()}"
                if not begun and Path(value).parent == Path("data") / model.kind:
                    advice = f"agent-peft download {model.kind} writes it; {advice}"
                raise AgentPeftError(f"{where}: there is no file or folder {str(value)!r} ({advice})")


def dump_config(config: TrainConfig, path: str | PathLike[str]) -> None:
    """Write every effective value. ``read_config`` of the file gives an equal configuration."""
    write_atomic(Path(path), dump(resolved(config)))
