"""Is the answer right? Rows are compared as multisets; their order counts only where the gold SQL sorts them.

Two whole numbers are equal when they are; else numbers are equal within 1e-6 of each other, or, where the
gold has at most four decimals (MySQL's AVG keeps no more), within half a unit of the fourth. In an answer,
but not in a table, numbers are also right as observations show them (`database.rounded`), and ``'5'``,
``'$5'`` and ``5`` are equal.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from agent_peft.environments.db_bench.database import Cell, Row, rounded
from agent_peft.environments.db_bench.literals import amount, read_literal

_MAX_ANSWER = 100_000  # characters: no gold is near it


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
