"""YAML 1.2 (core schema) that remembers where each value stood.

What differs from PyYAML's 1.1: ``1e-5`` is a number; ``yes``, ``no``, ``on`` and ``off`` are texts, not truth
values; ``010`` is ten; dates and ``1:30`` are texts; a key that stands twice is an error. A text may come
from anybody, so what it can grow to is bounded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import yaml

from agent_peft.types import AgentPeftError

LONGEST = 1 << 18  # characters of a document
DEEPEST = 50  # mappings and lists within each other
MOST_VALUES = 50_000  # aliases expanded
LARGEST = 1 << 256  # of a whole number

Scalar = str | int | float | bool | None
Node: TypeAlias = "Leaf | dict[str, Node] | list[Node]"


@dataclass(frozen=True, eq=False)
class Leaf:
    """A scalar, the place it was written at, and its key path there. Two leaves are the same only if they are
    one.

    >>> parse("a: {b: 1e-5}", "x.yaml")["a"]["b"]
    Leaf(value=1e-05, origin='x.yaml:1', path='a.b')
    """

    value: Scalar
    origin: str
    path: str


def parse(text: str, source: str, path: tuple[str, ...] = (), *, lines: bool = True) -> Node:
    """The document in ``text``. An origin is ``source:line``, or ``source`` where lines say nothing.

    Raises:
        AgentPeftError: not YAML, a key twice, a tag, a value that holds itself, or more than the bounds above
            allow.
    """
    if len(text) > LONGEST:
        raise AgentPeftError(f"{source}: has {len(text):,} characters; {LONGEST:,} is the most")
    try:
        root = yaml.compose(text, Loader=_Loader)
    except (yaml.MarkedYAMLError, yaml.reader.ReaderError) as error:
        raise AgentPeftError(_syntax(error, source, lines)) from error
    except (
        Exception
    ) as error:  # PyYAML raises of many kinds, such as OverflowError for an escape beyond Unicode
        raise AgentPeftError(f"{source}: is not YAML: {error}") from error
    return Leaf(None, source, ".".join(path)) if root is None else _Reading(source, lines).node(root, path)


def plain(node: Node) -> Any:
    """The values alone."""
    if isinstance(node, dict):
        return {key: plain(value) for key, value in node.items()}
    return [plain(value) for value in node] if isinstance(node, list) else node.value


def leaves(node: Node, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Leaf]]:
    """Every leaf with its key path in ``node``; places in a list count from 0."""
    if isinstance(node, Leaf):
        yield path, node
    else:
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from leaves(value, (*path, str(key)))


def dump(content: Any) -> str:
    """Mappings, lists and scalars as text that ``parse`` reads back to equal values, in the order given."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (PyYAML's own way of subclassing)
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self.depth += 1
        if self.depth > DEEPEST + 1:  # the scalars in the deepest
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, f"nested more than {DEEPEST} deep", mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        breaks = any(
            character in data for character in "\x85\u2028\u2029"
        )  # PyYAML would read them as ends of lines
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
    if abs(number) >= LARGEST:
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
    return f"{where}: is not YAML: {error.problem}"


class _Reading:
    def __init__(self, source: str, lines: bool) -> None:
        self._source = source
        self._lines = lines
        self._open: list[yaml.Node] = []  # what the present node stands in
        self._values = 0

    def node(self, node: yaml.Node, path: tuple[str, ...]) -> Node:
        if any(node is other for other in self._open):
            raise self._wrong(node, "is an alias of what it stands in", path)
        self._values += 1
        if self._values > MOST_VALUES or len(self._open) > DEEPEST:
            raise self._wrong(
                node,
                f"is too much: {MOST_VALUES:,} values and {DEEPEST} levels are the most, aliases expanded",
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
            shown = node.value if len(node.value) <= 40 else f"{node.value[:37]}..."
            raise self._wrong(
                node, f"has a tag that {shown!r} does not fit, or is a number beyond 256 bits", path
            ) from error

    def _check_text(self, node: yaml.ScalarNode, path: tuple[str, ...]) -> None:
        if _SURROGATE.search(node.value):
            raise self._wrong(node, "holds half of a character, a lone surrogate", path)

    def _origin(self, node: yaml.Node) -> str:
        return f"{self._source}:{node.start_mark.line + 1}" if self._lines else self._source

    def _wrong(self, node: yaml.Node, message: str, path: tuple[str, ...]) -> AgentPeftError:
        return AgentPeftError(f"{self._origin(node)}: {'.'.join(path) or 'the document'} {message}")
