from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_peft.replies import Reply, open_thought, read_reply

MARKS = ["<think>", "</think>", "[THINK]", "[/THINK]", "<seed:think>", "<|channel>thought", "<channel|>"]


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("ls", Reply(None, "ls")),
        (" ls\n", Reply(None, " ls\n")),  # as it is, where there is no thought
        ("<think>a</think>\n\nb", Reply("a", "b")),
        ("a</think>b", Reply("a", "b")),  # the prompt opened it
        ("a</think>b</think>c", Reply("ab", "c")),
        ("<think>a</think>b<think>c</think>d", Reply("ac", "bd")),
        ("[THINK]a</think>[/THINK]b", Reply("a</think>", "b")),
        ("<think><think>a</think>b", Reply("<think>a", "b")),
        ("<|channel>thought\na<channel|>b", Reply("\na", "b")),
        ("<think>a", Reply("a", "", closed=False)),
        ("a<think>b", Reply("b", "", closed=False)),  # whether a is an action is not certain
        ("<think>a</think>b<think>", Reply("a", "", closed=False)),
        ("<think>a[/THINK]b", Reply("a[/THINK]b", "", closed=False)),
        ("<thinking>a", Reply(None, "<thinking>a")),
        ("", Reply(None, "")),
    ],
)
def test_a_reply_in_parts(reply, expected):
    assert read_reply(reply) == expected


@given(st.lists(st.sampled_from(MARKS) | st.text(max_size=3), max_size=12).map("".join))
def test_any_text_is_read(reply):
    parts = read_reply(reply)
    assert parts.closed or parts.text == ""
    if parts.thought is None:
        assert parts == Reply(None, reply)
    else:
        assert len(parts.thought) + len(parts.text) < len(reply)


@pytest.mark.parametrize("unit", [*MARKS, "<think>a</think>", "a</think>", "<think", "</think><think>"])
def test_the_time_is_linear(unit):
    def seconds(count: int) -> float:
        started = time.process_time()
        read_reply(unit * count)
        return time.process_time() - started

    short = min(seconds(5_000) for _ in range(3))
    assert min(seconds(50_000) for _ in range(3)) < 60 * max(short, 1e-4)  # 100 if it were quadratic


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ("a:<think>\n", "<think>\n"),
        ("a:<think>\n\n</think>\n\n", ""),
        ("a:", ""),
        ("<think></think>a:[THINK]", "[THINK]"),
    ],
)
def test_a_prompt_that_opens_a_thought(prompt, opened):
    assert open_thought(prompt) == opened
