"""How the parts of a configuration are merged: defaults of all stages, items of ``stages``, overrides."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from pydantic import TypeAdapter, ValidationError

from agent_peft.algorithms import AlgorithmConfig, AnyAlgorithm
from agent_peft.configuration.run_config import ineffective_keys
from agent_peft.configuration.yaml12 import Leaf, Node, Tree, leaves, plain
from agent_peft.training.stage import StageConfig
from agent_peft.types import AgentPeftError

STAGE_KEYS = frozenset(StageConfig.model_fields)
_ALGORITHM: TypeAdapter[AlgorithmConfig] = TypeAdapter(AnyAlgorithm)


def merge(base: Tree, over: Tree) -> Tree:
    """Return ``over`` on ``base``, merged key by key. If both name a kind and the kinds differ, return
    ``over`` alone.

    >>> from agent_peft.configuration.yaml12 import parse
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


def dropped_keys(base: Tree, over: Tree, path: str = "") -> Iterator[tuple[str, list[str]]]:
    """Yield each mapping that ``merge`` takes from ``over`` alone because its kind differs: its key path, and
    the keys of ``base`` that it does not set.

    >>> from agent_peft.configuration.yaml12 import parse
    >>> of = lambda text: parse(text, "x")
    >>> list(dropped_keys(of("{a: {kind: x, digits: 2}}"), of("{a: {kind: y}}")))
    [('a', ['digits'])]
    """
    for name in base.keys() & over.keys():
        below, above, key = base[name], over[name], f"{path}.{name}" if path else name
        if isinstance(below, dict) and isinstance(above, dict):
            if merge(below, above) is above:
                others = [other for other in below if other not in above]
                if others:
                    yield key, others
            else:
                yield from dropped_keys(below, above, key)


def merge_stages(
    top: Tree, items: list[Tree] | None, general: Tree, specific: list[Tree], used: set[int]
) -> list[Tree]:
    """Merge each stage from the defaults in ``top``, its item, the overrides of all stages and its own.

    Args:
        items: the items of ``stages``; None where the top is the only stage.
        general: overrides of all stages.
        specific: overrides of each stage.
        used: ids of the leaves that have an effect elsewhere. Those with an effect here are added.

    Raises:
        AgentPeftError: a key has no effect on the stage that sets it, or on any stage.
    """
    defaults, over = (
        {key: value for key, value in tree.items() if key in STAGE_KEYS} for tree in (top, general)
    )
    stages: list[Tree] = []
    without_effect: list[dict[str, str]] = []
    for place, (item, override) in enumerate(zip(items or [{}], specific, strict=True)):
        ineffective = _ineffective(merge(merge(defaults, item), merge(over, override)))
        without_effect.append(ineffective)
        for tree in (item, override) if items else ():
            for key, reason in ineffective.items():
                if (node := _at(tree, key)) is not None:
                    raise AgentPeftError(_no_effect(node, f"stages.{place} {reason}"))
        from_file = merge(_without(defaults, ineffective), item)
        used |= {id(leaf) for _, leaf in leaves(from_file)}
        stages.append(merge(from_file, merge(_without(over, ineffective), override)))
    for key, reason in without_effect[0].items():
        for tree in (defaults, over, *specific):
            if (node := _at(tree, key)) is not None and all(key in keys for keys in without_effect):
                raise AgentPeftError(_no_effect(node, f"every stage {reason}"))
    for _, leaf in leaves(defaults):
        if id(leaf) not in used:
            raise AgentPeftError(_no_effect(leaf, "every stage sets its own"))
    return stages


def _no_effect(node: Node, reason: str) -> str:
    leaf = next(leaf for _, leaf in leaves(node))
    return f"{leaf.origin}: {leaf.path} has no effect, because {reason}; remove it"


def _ineffective(stage: Tree) -> dict[str, str]:
    """The keys without an effect on a stage with this algorithm, each with the reason."""
    try:
        algorithm = _ALGORITHM.validate_json(json.dumps(plain(stage.get("algorithm", {}))), strict=True)
    except ValidationError:  # reported later, with its place
        return {}
    return ineffective_keys(algorithm)


def _at(tree: Tree, key: str) -> Node | None:
    """The node at a key path, if there is one."""
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
