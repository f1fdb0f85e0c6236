"""How the parts of a configuration are merged: defaults of all stages, items of ``stages``, overrides."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from pydantic import BaseModel, TypeAdapter, ValidationError

from agent_peft.algorithms import AlgorithmConfig, AnyAlgorithm
from agent_peft.configuration.keys import model_of
from agent_peft.configuration.run_config import TrainConfig, ineffective_keys
from agent_peft.configuration.yaml12 import Leaf, Node, Tree, leaves, plain
from agent_peft.training.stage import StageConfig
from agent_peft.types import AgentPeftError

STAGE_KEYS = frozenset(StageConfig.model_fields)
ALTERNATIVES: Mapping[str, str] = {"steps": "epochs", "epochs": "steps"}  # of a stage
_TOP = (TrainConfig, StageConfig)  # the classes whose keys may stand at the top of a file
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
    if _differ(base, over):
        return over
    merged = {**base, **over}
    if "kind" in base and "kind" in over:
        merged["kind"] = base["kind"]  # repeating it overrides nothing
    for key in base.keys() & over.keys():
        below, above = base[key], over[key]
        if isinstance(below, dict) and isinstance(above, dict):
            merged[key] = merge(below, above)
    return merged


@dataclass(frozen=True)
class Switch:
    """A mapping that gets another kind: the keys that stay because both kinds have them, and the others.

    >>> Switch("environment", ["num_tasks"], ["digits"]).dropped
    ['digits']
    """

    path: str
    kept: list[str]
    dropped: list[str]


def override(base: Tree, over: Tree) -> Tree:
    """Return ``over`` on ``base``, two trees with keys of a configuration or of a stage, merged key by key.

    Where the kinds of a mapping differ, the keys of ``base`` that both kinds have stay. ``steps`` and
    ``epochs`` replace each other.

    >>> from agent_peft.configuration.yaml12 import parse
    >>> of = lambda text: parse(text, "x")
    >>> base = of("{steps: 9, environment: {kind: arithmetic, digits: 2, num_tasks: 5}}")
    >>> plain(override(base, of("{epochs: 2, environment: {kind: openenv, url: 'http://a'}}")))
    {'environment': {'kind': 'openenv', 'num_tasks': 5, 'url': 'http://a'}, 'epochs': 2}
    """
    return merge(_without_alternatives(_switched(base, over, _TOP, "")[0], over), over)


def switches(base: Tree, over: Tree, path: str = "") -> list[Switch]:
    """The mappings to which ``override`` gives another kind, as far as they hold other keys in ``base``."""
    return [switch for switch in _switched(base, over, _TOP, path)[1] if switch.kept or switch.dropped]


def _switched(
    base: Tree, over: Tree, models: Sequence[type[BaseModel] | None], path: str
) -> tuple[Tree, list[Switch]]:
    """``base`` with the kinds of ``over``, and without the keys that these kinds lack."""
    switched, found = dict(base), list[Switch]()
    for name in base.keys() & over.keys():
        below, above, key = base[name], over[name], f"{path}.{name}" if path else name
        if not (isinstance(below, dict) and isinstance(above, dict)):
            continue
        model = _model_of(models, name, above if "kind" in above else below)
        if _differ(below, above):
            stays = _known(below, model)
            switched[name] = {**stays, "kind": above["kind"]}
            kept, dropped = (
                [one for one in below if (one in stays) == known and one not in above]
                for known in (True, False)
            )
            found.append(Switch(key, kept, dropped))
        else:
            switched[name], inner = _switched(below, above, [model], key)
            found += inner
    return switched, found


def _differ(base: Tree, over: Tree) -> bool:
    """Whether both name a kind, and another one."""
    ours, theirs = base.get("kind"), over.get("kind")
    same = isinstance(ours, Leaf) and isinstance(theirs, Leaf) and ours.value == theirs.value
    return ours is not None and theirs is not None and not same


def _model_of(models: Sequence[type[BaseModel] | None], name: str, tree: Tree) -> type[BaseModel] | None:
    """The class of a key's mapping; None if no class, or only code that must not be imported, tells it."""
    kind = tree.get("kind")
    fields = (model.model_fields for model in models if model is not None)
    annotations = (known[name].annotation for known in fields if name in known)
    return next((model_of(one, kind.value if isinstance(kind, Leaf) else None) for one in annotations), None)


def _known(tree: Tree, model: type[BaseModel] | None) -> Tree:
    """The keys of a mapping that a class has, too, and so on inside them."""
    fields = model.model_fields if model is not None else {}
    known = {name: node for name, node in tree.items() if name in fields}
    for name, node in known.items():
        inner = _model_of([model], name, node) if isinstance(node, dict) else None
        if isinstance(node, dict) and inner is not None:
            known[name] = _known(node, inner)
    return known


def _without_alternatives(base: Tree, over: Tree) -> Tree:
    """``base`` without the key that a key of ``over`` replaces."""
    given = {
        key for key in ALTERNATIVES if isinstance(node := over.get(key), Leaf) and node.value is not None
    }
    return _without(base, [ALTERNATIVES[key] for key in given])


def merge_stages(
    top: Tree,
    items: list[Tree] | None,
    general: Tree,
    specific: list[Tree],
    used: set[int],
    inherited: Set[Leaf] = frozenset(),
) -> list[Tree]:
    """Merge each stage from the defaults in ``top``, its item, the overrides of all stages and its own.

    Args:
        items: the items of ``stages``; None where the top is the only stage.
        general: overrides of all stages.
        specific: overrides of each stage.
        used: ids of the leaves that have an effect elsewhere. Those with an effect here are added.
        inherited: the leaves of the files that this one extends. Where they have no effect, they are
            left out, since they are not this file's to remove.

    Raises:
        AgentPeftError: a key has no effect on the stage that sets it, or on any stage.
    """

    def refuse(tree: Tree, key: str, reason: str) -> None:
        at = _at(tree, key)
        for _, leaf in leaves(at) if at is not None else ():
            if leaf not in inherited:
                raise AgentPeftError(_no_effect(leaf, reason))

    defaults, over = stage_keys(top), stage_keys(general)
    stages: list[Tree] = []
    without_effect: list[dict[str, str]] = []
    for place, (item, own) in enumerate(zip(items or [{}], specific, strict=True)):
        ineffective = _ineffective(override(_onto(defaults, item), _onto(over, own)))
        without_effect.append(ineffective)
        for tree in (item, own) if items else ():
            for key, reason in ineffective.items():
                refuse(tree, key, f"stages.{place} {reason}")
        from_file = _onto(_without(defaults, ineffective), _without(item, ineffective) if items else item)
        used |= {id(leaf) for _, leaf in leaves(from_file)}
        stages.append(override(from_file, _onto(_without(over, ineffective), own)))
    for key, reason in without_effect[0].items():
        for tree in (defaults, over, *specific):
            if all(key in keys for keys in without_effect):
                refuse(tree, key, f"every stage {reason}")
    for _, leaf in leaves(defaults):
        if id(leaf) not in used and leaf not in inherited:
            raise AgentPeftError(_no_effect(leaf, "every stage sets its own"))
    return stages


def stage_keys(tree: Tree) -> Tree:
    """The keys at the top of a tree that belong to stages."""
    return {key: value for key, value in tree.items() if key in STAGE_KEYS}


def override_items(top: Tree, items: list[Tree], over: Tree) -> list[Tree]:
    """The items of ``stages`` with ``over`` on each of them, as far as it has an effect there.

    Args:
        top: the defaults of all stages.
    """
    defaults, over = stage_keys(top), stage_keys(over)
    ineffective = (_ineffective(override(_onto(defaults, item), over)) for item in items)
    return [override(item, _without(over, keys)) for item, keys in zip(items, ineffective, strict=True)]


def _onto(base: Tree, over: Tree) -> Tree:
    """As ``merge``, of the keys of one stage: ``steps`` and ``epochs`` replace each other."""
    return merge(_without_alternatives(base, over), over)


def _no_effect(leaf: Leaf, reason: str) -> str:
    return f"{leaf.origin}: {leaf.path} has no effect, because {reason}; remove it"


def _ineffective(stage: Tree) -> dict[str, str]:
    """The keys without an effect on a stage with this algorithm, each with the reason."""
    try:
        algorithm = _ALGORITHM.validate_json(json.dumps(plain(stage.get("algorithm", {}))), strict=True)
    except ValidationError:  # reported later, with its place
        return {}
    given = {"learn_from": plain(stage["learn_from"])} if "learn_from" in stage else {}
    return ineffective_keys(algorithm, **given)


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
