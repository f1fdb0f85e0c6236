"""Files. Those that others have made are read only if they are regular and no larger than they may be, and
every fault is told in one line; those that we make are whole or absent, whenever the process is killed:
written aside, synced, renamed.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from agent_peft.types import AgentPeftError

MEGABYTE = 1 << 20


def read_bytes(path: Path, what: str, limit: int) -> bytes:
    """The content of a regular file. A pipe, a device or a folder is refused without waiting for it.

    Args:
        what: what the path should lead to, for the messages: ``a YAML file``.
        limit: bytes.

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
            f"{path}: is larger than {limit / MEGABYTE:g} MB, which is the most that is read; give {what} that is smaller"
        )
    return content


def read_text(path: Path, what: str, limit: int) -> str:
    """The same as text, without a byte order mark.

    Raises:
        AgentPeftError: as ``read_bytes``, or it is not UTF-8.
    """
    try:
        return read_bytes(path, what, limit).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise AgentPeftError(f"{path}: is not UTF-8 text; give the path of {what}") from error


def check_regular(folder: Path) -> None:
    """For what a library is to read, which would wait for a pipe.

    Raises:
        AgentPeftError: something in the folder is neither a regular file nor a folder.
    """
    for path in folder.iterdir() if folder.is_dir() else ():
        if not path.is_file() and not path.is_dir():
            raise AgentPeftError(f"{path}: is no regular file; remove it")


def parse_json(text: str | bytes) -> Any:
    """What a JSON text says. It is fit to be written again: no nesting that is too deep, and no half of a
    character.

    Raises:
        ValueError: it is not JSON, or not fit.

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
    return os.open(path, flags | os.O_NONBLOCK)  # or a pipe would be waited for until somebody writes


def write_atomic(path: Path, text: str) -> None:
    """Write the file, or, if killed, leave what was there. Its folder is made. A link at its place, or
    aside, is replaced, not followed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.aside")
    aside.unlink(missing_ok=True)  # left by a process that was killed
    with open(aside, "x", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
