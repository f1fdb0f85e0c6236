"""From a YAML file and ``key=value`` overrides to a ``TrainConfig``, and back.

- A stage's keys may stand at the top, as defaults of all stages; an item of ``stages`` overrides them.
Mappings are merged key by key,
  except that another ``kind`` replaces the whole mapping. Without ``stages`` the top is the only stage.
- ``algorithm: grpo`` is short for ``{kind: grpo}``, so is ``environment: db_bench``; an item ``sft`` is
``{algorithm: {kind: sft}}``.
- ``evaluation.sampling`` takes the limits (max_new_tokens, max_tokens, stop) of the stage that it follows,
where it does not set its own.
- A stage passes over defaults that have no effect on it: one that learns from demonstrations over
``group_size`` and how tokens are drawn,
  one without ``kl_coef`` over ``reference``. In its own item they are errors.
- An override of a top-level stage key wins in every stage (``steps=3`` is a short run),
``stages.1.KEY=VALUE`` in one; the value is YAML.
- A default that no stage uses has no effect and is an error. Relative paths are relative to the current
directory.
- YAML is 1.2 (see ``yaml12``) and types are strict: ``"3"`` is no number, ``yes`` no truth value.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError

from agent_peft.algorithms import AlgorithmConfig, build_algorithm
from agent_peft.configuration.errors import Written, explain_mistakes
from agent_peft.configuration.lengths import fit_lengths
from agent_peft.configuration.run_config import REFERENCE_KEYS, ROLLOUT_KEYS, TrainConfig, resolved
from agent_peft.configuration.yaml12 import DEEPEST, Leaf, Node, dump, leaves, parse, plain
from agent_peft.environments import ENVIRONMENTS
from agent_peft.files import MEGABYTE, read_text, write_atomic
from agent_peft.training.stage import StageConfig
from agent_peft.types import AgentPeftError

logger = logging.getLogger(__name__)

Tree = dict[str, Node]

COMMAND_LINE = "command line"
STAGE_KEYS = frozenset(StageConfig.model_fields)
SHORT_FORMS = ("algorithm", "environment")  # a text there is a kind
_ALGORITHM: TypeAdapter[AlgorithmConfig] = TypeAdapter(AlgorithmConfig)


@dataclass(frozen=True)
class Provenance:
    """Where each value that is not a default came from, by its key path in the resolved configuration.

    >>> Provenance("q.yaml", {"stages.0.steps": "q.yaml:3"}).of("stages.0.steps")
    'q.yaml:3'
    """

    source: str
    origins: Mapping[str, str]

    def of(self, path: str) -> str:
        """``file:line``, ``command line`` or ``default``."""
        inside = (origin for key, origin in self.origins.items() if key == path or key.startswith(path + "."))
        return next(inside, "default")


def load_config(
    path: Path, overrides: Sequence[str] = (), *, check_files: bool = True, warn: bool = True
) -> tuple[TrainConfig, Provenance]:
    """The run that a file and overrides describe.

    Args:
        overrides: ``optimizer.learning_rate=1e-4`` and the like; of two that set the same key, neither is
            right.
        check_files: whether files that the run will read must be there.
        warn: whether to tell of keys of the file that an override of a ``kind`` takes out.

    Raises:
        AgentPeftError: anything wrong, in one line that names the place and the key.
    """
    top = _read(path)
    items = _stage_items(top, str(path))
    general, specific = _overrides(overrides, len(items or [{}]))
    left_out = dict(_left_out(top, general))
    for place, (item, own) in enumerate(zip(items or [], specific, strict=False)):
        left_out |= dict(_left_out(item, merge(general, own), f"stages.{place}"))
    root = merge(
        *({key: value for key, value in tree.items() if key not in STAGE_KEYS} for tree in (top, general))
    )
    root["stages"] = cast(
        list[Node], _stages(top, items, general, specific, used={id(leaf) for _, leaf in leaves(root)})
    )
    written = Written(root, str(path), one_stage=items is None)
    try:
        config = TrainConfig.model_validate_json(json.dumps(plain(root)), strict=True)
    except ValidationError as error:
        raise AgentPeftError(explain_mistakes(error, written)) from error
    if check_files:
        _check_files(config, written)
    config, origins = fit_lengths(config, written)
    for where, leaf in leaves(root):
        key = ".".join(where)
        inherited = not leaf.path.startswith("stages.") and key.startswith("stages.") and items is not None
        origins[key] = leaf.origin + (", for all stages" if inherited else "")
    for key in config.evaluation.inherited if config.evaluation is not None else ():
        origins[f"evaluation.sampling.{key}"] = "the stage that it follows"
    if warn:
        for key, others in left_out.items():
            logger.warning(
                "command line: %s is of another kind than in %s, whose %s it does not take over",
                key,
                path,
                ", ".join(others),
            )
    return config, Provenance(str(path), origins)


def _left_out(base: Tree, over: Tree, keys: str = "") -> Iterator[tuple[str, list[str]]]:
    """Where ``merge`` takes ``over`` alone, since it is of another kind: the key path, and the keys of
    ``base`` that it does not set.

    >>> of = lambda text: parse(text, "x")
    >>> list(_left_out(of("{a: {kind: x, digits: 2}}"), of("{a: {kind: y}}")))
    [('a', ['digits'])]
    """
    for name in base.keys() & over.keys():
        below, above, key = base[name], over[name], f"{keys}.{name}" if keys else name
        if isinstance(below, dict) and isinstance(above, dict):
            if merge(below, above) is above:
                others = [other for other in below if other not in above]
                if others:
                    yield key, others
            else:
                yield from _left_out(below, above, key)


def dump_config(config: TrainConfig, path: Path) -> None:
    """Write the resolved configuration, every value of it. ``load_config`` of the file gives an equal one."""
    write_atomic(path, dump(resolved(config)))


def merge(base: Tree, over: Tree) -> Tree:
    """``over`` on ``base``, mappings key by key; where both name a kind and not the same, ``over`` alone.

    >>> of = lambda text: parse(text, "x")
    >>> plain(merge(of("{kind: grpo, clip_low: 0.1}"), of("{kind: rloo}")))
    {'kind': 'rloo'}
    >>> plain(merge(of("{kind: grpo, clip_low: 0.1}"), of("{kl_coef: 1}")))
    {'kind': 'grpo', 'clip_low': 0.1, 'kl_coef': 1}
    """
    ours, theirs = base.get("kind"), over.get("kind")
    same_kind = isinstance(ours, Leaf) and isinstance(theirs, Leaf) and ours.value == theirs.value
    if ours is not None and theirs is not None and not same_kind:
        return over
    merged = {**base, **over}
    if same_kind:
        merged["kind"] = base["kind"]  # repeating it overrides nothing
    for key in base.keys() & over.keys():
        below, above = base[key], over[key]
        if isinstance(below, dict) and isinstance(above, dict):
            merged[key] = merge(below, above)
    return merged


def _read(path: Path) -> Tree:
    root = parse(read_text(path, "a YAML file", MEGABYTE), str(path))
    if not isinstance(root, dict):
        wrong = (
            "is empty"
            if isinstance(root, Leaf) and root.value is None
            else "is not a mapping of keys to values"
        )
        raise AgentPeftError(
            f"{path}: {wrong}; write at least run_dir, policy, environment, algorithm and steps"
        )
    return _expand(root)


def _expand(tree: Tree) -> Tree:
    """Short forms written out."""
    expanded = dict(tree)
    for key in SHORT_FORMS:
        node = expanded.get(key)
        if isinstance(node, Leaf) and isinstance(node.value, str):
            expanded[key] = {"kind": node}
    evaluation = expanded.get("evaluation")
    if isinstance(evaluation, dict):
        expanded["evaluation"] = _expand(evaluation)
    return expanded


def _stage_items(top: Tree, source: str) -> list[Tree] | None:
    """The items of ``stages``, which is taken out of ``top``; None where there is no such key."""
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
                f"{source}: stages.{place}: expected a mapping or an algorithm's name, got {json.dumps(plain(item))}"
            )
        items.append(_expand(item))
    return items


def _overrides(texts: Sequence[str], num_stages: int) -> tuple[Tree, list[Tree]]:
    """Overrides for the top (and so for all stages), and those for each stage."""
    general: Tree = {}
    specific: list[Tree] = [{} for _ in range(num_stages)]
    seen: dict[tuple[str, ...], str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        keys = tuple(name.strip().split("."))
        if not equals or not all(keys) or len(keys) > DEEPEST:
            raise AgentPeftError(
                f"{text!r}: an override is written key=value, such as optimizer.learning_rate=1e-4"
            )
        node = _relabel(parse(value, f"{COMMAND_LINE}: {name}", keys, lines=False))
        short = keys[-1] in SHORT_FORMS and keys[-2:-1] != (
            "environment",
        )  # which may have a key of this name of its own
        if short and isinstance(node, Leaf) and isinstance(node.value, str):
            keys = (*keys, "kind")
        for other, other_text in seen.items():
            if keys[: len(other)] == other[: len(keys)]:
                raise AgentPeftError(
                    f"{COMMAND_LINE}: {other_text!r} and {text!r} set the same key; give one of them"
                )
        seen[keys] = text
        if keys[0] == "stages":
            place = int(keys[1]) if len(keys) > 2 and keys[1].isdecimal() else None
            if place is None:
                raise AgentPeftError(
                    f"{COMMAND_LINE}: {text!r}: name one stage and one of its keys, such as stages.0.steps=10"
                )
            if place >= num_stages:
                raise AgentPeftError(
                    f"{COMMAND_LINE}: stages.{place} is out of range: the last stage is stages.{num_stages - 1}"
                )
            specific[place] = merge(specific[place], _expand(_nest(keys[2:], node)))
        else:
            general = merge(general, _expand(_nest(keys, node)))
    return general, specific


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


def _stages(
    top: Tree, items: list[Tree] | None, general: Tree, specific: list[Tree], used: set[int]
) -> list[Tree]:
    """Each stage, merged: defaults, its own keys, overrides of all, overrides of it.

    ``used`` are the ids of leaves that have an effect elsewhere; those of defaults that have one here are
    added.
    """
    defaults, over = (
        {key: value for key, value in tree.items() if key in STAGE_KEYS} for tree in (top, general)
    )
    stages: list[Tree] = []
    passed_over: list[dict[str, str]] = []
    for place, (item, own) in enumerate(zip(items or [{}], specific, strict=True)):
        passed_over.append(ineffective := _ineffective(merge(merge(defaults, item), merge(over, own))))
        for tree in (item, own) if items else ():
            for key, reason in ineffective.items():
                if (node := _at(tree, key)) is not None:
                    raise AgentPeftError(_no_effect(node, f"stages.{place} {reason}"))
        inherited, wanted = (_without(tree, ineffective) for tree in (defaults, over))
        from_file = merge(inherited, item)
        used |= {id(leaf) for _, leaf in leaves(from_file)}
        stages.append(merge(from_file, merge(wanted, own)))
    for key, reason in passed_over[0].items():
        for tree in (defaults, over, *specific):
            if (node := _at(tree, key)) is not None and all(
                key in ineffective for ineffective in passed_over
            ):
                raise AgentPeftError(_no_effect(node, f"every stage {reason}"))
    for _, leaf in leaves(defaults):
        if id(leaf) not in used:
            raise AgentPeftError(_no_effect(leaf, "every stage sets its own"))
    return stages


def _no_effect(node: Node, reason: str) -> str:
    leaf = next(leaf for _, leaf in leaves(node))
    return f"{leaf.origin}: {leaf.path} has no effect, because {reason}; remove it"


def _ineffective(stage: Tree) -> dict[str, str]:
    """Keys without an effect on a stage of this algorithm, and why."""
    try:
        algorithm = build_algorithm(
            _ALGORITHM.validate_json(json.dumps(plain(stage.get("algorithm", {}))), strict=True)
        )
    except ValidationError:  # told later, with its place
        return {}
    found = (
        {}
        if algorithm.on_policy
        else dict.fromkeys(ROLLOUT_KEYS, "learns from demonstrations, in groups of one, and draws no tokens")
    )
    return (
        found
        if algorithm.needs_reference
        else found | dict.fromkeys(REFERENCE_KEYS, "measures no KL (kl_coef is 0)")
    )


def _at(tree: Tree, key: str) -> Node | None:
    """What stands at a key path, if anything."""
    node: Node | None = tree
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return node


def _without(tree: Tree, keys: Iterable[str]) -> Tree:
    for key in keys:
        name, _, inner = key.partition(".")
        below = tree.get(name)
        if not inner:
            tree = {other: node for other, node in tree.items() if other != name}
        elif isinstance(below, dict):
            tree = {**tree, name: _without(below, [inner])}
    return tree


def _check_files(config: TrainConfig, written: Written) -> None:
    """Files of our own environments' tasks, and the adapter to start from. What a user's environment does
    with paths is its own affair.
    """
    places: list[tuple[str, Any]] = [("policy", config.policy), ("environment", config.environment)]
    if config.evaluation is not None:
        places.append(("evaluation.environment", config.evaluation.environment))
    for prefix, model in places:
        if prefix != "policy" and model.kind not in ENVIRONMENTS:
            continue
        for name, value in model:
            if isinstance(value, Path) and not value.exists():
                where = written.place((*prefix.split("."), name))
                raise AgentPeftError(
                    f"{where}: there is no file or folder {str(value)!r} (seen from {Path.cwd()})"
                )
