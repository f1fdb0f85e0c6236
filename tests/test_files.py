"""Files of strangers are refused in one line and without waiting; ours are whole or absent."""

from __future__ import annotations

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_peft.files import (
    parse_json,
    read_bytes,
    read_text,
    truncate_jsonl,
    write_atomic,
    write_json_atomic,
)
from agent_peft.types import AgentPeftError

LIMIT = 1000


def test_a_regular_file_is_read(tmp_path):
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbfab\xc3\xa9")
    assert read_text(tmp_path / "a", "a text", LIMIT) == "abé"
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert read_bytes(tmp_path / "b", "a text", 7) == b"\xef\xbb\xbfab\xc3\xa9"


def test_what_is_no_regular_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "endless").symlink_to("/dev/zero")
    for name, told in {
        "pipe": "no regular file",
        "endless": "no regular file",
        "loop": "cannot be read",
        ".": "cannot be read",
        "nowhere": "cannot be read (No such file or directory); give the path of a YAML file",
        "a\0b": "cannot be read",
        "x" * 300: "cannot be read",
    }.items():
        with pytest.raises(AgentPeftError) as raised:
            read_text(tmp_path / name, "a YAML file", LIMIT)
        assert told in str(raised.value)


def test_what_is_too_large_or_no_text_is_refused(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * (LIMIT + 1))
    with pytest.raises(AgentPeftError, match="is larger than"):
        read_bytes(tmp_path / "a", "a text", LIMIT)
    (tmp_path / "a").write_bytes(b"\xff")
    with pytest.raises(
        AgentPeftError,
        match=r"line 1: is not UTF-8 text \(byte 0x.*save the file as UTF-8, or give the path of a text",
    ):
        read_text(tmp_path / "a", "a text", LIMIT)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "[" * 5_000 + "]" * 5_000,
        '{"a":' * 5_000,
        "9" * 5_000,
        '"\\ud800"',
        "",
        "nul",
        "\xff",
        b"\xff",
    ],
)
def test_json_that_is_not_fit(text):
    with pytest.raises(ValueError, match=r"."):
        parse_json(text)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_json_that_is_fit_is_read_as_it_is(content):
    assert parse_json(json.dumps(content)) == content


def test_a_link_is_replaced_and_never_followed(tmp_path):
    (tmp_path / "victim").write_text("precious")
    for name in ("a", ".a.aside"):
        (tmp_path / name).symlink_to("victim")
    write_atomic(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "new"
    assert (tmp_path / "victim").read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "victim"]


def test_write_atomic(tmp_path):
    path = tmp_path / "new" / "a.txt"
    write_atomic(path, "one\n")
    write_atomic(path, "zwölf\n")
    assert path.read_bytes() == "zwölf\n".encode()
    assert [file.name for file in path.parent.iterdir()] == ["a.txt"]
    with pytest.raises(UnicodeEncodeError):
        write_atomic(path, "\ud800")
    assert path.read_bytes() == "zwölf\n".encode()
    with pytest.raises(ValueError, match="JSON"):
        write_json_atomic(path, float("nan"))
    assert path.read_bytes() == "zwölf\n".encode()


def test_truncate_jsonl_keeps_bytes_and_drops_a_torn_line(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = ['{"step": 0,  "x": 0.1}\n', '{"step": 1, "x": 1e-05}\n', '{"step": 2}\n']
    path.write_text("".join(lines) + '{"step": 1, "x"')
    truncate_jsonl(path, lambda record: record["step"] < 2)
    assert path.read_text() == lines[0] + lines[1]
    path.write_text(lines[0] + '{"step": 1}')  # whole, but its end of line never came
    truncate_jsonl(path, lambda record: True)
    assert path.read_text() == lines[0]


def test_truncate_jsonl_tells_of_a_damaged_file(tmp_path):
    truncate_jsonl(tmp_path / "none.jsonl", lambda record: True)
    assert not (tmp_path / "none.jsonl").exists()
    path = tmp_path / "a.jsonl"
    path.write_text("[1]\n" + json.dumps({"step": 1}) + "\n")
    with pytest.raises(AgentPeftError, match=r"a\.jsonl:1"):
        truncate_jsonl(path, lambda record: True)
