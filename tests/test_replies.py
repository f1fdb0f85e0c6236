from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_peft.replies import (
    DIALECTS,
    PYTHON_FAULT,
    Call,
    Reply,
    cast,
    open_thought,
    read_calls,
    read_reply,
)

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


LS = Call("ls", {"path": "/"})
DSML = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
NOT_JSON, NO_OBJECT = "The tool call is not JSON.", "A tool call is one JSON object with name and arguments."
CALLS = [
    ("hermes", '<tool_call>\n{"name": "ls", "arguments": {"path": "/"}}\n</tool_call>', [LS]),
    ("hermes", 'I look.<tool_call>{"name": "ls", "parameters": {"path": "/"}}', [LS]),
    ("hermes", '<tool_call>[{"name": "ls", "arguments": "{\\"path\\": \\"/\\"}"}]</tool_call>', [LS]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}', [Call("f", {"a": "x\ny"})]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "</tool_call><tool_call>"}}</tool_call>',
        [Call("f", {"a": "</tool_call><tool_call>"})],
    ),
    ("hermes", '<tool_call>{"name": "ls"', [Call(fault=NOT_JSON)]),
    ("hermes", "<tool_call>{}</tool_call>", [Call(fault=NO_OBJECT)]),
    ("hermes", '<tool_call>[{"name": "a"}, {"name": "b"}]', [Call(fault=NO_OBJECT)]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": [1]}',
        [Call("f", fault="The arguments of a tool call are a JSON object.")],
    ),
    ("hermes", '<tool_call>{"name": "a"}</tool_call>\n<tool_call>{"name": "b"}', [Call("a"), Call("b")]),
    ("hermes", "no call", []),
    (
        "qwen3_coder",
        "<tool_call>\n<function=ls>\n<parameter=path>\n/\n</parameter>\n</function>\n</tool_call>",
        [LS],
    ),
    ("qwen3_coder", "<function=ls><parameter=path>/</parameter></function>", [LS]),
    (
        "qwen3_coder",
        "<function=f>\n<parameter=a>\n  x\n\n</parameter> y\n</parameter>\n</function>",
        [Call("f", {"a": "  x\n\n</parameter> y"})],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=a>\nx\n<parameter=b>\ny\n</function>\n</tool_call>",
        [Call("f", {"a": "x", "b": "y"})],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=a>\n</parameter>, <parameter=b>, </function>, <function=g>\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>",
        [Call("f", {"a": "</parameter>, <parameter=b>, </function>, <function=g>"}), Call("g")],
    ),
    ("qwen3_coder", "<function=f><parameter=a>x</function>", [Call("f", {"a": "x"})]),
    (
        "qwen3_coder",
        "<function=f><parameter=a</function>",
        [Call("f", fault="The tag <parameter=a> is not closed.")],
    ),
    ("qwen3_coder", "<function=f><parameter=a>", [Call("f", fault="The tag </function> is missing.")]),
    ("llama3_json", '{"name": "ls", "parameters": {"path": "/"}}', [LS]),
    ("llama3_json", 'I look.<|python_tag|>{"name": "ls", "parameters": {"path": "/"}}<|eom_id|>', [LS]),
    ("llama3_json", '{"name": "a"}; {"name": "b"}', [Call("a"), Call("b")]),
    ("llama3_json", 'It is {"name": "a"}', []),
    ("llama3_json", "{name}", [Call(fault=NOT_JSON)]),
    ("llama3_json", '{"capital": "Paris"} is JSON', []),
    ("llama3_json", "<|python_tag|>{}", [Call(fault=NO_OBJECT)]),
    (
        "llama3_json",
        '{"name": "f", "parameters": {"a": "<|python_tag|>{}"}}',
        [Call("f", {"a": "<|python_tag|>{}"})],
    ),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "ls", "arguments": {"path": "/"}, "id": "abcdefghi"}]',
        [Call("ls", {"path": "/"}, "abcdefghi")],
    ),
    ("mistral", '[TOOL_CALLS]ls[ARGS]{"path": "/"}[TOOL_CALLS]ls{"path": "/"}', [LS, LS]),
    (
        "mistral",
        '[TOOL_CALLS]ls[CALL_ID]abcdefghi[ARGS]{"path": "/"}</s>',
        [Call("ls", {"path": "/"}, "abcdefghi")],
    ),
    ("mistral", "[TOOL_CALLS][{", [Call(fault=NOT_JSON)]),
    (
        "mistral",
        '[TOOL_CALLS]f[ARGS]{"a": "[TOOL_CALLS]g[ARGS]{}"}[TOOL_CALLS]ls{"path": "/"}',
        [Call("f", {"a": "[TOOL_CALLS]g[ARGS]{}"}), LS],
    ),
    ("deepseek_v3", DSML + 'ls<｜tool▁sep｜>{"path": "/"}<｜tool▁call▁end｜>', [LS]),
    (
        "deepseek_v3",
        DSML + 'function<｜tool▁sep｜>ls\n```json\n{"path": "/"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        [LS],
    ),
    ("deepseek_v3", DSML, [Call(fault=NO_OBJECT)]),
    (
        "deepseek_v3",
        DSML + 'f<｜tool▁sep｜>{"a": "<｜tool▁call▁begin｜>```json<｜tool▁sep｜>{}"}<｜tool▁call▁end｜>',
        [Call("f", {"a": "<｜tool▁call▁begin｜>```json<｜tool▁sep｜>{}"})],
    ),
    ("pythonic", "<|tool_call_start|>[ls(path='/')]<|tool_call_end|>", [LS]),
    ("pythonic", "<|python_start|>[ls(path='/')]<|python_end|>", [LS]),
    ("pythonic", "[ls(path='/'), f(a=[1, {'b': None}])]", [LS, Call("f", {"a": [1, {"b": None}]})]),
    ("pythonic", "[1, 2]", []),
    ("pythonic", "[ls('/')]", [Call(fault=PYTHON_FAULT)]),
    ("pythonic", "[ls(path=__import__('os').name)]", [Call(fault=PYTHON_FAULT)]),
    ("pythonic", "[ls(path=1e999)]", [Call(fault=PYTHON_FAULT)]),
    ("pythonic", "<|tool_call_start|>[ls(path='/'", [Call(fault=PYTHON_FAULT)]),
]


@pytest.mark.parametrize(("dialect", "text", "expected"), CALLS)
def test_calls(dialect, text, expected):
    rest, calls = read_calls(text, dialect)
    assert list(calls) == expected
    assert rest in ("", "I look.") or not calls
    assert calls or rest == text


PIECES = [
    *"{}[]()\"',:;=\\\n a1-",
    *("<tool_call>", "</tool_call>", "<function=", "<parameter=", ">", "</parameter>", "</function>"),
    *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<|tool_call_start|>", "<|tool_call_end|>"),
    *(
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "```json",
        '{"name": "a", "arguments": ',
        "f(a=",
        "\x00",
        "\ud800",
    ),
]


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=15).map("".join))
def test_any_text_has_calls_or_none(text):
    for dialect in DIALECTS:
        for call in read_calls(text, dialect)[1]:
            assert call.fault or (call.name and isinstance(call.arguments, dict))


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("piece", [*PIECES, "[f(a=-", "[f(a=(", "[f(a=[", '{"a":', "[[", "{ ", "[f(a=1)]"])
def test_long_hostile_texts_take_linear_time(dialect, piece):
    def seconds(count: int) -> float:
        started = time.process_time()
        read_calls("[f(a=" * (dialect == "pythonic") + piece * count, dialect)
        return time.process_time() - started

    short = min(seconds(500) for _ in range(2))
    assert min(seconds(5_000) for _ in range(2)) < 60 * max(short, 1e-3)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "boolean"}, "True", True),
        ({"type": ["integer", "null"]}, "None", None),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "7", "7"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "7", 7),
        ({"oneOf": [{"type": "array"}, {"type": "object"}]}, '["a"]', ["a"]),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "7", "7"),
        ({"type": "integer"}, "seven", "seven"),
        ({"type": "string"}, "True", "True"),
        ({"anyOf": None}, "7", "7"),
        (None, "7", "7"),
    ],
)
def test_texts_are_read_as_the_schema_types_them(schema, text, value):
    assert cast(Call("f", {"a": text}), {"properties": {"a": schema}}).arguments == {"a": value}


CORPUS = "canitoolcall==0.1.1"
READ_ELSE = {  # what is read otherwise than there, and why
    "qwen3-hermes/marker-in-arguments": "without token ids a mark in JSON is a mark, too",
    "mistral/v13think-marker-in-arguments": "the same",
    "qwen3-hermes/truncated-second-parallel-call": "a call that is cut is a fault, which the model reads",
    "mistral/v13think-stop-at-open-marker": "the same",
    "qwen3-xml/llamacpp-q35-call-inside-think": "what stands in a thought is not a call",
    "qwen3-xml/bug-coder-text-after-call": "text after a call is left out",
}


def corpus(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Completions of other projects' parser tests, with the dialect of each."""
    families = {"qwen3-hermes": "hermes", "qwen3-xml": "qwen3_coder", "deepseek": "deepseek_v3"}
    for path in sorted((folder / "canitoolcall/_data/fixtures").glob("*/*.jsonl")):
        for line in path.read_text("utf-8").splitlines():
            entry = json.loads(line)
            text = entry["raw_output"]
            dialect = families.get(path.parent.name, path.parent.name)
            if dialect == "llama":
                dialect = "pythonic" if text.lstrip().startswith(("[", "<|python_start|>")) else "llama3_json"
            if dialect in DIALECTS and not (dialect == "deepseek_v3" and path.stem.startswith(("v32", "v4"))):
                yield dialect, entry


@pytest.mark.slow
def test_completions_of_other_projects_are_read_as_expected(unpacked_wheel):
    ends = re.compile(r"<\|(im_end|endoftext|eot_id|eom_id|eot|eom)\|>$|</s>$|<｜end▁of▁sentence｜>$")
    wrong, count = set[str](), 0
    for dialect, entry in corpus(unpacked_wheel(CORPUS)):
        if "expected" not in entry or "DSML" in entry["raw_output"]:  # cut; or V3.2's dialect
            continue
        opened, text = open_thought(entry.get("generation_prompt") or ""), ends.sub("", entry["raw_output"])
        reply = read_reply(text if not opened or "</think>" in text else opened + text)
        rest, calls = read_calls(reply.text, dialect)
        schemas = {
            tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in entry["tools"]
        }
        if dialect == "qwen3_coder":
            calls = tuple(cast(call, schemas.get(call.name, {})) for call in calls)
        found = [call.fault or {"name": call.name, "arguments": call.arguments} for call in calls]
        wanted = entry["expected"]
        thought, content = wanted["reasoning_content"] or "", wanted["content"] or ""
        read = found, (reply.thought or "").strip(), rest.strip()
        count += 1
        if read != (wanted["tool_calls"] or [], thought.strip(), content.strip()):
            wrong.add(entry["id"])
    assert (wrong, count) == (READ_ELSE.keys(), 198)
