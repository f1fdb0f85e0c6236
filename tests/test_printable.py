"""No text of a stranger moves the cursor, recolours, reorders or forges a line."""

from __future__ import annotations

import io
import unicodedata

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agent_peft.printable import Printable, printable

HOSTILE = "\x1b]0;owned\x07\x1b[2J\r\x9b31m\u202egnp.exe\u2066\u2028\ud800\U000e0041\n"


def test_what_has_a_shape_stays_and_the_rest_is_escaped():
    assert printable("déjà vu — 日本\xa0語 😀") == "déjà vu — 日本\xa0語 😀"
    assert (
        printable(HOSTILE)
        == "\\x1b]0;owned\\x07\\x1b[2J\\r\\x9b31m\\u202egnp.exe\\u2066\\u2028\\ud800\\U000e0041\\n"
    )
    assert printable(7) == "7"
    assert len(printable("\x1b" * 1000, limit=100)) <= 400


@given(st.text(st.characters(exclude_categories=[])))
def test_no_control_or_format_character_is_left(text):
    shown = printable(text)
    assert not {unicodedata.category(character) for character in shown} & {"Cc", "Cf", "Cs", "Zl", "Zp"}
    shown.encode()  # it is text that any terminal can be sent


def test_a_table_of_hostile_cells():
    table = Table(title=HOSTILE)
    table.add_column(Text(HOSTILE))
    table.add_row(Text(HOSTILE))
    output = io.StringIO()
    Console(file=output, width=200, force_terminal=False).print(Printable(table))
    assert all(character.isprintable() for line in output.getvalue().split("\n") for character in line)
    assert "owned" in output.getvalue()
