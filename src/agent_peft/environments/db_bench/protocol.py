"""The form of the agent's replies: ``Action: Operation`` and one block of SQL, or ``Action: Answer`` and
``Final Answer: …``; or JSON calls of the tools ``execute_sql`` and ``commit_final_answer``, as AgentBench has
them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from agent_peft.environments.tool_calls import (
    TWO_ACTIONS,
    MalformedReply,
    declare,
    read_call,
    read_tool_call,
    write_call,
    write_tool_call,
)
from agent_peft.types import ToolCall

_ACTION = re.compile(r"\baction\s*+:[\s*`]*+(operation|answer)\b", re.IGNORECASE)
_FINAL_ANSWER = re.compile(r"(\*\*)?\bfinal\s++answer\s*+:(\*\*)?", re.IGNORECASE)  # it may be bold
_BLANK_LINE = re.compile(r"(\S)[ \t\r]*+\n\s*?\n")
_FENCED = re.compile(r"```\w*+\s(.*?)```", re.DOTALL)
_LANGUAGE = re.compile(r"(?:sqlite3?|sql|mysql|mariadb|postgresql|postgres)(?=\s|$)", re.IGNORECASE)

OPERATION_FORMAT = "Action: Operation\n```sql\n<one SQL statement>\n```"
ANSWER_FORMAT = "Action: Answer\nFinal Answer: <rows>"


@dataclass(frozen=True)
class SqlOperation:
    """The agent wants to run ``sql``.

    >>> SqlOperation("SELECT 1").sql
    'SELECT 1'
    """

    sql: str


@dataclass(frozen=True)
class FinalAnswer:
    """The agent is done, and answers ``text`` (never blank).

    >>> FinalAnswer("[(1,)]").text
    '[(1,)]'
    """

    text: str


Reply = SqlOperation | FinalAnswer


def parse_reply(reply: str) -> Reply:
    """Understand a reply of the ``action`` protocol. Case, white space, text around the action and the
    block's language tag do not matter; nor does bold type, or a block, of the answer, or what follows it
    after a blank line.

    Takes time linear in the reply. Raises `MalformedReply`.

    >>> parse_reply("Action: Operation\\n```sql\\nSELECT 1;\\n```")
    SqlOperation(sql='SELECT 1;')
    >>> parse_reply("action: answer\\nfinal answer: 42")
    FinalAnswer(text='42')
    """
    first = _ACTION.search(reply)
    if first is None:
        raise MalformedReply(f"No action found. Write either\n{OPERATION_FORMAT}\nor\n{ANSWER_FORMAT}")
    return _parse_answer(reply, first.end()) if first[1].lower() == "answer" else _parse_operation(reply)


def parse_tool_call(reply: str) -> Reply:
    """Understand a reply of the ``json_tool_calls`` protocol. An argument counts under any name if it is the
    only one. Raises `MalformedReply`.

    >>> parse_tool_call('{"name": "execute_sql", "arguments": {"query": "SELECT 1"}}')
    SqlOperation(sql='SELECT 1')
    >>> parse_tool_call('{"name": "commit_final_answer", "arguments": {"answers": [[1, "a"]]}}')
    FinalAnswer(text='[[1, "a"]]')
    """
    call = read_tool_call(reply, example=sql_call("<one SQL statement>"))
    return _parse_call(call, f"Write\n{sql_call('<one SQL statement>')}", f"Write\n{answer_call('<rows>')}")


def parse_native(reply: str) -> Reply:
    """Understand a call that the model has written in its own form. Raises `MalformedReply`."""
    return _parse_call(
        read_call(reply), "Call execute_sql with query.", "Call commit_final_answer with answers."
    )


def _parse_call(call: ToolCall, run: str, finish: str) -> Reply:
    """Understand one call. ``run`` and ``finish`` are how to call the tools."""
    if call.name == "execute_sql":
        query = _argument(call.arguments, "query")
        if not isinstance(query, str):
            raise MalformedReply(f"The query is missing. {run}")
        if not query.strip():
            raise MalformedReply("The query is empty.")
        return SqlOperation(query.strip())
    if call.name == "commit_final_answer":
        answers = _argument(call.arguments, "answers")
        if answers is None:
            raise MalformedReply(f"The answers are missing. {finish}")
        try:
            text = answers if isinstance(answers, str) else json.dumps(answers, ensure_ascii=False)
        except RecursionError:  # writing takes a little more of the stack than reading
            raise MalformedReply("The answers are nested too deeply.") from None
        if not text.strip():
            raise MalformedReply("The answers are empty.")
        return FinalAnswer(text)
    raise MalformedReply(f"There is no tool {call.name[:40]!r}; call execute_sql or commit_final_answer.")


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


def sql_call(sql: str, write: Callable[..., str] = write_tool_call) -> str:
    """The tool call that runs ``sql``."""
    return write("execute_sql", query=sql.strip())


def answer_call(rows: Sequence[Sequence[object]] | str, write: Callable[..., str] = write_tool_call) -> str:
    """The tool call that finishes with ``rows`` (each a list), or with a text.

    >>> answer_call([(1, "a")]).splitlines()[1]
    '{"name": "commit_final_answer", "arguments": {"answers": [[1, "a"]]}}'
    """
    answers = [rows] if isinstance(rows, str) else [list(row) for row in rows]
    return write("commit_final_answer", answers=answers)


def _argument(arguments: Mapping[str, Any], name: str) -> Any:
    return next(iter(arguments.values())) if len(arguments) == 1 else arguments.get(name)


def _parse_operation(reply: str) -> SqlOperation:
    parts = reply.split("```")
    outside = "\n".join(parts[::2])
    if any(match[1].lower() == "answer" for match in _ACTION.finditer(outside)):
        raise MalformedReply(TWO_ACTIONS)
    if len(parts) < 3:
        why = "The ```sql block is not closed." if len(parts) == 2 else "No SQL block found."
        raise MalformedReply(f"{why} Write\n{OPERATION_FORMAT}")
    if len(parts) > 3:
        raise MalformedReply("More than one block found. Write one SQL statement in one ```sql block.")
    sql = parts[1].strip()
    if language := _LANGUAGE.match(sql):
        sql = sql[language.end() :].strip()
    if not sql:
        raise MalformedReply(f"The SQL block is empty. Write\n{OPERATION_FORMAT}")
    return SqlOperation(sql)


def _parse_answer(reply: str, position: int) -> FinalAnswer:
    marker = _FINAL_ANSWER.search(reply, position)
    other = _ACTION.search(reply, position, marker.start() if marker else len(reply))
    if other is not None and other[1].lower() == "operation":
        raise MalformedReply(TWO_ACTIONS)
    if marker is None:
        raise MalformedReply(f"No final answer found. Write\n{ANSWER_FORMAT}")
    text = reply[marker.end() :].strip()
    follow = re.search(r"^[ \t]*+action[ \t]*+:", text, re.IGNORECASE | re.MULTILINE)
    if follow is not None:
        raise MalformedReply(TWO_ACTIONS)
    if fenced := _FENCED.match(text):
        text = fenced[1].strip()
    else:
        rows = text.startswith(("[", "("))  # these may hold blank lines
        ends = (blank.end(1) for blank in _BLANK_LINE.finditer(text) if not rows or blank[1] in ")]*`")
        text = text[: next(ends, None)]
        if marker[1] and not marker[2]:
            text = text.removesuffix("**")
    if not text.strip("`* \t\n"):
        raise MalformedReply(f"The final answer is empty. Write\n{ANSWER_FORMAT}")
    return FinalAnswer(text)


# Short on purpose: the agent reads one in every episode.
SYSTEM_PROMPT = """\
You work on one SQLite table. Reply in one of two ways.
To run one SQL statement and see its result:
Action: Operation
```sql
SELECT a FROM t;
```
To finish:
Action: Answer
Final Answer: [(1, 'x'), (2, 'y')]
The final answer holds the rows asked for, as a list of tuples; after a change write done.
You have {max_turns} turns, the answer included."""
_JSON_PROMPT = f"""\
You work on one SQLite table. Each reply is one tool call.
To run one SQL statement and see its result:
{sql_call("SELECT a FROM t;")}
To finish:
{answer_call([(1, "x"), (2, "y")])}
The answers are the rows asked for, each as a list; after a change write ["done"].
You have {{max_turns}} turns, the answer included."""

# the model's chat template shows the tools
_NATIVE_PROMPT = """\
You work on one SQLite table. Each reply is one call of a tool.
The answers are the rows asked for, each as a list: [[1, "x"], [2, "y"]]; after a change: ["done"].
You have {max_turns} turns, the answer included."""
_TOOLS = (
    declare(
        "execute_sql",
        "Run one SQL statement and see its result.",
        query={"type": "string", "description": "one SQL statement"},
    ),
    declare(
        "commit_final_answer",
        "Finish.",
        answers={"type": "array", "items": {}, "description": "the rows, each as a list"},
    ),
)


@dataclass(frozen=True)
class Protocol:
    """How actions are read, written and explained.

    Attributes:
        tools: what the model's chat template shows.
        rows: how the agent reads the rows of a result: as it answers with them.
    """

    parse: Callable[[str], Reply]
    operation: Callable[[str], str]
    answer: Callable[[Sequence[Sequence[object]] | str], str]
    system_prompt: str
    tools: Sequence[Mapping[str, Any]] = ()
    rows: Callable[[Sequence[Sequence[object]]], str] = repr


ProtocolName = Literal["action", "json_tool_calls", "native"]
PROTOCOLS: dict[ProtocolName, Protocol] = {
    "action": Protocol(parse_reply, operation, answer, SYSTEM_PROMPT),
    "json_tool_calls": Protocol(parse_tool_call, sql_call, answer_call, _JSON_PROMPT),
    "native": Protocol(
        parse_native,
        partial(sql_call, write=write_call),
        partial(answer_call, write=write_call),
        _NATIVE_PROMPT,
        _TOOLS,
        partial(json.dumps, ensure_ascii=False, default=repr),
    ),
}
