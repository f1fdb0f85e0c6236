"""Reading and writing files.

Files are read only if they are regular and not larger than a limit; every fault is an error of one line.
A run directory may come from a stranger: what a run reads or writes there is opened without following links.
Files that we write are whole or absent, whenever the process is killed: written aside, synced, renamed.
"""

from __future__ import annotations

import codecs
import errno
import fcntl
import json
import math
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from agent_peft.types import AgentPeftError

MEGABYTE = 1 << 20
MAX_JSONL_BYTES = 1 << 30


@contextmanager
def _folder(path: Path, unlinked: int) -> Iterator[int]:
    """A descriptor of a folder, none of whose last ``unlinked`` names is a link."""
    at = max(len(path.parts) - unlinked, 0)
    place = os.open(Path(*path.parts[:at]), os.O_DIRECTORY)
    try:
        for name in path.parts[at:]:
            inside = os.open(name, os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=place)
            os.close(place)
            place = inside
        yield place
    finally:
        os.close(place)


def open_regular(path: Path, flags: int = os.O_RDONLY, unlinked: int = 1) -> int:
    """Return a descriptor of a regular file. A pipe, a device or a folder is refused without waiting for it.

    Args:
        unlinked: how many of the path's last names must not be links: 1 is the file itself, 2 is also its
            folder, and so on; 0 follows links.

    Raises:
        OSError: it cannot be opened, is not such a file, or is to be written and has other names.
    """
    # without O_NONBLOCK, opening a pipe waits until somebody writes
    flags |= os.O_NONBLOCK | (os.O_NOFOLLOW if unlinked else 0)
    try:
        if unlinked < 2:  # the folder need not be readable
            descriptor = os.open(path, flags, 0o666)
        else:
            with _folder(path.parent, unlinked - 1) as folder:
                descriptor = os.open(path.name, flags, 0o666, dir_fd=folder)
    except OSError as error:
        link = unlinked and path.is_symlink()
        cause = "it is a link, which is not followed" if link else error.strerror
        raise OSError(error.errno, cause, str(path)) from error
    status = os.fstat(descriptor)
    fault = None if stat.S_ISREG(status.st_mode) else "it is not a regular file"
    if fault is None and flags & (os.O_WRONLY | os.O_RDWR) and status.st_nlink != 1:
        fault = "it has other names (hard links), whose content would change, too"
    if fault is not None:
        os.close(descriptor)
        raise OSError(errno.EINVAL, fault, str(path))
    return descriptor


@contextmanager
def opened(path: Path, unlinked: int = 1) -> Iterator[Path]:
    """A path at which a library finds the regular file that is at ``path`` now.

    Raises:
        OSError: as ``open_regular``.
    """
    descriptor = open_regular(path, unlinked=unlinked)
    try:
        yield Path(f"/dev/fd/{descriptor}")
    finally:
        os.close(descriptor)


@contextmanager
def locked(path: Path, wait: bool = False) -> Iterator[None]:
    """Inside, this process holds the lock of a file, which is made if needed.

    Raises:
        BlockingIOError: another process holds it, and ``wait`` is false.
        OSError: the file cannot be made, or is not a regular one of one name.
    """
    descriptor = open_regular(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked process may hold a copy of the descriptor
        os.close(descriptor)


def read_bytes(path: Path, what: str, limit: int, unlinked: int = 0) -> bytes:
    """Return the content of a regular file, as ``open_regular`` opens it.

    Args:
        what: the expected kind of file, for the messages: ``a YAML file``.
        limit: the largest size, in bytes.
    """
    try:
        with open(open_regular(path, unlinked=unlinked), "rb") as file:
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


def read_text(path: Path, what: str, limit: int, unlinked: int = 0) -> str:
    """Return a regular file as text, without a byte order mark: UTF-8, or UTF-16 with a mark."""
    content = read_bytes(path, what, limit, unlinked)
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
    """Check a folder before a library reads it, since a library would wait for a pipe. Links are allowed in
    the cache of the hub and in folders that a user has put together, and not in a run directory.
    """
    if folder.parent.name == "checkpoints" or folder.name == "start":
        check_tree(folder)
    for path in folder.iterdir() if folder.is_dir() else ():
        if not path.is_file() and not path.is_dir():
            raise AgentPeftError(f"{path}: is not a regular file; remove it")


def check_tree(path: Path, depth: int = 8) -> None:
    """Check that a path, and everything in it if it is a folder, is a regular file or a folder. A path at
    which there is nothing passes.

    Args:
        depth: how many levels of folders may hold others. What is deeper is not looked at.
    """
    try:
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            raise AgentPeftError(
                f"{path}: is a link, which is not followed; put what it leads to in its place, or remove it"
            )
        if not stat.S_ISDIR(mode):
            if not stat.S_ISREG(mode):
                raise AgentPeftError(f"{path}: is not a regular file; remove it")
            return
        with os.scandir(path) as entries:
            inside = [entry.name for entry in entries if not entry.is_file(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):  # also where a run removes a file meanwhile
        return
    except OSError as error:
        raise AgentPeftError(f"{path}: cannot be read ({error.strerror}); remove it") from error
    for name in sorted(inside) if depth else ():
        check_tree(path / name, depth - 1)


def unique_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """The ``object_pairs_hook`` of ``json`` for a text of which two readers must not read two things.

    Raises:
        ValueError: an object has two equal keys.

    >>> json.loads('{"a": 1}', object_pairs_hook=unique_keys)
    {'a': 1}
    """
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        name = next(name for name in content if names.count(name) > 1)
        raise ValueError(f"an object has the key {name!r:.80} twice")
    return content


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


def finite(value: Any, instead: Callable[[float], Any]) -> Any:
    """JSON values, with ``instead`` of each number that is not finite, which JSON lacks.

    >>> finite({"a": [1.5, math.inf]}, instead=str)
    {'a': [1.5, 'inf']}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else instead(value)
    if isinstance(value, Mapping):
        return {str(name): finite(one, instead) for name, one in value.items()}
    return [finite(one, instead) for one in value] if isinstance(value, list | tuple) else value


def write_atomic(path: Path, content: str | bytes, unlinked: int = 1) -> None:
    """Write a file, text as UTF-8; if the process is killed, the old file stays whole. The folder is made if
    needed.

    Args:
        unlinked: as of ``open_regular``, at least 1.

    Raises:
        OSError: it cannot be written, or something else than a regular file is there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = f".{path.name}.aside"
    with _folder(path.parent, unlinked - 1) as folder:
        with suppress(FileNotFoundError):
            mode = os.stat(path.name, dir_fd=folder, follow_symlinks=False).st_mode
            if not stat.S_ISREG(mode):
                kind = "a link" if stat.S_ISLNK(mode) else "no regular file"
                raise OSError(errno.EEXIST, f"there is {kind} in its place; remove it", str(path))
        with suppress(FileNotFoundError):
            os.unlink(aside, dir_fd=folder)  # left by a process that was killed
        made = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=folder)
        with open(made, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        os.fsync(folder)


def write_json_atomic(path: Path, content: Any, unlinked: int = 1) -> None:
    """Write indented JSON as ``write_atomic`` does.

    Raises:
        ValueError: the content is not fit for JSON, such as an infinite number. The file stays as it was.
    """
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_atomic(path, text, unlinked)


def truncate_jsonl(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Keep the lines whose record ``keep`` accepts, byte for byte. A torn last line is removed, and a missing
    file stays missing.
    """
    if not path.exists():
        return
    lines = read_bytes(path, "a JSONL file", MAX_JSONL_BYTES, unlinked=1).splitlines(keepends=True)
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
                    f"{path}:{number}: is not a record of a step; repair or remove the line"
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
