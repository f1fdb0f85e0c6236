"""Task files of anybody: read, or refused in one line that names the file."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path

import pyarrow
import pyarrow.parquet as parquet
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from agent_peft.environments import db_bench, load_environment, os_interaction
from agent_peft.environments.db_bench.environment import HUB_SET
from agent_peft.environments.task_files import download
from agent_peft.environments.task_files.download import convert, read_rows
from agent_peft.files import MEGABYTE
from agent_peft.types import AgentPeftError

READERS = {
    "db_bench": db_bench.load_tasks,
    "os_interaction": os_interaction.load_tasks,
    "gsm8k": lambda path: load_environment("gsm8k", tasks=path),
    "questions": lambda path: load_environment("questions", tasks=path),
    "chat": lambda path: load_environment("chat", tasks=path),
    "preferences": lambda path: load_environment("preferences", tasks=path),
}
KEYS = [
    "question", "answer", "instruction", "description", "create", "init", "evaluation", "match", "check", "example", "answer_info", "sql",  # noqa: E501
    "messages", "role", "content", "prompt", "chosen", "rejected", "direct", "md5", "table_info", "name", "column_info_list", "type", "row_list", "skill_list", "sample_index", "evaluation_info",  # noqa: E501
]  # fmt: skip
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["#### 1", "SELECT 1", "INT"])
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=6),
    max_leaves=25,
)


def read_or_refused(reader, path):
    try:
        reader(path)
    except AgentPeftError as error:
        assert str(error).startswith(str(path))
        assert len(str(error)) < 5_000


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("content", ["", " \n\n"])
@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_a_file_without_tasks_says_so(kind, content, suffix, tmp_path):
    path = tmp_path / f"t{suffix}"
    path.write_text(content)
    with pytest.raises(AgentPeftError, match=f"^{path}: holds no (entry|rows); give a"):
        load_environment({"kind": kind, "tasks": path})


@pytest.mark.parametrize(
    "settings",
    [
        {"kind": "arithmetic", "num_tasks": 0},
        {"kind": "db_bench", "generate": {"num_tasks": 0}},
        {"kind": "db_bench", "generate": {"num_tasks": 2}, "limit": 0},
        {"kind": "db_bench", "generate": {"num_tasks": 2}, "skills": []},
        {"kind": "os_interaction", "generate": {"num_tasks": 0}},
        {"kind": "os_interaction", "generate": {"num_tasks": 2}, "skills": []},
        {"kind": "openenv", "url": "http://127.0.0.1:9", "num_tasks": 0},
    ],
)
def test_settings_that_leave_no_task_are_refused(settings):
    with pytest.raises(AgentPeftError, match=r"^environment\.[a-z_.]+: .*(greater|at least)"):
        load_environment(settings)


@pytest.mark.parametrize("name", READERS)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=values, lines=st.booleans())
@example(content={"a": {"skill_list": [], "answer_info": {"sql": "ATTACH 'x' AS y"}}}, lines=False)
def test_any_json_is_read_or_refused(tmp_path, name, content, lines):
    path = tmp_path / "t.jsonl"
    path.write_text(
        "\n".join(map(json.dumps, content)) if lines and isinstance(content, list) else json.dumps(content)
    )
    read_or_refused(READERS[name], path)


@pytest.mark.parametrize("name", READERS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=60) | st.text('[]{}",:\\ud80 \n1eE+-.ntrue', max_size=60).map(str.encode))
@example(b"[" * 100_000)
@example(b'{"question": ' * 5_000)
@example(b'{"question": "\\ud800", "answer": "#### 1"}')
@example(b'[{"sample_index": ' + b"9" * 4_000 + b"}]")
@example(b"\xef\xbb\xbf")
def test_any_bytes_are_read_or_refused(tmp_path, name, content):
    path = tmp_path / "t.json"
    path.write_bytes(content)
    read_or_refused(READERS[name], path)


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_only_a_newline_ends_a_row(tmp_path, name, newline, suffix):
    """JSON may hold the other separators of lines as they are."""
    text = "one\u2028two\u2029three\x85four"
    row = {
        "description": text,  # of AgentBench, DB and OS
        "type": ["other"],
        "label": [text],
        "table": {"table_name": text, "table_info": {"columns": [{"name": "a"}], "rows": [[text]]}},
        "evaluation": {"match": text},
        "question": text,
        "answer": "#### 1",
        "messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text}],
        "prompt": text,
        "chosen": "yes",
        "rejected": "no",
    }
    path = tmp_path / f"t{suffix}"
    path.write_text(2 * (json.dumps(row, ensure_ascii=False) + newline), newline="")
    read = READERS[name](path)
    tasks = read.tasks if hasattr(read, "tasks") else read
    assert len(tasks) == 2 and text in json.dumps(dict(tasks[1].content), ensure_ascii=False)


@pytest.mark.parametrize("name", READERS)
def test_a_pipe_or_a_device_is_refused_at_once(tmp_path, name):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for path in (tmp_path / "pipe", tmp_path / "zero"):
        with pytest.raises(AgentPeftError, match="is not a regular file"):
            READERS[name](path)


# -- files of the hub ----------------------------------------------------------------------------------------


@pytest.fixture
def snapshot(tmp_path) -> Path:
    for name in ("db_bench", "os_interaction"):
        (tmp_path / "snapshot" / name).mkdir(parents=True)
        (tmp_path / "snapshot" / name / "a.jsonl").write_text("{}\n")
    return tmp_path / "snapshot"


@pytest.mark.parametrize(
    "row",
    [
        "1",
        "[]",
        "[" * 100_000,
        json.dumps({"answer_info": "[" * 100_000}),
        json.dumps({"answer_info": "-" * 5_000 + "1"}),
        json.dumps({"answer_info": "(" * 90 + "1," + ")" * 90}),
        json.dumps({"answer_info": "{1, 2}"}),
        json.dumps({"answer_info": "{(1, 2): 3}"}),
        json.dumps({"answer_info": "b'a'"}),
        json.dumps({"answer_info": "'\\ud800'"}),
        json.dumps({"answer_info": "__import__('os').system('touch PWNED')"}),
        '{"a": ' * 400 + "1" + "}" * 400,
        '{"a": "\\ud800"}',
    ],
    ids=lambda row: row[:40],
)
def test_rows_that_are_not_what_they_were_are_told_or_written(snapshot, tmp_path, monkeypatch, row):
    monkeypatch.chdir(tmp_path)
    (snapshot / "db_bench" / "a.jsonl").write_text(row + "\n")
    try:
        convert(HUB_SET, snapshot, tmp_path / "out")
    except AgentPeftError as error:
        assert len(str(error)) < 2_000
    assert not (tmp_path / "PWNED").exists()


@pytest.mark.slow
def test_a_small_parquet_file_of_large_rows_is_refused_before_it_fills_the_memory(tmp_path):
    path = tmp_path / "a.parquet"
    parquet.write_table(
        pyarrow.table({"x": pyarrow.array(["a" * 10_000] * 50_000)}), path, compression="zstd"
    )
    assert path.stat().st_size < MEGABYTE
    tracemalloc.start()
    held = pyarrow.total_allocated_bytes()
    with pytest.raises(AgentPeftError, match=r"a\.parquet: cannot be read \(its rows take more than 64 MB\)"):
        read_rows([path])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200 * MEGABYTE
    assert pyarrow.total_allocated_bytes() - held < 200 * MEGABYTE


def test_too_many_rows_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(download, "MAX_ROWS", 1000)
    parquet.write_table(pyarrow.table({"x": pyarrow.nulls(1001)}), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text("{}\n" * 1001)
    for path in (tmp_path / "a.parquet", tmp_path / "a.jsonl"):
        with pytest.raises(AgentPeftError, match="there are more than 1,000 rows"):
            read_rows([path])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(place=st.integers(0, 10_000), byte=st.integers(1, 255), cut=st.booleans())
def test_a_damaged_parquet_file_is_read_or_refused(tmp_path, place, byte, cut):
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"x": ["a", "b"] * 20, "y": [[1], None] * 20}), path)
    content = bytearray(path.read_bytes())
    content[place % len(content)] ^= byte
    path.write_bytes(content[: place % len(content)] if cut else content)
    read_or_refused(lambda path: read_rows([path]), path)
