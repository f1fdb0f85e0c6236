"""The form of the agent's replies: ``Action: Operation`` and one block of SQL, or ``Action: Answer`` and
``Final Answer: …``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_ACTION = re.compile(r"\baction\s*+:[\s*`]*+(operation|answer)\b", re.IGNORECASE)
_FINAL_ANSWER = re.compile(r"\bfinal\s++answer\s*+:", re.IGNORECASE)
_LANGUAGE = re.compile(r"(?:sqlite3?|sql|mysql|mariadb|postgresql|postgres)(?=\s|$)", re.IGNORECASE)

OPERATION_FORMAT = "Action: Operation\n```sql\n<one SQL statement>\n```"
ANSWER_FORMAT = "Action: Answer\nFinal Answer: <rows>"


@dataclass(frozen=True)
class Operation:
    """The agent wants to run ``sql``.

    >>> Operation("SELECT 1").sql
    'SELECT 1'
    """

    sql: str


@dataclass(frozen=True)
class Answer:
    """The agent is done, and says ``text`` (never blank).

    >>> Answer("[(1,)]").text
    '[(1,)]'
    """

    text: str


@dataclass(frozen=True)
class MalformedReply:
    """The reply could not be understood; ``why`` tells the agent what to write.

    >>> MalformedReply("Write one action.").why
    'Write one action.'
    """

    why: str


def parse_reply(reply: str) -> Operation | Answer | MalformedReply:
    """Understand a reply. Case, white space, text around the action and the block's language tag do not
    matter.

    Takes time linear in the reply, and never raises.

    >>> parse_reply("Action: Operation\\n```sql\\nSELECT 1;\\n```")
    Operation(sql='SELECT 1;')
    >>> parse_reply("action: answer\\nfinal answer: 42")
    Answer(text='42')
    """
    first = _ACTION.search(reply)
    if first is None:
        return MalformedReply(f"No action found. Write either\n{OPERATION_FORMAT}\nor\n{ANSWER_FORMAT}")
    return _parse_answer(reply, first.end()) if first[1].lower() == "answer" else _parse_operation(reply)


def operation(sql: str) -> str:
    """The reply that runs ``sql``."""
    return OPERATION_FORMAT.replace("<one SQL statement>", sql.strip())


def answer(rows: Sequence[Sequence[object]] | str) -> str:
    """The reply that finishes with ``rows`` (written as a list of tuples), or with a text.

    >>> answer([[1, "a"]])
    "Action: Answer\\nFinal Answer: [(1, 'a')]"
    """
    return ANSWER_FORMAT.replace(
        "<rows>", rows if isinstance(rows, str) else repr([tuple(row) for row in rows])
    )


def _parse_operation(reply: str) -> Operation | MalformedReply:
    parts = reply.split("```")
    outside = "\n".join(parts[::2])
    if any(match[1].lower() == "answer" for match in _ACTION.finditer(outside)):
        return MalformedReply(
            "Two actions found. Write one action, wait for its result, then write the other."
        )
    if len(parts) < 3:
        why = "The ```sql block is not closed." if len(parts) == 2 else "No SQL block found."
        return MalformedReply(f"{why} Write\n{OPERATION_FORMAT}")
    if len(parts) > 3:
        return MalformedReply("More than one block found. Write one SQL statement in one ```sql block.")
    sql = parts[1].strip()
    if language := _LANGUAGE.match(sql):
        sql = sql[language.end() :].strip()
    return Operation(sql) if sql else MalformedReply(f"The SQL block is empty. Write\n{OPERATION_FORMAT}")


def _parse_answer(reply: str, position: int) -> Answer | MalformedReply:
    marker = _FINAL_ANSWER.search(reply, position)
    other = _ACTION.search(reply, position, marker.start() if marker else len(reply))
    if other is not None and other[1].lower() == "operation":
        return MalformedReply(
            "Two actions found. Write one action, wait for its result, then write the other."
        )
    if marker is None:
        return MalformedReply(f"No final answer found. Write\n{ANSWER_FORMAT}")
    text = reply[marker.end() :].strip()
    follow = re.search(r"^[ \t]*+action[ \t]*+:", text, re.IGNORECASE | re.MULTILINE)
    if follow is not None:
        return MalformedReply(
            "Two actions found. Write one action, wait for its result, then write the other."
        )
    return (
        Answer(text)
        if text.strip("`* \t\n")
        else MalformedReply(f"The final answer is empty. Write\n{ANSWER_FORMAT}")
    )
