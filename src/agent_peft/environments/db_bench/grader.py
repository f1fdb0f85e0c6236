"""Is the answer right? Rows are compared as multisets; their order counts only where the gold SQL sorts them.

Two whole numbers are equal when they are; else numbers are equal within 1e-6 of each other, or, where the
gold has at most four decimals (MySQL's AVG keeps no more), within half a unit of the fourth. In an answer,
but not in a table, numbers are also right as observations show them (`database.rounded`), and ``'5'``,
``'$5'`` and ``5`` are equal.

The score of an answer or of a change says how near it comes: the Dice coefficient of two multisets of rows
(Dice, 1945), 2 Σ likeness / (n + m), where equal rows are alike by 1, and rows that are left over are paired,
the most alike first, by the share of their cells that are equal.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from agent_peft.environments.db_bench.database import Cell, Row, rounded
from agent_peft.environments.db_bench.literals import amount, read_literal

_MAX_ANSWER = 100_000  # characters: no gold is near it
_MAX_PAIRS = 10_000  # of rows whose cells are compared; of more, only equal rows count


def answer_is_correct(text: str, gold: Sequence[Row], order: tuple[int, ...] | None) -> bool:
    """Grade a final answer.

    Args:
        text: what the agent wrote after ``Final Answer:``. Tuples or lists, in Python or JSON; one row or one
            column may be flat and one value bare. Nothing written is never right, not even for an empty
            result: that is ``[]``.
        gold: the rows it should show.
        order: the columns by which they are sorted (`syntax.order_keys`), or None.
    """
    text = text.strip().strip("`").strip()
    if not text or len(text) > _MAX_ANSWER:
        return False
    exact = [_loose(row) for row in gold]
    shown = [tuple(map(rounded, row)) for row in exact]
    return any(
        _same(expected, [_loose(row) for row in rows], order)
        for rows in _readings(text, gold)
        for expected in ([exact] if shown == exact else [exact, shown])
    )


def answer_score(text: str, gold: Sequence[Row]) -> float:
    """How near an answer comes to the rows of the gold, from 0 to 1. Their order does not count.

    >>> answer_score("[(1, 'a')]", [(1, "a"), (2, "b")])
    0.6666666666666666
    """
    text = text.strip().strip("`").strip()
    if not text or len(text) > _MAX_ANSWER:
        return 0.0
    exact = [_loose(row) for row in gold]
    readings = [[_loose(row) for row in rows] for rows in _readings(text, gold)]
    return max((_nearness(exact, rows) for rows in readings), default=0.0)


def change_score(before: Sequence[Row], actual: Sequence[Row], gold: Sequence[Row]) -> float:
    """How near a change comes to the gold's, from 0 to 1. Both are compared as the rows that they take out of
    the table and the rows that they put in; no change at all is 0.

    >>> change_score([(1, "a")], [(1, "a"), (2, "x")], [(1, "a"), (2, "b")])
    0.5
    """
    old, new, right = (Counter(_typed(tuple(row)) for row in rows) for rows in (before, actual, gold))
    taken, put = _untyped(old - new), _untyped(new - old)
    to_take, to_put = _untyped(old - right), _untyped(right - old)
    edits, right_edits = len(taken) + len(put), len(to_take) + len(to_put)
    if not edits or not right_edits:
        return float(edits == right_edits)
    # a row is taken out or it is not: one that is only like it was not meant
    alike = sum((Counter(map(_typed, taken)) & Counter(map(_typed, to_take))).values())
    return 2 * (alike + _likeness(to_put, put)) / (edits + right_edits)


def tables_are_equal(actual: Sequence[Row] | None, expected: Sequence[Row] | None) -> bool:
    """Whether two tables hold the same rows, in any order; a table that is gone (None) equals nothing."""
    return (
        actual is not None
        and expected is not None
        and _same([tuple(row) for row in expected], [tuple(row) for row in actual], None)
    )


def _readings(text: str, gold: Sequence[Row]) -> list[list[Row]]:
    """All the row lists the text may mean, given the shape of the gold."""
    readings = []
    for thousands in (False, True):
        try:
            value = read_literal(text, thousands=thousands)
        except ValueError:
            continue
        readings += _as_rows(value, gold)
    if len(gold) == 1 and len(gold[0]) == 1:
        readings.append([(text,)])
    return readings


def _as_rows(value: Any, gold: Sequence[Row]) -> list[list[Row]]:
    one_row, one_column = len(gold) == 1, bool(gold) and len(gold[0]) == 1
    if not isinstance(value, list):
        return [[(value,)]] if one_row and one_column else []
    if all(isinstance(row, list) for row in value):
        rows = [tuple(row) for row in value]
        return [rows] if not any(isinstance(cell, list) for row in rows for cell in row) else []
    if any(isinstance(cell, list) for cell in value):
        return []
    return ([[tuple(value)]] if one_row else []) + ([[(cell,) for cell in value]] if one_column else [])


def _same(gold: list[Row], answered: list[Row], order: tuple[int, ...] | None) -> bool:
    if len(gold) != len(answered) or {len(row) for row in gold} != {len(row) for row in answered}:
        return False
    if order is not None and not all(
        _equal(a[key], b[key]) for a, b in zip(gold, answered, strict=True) for key in order
    ):
        return False
    # rows that are equal to the letter first; those left over differ, if at all, by less than rounding can
    # tell
    missing, surplus = Counter(map(_typed, gold)), Counter(map(_typed, answered))
    left, right = list((missing - surplus).elements()), list((surplus - missing).elements())
    left, right = sorted(left, key=_sort_key), sorted(right, key=_sort_key)
    return all(
        _equal(a, b) for x, y in zip(left, right, strict=True) for (_, a), (_, b) in zip(x, y, strict=True)
    )


def _nearness(gold: list[Row], answered: list[Row]) -> float:
    if not gold or not answered:
        return float(len(gold) == len(answered))
    return 2 * _likeness(gold, answered) / (len(gold) + len(answered))


def _likeness(gold: Sequence[Row], rows: Sequence[Row]) -> float:
    """The sum over pairs of rows of the share of their cells that are equal. No row is in two pairs."""
    wanted, offered = Counter(map(_typed, gold)), Counter(map(_typed, rows))
    equal = sum((wanted & offered).values())
    left, right = _untyped(wanted - offered), _untyped(offered - wanted)
    if len(left) * len(right) > _MAX_PAIRS:
        return float(equal)
    pairs = sorted(
        ((_equal_cells(one, other), i, j) for i, one in enumerate(left) for j, other in enumerate(right)),
        key=lambda pair: (-pair[0], pair[1:]),
    )
    total, lefts, rights = float(equal), set[int](), set[int]()
    for share, i, j in pairs:
        if i not in lefts and j not in rights:
            total += share
            lefts.add(i)
            rights.add(j)
    return total


def _equal_cells(gold: Row, row: Row) -> float:
    equal = sum(_equal(a, b) for a, b in zip(gold, row, strict=False))
    return equal / max(len(gold), len(row), 1)


def _untyped(rows: Counter[tuple[tuple[bool, Cell], ...]]) -> list[Row]:
    return [tuple(cell for _, cell in row) for row in rows.elements()]


def _loose(row: Row) -> Row:
    """A row of an answer: texts that show a number become that number."""
    return tuple(_number_or_text(cell) if isinstance(cell, str) else cell for cell in row)


def _number_or_text(cell: str) -> Cell:
    number = amount(cell)
    return cell.strip() if number is None else number


def _is_number(cell: Cell) -> bool:
    return isinstance(cell, int | float)


def _typed(row: Row) -> tuple[tuple[bool, Cell], ...]:
    return tuple((_is_number(cell), cell) for cell in row)


def _sort_key(row: tuple[tuple[bool, Cell], ...]) -> tuple[tuple[str, Any], ...]:
    """Texts to the letter, numbers to four digits, so that a rounding error does not change the order."""
    return tuple(
        ("number", float(f"{_as_float(cell):.4g}"))
        if number
        else (type(cell).__name__, "" if cell is None else cell)
        for number, cell in row
    )


def _as_float(cell: Any) -> float:
    try:
        return float(cell)
    except OverflowError:
        return math.inf if cell > 0 else -math.inf


def _equal(gold: Cell, answered: Cell) -> bool:
    if not (isinstance(gold, int | float) and isinstance(answered, int | float)):
        return type(gold) is type(answered) and gold == answered
    if isinstance(gold, int) and isinstance(answered, int):
        return gold == answered
    a, b = _as_float(gold), _as_float(answered)
    if math.isclose(a, b, rel_tol=1e-6):
        return True
    return (
        math.isfinite(a)
        and math.isfinite(b)
        and math.isclose(a, round(a, 4), rel_tol=1e-12)
        and abs(a - b) <= 5.0001e-5
    )
