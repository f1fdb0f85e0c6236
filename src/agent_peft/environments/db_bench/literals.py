"""Reading an answer's values: Python literals and JSON, with no evaluation, no recursion, and in time
linear in the text.
"""

from __future__ import annotations

import re
import sys
from typing import Any

from agent_peft.environments.db_bench.database import Cell

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


def read_literal(text: str, *, thousands: bool = False) -> Any:
    """The value that ``text`` writes: a cell, or lists of values (tuples become lists too).

    Args:
        thousands: whether ``1,000`` between other values is one number.

    Raises:
        ValueError: the text is not such a value.

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
            stack[-1].append(
                _WORDS[token.lower()]
                if kind == "word"
                else _string(token)
                if kind == "string"
                else to_number(token)
            )
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
    return to_number(text) if len(text) < _MAX_DIGITS and _AMOUNT.fullmatch(text) else None


def to_number(text: str) -> int | float:
    """A number as it is written, without its dollar sign and thousands commas.

    Raises:
        ValueError: it has too many digits.
    """
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
