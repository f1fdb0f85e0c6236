"""The operations, each with its symbol, its result, and its worked form.

In a worked form every number stands backwards, its last digit first, in the order of the carries. It is
padded with zeros to a width that depends only on the digits of the operands. So each character follows from a
few others at fixed distances before it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from agent_peft.lookup import find
from agent_peft.types import AgentPeftError


@dataclass(frozen=True)
class Operation:
    """Something to be done with two numbers.

    ``worked(a, b, digits)`` is what is written between the question and the last ``=``, for operands of
    ``digits`` digits.

    >>> OPERATIONS["multiplication"].compute(12, 34), OPERATIONS["multiplication"].worked(12, 34, 2)
    (408, '840+0630')
    """

    symbol: str
    compute: Callable[[int, int], int]
    worked: Callable[[int, int, int], str] | None = None

    def __post_init__(self) -> None:
        if not self.symbol or any(
            character.isdigit() or character.isspace() or character in "=$" for character in self.symbol
        ):
            raise AgentPeftError(
                f"an operation's symbol stands between two numbers, and {self.symbol!r} cannot; choose one "
                "such as '-'"
            )


def backwards(number: int, width: int = 0) -> str:
    """The digits from the last to the first, filled up with zeros (which are the number's leading ones). A
    minus sign comes last.

    >>> backwards(12, 4), backwards(-12)
    ('2100', '21-')
    """
    return str(number)[::-1].ljust(width, "0")


def columns(a: int, b: int, digits: int) -> str:
    """Column by column, the last first: the digit that is written, and the carry.

    >>> columns(345, 678, 3)  # 5+8 = 13, 4+7+1 = 12, 3+6+1 = 10
    '312101'
    """
    text, carry = "", 0
    for place in range(digits):
        column = a // 10**place % 10 + b // 10**place % 10 + carry
        carry = column // 10
        text += f"{column % 10}{carry}"
    return text


def partial_products(a: int, b: int, digits: int) -> str:
    """Multiply ``a`` by each digit of ``b``, from the last to the first, and add up the products one after
    the other. Every sum has two numbers, except the last.

    >>> partial_products(12, 34, 2)  # 48 + 360
    '840+0630'
    >>> partial_products(123, 456, 3)  # 738 + 6150 = 6888, 6888 + 49200
    '8370+05160=88860+002940'
    """
    text, total = "", 0
    for place in range(digits):
        part = a * (b // 10**place % 10) * 10**place
        if place > 1:
            text += "=" + backwards(total, digits + place)
        text += "+" * (place > 0) + backwards(part, digits + 1 + place)
        total += part
    return text


OPERATIONS = {
    "addition": Operation("+", lambda a, b: a + b, columns),
    "multiplication": Operation("*", lambda a, b: a * b, partial_products),
}


def find_operation(name: str) -> Operation:
    """A row of ``OPERATIONS``, or the ``Operation`` that ``package.module:NAME`` names; else ValueError."""
    if ":" not in name:
        if name not in OPERATIONS:
            raise ValueError(
                f"there is no operation {name!r}; give {', '.join(OPERATIONS)}, or your own as "
                "package.module:NAME"
            )
        return OPERATIONS[name]
    operation = find(name, "package.module:NAME")
    if not isinstance(operation, Operation):
        raise ValueError(
            f"{name!r} is a {type(operation).__name__}, not an agent_peft.environments.arithmetic.Operation; "
            "name one"
        )
    return operation
