"""From a YAML file (or a mapping) and overrides to a ``TrainConfig``, and back.

- The keys of a stage may stand at the top, as defaults of all stages. An item of ``stages`` overrides them.
  Mappings are merged key by key; a mapping of another ``kind`` replaces the whole mapping. Without ``stages``
  the top is the only stage.
- ``algorithm: grpo`` is short for ``{kind: grpo}``, and so is ``environment: db_bench``. An item ``sft`` of
  ``stages`` is short for ``{algorithm: {kind: sft}}``.
- ``evaluation.sampling`` takes the limits (max_new_tokens, max_tokens, stop) that it does not set from the
  stage that it follows.
- Defaults that have no effect on a stage are not passed to it: ``group_size`` and the sampling distribution
  if it learns from demonstrations, ``reference`` without ``kl_coef``. In the stage's item they are errors.
- An override of a top-level stage key wins in every stage (``steps=3`` makes a short run), one of
  ``stages.1.KEY`` in one stage. On the command line its value is YAML.
- A default that no stage uses is an error. Relative paths are relative to the current folder.
- ``extends: other.yaml`` (or a list, or bundled names; relative to the file that it stands in) puts the keys
  of those files first. The keys of this file win as overrides do: mappings merge key by key, ``stages`` and
  other lists replace those below as a whole, a key of a stage at the top wins in every stage. Where a mapping
  gets another ``kind``, the keys that both kinds have stay. What has no effect any more is left out.
- ``steps`` and ``epochs`` replace each other.
- YAML is 1.2 (see ``yaml12``) and types are strict: ``"3"`` is not a number, ``yes`` is not a truth value.
- A name such as ``quickstart``, without a folder or suffix, is a bundled configuration if it is not a file.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from agent_peft.configuration.errors import Document, config_error
from agent_peft.configuration.merging import STAGE_KEYS, merge, merge_stages, override, switches
from agent_peft.configuration.reading import SHORT_FORMS, Source, expand, read_content, tree_of
from agent_peft.configuration.relocation import run_of, settle_paths
from agent_peft.configuration.run_config import TrainConfig, resolved
from agent_peft.configuration.yaml12 import MAX_DEPTH, Leaf, Node, Tree, dump, leaves, parse, plain
from agent_peft.environments import ENVIRONMENTS
from agent_peft.files import write_atomic
from agent_peft.policies.config import PretrainedConfig
from agent_peft.policies.models.positions import bound_of, fit
from agent_peft.policies.models.shape import config_at_hand
from agent_peft.policies.models.start import START, from_start, split_run, with_adapter
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.types import AgentPeftError

logger = logging.getLogger(__name__)

Overrides = Sequence[str] | Mapping[str, Any]

COMMAND_LINE, ARGUMENT = "command line", "argument"  # origins of overrides
ADAPTER = "the adapter that it continues with"  # the origin of LoRA settings


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

    Raises:
        AgentPeftError: as ``read_config``.

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
    adapt: Callable[[Tree, Tree], None] | None = None,
) -> tuple[TrainConfig, Provenance]:
    """Return the run that a configuration describes, and the origin of each value.

    Args:
        source: as of ``load_config``.
        overrides: texts such as ``optimizer.learning_rate=1e-4``, or a mapping from key paths to values. Two
            overrides of one key are an error.
        check_files: whether the files that the run reads must exist.
        warn: whether to tell which keys of ``source`` an override of a ``kind`` keeps and drops.
        adapt: is called with the tree of ``source``, which it may change, and the tree of the overrides.

    Raises:
        AgentPeftError: anything is wrong. Its one line names the place and the key.
    """
    content = read_content(source)
    name, top, items = content.name, content.top, content.items
    general, specific = _overrides(overrides, len(items or [{}]))
    if not isinstance(source, Mapping):
        settle_paths(Path(name), top, items or (), general if check_files else None)
    if adapt is not None:
        adapt(top, general)
    switched = switches(top, general)
    for place, (item, own) in enumerate(zip(items or [], specific, strict=False)):
        switched += switches(item, merge(general, own), f"stages.{place}")
    root = override(
        *({key: value for key, value in tree.items() if key not in STAGE_KEYS} for tree in (top, general))
    )
    used = {id(leaf) for _, leaf in leaves(root)}
    stages = merge_stages(top, items, general, specific, used, content.inherited)
    root["stages"] = cast(list[Node], stages)
    document = Document(root, name, one_stage=items is None)
    try:
        config = TrainConfig.model_validate_json(json.dumps(plain(root)), strict=True)
    except ValidationError as error:
        raise AgentPeftError(config_error(error, document)) from error
    if check_files:
        _check_files(config, document)
    begun = run_of(Path(name)) is not None  # and its settings are recorded
    config, adapted = fit_adapter(config) if check_files and not begun else (config, {})
    config, origins = fit_lengths(config, document)
    origins |= adapted
    for where, leaf in leaves(root):
        key = ".".join(where)
        inherited = not leaf.path.startswith("stages.") and key.startswith("stages.") and items is not None
        origins[key] = leaf.origin + (", for all stages" if inherited else "")
    for key in config.evaluation.inherited if config.evaluation is not None else ():
        origins[f"evaluation.sampling.{key}"] = "the stage that it follows"
    for switch in switched if warn else ():
        keeps = f"keeps {', '.join(switch.kept)}" if switch.kept else ""
        drops = f"drops {', '.join(switch.dropped)}" if switch.dropped else ""
        logger.warning(
            "%s: %s has another kind than in %s; of its other keys there it %s",
            COMMAND_LINE,
            switch.path,
            name,
            " and ".join(filter(None, (keeps, drops))),
        )
    return config, Provenance(name, origins)


def dump_config(config: TrainConfig, path: str | PathLike[str]) -> None:
    """Write every effective value. ``read_config`` of the file gives an equal configuration."""
    write_atomic(Path(path), dump(resolved(config)))


def parse_keys(texts: Sequence[str]) -> dict[str, Any]:
    """Return ``key=value`` arguments of a command as a mapping; a value is YAML.

    Raises:
        AgentPeftError: a text is not written key=value, or one sets a key inside of another one's value.

    >>> parse_keys(["num_tasks=3", "generate.skills=[insert, delete]"])
    {'num_tasks': 3, 'generate': {'skills': ['insert', 'delete']}}
    """
    tree: Tree = {}
    for _, keys, node in _parsed(texts, COMMAND_LINE, short_forms=()):
        tree = merge(tree, _nest(keys, node))
    return cast(dict[str, Any], plain(tree))


def _overrides(overrides: Overrides, num_stages: int) -> tuple[Tree, list[Tree]]:
    """The overrides of the top (and so of all stages), and those of each stage."""
    general: Tree = {}
    specific: list[Tree] = [{} for _ in range(num_stages)]
    origin = ARGUMENT if isinstance(overrides, Mapping) else COMMAND_LINE
    for text, keys, node in _parsed(overrides, origin):
        if keys[0] != "stages":
            general = merge(general, expand(_nest(keys, node)))
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
        specific[place] = merge(specific[place], expand(_nest(keys[2:], node)))
    return general, specific


def _parsed(
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
                f"{text!r}: an override is written key=value, such as optimizer.learning_rate=1e-4"
            )
        node = tree_of(value, origin, keys)
        if isinstance(item, str):
            node = _relabel(parse(yaml, f"{origin}: {name}", keys, lines=False))
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


def _relabel(node: Node) -> Node:
    if isinstance(node, Leaf):
        return Leaf(node.value, COMMAND_LINE, node.path)
    if isinstance(node, list):
        return [_relabel(child) for child in node]
    return {key: _relabel(child) for key, child in node.items()}


def _nest(keys: Sequence[str], node: Node) -> Tree:
    for key in reversed(keys[1:]):
        node = {key: node}
    return {keys[0]: node}


def _check_files(config: TrainConfig, document: Document) -> None:
    """Check that the task files of the built-in environments exist, and the adapter to start from. Only the
    class of a custom environment knows what its paths are for.
    """
    places: list[tuple[str, Any]] = [("policy", config.policy), ("environment", config.environment)]
    if config.evaluation is not None:
        places.append(("evaluation.environment", config.evaluation.environment))
    for prefix, model in places:
        if prefix != "policy" and model.kind not in ENVIRONMENTS:
            continue
        for name, value in model:
            if prefix == "policy" and (config.run_dir / START).is_dir():  # of which the run has a copy
                continue
            if isinstance(value, Path) and not value.exists():
                where = document.place((*prefix.split("."), name))
                raise AgentPeftError(
                    f"{where}: there is no file or folder {str(value)!r} (seen from {Path.cwd()})"
                )


def fit_lengths(config: TrainConfig, document: Document) -> tuple[TrainConfig, dict[str, str]]:
    """The same run with ``max_tokens`` lowered to the model's positions wherever it is the default, and where
    each such value comes from.

    A model that is not here yet is not asked; the engine asks it when it is loaded.

    Raises:
        AgentPeftError: ``max_tokens`` of a stage or of the evaluation was set, and is more.
    """
    model = config_at_hand(config.policy)
    bound = None if model is None else bound_of(model)
    if bound is None:
        return config, {}
    origins: dict[str, str] = {}

    def fitted(sampling: SamplingConfig, *keys: str) -> dict[str, SamplingConfig]:
        found = fit(sampling, bound, document.place((*keys, "sampling", "max_tokens")))
        if found is not sampling:
            origins[".".join((*keys, "sampling", "max_tokens"))] = "the positions of policy.model"
        return {"sampling": found}

    stages = tuple(
        stage.model_copy(update=fitted(stage.sampling, "stages", str(place)))
        for place, stage in enumerate(config.stages)
    )
    evaluation = config.evaluation and config.evaluation.following(stages[-1].sampling)
    evaluation = evaluation and evaluation.model_copy(update=fitted(evaluation.sampling, "evaluation"))
    return config.model_copy(update={"stages": stages, "evaluation": evaluation}), origins


def fit_adapter(config: TrainConfig) -> tuple[TrainConfig, dict[str, str]]:
    """Return the same run with ``policy.lora`` as its adapter needs it, and the origin of each changed key.

    If ``policy.model`` is not here, the copy in the run directory is asked.

    Raises:
        AgentPeftError: what ``policy.model`` names does not exist, or contradicts ``policy.lora``.
    """
    if not isinstance(policy := config.policy, PretrainedConfig):
        return config, {}
    here = split_run(policy.model)[0].exists()
    fitted = with_adapter(policy if here else from_start(policy, config.run_dir))
    if fitted.lora == policy.lora or fitted.lora is None or policy.lora is None:
        return config, {}
    changed = [key for key, value in fitted.lora if value != getattr(policy.lora, key)]
    policy = policy.model_copy(update={"lora": fitted.lora})
    return config.model_copy(update={"policy": policy}), {f"policy.lora.{key}": ADAPTER for key in changed}
