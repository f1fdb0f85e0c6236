"""Sets from the Hugging Face hub, as the files that the environments read. The one place that speaks with the
hub about them.

huggingface_hub comes with transformers; reading parquet needs pyarrow, the extra ``datasets``.
"""

from __future__ import annotations

import ast
import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_peft.files import MEGABYTE, parse_json, read_text, write_atomic
from agent_peft.types import AgentPeftError


@dataclass(frozen=True)
class HubSet:
    """A set's place on the hub, and which of our files is made from which of its files (patterns).

    >>> SETS["gsm8k"].files["test.jsonl"]
    'main/test*'
    """

    repository: str
    files: Mapping[str, str]


SETS = {
    "gsm8k": HubSet("openai/gsm8k", {"train.jsonl": "main/train*", "test.jsonl": "main/test*"}),
    "lifelong_agent_bench": HubSet(
        "csyq/LifelongAgentBench",
        {"db_bench/entry_dict.json": "db_bench/*", "os_interaction/entry_dict.json": "os_interaction/*"},
    ),
}
SUFFIXES = (".parquet", ".jsonl")
MOST_ROWS = 1_000_000
MOST_BYTES = (
    64 * MEGABYTE
)  # of a file's rows, whatever the file itself is: a small one may hold a text a million times
# parquet has no lists of mixed types, so these may be texts that hold JSON or a Python literal
STRUCTURED = frozenset(
    {"answer_info", "direct", "table_info", "column_info_list", "row_list", "skill_list"}
) | {
    "initialization_command_item",
    "evaluation_info",
    "evaluation_command_item",
    "ground_truth_command_item",
}


def download(name: str, folder: Path) -> list[Path]:
    """Fetch a set and write it into ``folder``, in the layout of ``SETS``. Returns the files that were
    written.

    Raises:
        AgentPeftError: there is no such set, the hub does not give it, or it is not what it was.
    """
    if name not in SETS:
        near = difflib.get_close_matches(name, SETS, 1)
        advice = f"did you mean {near[0]!r}?" if near else f"choose {' or '.join(SETS)}"
        raise AgentPeftError(f"there is no set {name!r} to download; {advice}")
    chosen = SETS[name]
    return convert(chosen, _snapshot(chosen.repository, list(chosen.files.values())), folder)


def convert(chosen: HubSet, snapshot: Path, folder: Path) -> list[Path]:
    """Write a set's files from a local copy of its repository."""
    written = []
    for file, pattern in chosen.files.items():
        rows = read_rows(_found(snapshot, [pattern], chosen.repository))
        path = folder / file
        try:
            text = _written(path, rows)
            text.encode()  # half of a character is in no file
        except (
            RecursionError,
            TypeError,
            ValueError,
        ) as error:  # what JSON cannot hold, such as a date or a set
            raise AgentPeftError(
                f"{chosen.repository}: {pattern} cannot be written as JSON ({error}); the set has changed"
            ) from error
        try:
            write_atomic(path, text)
        except OSError as error:
            raise AgentPeftError(
                f"{path}: cannot be written ({error.strerror}); name another folder"
            ) from error
        written.append(path)
    return written


def _written(path: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    if path.suffix == ".jsonl":
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    entries = {str(row.get("sample_index", place)): unpacked(row) for place, row in enumerate(rows)}
    if len(entries) < len(rows):
        raise ValueError("it holds one sample_index twice")
    return json.dumps(entries, ensure_ascii=False, indent=1) + "\n"


def hub_rows(repository: str, split: str) -> list[dict[str, Any]]:
    """The rows of one split of a hub id, of its configuration ``main`` where it has several.

    Raises:
        AgentPeftError: the hub does not give it.
    """
    patterns = [f"{place}{split}*{suffix}" for place in ("main/", "data/", "") for suffix in SUFFIXES]
    return read_rows(_found(_snapshot(repository, patterns), patterns, repository))


def read_rows(files: Sequence[Path]) -> list[dict[str, Any]]:
    """The rows of parquet and JSONL files, in order.

    Raises:
        AgentPeftError: one cannot be read, holds more than ``MOST_ROWS`` or ``MOST_BYTES``, or a row that is
            no object.
    """
    rows: list[dict[str, Any]] = []
    for file in files:
        try:
            for row in _parquet_rows(file) if file.suffix == ".parquet" else _json_rows(file):
                if not isinstance(row, dict):
                    raise ValueError("a row is no object")
                if len(rows) == MOST_ROWS:
                    raise ValueError(f"there are more than {MOST_ROWS:,} rows")
                rows.append(row)
        except ImportError as error:
            raise AgentPeftError(
                f"{file.name}: reading parquet needs pyarrow: pip install 'agent-peft[datasets]'"
            ) from error
        except AgentPeftError:
            raise
        except Exception as error:  # pyarrow raises of many kinds
            raise AgentPeftError(
                f"{file}: cannot be read ({' '.join(str(error).split())[:200]}); remove it and fetch it again"
            ) from error
    return rows


def _json_rows(file: Path) -> Iterator[Any]:
    return (
        parse_json(line) for line in read_text(file, "a JSONL file", MOST_BYTES).split("\n") if line.strip()
    )


def _parquet_rows(file: Path) -> Iterator[Any]:
    """Batch by batch, each of which is within the bound even if all of its rows hold the largest text that
    the file can hold.
    """
    import pyarrow.parquet as parquet

    with parquet.ParquetFile(file) as table:
        groups = [table.metadata.row_group(number) for number in range(table.metadata.num_row_groups)]
        largest = max((group.total_byte_size for group in groups), default=0)
        _check_bytes(largest)
        read = 0
        for batch in table.iter_batches(batch_size=min(1000, max(1, MOST_BYTES // max(1, largest)))):
            read += batch.nbytes
            _check_bytes(read)
            yield from batch.to_pylist()


def _check_bytes(number: int) -> None:
    if number > MOST_BYTES:
        raise ValueError(f"its rows take more than {MOST_BYTES // MEGABYTE} MB")


def unpacked(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row whose structured values are structures, also where they were written as texts.

    >>> unpacked({"instruction": "[1]", "answer_info": {"direct": "[(1, 'a')]", "md5": None}})
    {'instruction': '[1]', 'answer_info': {'direct': [(1, 'a')], 'md5': None}}
    """
    return {key: _unpacked(key, value) for key, value in row.items()}


def _unpacked(key: str, value: Any) -> Any:
    if isinstance(value, str) and key in STRUCTURED:
        try:
            value = parse_json(value)
        except ValueError:
            try:
                value = ast.literal_eval(value)  # literals only: it runs nothing
            except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
                raise AgentPeftError(
                    f"{key}: {value[:40]!r} is neither JSON nor a literal; the set has changed"
                ) from error
    return unpacked(value) if isinstance(value, Mapping) else value


def _snapshot(repository: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repository, repo_type="dataset", allow_patterns=patterns))
    except Exception as error:  # the client lets through those of its transport, too
        cause = " ".join(str(error).split())[:200]
        raise AgentPeftError(
            f"{repository}: the hub does not give it ({type(error).__name__}: {cause}); check the name and the network"
        ) from error


def _found(snapshot: Path, patterns: Sequence[str], repository: str) -> list[Path]:
    """The files of the first pattern that has any."""
    for pattern in patterns:
        files = sorted(path for path in snapshot.glob(pattern) if path.suffix in SUFFIXES)
        if files:
            return files
    raise AgentPeftError(
        f"{repository}: holds no {' or '.join(SUFFIXES)} file like {' or '.join(patterns)}; the set has changed"
    )
