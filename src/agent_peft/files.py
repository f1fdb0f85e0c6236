"""Reading and writing files.

Files of others are read only if they are regular and not larger than a limit; every fault is an error of one
line. Our files are whole or absent, whenever the process is killed: written aside, synced, renamed.
"""

from __future__ import annotations

import codecs
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agent_peft.types import AgentPeftError

MEGABYTE = 1 << 20
MAX_JSONL_BYTES = 1 << 30


def read_bytes(path: Path, what: str, limit: int) -> bytes:
    """Return the content of a regular file. A pipe, a device or a folder is refused without waiting for it.

    Args:
        what: the expected kind of file, for the messages: ``a YAML file``.
        limit: the largest size, in bytes.

    Raises:
        AgentPeftError: it cannot be read, is no regular file, or is larger than ``limit``.
    """
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise AgentPeftError(f"{path}: is no regular file; give the path of {what}")
            content = file.read(limit + 1)
    except OSError as error:
        raise AgentPeftError(f"{path}: cannot be read ({error.strerror}); give the path of {what}") from error
    except ValueError as error:  # a NUL in the path
        raise AgentPeftError(f"{str(path)!r}: cannot be read ({error}); give the path of {what}") from error
    if len(content) > limit:
        raise AgentPeftError(
            f"{path}: is larger than {limit / MEGABYTE:g} MB, which is the most that is read; give {what} "
            "that is smaller"
        )
    return content


def read_text(path: Path, what: str, limit: int) -> str:
    """Return the content of a regular file as text, without a byte order mark: UTF-8, or UTF-16 with a mark.

    Raises:
        AgentPeftError: as ``read_bytes``, or it is neither.
    """
    content = read_bytes(path, what, limit)
    encoding = "utf-16" if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        line, byte = content.count(b"\n", 0, error.start) + 1, content[error.start]
        raise AgentPeftError(
            f"{path}: line {line}: is not UTF-8 text (byte 0x{byte:02x}); save the file as UTF-8, or give "
            f"the path of {what}"
        ) from error


def check_regular(folder: Path) -> None:
    """Check a folder before a library reads it, since a library would wait for a pipe.

    Raises:
        AgentPeftError: something in the folder is neither a regular file nor a folder.
    """
    for path in folder.iterdir() if folder.is_dir() else ():
        if not path.is_file() and not path.is_dir():
            raise AgentPeftError(f"{path}: is no regular file; remove it")


def parse_json(text: str | bytes) -> Any:
    """Parse JSON that can be written again: its nesting is not too deep, and no text holds half a character.

    Raises:
        ValueError: the text is not JSON, or cannot be written again.

    >>> parse_json('{"a": [1]}')
    {'a': [1]}
    """
    try:
        content = json.loads(text)
        json.dumps(content, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("brackets are nested too deeply") from error
    except UnicodeEncodeError as error:
        raise ValueError("a text holds half of a character, a lone surrogate") from error
    return content


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # else opening a pipe waits until somebody writes


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file, text as UTF-8; if the process is killed, the old file stays whole. The folder is made if
    needed. A link at the path is replaced, not followed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.aside")
    aside.unlink(missing_ok=True)  # left by a process that was killed
    with open(aside, "xb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    sync(path.parent)


def write_json_atomic(path: Path, content: Any) -> None:
    """Write indented JSON as ``write_atomic`` does.

    Raises:
        ValueError: the content is not fit for JSON, such as an infinite number. The file stays as it was.
    """
    write_atomic(path, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def truncate_jsonl(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Keep the lines whose record ``keep`` accepts, byte for byte. A torn last line is removed, and a missing
    file stays missing.

    Raises:
        AgentPeftError: a line before the last is not a JSON object that ``keep`` can read (it raises KeyError
            or TypeError).
    """
    if not path.exists():
        return
    lines = read_bytes(path, "a JSONL file", MAX_JSONL_BYTES).splitlines(keepends=True)
    accepted = []
    for number, line in enumerate(lines, start=1):
        try:
            record = parse_json(line)
            if not isinstance(record, dict):
                raise ValueError("not an object")
            if keep(record) and line.endswith(b"\n"):
                accepted.append(line)
        except (KeyError, TypeError, ValueError) as error:
            if number < len(lines):
                raise AgentPeftError(
                    f"{path}:{number}: is no record of a step; repair or remove the line"
                ) from error
    if accepted != lines:
        write_atomic(path, b"".join(accepted).decode("utf-8"))


def sync(path: Path) -> None:
    """Wait until a file, or the list of names in a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
