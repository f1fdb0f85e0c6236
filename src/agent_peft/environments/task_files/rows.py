"""Rows of tables: JSON lines, a JSON array, CSV (with commas, semicolons or tabs) or Parquet, from a file or
a hub id.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator

from agent_peft.environments.task_files.download import hub_rows, read_rows
from agent_peft.environments.task_files.reading import MAX_FILE_BYTES
from agent_peft.environments.task_files.split import Portion, check_split_of_file
from agent_peft.files import parse_json, read_text
from agent_peft.lookup import alike, is_hub_id
from agent_peft.types import AgentPeftError

SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
SPREADSHEETS = (".xlsx", ".xlsm", ".xls", ".ods", ".numbers")
A_TABLE = "a file of rows (.jsonl, .json, .csv or .parquet)"
_DELIMITER_NAMES = {",": "comma", ";": "semicolon", "\t": "tab"}

_DECLARED = re.compile(r"sep=(.)\r?\n")  # the first line, as Excel writes and reads it


def file_or_hub_id(source: str | Path) -> str | Path:
    """The source as a path, or as a text if it is a hub id: ``owner/name`` without the suffix of a table.

    >>> file_or_hub_id("openai/gsm8k"), file_or_hub_id("rows/train.csv").suffix
    ('openai/gsm8k', '.csv')
    """
    if isinstance(source, Path) or source.lower().endswith((*SUFFIXES, *SPREADSHEETS)):
        return Path(source)
    return source if "/" in source and is_hub_id(source) and not Path(source).exists() else Path(source)


TableSource = Annotated[str | Path, AfterValidator(file_or_hub_id)]


def check_split(tasks: str | Path, split: str | None) -> None:
    """Raise ValueError if a hub id has no split, or a file has another one than ``train``."""
    if isinstance(tasks, Path):
        check_split_of_file(split)
    elif split is None:
        raise ValueError(
            f"split is missing: {tasks!r} is taken for a hub id (a file ends in {', '.join(SUFFIXES)}); set "
            "it to a split of that set, such as train"
        )


@dataclass(frozen=True)
class TableRow:
    """A row of a table. ``number`` is its line in a file of lines, and else its place, from 1.

    >>> TableRow("line", 3, {"question": "1 + 1?"}).place
    'line 3'
    """

    unit: str  # line or row
    number: int
    content: Any

    @property
    def place(self) -> str:
        return f"{self.unit} {self.number}"


def read_table(source: Path | str, split: str | None) -> tuple[str, Sequence[TableRow]]:
    """The rows of a file, or of a part of a hub id, and the name of their ids: the file's or the split's."""
    if isinstance(source, Path):
        return source.stem, list(_rows_of_file(source))
    name = Portion.parse(split or "").name
    return name, [TableRow("row", number, row) for number, row in enumerate(hub_rows(source, name), 1)]


def check_columns(source: Path | str, rows: Sequence[TableRow], columns: Mapping[str, str]) -> None:
    """Check that each row is an object of JSON values, and that some row has each column (by its key)."""
    known: dict[str, None] = {}
    for row in rows:
        if not isinstance(row.content, Mapping):
            raise AgentPeftError(f"{source}: {row.place}: must be an object with a value for each column")
        known |= dict.fromkeys(row.content)
        try:
            json.dumps(row.content, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise AgentPeftError(
                f"{source}: {row.place}: a value is not JSON ({error}); write it as text or number"
            ) from error
    for key, column in columns.items():
        if column not in known:
            closest = alike(column, known)
            advice = f"did you mean {closest!r}?" if closest else f"set {key} to one of them"
            raise AgentPeftError(
                f"{source}: there is no column {column!r} for {key}; it has {', '.join(known)}; {advice}"
            )


def _rows_of_file(path: Path) -> Iterator[TableRow]:
    suffix = path.suffix.lower()
    if suffix in SPREADSHEETS:
        raise AgentPeftError(
            f"{path}: is a spreadsheet, which is not read; save the sheet as CSV (UTF-8), and name that file"
        )
    if suffix == ".parquet":
        yield from (TableRow("row", number, row) for number, row in enumerate(read_rows([path]), 1))
        return
    text = read_text(path, A_TABLE, MAX_FILE_BYTES)
    if "\0" in text:
        raise AgentPeftError(f"{path}: holds NUL characters, so it is not UTF-8 text; save the file as UTF-8")
    if suffix in (".csv", ".tsv"):
        yield from _csv_rows(path, text)
        return
    if suffix == ".json" and text.lstrip().startswith("["):
        try:
            rows = parse_json(text)
        except ValueError as error:
            raise AgentPeftError(f"{path}: is not JSON ({error})") from error
        yield from (TableRow("row", number, row) for number, row in enumerate(rows, 1))
        return
    for number, line in enumerate(text.split("\n"), 1):  # splitlines would cut at U+2028 inside a text, too
        if line.strip():
            try:
                yield TableRow("line", number, parse_json(line))
            except ValueError as error:
                advice = "a JSONL file holds one entry a line"
                if suffix not in SUFFIXES:
                    advice = f"the name of a table ends in {', '.join(SUFFIXES)}"
                raise AgentPeftError(f"{path}: line {number}: is not JSON ({error}); {advice}") from error


def _csv_rows(path: Path, text: str) -> Iterator[TableRow]:
    """Rows whose values are texts. The first line names the columns."""
    delimiter = _delimiter(text)
    reader = csv.reader(io.StringIO(text, newline=""), strict=True, delimiter=delimiter)
    columns: list[str] | None = None
    line = 1
    try:
        for cells in reader:
            first, line = line, reader.line_num + 1
            if not cells or (first == 1 and _DECLARED.match(text)):
                continue
            if columns is None:
                columns = cells
                if len(set(columns)) < len(columns):
                    raise AgentPeftError(f"{path}: line {first}: two columns have one name; rename one")
                continue
            if len(cells) != len(columns):
                raise AgentPeftError(
                    f"{path}: line {first}: has {len(cells)} values for {len(columns)} columns; put a text "
                    f"with a {_DELIMITER_NAMES.get(delimiter, delimiter)} in double quotes"
                )
            yield TableRow("line", first, dict(zip(columns, cells, strict=True)))
    except csv.Error as error:
        raise AgentPeftError(f"{path}: line {line}: is not CSV ({error})") from error


def _delimiter(text: str) -> str:
    """The character between the values of a CSV file: the declared one, or the one with which the first row
    is as long as the header; of several, the one with the most columns.
    """
    if declared := _DECLARED.match(text):
        return declared[1]

    def fit(delimiter: str) -> tuple[bool, int]:
        rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
        try:
            header, *first = islice(filter(None, rows), 2)
        except (csv.Error, ValueError):  # ValueError: the file is empty
            return False, 0
        return len(header) > 1 and all(len(cells) == len(header) for cells in first), len(header)

    return max(_DELIMITER_NAMES, key=fit)
