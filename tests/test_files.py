"""Files of strangers are refused in one line and without waiting; ours are whole or absent."""

from __future__ import annotations

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_peft.files import (
    check_tree,
    locked,
    open_regular,
    opened,
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
        "pipe": "not a regular file",
        "endless": "not a regular file",
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


@pytest.mark.slow
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_json_that_is_fit_is_read_as_it_is(content):
    assert parse_json(json.dumps(content)) == content


def test_a_link_is_neither_followed_nor_replaced(tmp_path):
    (tmp_path / "victim").write_text("precious")
    for name in ("a", ".b.aside"):
        (tmp_path / name).symlink_to("victim")
    with pytest.raises(OSError, match="there is a link in its place; remove it"):
        write_atomic(tmp_path / "a", "new")
    write_atomic(tmp_path / "b", "new")  # what a kill left is ours
    assert (tmp_path / "b").read_text() == "new"
    assert (tmp_path / "victim").read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "victim"]


def foreign(path, kind, victim):
    """Put at ``path`` what no run has there."""
    if kind == "link":
        path.symlink_to(victim)
    elif kind == "dangling link":
        path.symlink_to(victim.with_name("nowhere"))
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        os.link(victim, path)


@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe", "folder", "hard link"])
def test_what_a_stranger_put_in_place_of_a_file_is_not_opened(tmp_path, kind):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    foreign(tmp_path / "a", kind, victim)
    with pytest.raises(OSError, match=r"."):
        os.close(open_regular(tmp_path / "a", os.O_WRONLY | os.O_CREAT | os.O_APPEND))
    with pytest.raises(OSError, match=r"."), locked(tmp_path / "a"):
        pass
    if kind == "hard link":  # reading does no harm, and a new file replaces one of its names
        write_atomic(tmp_path / "a", "new")
    else:
        with pytest.raises(AgentPeftError, match="cannot be read"):
            read_bytes(tmp_path / "a", "a text", LIMIT, unlinked=1)
        with pytest.raises(OSError, match="remove it"):
            write_atomic(tmp_path / "a", "new")
    assert victim.read_text() == "precious"
    assert not (tmp_path / "nowhere").exists()


def test_a_folder_that_is_a_link_is_not_followed(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a").write_text("precious")
    (tmp_path / "run").symlink_to("elsewhere")  # a run directory itself may be one
    assert read_text(tmp_path / "run" / "a", "a text", LIMIT, unlinked=1) == "precious"
    with pytest.raises(AgentPeftError, match="cannot be read"):
        read_text(tmp_path / "run" / "a", "a text", LIMIT, unlinked=2)
    for name in ("a", "b"):
        with pytest.raises(NotADirectoryError):
            write_atomic(tmp_path / "run" / name, "new", unlinked=2)
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["a"]
    assert (tmp_path / "elsewhere" / "a").read_text() == "precious"


def test_a_tree_holds_regular_files_and_folders_only(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "tree" / "a" / "b").mkdir(parents=True)
    (tmp_path / "tree" / "a" / "b" / "c").write_text("c")
    check_tree(tmp_path / "tree")
    check_tree(tmp_path / "nowhere")
    for kind, message in {
        "link": "is a link",
        "dangling link": "is a link",
        "pipe": "not a regular file",
    }.items():
        foreign(tmp_path / "tree" / "a" / "b" / "d", kind, victim)
        with pytest.raises(AgentPeftError, match=message):
            check_tree(tmp_path / "tree")
        check_tree(tmp_path / "tree", depth=1)
        (tmp_path / "tree" / "a" / "b" / "d").unlink()


def test_what_a_library_opens_is_what_was_checked(tmp_path):
    """The file is another one by the time that the library opens it."""
    (tmp_path / "a").write_text("ours")
    (tmp_path / "victim").write_text("precious")
    with opened(tmp_path / "a") as place:
        (tmp_path / "a").unlink()
        (tmp_path / "a").symlink_to("victim")
        assert place.read_text() == "ours"


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
