import json
import re
import time
from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agent_peft.environments.db_bench.protocol import (
    PROTOCOLS,
    FinalAnswer,
    SqlOperation,
    answer,
    answer_call,
    operation,
    parse_reply,
    parse_tool_call,
    sql_call,
)
from agent_peft.environments.tool_calls import MalformedReply, write_tool_call


@pytest.mark.parametrize(
    "reply",
    [
        operation("SELECT 1"),
        "Action: Operation\n```sql\nSELECT 1\n```",
        "action : operation\n\n```SQL\n  SELECT 1\n```\n",
        "I will look.\nAction: Operation\n```\nSELECT 1\n```\nThat is it.",
        "Action: Operation ```sql SELECT 1 ```",
        "**Action:** `Operation`\n```mysql\nSELECT 1```".replace("Action:**", "Action:"),
        "ACTION:OPERATION\r\n```sqlite\r\nSELECT 1\r\n```",
    ],
)
def test_operations(reply):
    assert parse_reply(reply) == SqlOperation("SELECT 1")


@pytest.mark.parametrize(
    "reply",
    [
        answer([(1, "a")]),
        "Action: Answer\nFinal Answer: [(1, 'a')]",
        "action: answer\n\nfinal  answer : [(1, 'a')]\n",
        "Thought: done.\nAction: Answer Final Answer:\n[(1, 'a')]",
        "**Action:** Answer\n**Final Answer:** [(1, 'a')]",
        "**Action: Answer**\n**Final Answer: [(1, 'a')]**\n",
        "**Action:** Answer\n\n**Final Answer:**\n\n```python\n[(1, 'a')]\n```\n",
        "Action: Answer\nFinal Answer: ```json\n[(1, 'a')]```\n\nThat is it.",
        "Action: Answer\nFinal Answer: [(1, 'a')]\n\nThere is one row (of 3).",
        "Action: Answer\r\nFinal Answer: [(1, 'a')]\r\n\r\nThere is one row.",
        "Action: Answer\n**Final Answer: [(1, 'a')]**\n\nThere is one row.",
        "Action: Answer\nFinal Answer:\n```\n\n[(1, 'a')]\n\n```\nThere is one row.",
    ],
)
def test_answers(reply):
    assert parse_reply(reply) == FinalAnswer("[(1, 'a')]")


@pytest.mark.parametrize("rows", ["[(1, 'a'),\n\n(2, 'b')]", "[('a\n\nb',)]", "[(1,),\n \n\n(2,)]"])
def test_rows_may_hold_blank_lines(rows):
    assert parse_reply(f"Action: Answer\nFinal Answer: {rows}\n\nThese are all.") == FinalAnswer(rows)
    assert parse_reply(f"Action: Answer\nFinal Answer:\n```\n{rows}\n```") == FinalAnswer(rows)


def test_an_answer_may_have_several_lines():
    assert parse_reply("Action: Answer\nFinal Answer: [(1, 'a'),\n (2, 'b')]") == FinalAnswer(
        "[(1, 'a'),\n (2, 'b')]"
    )


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        ("", "No action found"),
        ("SELECT 1", "No action found"),
        ("```sql\nSELECT 1\n```", "No action found"),
        ("Action: Dance", "No action found"),
        ("Action: Operation", "No SQL block"),
        ("Action: Operation\nSELECT 1", "No SQL block"),
        ("Action: Operation\n```sql\nDELETE FROM t", "not closed"),  # it may have been cut before its WHERE
        ("Action: Operation\n```sql\n\n```", "empty"),
        ("Action: Operation\n```sql\nSELECT 1\n```\n```sql\nSELECT 2\n```", "More than one block"),
        ("Action: Operation" + "\n```sql\nSELECT 1\n```" * 10, "More than one block"),
        ("Action: Operation\n```sql\nSELECT 1\n```\nAction: Answer\nFinal Answer: [(1,)]", "Two actions"),
        ("Action: Answer\nFinal Answer: [(1,)]\nAction: Operation\n```sql\nSELECT 1\n```", "Two actions"),
        ("Action: Answer\nAction: Operation\n```sql\nSELECT 1\n```", "Two actions"),
        ("Action: Answer", "No final answer"),
        ("Action: Answer\nFinal Answer:", "empty"),
        ("Action: Answer\nFinal Answer: \n ``", "empty"),
        ("**Action: Answer**\n**Final Answer:**", "empty"),
        ("Action: Answer\nFinal Answer: ```python\n```", "empty"),
        ("Action: Answer\nFinal Answer: [(1,)]\n\nAction: Operation\n```sql\nSELECT 1\n```", "Two actions"),
    ],
)
def test_malformed_replies_say_what_to_write(reply, why):
    with pytest.raises(MalformedReply, match=re.escape(why)) as malformed:
        parse_reply(reply)
    assert len(str(malformed.value)) < 200


def test_sql_is_not_taken_for_a_language():
    assert parse_reply("Action: Operation\n```\nsqlite_master\n```") == SqlOperation("sqlite_master")


def test_what_looks_like_an_action_inside_the_sql_is_sql():
    sql = "SELECT 'Action: Answer'"
    assert parse_reply(operation(sql)) == SqlOperation(sql)


@pytest.mark.parametrize(
    ("reply", "action"),
    [
        (
            '<tool_call>\n{"name": "execute_sql", "arguments": {"query": "SELECT 1"}}\n</tool_call>',
            SqlOperation("SELECT 1"),
        ),
        (  # the closing tag may be a stop string
            'I look.\n<tool_call>{"name": "execute_sql", "arguments": {"query": " SELECT 1\\n"}}',
            SqlOperation("SELECT 1"),
        ),
        (
            '```json\n{"name": "execute_sql", "parameters": {"sql": "SELECT 1"}}\n```',
            SqlOperation("SELECT 1"),
        ),
        ('{"name": "execute_sql", "arguments": "{\\"query\\": \\"SELECT 1\\"}"}', SqlOperation("SELECT 1")),
        (
            '{"name": "execute_sql", "arguments": {"thought": "hm", "query": "SELECT 1"}}',
            SqlOperation("SELECT 1"),
        ),
        ('{"name": "commit_final_answer", "arguments": {"answers": ["a", "1"]}}', FinalAnswer('["a", "1"]')),
        ('{"name": "commit_final_answer", "arguments": {"answers": [[1, "é"]]}}', FinalAnswer('[[1, "é"]]')),
        ('{"name": "commit_final_answer", "arguments": {"answers": []}}', FinalAnswer("[]")),
        ('{"name": "commit_final_answer", "arguments": {"answers": "[(1, 2)]"}}', FinalAnswer("[(1, 2)]")),
        ('{"name": "commit_final_answer", "arguments": {"answer": 42}}', FinalAnswer("42")),
    ],
)
def test_tool_calls(reply, action):
    assert parse_tool_call(reply) == action


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        ("", "No tool call found"),
        ("Action: Answer\nFinal Answer: 1", "No tool call found"),
        ('{"name": "execute_sql", "arguments": {"query": "SELECT 1"}', "No tool call found"),
        ("[" * 100_000, "No tool call found"),
        ("[1]", "object with name"),
        ('{"name": "execute_sql"}', "query is missing"),
        ('{"name": "execute_sql", "arguments": {"query": ["SELECT 1"]}}', "query is missing"),
        ('{"name": "execute_sql", "arguments": {"a": "SELECT 1", "b": 2}}', "query is missing"),
        ('{"name": "execute_sql", "arguments": {"query": " "}}', "query is empty"),
        ('{"name": "execute_sql", "arguments": [1]}', "arguments of a tool call are an object"),
        ('{"name": "commit_final_answer", "arguments": {}}', "answers are missing"),
        ('{"name": "commit_final_answer", "arguments": {"answers": null}}', "answers are missing"),
        ('{"name": "commit_final_answer", "arguments": {"answers": " "}}', "answers are empty"),
        ('{"name": "drop", "arguments": {}}', "no tool 'drop'"),
        (sql_call("SELECT 1") + answer_call("done"), "Two actions"),
    ],
)
def test_malformed_tool_calls_say_what_to_write(reply, why):
    with pytest.raises(MalformedReply, match=re.escape(why)) as malformed:
        parse_tool_call(reply)
    assert len(str(malformed.value)) < 200


@pytest.mark.parametrize("protocol", PROTOCOLS.values(), ids=PROTOCOLS)
def test_what_is_written_is_read_back(protocol):
    sql = "SELECT \"a\", 'it''s \\ é'\nFROM t;"
    assert protocol.parse(protocol.operation(sql)) == SqlOperation(sql)
    rows = [(1, "it's"), (2.5, None)]
    written = protocol.parse(protocol.answer(rows))
    assert isinstance(written, FinalAnswer)
    assert written.text == (repr(rows) if protocol is PROTOCOLS["action"] else json.dumps(rows))
    assert isinstance(protocol.parse(protocol.answer([(b"\0",)])), FinalAnswer)


@pytest.mark.parametrize("name", ["action", "json_tool_calls"])  # a template shows the tools of native
def test_the_system_prompt_shows_each_action_as_it_is_written(name):
    protocol = PROTOCOLS[name]
    assert protocol.operation("SELECT a FROM t;") in protocol.system_prompt
    assert protocol.answer([(1, "x"), (2, "y")]) in protocol.system_prompt
    assert "{max_turns} turns" in protocol.system_prompt and "after a change write" in protocol.system_prompt
    assert len(protocol.system_prompt.split()) < 90


@pytest.mark.parametrize("name", ["action", "native"])
def test_an_answer_copies_the_rows_as_they_were_read(name):
    protocol, rows = PROTOCOLS[name], [(1, "it's é"), (2.5, None)]
    assert protocol.parse(protocol.answer(rows)) == FinalAnswer(protocol.rows(rows))
    assert protocol.rows([(b"\0",)]), "any cell can be read"


def test_any_depth_is_read_or_refused():
    for depth in range(600, 1_050):  # where the limit is depends on the stack so far
        call = '{"name": "commit_final_answer", "arguments": {"answers": ' + "[" * depth + "]" * depth + "}}"
        with suppress(MalformedReply):
            assert isinstance(parse_tool_call(call), FinalAnswer)


@given(
    st.text()
    | st.text("action:oper \n`sqlfinw*", max_size=200)
    | st.dictionaries(
        st.sampled_from(["query", "answers", "x"]), st.none() | st.text() | st.lists(st.floats() | st.text())
    ).map(lambda arguments: write_tool_call("commit_final_answer", **arguments))
)
@example('{"name": "commit_final_answer", "arguments": {"answers": ' + "9" * 4_000 + "}}")
@example('{"name": "commit_final_answer", "arguments": {"answers": [1e999, NaN]}}')
@example('{"name": "\\ud800", "arguments": {}}')
@example('{"name":' * 50_000)
def test_any_reply_is_an_action_or_malformed(reply):
    for protocol in PROTOCOLS.values():
        with suppress(MalformedReply):
            assert isinstance(protocol.parse(reply), SqlOperation | FinalAnswer)


SQL = "Action: Operation\n```sql\n"
PIECES = [
    "action ",
    "action:",
    "action:\n",
    "final  ",
    "Action: Answer ",
    "`",
    "```",
    SQL,
    " ",
    "*",
    "\n ",
    "{",
]


@pytest.mark.parametrize("piece", [*PIECES, "<tool_call>"])
@pytest.mark.parametrize("head", ["", "Action: Answer\nFinal Answer: ", SQL, "<tool_call>"])
@pytest.mark.parametrize("protocol", PROTOCOLS.values(), ids=PROTOCOLS)
def test_parsing_a_megabyte_is_quick(protocol, head, piece):
    reply = head + piece * (1_000_000 // len(piece))
    begun = time.perf_counter()
    with suppress(MalformedReply):
        protocol.parse(reply)
    assert time.perf_counter() - begun < 2


def test_a_string_of_a_call_may_hold_newlines():
    call = '<tool_call>{"name": "execute_sql", "arguments": {"query": "SELECT a\nFROM t"}}</tool_call>'
    assert parse_tool_call(call) == SqlOperation("SELECT a\nFROM t")
