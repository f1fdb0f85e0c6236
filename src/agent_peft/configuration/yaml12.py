"""YAML 1.2 (core schema) with the line of each value.

It differs from PyYAML's 1.1: ``1e-5`` is a number; ``yes``, ``no``, ``on`` and ``off`` are texts, not truth
values; ``010`` is ten; dates and ``1:30`` are texts; a key that stands twice is an error. A document may come
from a stranger, so its size is bounded, also after aliases are expanded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import yaml

from agent_peft.types import AgentPeftError

MAX_CHARACTERS = 1 << 18  # of a document
MAX_DEPTH = 50  # mappings and lists inside each other
MAX_VALUES = 50_000  # aliases expanded
MAX_INTEGER = 1 << 256  # in magnitude, exclusive

_BACKSLASH = "; a backslash in double quotes begins an escape: write a path in single quotes, or with /"
_ADVICE = {  # part of PyYAML's message -> what to do
    "'\\t'": "; indent with spaces, not with tabs",
    "escape": _BACKSLASH,
}

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
    """Parse the document in ``text``.

    Args:
        source: the name of the document, for origins: ``source:line``.
        path: the key path that the document stands at.
        lines: False leaves the line out of origins, for a document of one line.

    Raises:
        AgentPeftError: it is not YAML, a key stands twice, it has a tag, a value holds itself, or it exceeds
            the bounds above.
    """
    if len(text) > MAX_CHARACTERS:
        raise AgentPeftError(f"{source}: has {len(text):,} characters; {MAX_CHARACTERS:,} is the most")
    try:
        root = yaml.compose(text, Loader=_Loader)
    except (yaml.MarkedYAMLError, yaml.reader.ReaderError) as error:
        raise AgentPeftError(_syntax(error, source, lines)) from error
    except Exception as error:  # of many kinds, such as OverflowError for an escape beyond Unicode
        raise AgentPeftError(f"{source}: is not YAML: {error}") from error
    return Leaf(None, source, ".".join(path)) if root is None else _Reader(source, lines).node(root, path)


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


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (PyYAML's own way of subclassing)
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self.depth += 1
        if self.depth > MAX_DEPTH + 1:  # the scalars in the deepest
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, f"nested more than {MAX_DEPTH} deep", mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        breaks = any(character in data for character in "\x85\u2028\u2029")  # ends of lines for PyYAML
        return self.represent_scalar(_TAG + "str", data, style='"' if breaks else None)


_Dumper.add_representer(str, _Dumper.represent_str)


_SURROGATE = re.compile(r"[\ud800-\udfff]")
_TAG = "tag:yaml.org,2002:"
_RESOLVED = (  # https://yaml.org/spec/1.2.2/#1032-tag-resolution, and the merge key
    ("null", r"~|null|Null|NULL|", "~nN"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
    ("merge", r"<<", "<"),
)
for _name, _pattern, _first in _RESOLVED:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(
            _TAG + _name, re.compile(f"^(?:{_pattern})$"), [*_first, ""] if _name == "null" else list(_first)
        )


def _integer(text: str) -> int:
    number = int(text, 0) if text[:2] in ("0o", "0x") else int(text)
    if abs(number) >= MAX_INTEGER:
        raise ValueError(text)
    return number


def _float(text: str) -> float:
    return float(re.sub(r"\.(?=[iInN])", "", text))  # .inf and .nan


_SCALARS: dict[str, Callable[[str], Scalar]] = {
    "str": str,
    "merge": str,
    "null": lambda text: None,
    "bool": lambda text: {"true": True, "false": False}[text.lower()],
    "int": _integer,
    "float": _float,
}


def _syntax(error: yaml.MarkedYAMLError | yaml.reader.ReaderError, source: str, lines: bool) -> str:
    if isinstance(error, yaml.reader.ReaderError):
        return f"{source}: is not text: it holds the character #x{int(error.character):04x}"
    where = f"{source}:{error.problem_mark.line + 1}" if lines and error.problem_mark else source
    advice = next((advice for part, advice in _ADVICE.items() if part in str(error.problem)), "")
    return f"{where}: is not YAML: {error.problem}{advice}"


class _Reader:
    def __init__(self, source: str, lines: bool) -> None:
        self._source = source
        self._lines = lines
        self._open: list[yaml.Node] = []  # the nodes around the present one
        self._values = 0

    def node(self, node: yaml.Node, path: tuple[str, ...]) -> Node:
        if any(node is other for other in self._open):
            raise self._wrong(node, "is an alias of what it stands in", path)
        self._values += 1
        if self._values > MAX_VALUES or len(self._open) > MAX_DEPTH:
            raise self._wrong(
                node,
                f"is too much: {MAX_VALUES:,} values and {MAX_DEPTH} levels are the most, aliases expanded",
                path,
            )
        if isinstance(node, yaml.ScalarNode):
            return Leaf(self._scalar(node, path), self._origin(node), ".".join(path))
        if node.tag not in (_TAG + "map", _TAG + "seq"):
            raise self._wrong(node, f"has the tag {node.tag}; write the value itself", path)
        self._open.append(node)
        try:
            if isinstance(node, yaml.SequenceNode):
                return [self.node(child, (*path, str(place))) for place, child in enumerate(node.value)]
            return self._mapping(node, path)
        finally:
            self._open.pop()

    def _mapping(self, node: yaml.Node, path: tuple[str, ...]) -> dict[str, Node]:
        own: dict[str, Node] = {}
        merged: dict[str, Node] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise self._wrong(key_node, "has a key that is not a text", path)
            self._check_text(key_node, path)
            key = key_node.value
            value = self.node(value_node, (*path, key))
            if key_node.tag == _TAG + "merge":
                for mapping in value if isinstance(value, list) else [value]:
                    if not isinstance(mapping, dict):
                        raise self._wrong(key_node, "has a << that is not a mapping", path)
                    for name, inherited in mapping.items():
                        merged.setdefault(name, inherited)
            elif key in own:
                raise self._wrong(key_node, "stands twice; keep one", (*path, key))
            else:
                own[key] = value
        return {**merged, **own}

    def _scalar(self, node: yaml.ScalarNode, path: tuple[str, ...]) -> Scalar:
        convert = _SCALARS.get(node.tag.removeprefix(_TAG))
        if convert is None:
            raise self._wrong(node, f"has the tag {node.tag}; write the value itself", path)
        self._check_text(node, path)
        try:
            return convert(node.value)
        except (ValueError, KeyError) as error:
            text = node.value if len(node.value) <= 40 else f"{node.value[:37]}..."
            raise self._wrong(
                node, f"has a tag that {text!r} does not fit, or is a number beyond 256 bits", path
            ) from error

    def _check_text(self, node: yaml.ScalarNode, path: tuple[str, ...]) -> None:
        if _SURROGATE.search(node.value):
            raise self._wrong(node, "holds half of a character, a lone surrogate", path)

    def _origin(self, node: yaml.Node) -> str:
        return f"{self._source}:{node.start_mark.line + 1}" if self._lines else self._source

    def _wrong(self, node: yaml.Node, message: str, path: tuple[str, ...]) -> AgentPeftError:
        return AgentPeftError(f"{self._origin(node)}: {'.'.join(path) or 'the document'} {message}")
