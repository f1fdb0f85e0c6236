"""Does every part of a statement matter? Each clause, comparator and direction is changed in turn; a
statement whose answer survives a change would teach nothing about it, and would reward an agent that
overlooks it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from agent_peft.environments.db_bench.generation.plan import (
    Aggregate,
    Among,
    Arithmetic,
    Between,
    Comparison,
    Delete,
    Expression,
    Junction,
    Node,
    Operator,
    Reference,
    Select,
    Sort,
    Statement,
    Update,
)
from agent_peft.environments.db_bench.generation.schemas import Column

_OPPOSITE: dict[str, Operator] = {">": "<", "<": ">", ">=": "<=", "<=": ">=", "=": "<>", "<>": "="}
_BOUNDARY: dict[str, Operator] = {">": ">=", "<": "<=", ">=": ">", "<=": "<"}
_OTHER_FUNCTION = {"MAX": "MIN", "MIN": "MAX", "SUM": "AVG", "AVG": "SUM"}
_OTHER_SIGN = {"+": "-", "-": "+", "*": "+", "/": "*"}


def mutants(node: Any) -> Iterator[Any]:
    """The node with one part changed, each part in turn. None: the part is left out.

    >>> from agent_peft.environments.db_bench.generation.plan import sql
    >>> [sql(mutant) for mutant in mutants(Between(Aggregate("COUNT"), 2, 5))]
    ['COUNT(*) >= 2', 'COUNT(*) <= 5']
    """
    yield from _changes(node)
    if isinstance(node, Column | Reference | str | int | float):
        return
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        if isinstance(value, tuple):
            for i, part in enumerate(value):
                if dataclasses.is_dataclass(part) and not isinstance(part, Column):
                    for changed in mutants(part):
                        kept = () if changed is None else (changed,)
                        yield dataclasses.replace(node, **{field.name: (*value[:i], *kept, *value[i + 1 :])})
        elif dataclasses.is_dataclass(value) and not isinstance(value, Column):
            for changed in mutants(value):
                if changed is not None:
                    yield dataclasses.replace(node, **{field.name: changed})


def _changes(node: Node) -> Iterator[Any]:
    """The changes of a part itself, not of the parts inside it."""
    change = dataclasses.replace
    if isinstance(node, Select | Update | Delete):
        match node.where:
            case Comparison(_, operator, str() | int()) if operator in _BOUNDARY:  # it stands alone
                yield change(node, where=change(node.where, operator=_BOUNDARY[operator]))
    match node:
        case Comparison(_, operator) if operator in _OPPOSITE:
            yield change(node, operator=_OPPOSITE[operator])
        case Between(left, low, high):
            yield Comparison(left, ">=", low)
            yield Comparison(left, "<=", high)
        case Among(_, values) if isinstance(values, tuple):
            for i in range(len(values)):
                yield change(node, values=(*values[:i], *values[i + 1 :]))
        case Junction(connector, parts):
            yield change(node, connector="OR" if connector == "AND" else "AND")
            for i in range(len(parts)):
                others = (*parts[:i], *parts[i + 1 :])
                yield others[0] if len(others) == 1 else change(node, parts=others)
        case Aggregate(function) if function in _OTHER_FUNCTION:
            yield change(node, function=_OTHER_FUNCTION[function])
        case Arithmetic(sign):
            yield change(node, operator=_OTHER_SIGN[sign])
        case Sort():
            yield None
            yield change(node, descending=not node.descending)
        case Select():
            for name in ("where", "having", "limit", "offset"):
                if getattr(node, name) is not None:
                    yield change(node, **{name: None, **({"offset": None} if name == "limit" else {})})
            if len(node.groups) > 1:
                for i in range(len(node.groups)):
                    yield change(node, groups=(*node.groups[:i], *node.groups[i + 1 :]))
        case Update() | Delete():
            for name in ("where", "limit"):
                if getattr(node, name) is not None:
                    yield change(node, **{name: None})
            if isinstance(node, Update) and len(node.assignments) > 1:
                for i in range(len(node.assignments)):
                    yield change(node, assignments=(*node.assignments[:i], *node.assignments[i + 1 :]))


def with_ties_broken(node: Any, columns: Sequence[Column], descending: bool) -> Any:
    """The statement with further sort keys after its own wherever it sorts, so that rows which tie come in
    one order, or, with ``descending``, in the other.
    """
    changed = {}
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, Column):
            changed[field.name] = with_ties_broken(value, columns, descending)
        elif isinstance(value, tuple):
            changed[field.name] = tuple(
                with_ties_broken(part, columns, descending)
                if dataclasses.is_dataclass(part) and not isinstance(part, Column)
                else part
                for part in value
            )
    if isinstance(node, Select | Update | Delete) and node.order:
        keys: list[Expression] = [*columns]
        if isinstance(node, Select):
            plain = not node.groups and isinstance(node.source, str)
            keys = [*(output.expression for output in node.outputs), *(columns if plain else ())]
        changed["order"] = (*node.order, *(Sort(key, descending) for key in keys))
    return dataclasses.replace(node, **changed)


Run = Callable[[Statement], object]  # what a statement answers, to compare; None: it fails


def every_part_matters(statement: Statement, answer: object, run: Run) -> bool:
    """Whether each change gives another answer than ``answer``. A change that cannot run matters, too."""
    return all(run(mutant) != answer for mutant in mutants(statement))


def is_determined(statement: Statement, columns: Sequence[Column], run: Run) -> bool:
    """Whether no tie leaves the answer open."""
    broken = with_ties_broken(statement, columns, False)
    return broken == statement or run(broken) == run(with_ties_broken(statement, columns, True))
