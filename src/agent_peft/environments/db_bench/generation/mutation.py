"""Does every part of a statement matter? Each clause, comparator and direction is changed in turn; a
statement whose answer survives a change would teach nothing about it, and would reward an agent that
overlooks it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from agent_peft.environments.db_bench.database import Row
from agent_peft.environments.db_bench.generation.plan import (
    Aggregate,
    Among,
    Between,
    Calculation,
    Delete,
    Derived,
    Expression,
    Insert,
    Junction,
    Node,
    Operator,
    Projection,
    Relation,
    Scalar,
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


_PARTS = (
    *(Aggregate, Among, Calculation, Between, Relation, Delete, Derived),
    *(Insert, Junction, Projection, Scalar, Select, Sort, Update),
)


_FIELDS = {kind: tuple(field.name for field in dataclasses.fields(kind)) for kind in _PARTS}


def mutants(node: Any) -> Iterator[Any]:
    """The node with one part changed, each part in turn, the innermost first, which most often turn out to be
    idle. None: the part is left out.

    >>> from agent_peft.environments.db_bench.generation.plan import sql
    >>> [sql(mutant) for mutant in mutants(Between(Aggregate("COUNT"), 2, 5))]
    ['COUNT(*) >= 2', 'COUNT(*) <= 5']
    """
    for name in _FIELDS.get(type(node), ()):
        value = getattr(node, name)
        if isinstance(value, tuple):
            for i, part in enumerate(value):
                if isinstance(part, _PARTS):
                    for changed in mutants(part):
                        kept = () if changed is None else (changed,)
                        yield dataclasses.replace(node, **{name: (*value[:i], *kept, *value[i + 1 :])})
        elif isinstance(value, _PARTS):
            for changed in mutants(value):
                if changed is not None:
                    yield dataclasses.replace(node, **{name: changed})
    yield from _changes(node)


def _changes(node: Node) -> Iterator[Any]:
    """The changes of a part itself, not of the parts inside it."""
    change = dataclasses.replace
    if isinstance(node, Select | Update | Delete):
        match node.where:
            case Relation(_, operator, str() | int()) if operator in _BOUNDARY:  # it stands alone
                yield change(node, where=change(node.where, operator=_BOUNDARY[operator]))
    match node:
        case Relation(_, operator) if operator in _OPPOSITE:
            yield change(node, operator=_OPPOSITE[operator])
        case Between(left, low, high):
            yield Relation(left, ">=", low)
            yield Relation(left, "<=", high)
        case Among(_, values) if isinstance(values, tuple):
            for i in range(len(values)):
                yield change(node, values=(*values[:i], *values[i + 1 :]))
        case Junction(connector, parts):
            for i in range(len(parts)):
                others = (*parts[:i], *parts[i + 1 :])
                yield others[0] if len(others) == 1 else change(node, parts=others)
            yield change(node, connector="OR" if connector == "AND" else "AND")
        case Aggregate(function) if function in _OTHER_FUNCTION:
            yield change(node, function=_OTHER_FUNCTION[function])
        case Calculation(sign):
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


def with_plan_ties_broken(node: Any, columns: Sequence[Column], descending: bool) -> Any:
    """The statement with further sort keys after its own wherever it sorts, so that rows which tie come in
    one order, or, with ``descending``, in the other.
    """
    changed = {}
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, Column):
            changed[field.name] = with_plan_ties_broken(value, columns, descending)
        elif isinstance(value, tuple):
            changed[field.name] = tuple(
                with_plan_ties_broken(part, columns, descending)
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


Run = Callable[[Statement], tuple[Row, ...] | None]  # what a statement answers; None: it fails


def every_part_matters(statement: Statement, answer: object, run: Run) -> bool:
    """Whether each change gives another answer than ``answer``. A change that cannot run matters, too."""
    return all(run(mutant) != answer for mutant in mutants(statement))


def is_determined(statement: Statement, columns: Sequence[Column], run: Run) -> bool:
    """Whether no tie leaves the answer open."""
    ascending = with_plan_ties_broken(statement, columns, False)
    if ascending == statement:
        return True
    descending = with_plan_ties_broken(statement, columns, True)
    if run(ascending) != run(descending):
        return False
    # of three rows that tie, the middle one is the same in both orders: so the skipped ones must be, too
    return not isinstance(statement, Select) or _skipped(ascending, run) == _skipped(descending, run)


def _skipped(query: Select, run: Run) -> list[Row]:
    """The rows before the offset, in no order."""
    if not query.offset:
        return []
    return sorted(run(dataclasses.replace(query, limit=query.offset, offset=None)) or (), key=repr)
