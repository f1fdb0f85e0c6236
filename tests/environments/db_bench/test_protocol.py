import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_peft.environments.db_bench.protocol import (
    Answer,
    MalformedReply,
    Operation,
    answer,
    operation,
    parse_reply,
)


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
    assert parse_reply(reply) == Operation("SELECT 1")


@pytest.mark.parametrize(
    "reply",
    [
        answer([(1, "a")]),
        "Action: Answer\nFinal Answer: [(1, 'a')]",
        "action: answer\n\nfinal  answer : [(1, 'a')]\n",
        "Thought: done.\nAction: Answer Final Answer:\n[(1, 'a')]",
    ],
)
def test_answers(reply):
    assert parse_reply(reply) == Answer("[(1, 'a')]")


def test_an_answer_may_have_several_lines():
    assert parse_reply("Action: Answer\nFinal Answer: [(1, 'a'),\n (2, 'b')]") == Answer(
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
    ],
)
def test_malformed_replies_say_what_to_write(reply, why):
    parsed = parse_reply(reply)
    assert isinstance(parsed, MalformedReply)
    assert why in parsed.why
    assert len(parsed.why) < 200


def test_sql_is_not_taken_for_a_language():
    assert parse_reply("Action: Operation\n```\nsqlite_master\n```") == Operation("sqlite_master")


def test_what_looks_like_an_action_inside_the_sql_is_sql():
    sql = "SELECT 'Action: Answer'"
    assert parse_reply(operation(sql)) == Operation(sql)


@given(st.text() | st.text("action:oper \n`sqlfinw*", max_size=200))
def test_parsing_never_raises(reply):
    assert isinstance(parse_reply(reply), Operation | Answer | MalformedReply)


@pytest.mark.parametrize(
    "piece",
    [
        "action ",
        "action:",
        "action:\n",
        "final  ",
        "Action: Answer ",
        "`",
        "```",
        "Action: Operation\n```sql\n",
        " ",
        "*",
        "\n ",
    ],
)
@pytest.mark.parametrize("head", ["", "Action: Answer\nFinal Answer: ", "Action: Operation\n```sql\n"])
def test_parsing_a_megabyte_is_quick(head, piece):
    reply = head + piece * (1_000_000 // len(piece))
    begun = time.perf_counter()
    parse_reply(reply)
    assert time.perf_counter() - begun < 2
