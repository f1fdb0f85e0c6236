"""YAML 1.2 (core schema) with the line of each value.

It differs from PyYAML's 1.1: ``1e-5`` is a number; ``yes``, ``no``, ``on`` and ``off`` are texts, not truth
values; ``010`` is ten; dates and ``1:30`` are texts; a repeated key is an error. A document may come from a
stranger, so its size is bounded, also after aliases are expanded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import yaml
from yaml.composer import Composer
from yaml.resolver import Resolver

from agent_peft.types import AgentPeftError

MAX_CHARACTERS = 1 << 18  # of a document
MAX_DEPTH = 50  # mappings and lists inside each other
MAX_VALUES = 50_000  # aliases expanded

Scalar = str | int | float | bool | None
Node: TypeAlias = "Leaf | dict[str, Node] | list[Node]"
Tree: TypeAlias = "dict[str, Node]"


@dataclass(frozen=True, eq=False)
class Leaf:
    """A scalar, its origin and its key path there. Two leaves are equal only if they are the same object.

    >>> parse("a: {b: 1e-5}", "x.yaml")["a"]["b"]
    Leaf(value=1e-05, origin='x.yaml:1', path='a.b')
    """

    value: Scalar
    origin: str
    path: str


def parse(text: str, source: str, path: tuple[str, ...] = (), *, lines: bool = True) -> Node:
    """Parse a document. It is refused if it is no YAML, repeats a key, has a tag or exceeds the bounds above.

    Args:
        source: the name of the document, for origins: ``source:line``.
        path: the key path of the whole document.
        lines: False leaves the line out of origins, for a document of one line.
    """
    place = f"{source}: {'.'.join(path)}" if path else source
    if len(text) > MAX_CHARACTERS:
        raise AgentPeftError(f"{place}: has {len(text):,} characters; {MAX_CHARACTERS:,} is the most")
    try:
        root = _compose(text)
    except yaml.MarkedYAMLError as error:
        advice = next((advice for part, advice in _ADVICE.items() if part in str(error.problem)), "")
        line = f":{error.problem_mark.line + 1}" if lines and error.problem_mark else ""
        raise AgentPeftError(f"{place}{line}: is not YAML: {error.problem}{advice}") from error
    except yaml.reader.ReaderError as error:
        character = f"#x{int(error.character):04x}"
        raise AgentPeftError(f"{place}: is not text: it holds the character {character}") from error
    except Exception as error:  # of many kinds, such as OverflowError for an escape beyond Unicode
        raise AgentPeftError(f"{place}: is not YAML: {error}") from error
    return Leaf(None, source, ".".join(path)) if root is None else _Reader(source, lines).read(root, path)


def plain(node: Node) -> Any:
    """Return the values of a node, without their origins."""
    if isinstance(node, dict):
        return {key: plain(value) for key, value in node.items()}
    return [plain(value) for value in node] if isinstance(node, list) else node.value


def leaves(node: Node, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Leaf]]:
    """Yield every leaf with its key path in ``node``. Indices of lists count from 0."""
    if isinstance(node, Leaf):
        yield path, node
    else:
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from leaves(value, (*path, str(key)))


def dump(content: Any) -> str:
    """Return a text that ``parse`` reads back to equal values, in the same order."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _compose(text: str) -> yaml.Node | None:
    """Parse with libyaml, eight times as fast, what it reads as PyYAML does. PyYAML's messages are better."""
    if "---" not in text and _SIMPLE.fullmatch(text):
        with suppress(Exception):
            return yaml.compose(text, Loader=_FastLoader)
    return yaml.compose(text, Loader=_Loader)


class _Bounded(Composer, Resolver):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (PyYAML's own way of subclassing)
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self.depth += 1
        if self.depth > MAX_DEPTH + 1:  # the scalars in the deepest
            mark = self.peek_event().start_mark  # type: ignore[attr-defined]
            raise yaml.composer.ComposerError(None, None, f"nested more than {MAX_DEPTH} deep", mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


class _Loader(_Bounded, yaml.SafeLoader):
    pass


_FAST: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # a PyYAML may have been built without libyaml


class _FastLoader(_Bounded, _FAST):  # type: ignore[misc]
    def __init__(self, text: str) -> None:
        _FAST.__init__(self, text)


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        breaks = any(character in data for character in "\x85\u2028\u2029")  # ends of lines for PyYAML
        return self.represent_scalar(_TAG + "str", data, style='"' if breaks else None)


_Dumper.add_representer(str, _Dumper.represent_str)


def _integer(text: str) -> int:
    number = int(text, 0) if text[:2] in ("0o", "0x") else int(text)
    if abs(number) >> 256:
        raise ValueError(text)
    return number


_SIMPLE = re.compile(r"[^\0-\t\v-\x1f!%&*>?|\x7f-\U0010ffff]*")  # where libyaml and PyYAML agree
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_BACKSLASH = "; a backslash in double quotes begins an escape: write a path in single quotes, or with /"
_ADVICE = {"'\\t'": "; indent with spaces, not with tabs", "escape": _BACKSLASH}  # part of PyYAML's message
_TAG = "tag:yaml.org,2002:"
_FLOAT = r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
# https://yaml.org/spec/1.2.2/#1032-tag-resolution, and the merge key: the form of a scalar, the characters
# that it begins with, and its value
_SCALARS: dict[str, tuple[str, str, Callable[[str], Scalar]]] = {
    "null": (r"~|null|Null|NULL|", "~nN", lambda text: None),
    "bool": ("true|True|TRUE|false|False|FALSE", "tTfF", lambda t: {"true": True, "false": False}[t.lower()]),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789", _integer),
    "float": (_FLOAT, "-+.0123456789", lambda text: float(re.sub(r"\.(?=[iInN])", "", text))),
    "merge": (r"<<", "<", str),
}
for _name, (_form, _first, _) in _SCALARS.items():
    for _class in (_Bounded, _Dumper):
        _begins = [*_first, ""] if _name == "null" else list(_first)
        _class.add_implicit_resolver(_TAG + _name, re.compile(f"^(?:{_form})$"), _begins)


class _Reader:
    def __init__(self, source: str, lines: bool) -> None:
        self._source, self._lines, self._values = source, lines, 0

    def read(self, node: yaml.Node, path: tuple[str, ...]) -> Node:
        self._values += 1
        if self._values > MAX_VALUES or len(path) > MAX_DEPTH:
            bounds = f"{MAX_VALUES:,} values and {MAX_DEPTH} levels are the most, aliases expanded"
            raise self._wrong(node, f"is too much: {bounds}", path)
        if isinstance(node, yaml.ScalarNode):
            return Leaf(self._scalar(node, path), self._origin(node), ".".join(path))
        if node.tag not in (_TAG + "map", _TAG + "seq"):
            raise self._wrong(node, f"has the tag {node.tag}; write the value itself", path)
        if isinstance(node, yaml.SequenceNode):
            return [self.read(child, (*path, str(place))) for place, child in enumerate(node.value)]
        own: Tree = {}
        merged: Tree = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise self._wrong(key_node, "has a key that is not a text", path)
            key = self._text(key_node, path)
            value = self.read(value_node, (*path, key))
            if key_node.tag == _TAG + "merge":
                for mapping in value if isinstance(value, list) else [value]:
                    if not isinstance(mapping, dict):
                        raise self._wrong(key_node, "has a << that is not a mapping", path)
                    for name, inherited in mapping.items():
                        merged.setdefault(name, inherited)
            elif key in own:
                raise self._wrong(key_node, "is set twice; keep one", (*path, key))
            else:
                own[key] = value
        return {**merged, **own}

    def _scalar(self, node: yaml.ScalarNode, path: tuple[str, ...]) -> Scalar:
        name = node.tag.removeprefix(_TAG)
        if name not in (*_SCALARS, "str"):
            raise self._wrong(node, f"has the tag {node.tag}; write the value itself", path)
        text = self._text(node, path)
        try:
            return text if name == "str" else _SCALARS[name][2](text)
        except (ValueError, KeyError) as error:
            short = text if len(text) <= 40 else f"{text[:37]}..."
            fault = f"has a tag that {short!r} does not fit, or is a number beyond 256 bits"
            raise self._wrong(node, fault, path) from error

    def _text(self, node: yaml.ScalarNode, path: tuple[str, ...]) -> str:
        if _SURROGATE.search(node.value):
            raise self._wrong(node, "holds half of a character, a lone surrogate", path)
        return str(node.value)

    def _origin(self, node: yaml.Node) -> str:
        return f"{self._source}:{node.start_mark.line + 1}" if self._lines else self._source

    def _wrong(self, node: yaml.Node, message: str, path: tuple[str, ...]) -> AgentPeftError:
        return AgentPeftError(f"{self._origin(node)}: {'.'.join(path) or 'the document'} {message}")
