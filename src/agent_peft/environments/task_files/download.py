"""Downloading sets of tasks from the Hugging Face hub, and writing them as the files that environments read.

huggingface_hub comes with transformers; reading parquet needs pyarrow, the extra ``datasets``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from agent_peft.environments.task_files.reading import parse_literal
from agent_peft.files import MEGABYTE, parse_json, read_text, write_atomic
from agent_peft.hub import hub_or_cache, why_not_given
from agent_peft.lookup import install
from agent_peft.types import AgentPeftError


@dataclass(frozen=True)
class HubSet:
    """A set of tasks on the hub.

    >>> HubSet("openai/gsm8k", {"test.jsonl": "main/test*"}).files["test.jsonl"]
    'main/test*'
    """

    repository: str
    files: Mapping[str, str]  # our file -> the pattern of the repository's files that it is made from
    # keys whose values may be texts that hold JSON or a Python literal: parquet has no lists of mixed types
    structured: frozenset[str] = frozenset()


SUFFIXES = (".parquet", ".jsonl")
MAX_ROWS = 1_000_000
MAX_BYTES = 64 * MEGABYTE  # of a set's files, and of a file's rows: a small file may hold large texts


def download(hub_set: HubSet, folder: Path) -> list[Path]:
    """Fetch a set and write it into ``folder``. Return the files."""
    return convert(hub_set, _snapshot(hub_set.repository, list(hub_set.files.values())), folder)


def convert(hub_set: HubSet, snapshot: Path, folder: Path) -> list[Path]:
    """Write a set's files from a local copy of its repository."""
    for file, pattern in hub_set.files.items():
        files = _matching(snapshot, [pattern])
        if not files:
            raise AgentPeftError(
                f"{hub_set.repository}: holds no {' or '.join(SUFFIXES)} file like {pattern}; the set has "
                "changed"
            )
        rows = read_rows(files)
        path = folder / file
        try:
            text = _file_text(path, rows, hub_set.structured)
            text.encode()  # half of a character is in no file
        except (RecursionError, TypeError, ValueError) as error:  # a date or a set is not JSON
            raise AgentPeftError(
                f"{hub_set.repository}: {pattern} cannot be written as JSON ({error}); the set has changed"
            ) from error
        try:
            write_atomic(path, text)
        except OSError as error:
            raise AgentPeftError(
                f"{path}: cannot be written ({error.strerror}); name another folder"
            ) from error
    return [folder / file for file in hub_set.files]


def _file_text(path: Path, rows: Sequence[Mapping[str, Any]], structured: frozenset[str]) -> str:
    if path.suffix == ".jsonl":
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    entries = {
        str(row.get("sample_index", place)): unpacked(row, structured) for place, row in enumerate(rows)
    }
    if len(entries) < len(rows):
        raise ValueError("it holds one sample_index twice")
    return json.dumps(entries, ensure_ascii=False, indent=1) + "\n"


def hub_rows(repository: str, split: str) -> list[dict[str, Any]]:
    """The rows of one split of a hub id, of its configuration ``main`` where it has several."""
    forms = ("{place}{split}{suffix}", "{place}{split}-*{suffix}")  # train_extra.jsonl is another split
    patterns = [
        form.format(place=place, split=split, suffix=suffix)
        for place in ("main/", "data/", "")
        for suffix in SUFFIXES
        for form in forms
    ]
    files = _matching(_snapshot(repository, patterns), patterns)
    if not files:
        raise AgentPeftError(
            f"{repository}: holds no {' or '.join(SUFFIXES)} file of a split {split!r}, at its top, in main/ "
            "or in data/; give another split, or download a file and name that"
        )
    return read_rows(files)


def read_rows(files: Sequence[Path]) -> list[dict[str, Any]]:
    """The rows of parquet and JSONL files, in order; at most ``MAX_ROWS``, and ``MAX_BYTES`` a file."""
    rows: list[dict[str, Any]] = []
    for file in files:
        try:
            for row in _parquet_rows(file) if file.suffix == ".parquet" else _json_rows(file):
                if not isinstance(row, dict):
                    raise ValueError("a row is not an object")
                if len(rows) == MAX_ROWS:
                    raise ValueError(f"there are more than {MAX_ROWS:,} rows")
                rows.append(row)
        except ImportError as error:
            raise AgentPeftError(
                f"{file.name}: reading parquet needs pyarrow: {install('datasets')}"
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
        parse_json(line) for line in read_text(file, "a JSONL file", MAX_BYTES).split("\n") if line.strip()
    )


def _parquet_rows(file: Path) -> Iterator[Any]:
    """Batch by batch, each within the bound even if all of its rows hold the largest text of the file."""
    import pyarrow.parquet as parquet

    with parquet.ParquetFile(file) as table:
        groups = [table.metadata.row_group(number) for number in range(table.metadata.num_row_groups)]
        largest = max((group.total_byte_size for group in groups), default=0)
        _check_bytes(largest)
        read = 0
        for batch in table.iter_batches(batch_size=min(1000, max(1, MAX_BYTES // max(1, largest)))):
            read += batch.nbytes
            _check_bytes(read)
            yield from batch.to_pylist()


def _check_bytes(number: int) -> None:
    if number > MAX_BYTES:
        raise ValueError(f"its rows take more than {MAX_BYTES // MEGABYTE} MB")


def unpacked(row: Mapping[str, Any], structured: frozenset[str]) -> dict[str, Any]:
    """Parse the values of the structured keys where they are texts.

    >>> row = {"instruction": "[1]", "answer_info": {"direct": "[(1, 'a')]", "md5": None}}
    >>> unpacked(row, frozenset({"answer_info", "direct"}))
    {'instruction': '[1]', 'answer_info': {'direct': [(1, 'a')], 'md5': None}}
    """
    return {key: _unpacked(key, value, structured) for key, value in row.items()}


def _unpacked(key: str, value: Any, structured: frozenset[str]) -> Any:
    if isinstance(value, str) and key in structured:
        try:
            value = parse_literal(value)
        except ValueError as error:
            raise AgentPeftError(f"{key}: {value[:40]!r} is {error}; the set has changed") from error
    return unpacked(value, structured) if isinstance(value, Mapping) else value


def _snapshot(repository: str, patterns: list[str]) -> Path:
    """A local copy of the files that match a pattern. Sizes that the hub lists are checked first."""
    from huggingface_hub import snapshot_download

    try:
        with hub_or_cache():
            _check_size(repository, _sizes_on_hub(repository, patterns))
            folder = Path(snapshot_download(repository, repo_type="dataset", allow_patterns=patterns))
    except AgentPeftError:
        raise
    except Exception as error:  # the client lets through those of its transport, too
        raise AgentPeftError(
            f"{repository}: the hub does not give it ({why_not_given(error)}); check the name and the network"
        ) from error
    files = {file for pattern in patterns for file in folder.glob(pattern) if file.is_file()}
    _check_size(repository, [file.stat().st_size for file in files])
    return folder


def _sizes_on_hub(repository: str, patterns: list[str]) -> list[int]:
    """The bytes of each file that would be fetched; none if the hub does not list them (no network)."""
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    try:
        tree = HfApi().list_repo_tree(repository, recursive=True, repo_type="dataset")
        sizes = {entry.path: entry.size for entry in tree if isinstance(entry, RepoFile)}
    except Exception:  # fetching says what is wrong, or finds the files in the cache
        return []
    return [size for path, size in sizes.items() if any(fnmatch(path, pattern) for pattern in patterns)]


def _check_size(repository: str, sizes: Sequence[int]) -> None:
    if sum(sizes) > MAX_BYTES:
        raise AgentPeftError(
            f"{repository}: its files take {sum(sizes) / MEGABYTE:,.0f} MB, and {MAX_BYTES // MEGABYTE} MB "
            "is the most that is read; take a part of them into a file, and name that"
        )


def _matching(snapshot: Path, patterns: Sequence[str]) -> list[Path]:
    """The files of the first pattern that has any."""
    matching = (
        sorted(path for path in snapshot.glob(pattern) if path.suffix in SUFFIXES) for pattern in patterns
    )
    return next(filter(None, matching), [])
