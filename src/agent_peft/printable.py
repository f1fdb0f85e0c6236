"""Text of strangers on a terminal: what would move the cursor, recolour, reorder or forge lines is shown
as an escape.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment


def printable(text: object, limit: int | None = None) -> str:
    r"""One line of a text, of at most ``limit`` characters. A backslash escape stands for each character that
    has no shape.

    >>> print(printable("a\x1b[31m\nb\u202ec é"))
    a\x1b[31m\nb\u202ec é
    >>> printable("abcdef", limit=5)
    'ab...'
    """
    whole = str(text)
    if limit is not None and len(whole) > limit:
        whole = whole[: limit - 3] + "..."
    if whole.isprintable():
        return whole
    return "".join(
        c if c.isprintable() or unicodedata.category(c) == "Zs" else c.encode("unicode_escape").decode()
        for c in whole
    )


def cause_of(error: BaseException) -> str:
    """An error's message in one line, for another message."""
    return " ".join(str(error).split())[:200] or type(error).__name__


class Printable:
    """A table, or anything else that rich can draw, with the characters of its texts as ``printable``
    shows them.
    """

    def __init__(self, drawn: RenderableType) -> None:
        self._drawn = drawn

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for segment in console.render(self._drawn, options):
            lines = segment.text.split("\n")
            yield segment if segment.control else Segment("\n".join(map(printable, lines)), segment.style)
