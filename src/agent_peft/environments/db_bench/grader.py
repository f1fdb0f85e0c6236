"""Is the answer right? Rows are compared as multisets; their order counts only where the gold SQL sorts them.

Two whole numbers are equal when they are; else numbers are equal within 1e-6 of each other, or, where the
gold has at most four decimals (MySQL's AVG keeps no more), within half a unit of the fourth. In an answer,
but not in a table, numbers are also right as observations show them (`rounded`), and ``'5'``,
``'$5'`` and ``5`` are equal.

The score of an answer or of a change is its nearness to the gold: the Dice coefficient of two multisets of
rows (Dice, 1945), 2 Σ likeness / (n + m), where equal rows are alike by 1, and rows that are left over are
paired, the most alike first, by the share of their cells that are equal.
"""

from __future__ import annotations

import math
import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Sequence
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

from agent_peft.environments.db_bench.database import Cell, Row

_MAX_ANSWER = 100_000  # characters: no gold is near it
_MAX_PAIRS = 10_000  # of rows whose cells are compared; of more, only equal rows count
_TOLERANCE = 1e-2  # of two numbers of AgentBench
# what AgentBench takes for 0, but for the empty text: who writes nothing is never right
_ZEROS = frozenset(["none", "null", "undefined", "nan", "inf", "infinity", "-inf", "-infinity"])
_MAX_DEPTH = 8
_MAX_DIGITS = 400  # a double has at most 309 before the point
_BLANK = re.compile(r"\s*")
_TOKEN = re.compile(
    r"""(?P<open>[\[(])|(?P<close>[\])])|(?P<comma>,)
    |(?P<string>'(?:[^'\\]|\\.|'')*+'|"(?:[^"\\]|\\.|"")*+")
    |(?P<word>(?:null|none|true|false|[-+]?inf(?:inity)?)\b)
    |(?P<number>(?:[-+]?\$?|\$[-+])(?:\d++(?:\.\d*+)?|\.\d++)(?:e[-+]?\d++)?(?![\w.]))""",
    re.VERBOSE | re.IGNORECASE | re.DOTALL,
)
_THOUSANDS = re.compile(r"(?:[-+]?\$?|\$[-+])\d{1,3}(?:,\d{3})++(?:\.\d++)?(?![\w.])")
_AMOUNT = re.compile(r"(?:[-+]?\$?|\$[-+])(?:(?:0|[1-9]\d*+|[1-9]\d{0,2}(?:,\d{3})++)(?:\.\d++)?|\.\d++)")
_ESCAPE = re.compile(r"\\(U[0-9a-fA-F]{8}|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_WORDS: dict[str, Cell] = {"null": None, "none": None, "true": 1, "false": 0}
_WORDS |= {f"{sign}{word}": float(f"{sign}inf") for sign in ("", "+", "-") for word in ("inf", "infinity")}
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}


def answer_is_correct(text: str, gold: Sequence[Row], order: tuple[int, ...] | None) -> bool:
    """Grade a final answer: tuples or lists, in Python or JSON; one row or one column may be flat and the
    values of one row bare. An empty text is never right, not even for an empty result: that is ``[]``.
    ``order``: the columns that sort the gold (`syntax.order_keys`), or None.
    """
    exact = [_loose(row) for row in gold]
    shown = [tuple(map(rounded_number, row)) for row in exact]
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


def answer_matches(text: str, labels: Sequence[str]) -> bool:
    """Grade an answer as AgentBench does: as a set of texts, where quotes around them, thousands commas and
    percent signs do not count, and numbers are equal within 0.01.

    >>> answer_matches("[('1,250',), ('b',)]", ["b", "1250"]), answer_matches("2.0", ["2"])
    (True, True)
    """
    text = text.strip().strip("`").strip()
    answered = [text] if text in labels else _values(text) if len(text) <= _MAX_ANSWER else []
    answers, truth = list(map(_agentbench_text, answered)), list(map(_agentbench_text, labels))
    if not answers or "" in answers:
        return False
    numbers, true_numbers = _all_numbers(answers), _all_numbers(truth)
    if numbers is None or true_numbers is None:
        return set(answers) == set(truth)
    if len(numbers) != len(true_numbers):
        return False
    pairs = zip(sorted(numbers), sorted(true_numbers), strict=True)
    return all(abs(a - b) <= _TOLERANCE for a, b in pairs)


def rounded_number(cell: Cell) -> Cell:
    """A number as it is shown: with four decimals, as MySQL's ``AVG`` has them, rounded half up. A number
    below 0.1 keeps all its digits, since four decimals would lose most of them.

    >>> rounded_number(41.65625), rounded_number(7), rounded_number(1 / 3), rounded_number(0.00012345)
    (41.6563, 7, 0.3333, 0.00012345)
    """
    if not isinstance(cell, float) or not 0.1 <= abs(cell) < 1e12:
        return cell
    return float(Decimal(repr(cell)).quantize(Decimal("0.0001"), ROUND_HALF_UP))


def _readings(text: str, gold: Sequence[Row]) -> list[list[Row]]:
    """All the row lists the text may mean, given the shape of the gold."""
    text, readings = text.strip().strip("`").strip(), []
    if not text or len(text) > _MAX_ANSWER:
        return []
    for thousands in (False, True):
        try:
            value = read_literal(text, thousands=thousands)
        except ValueError:
            continue
        readings += _as_rows(value, gold)
    if len(gold) == 1 and len(gold[0]) == 1:
        readings.append([(text,)])
    elif len(gold) == 1 and not readings:  # LifelongAgentBench's grader, too, reads a row of bare texts
        readings.append([tuple(text.strip("[]()").split(","))])
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
    # rows that are equal to the letter first; those left over differ by rounding errors, or are unequal
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
    return _composed(cell.strip()) if number is None else number


def _composed(text: str) -> str:
    """A letter is one character however it is composed: the tokenizers of some models compose it."""
    return unicodedata.normalize("NFC", text)


def _typed(row: Row) -> tuple[tuple[bool, Cell], ...]:
    return tuple((isinstance(cell, int | float), cell) for cell in row)


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


def _values(text: str) -> list[Cell]:
    """The values of an answer: those of a list, or of rows with one cell each; else the whole text is one."""
    if not text.startswith(("[", "(")):
        return [text]
    try:
        values = read_literal(text)
    except ValueError:  # the texts of a list may be bare
        return list(text[1:-1].split(",")) if text[0] == "[" and text[-1] == "]" else [text]
    cells = [value[0] if isinstance(value, list) and len(value) == 1 else value for value in values]
    return [] if any(isinstance(cell, list) for cell in cells) else cells


def _agentbench_text(cell: Cell) -> str:
    text = _composed(str(cell).strip())
    text = (text.strip("'\"") or text).removesuffix("%").strip().replace(",", "")
    return "0" if text.lower() in _ZEROS else text


def _all_numbers(texts: Sequence[str]) -> list[float] | None:
    try:
        return list(map(float, texts))
    except ValueError:
        return None


def read_literal(text: str, *, thousands: bool = False) -> Any:
    """The value that ``text`` writes in Python or JSON: a cell, or lists of values (tuples become lists too);
    ``thousands``: whether ``1,000`` between other values is one number. Linear in the text, without recursion
    or evaluation. Raises `ValueError`: the text is not such a value.

    >>> read_literal("[(1, 'a'), (2, null)]"), read_literal("5, 'O''Hara'")
    ([[1, 'a'], [2, None]], [5, "O'Hara"])
    >>> read_literal("[(1,000)]", thousands=True)
    [[1000]]
    """
    stack: list[list[Any]] = [[]]
    brackets: list[str] = []
    expects_value, comma, position = True, False, _skip_blank(text, 0)
    while position < len(text):
        match = (_THOUSANDS.match(text, position) if thousands else None) or _TOKEN.match(text, position)
        if match is None:
            raise ValueError(f"unexpected text at {position}")
        kind, token = match.lastgroup or "number", match[0]
        if kind == "comma":
            if expects_value:
                raise ValueError("a comma too many")
            expects_value = comma = True
        elif kind == "close":
            if not brackets or brackets.pop() + token not in ("[]", "()"):
                raise ValueError("brackets do not match")
            closed = stack.pop()
            stack[-1].append(closed)
            expects_value = comma = False
        elif not expects_value:
            raise ValueError("a comma is missing")
        elif kind == "open":
            if len(brackets) == _MAX_DEPTH:
                raise ValueError("brackets are nested too deeply")
            brackets.append(token)
            stack.append([])
        else:
            read = {"word": lambda word: _WORDS[word.lower()], "string": _string, "number": _number}[kind]
            stack[-1].append(read(token))
            expects_value = False
        position = _skip_blank(text, match.end())
    if brackets or not stack[0]:
        raise ValueError("a bracket is left open" if brackets else "nothing is written")
    top = stack[0]
    return top[0] if len(top) == 1 and not comma else top


def amount(text: str) -> int | float | None:
    """The number that a text shows (``'5'``, ``'$5'``, ``'1,000,000'``, ``'-2.50'``), or None. ``'007'`` is
    no number but a code.

    >>> amount("$1,000"), amount("2.50"), amount("007")
    (1000, 2.5, None)
    """
    text = text.strip()
    return _number(text) if len(text) < _MAX_DIGITS and _AMOUNT.fullmatch(text) else None


def _number(text: str) -> int | float:
    text = text.replace(",", "").replace("$", "")
    if len(text) > _MAX_DIGITS:
        raise ValueError("a number has too many digits")
    return int(text) if text.lstrip("+-").isdigit() else float(text)


def _skip_blank(text: str, position: int) -> int:
    match = _BLANK.match(text, position)
    return match.end() if match else position


def _string(token: str) -> str:
    quote, inner = token[0], token[1:-1]
    inner = inner.replace(quote * 2, quote)
    if "\\" not in inner:
        return inner
    # JSON may write one character as two surrogates
    return _ESCAPE.sub(_unescaped, inner).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _unescaped(match: re.Match[str]) -> str:
    code = match[1]
    if len(code) == 1:
        return _ESCAPED.get(code, code)
    number = int(code[1:], 16)
    if number > sys.maxunicode:
        raise ValueError(f"there is no character {code}")
    return chr(number)
