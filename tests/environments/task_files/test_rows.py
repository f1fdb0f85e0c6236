"""Tables of anybody: their rows with their lines, or one line that names the place."""

import csv
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet as parquet
import pytest

from agent_peft.environments.task_files.rows import check_columns, file_or_hub_id, read_table
from agent_peft.types import AgentPeftError

ROWS = [{"question": "1+1=", "answer": "2"}, {"question": 'a, "b"\nc?', "answer": "é"}]


def write(path, rows=ROWS):
    match path.suffix:
        case ".jsonl":
            path.write_text("\n" + "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows), "utf-8")
        case ".json":
            path.write_text(json.dumps(rows, indent=1), "utf-8")
        case ".csv":
            quoted = ['"' + row["question"].replace('"', '""') + '",' + row["answer"] for row in rows]
            path.write_text(
                "\ufeffquestion,answer\r\n" + "\r\n".join(quoted) + "\r\n\r\n", "utf-8", newline=""
            )
        case ".parquet":
            parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize(
    ("suffix", "places"),
    [
        (".jsonl", ["line 2", "line 4"]),
        (".json", ["row 1", "row 2"]),
        (".csv", ["line 2", "line 3"]),
        (".parquet", ["row 1", "row 2"]),
    ],
)
def test_every_format_gives_the_same_rows(tmp_path, suffix, places):
    name, rows = read_table(write(tmp_path / f"t{suffix}"), None)
    assert name == "t"
    assert [row.content for row in rows] == ROWS
    assert [row.place for row in rows] == places


def test_a_row_of_a_csv_file_has_the_line_of_its_beginning(tmp_path):
    rows = read_table(write(tmp_path / "t.csv", [*reversed(ROWS), ROWS[0]]), None)[1]
    assert [row.number for row in rows] == [2, 4, 5]


def test_one_line_of_json_is_one_row(tmp_path):
    (tmp_path / "t.json").write_text('{"question": "1+1=", "answer": "2"}')
    assert [row.content for row in read_table(tmp_path / "t.json", None)[1]] == ROWS[:1]


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("t.jsonl", '{"a": 1}\n{"a": \n', "line 2: is not JSON"),
        ("t.json", '[{"a": 1}', "is not JSON ("),
        ("t.csv", "a,b\n1,2\n3\n", "line 3: has 1 values for 2 columns"),
        ("t.csv", 'a,b\n1,"2\n', "line 2: is not CSV (unexpected end"),
        ("t.csv", "a,a\n1,2\n", "line 1: two columns have one name"),
        ("t.csv", f"a\n{'x' * 200_000}\n", "line 2: is not CSV (field larger than field limit"),
        ("t.parquet", "PAR1", "cannot be read ("),
    ],
)
def test_a_wrong_file_is_one_line_with_its_place(tmp_path, name, content, told):
    (tmp_path / name).write_text(content)
    with pytest.raises(AgentPeftError) as raised:
        read_table(tmp_path / name, None)
    assert str(raised.value).startswith(f"{tmp_path / name}: {told}")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ([{"question": "q", "answer": 1}, [1]], "row 2: must be an object with a value for each column"),
        ([{"question": "q", "answer": float("nan")}], "row 1: a value is not JSON"),
        ([{"q": "q", "anwser": 1}], "there is no column 'answer' for key; it has q, anwser; did you mean"),
        ([{"q": "q", "label": 1}], "there is no column 'answer' for key; it has q, label; set key to"),
    ],
)
def test_columns(tmp_path, content, told):
    (tmp_path / "t.json").write_text(json.dumps(content))
    with pytest.raises(AgentPeftError) as raised:
        check_columns("t.json", read_table(tmp_path / "t.json", None)[1], {"key": "answer"})
    assert str(raised.value).startswith(f"t.json: {told}")


def test_a_value_that_no_json_holds_is_told(tmp_path):
    table = pyarrow.table({"question": ["q"], "day": pyarrow.array([0], pyarrow.date32())})
    parquet.write_table(table, tmp_path / "t.parquet")
    with pytest.raises(AgentPeftError, match=r"row 1: a value is not JSON .*date"):
        check_columns("t", read_table(tmp_path / "t.parquet", None)[1], {})


def test_what_is_a_hub_id():
    assert file_or_hub_id("openai/gsm8k") == "openai/gsm8k"
    for path in ("rows/t.jsonl", "rows/t.json", "rows/t.csv", "rows/t.parquet", "t", "/a/b", "a/b/c"):
        assert not isinstance(file_or_hub_id(path), str)


PLAIN = [{"question": "1,5 + 2?", "answer": "3; or so"}, {"question": "a\nb", "answer": "ü"}]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("suffix", [".csv", ".CSV", ".tsv"])
def test_csv_as_spreadsheets_write_it(tmp_path, suffix, delimiter, encoding):
    path = tmp_path / f"t{suffix}"
    with path.open("w", encoding=encoding, newline="") as file:
        writer = csv.DictWriter(file, list(PLAIN[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(PLAIN)
    assert [dict(row.content) for row in read_table(path, None)[1]] == PLAIN


def test_csv_that_declares_its_delimiter(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("sep=|\na|b;c\n1|2;3\n")
    rows = read_table(path, None)[1]
    assert [(row.number, row.content) for row in rows] == [(3, {"a": "1", "b;c": "2;3"})]


def test_the_delimiter_is_that_of_the_header_and_the_first_row(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text('"which of a; b; c",answer\nx,"1;2;3"\n')
    assert read_table(path, None)[1][0].content == {"which of a; b; c": "x", "answer": "1;2;3"}
    path.write_text("question;answer\n1;2\n3;4;5\n")
    with pytest.raises(
        AgentPeftError, match="line 3: has 3 values for 2 columns; put a text with a semicolon"
    ):
        read_table(path, None)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "t.csv",
            "a,b\n1,ü\n".encode("cp1252"),
            r"line 2: is not UTF-8 text \(byte 0xfc\); save the file as",
        ),
        ("t.csv", "a,b\n1,2\n".encode("utf-16-le"), "holds NUL characters, so it is not UTF-8 text; save"),
        ("t.xlsx", b"PK\x03\x04", r"is a spreadsheet, .*; save the sheet as CSV \(UTF-8\)"),
        ("t.XLS", b"", "is a spreadsheet"),
        ("t.ods", b"", "is a spreadsheet"),
        ("t.txt", b"question: 1?\n", r"line 1: is not JSON .*; the name of a table ends in \.jsonl, \.json"),
    ],
)
def test_a_file_that_is_no_table_is_refused_with_the_remedy(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(AgentPeftError, match=message):
        read_table(tmp_path / name, None)


def test_no_file_of_here_is_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows").mkdir()
    for path in ("rows/t", "other/t.xlsx", "other/t.CSV", "./t", "../t"):
        assert isinstance(file_or_hub_id(path), Path)
