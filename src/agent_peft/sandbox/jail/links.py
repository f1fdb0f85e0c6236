"""Symbolic links whose target differs from process to process: those into ``/proc`` and ``/dev``.

During an inspection such a link would show a program its own command line, or the text that a file is
compared with. Hence they are removed.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator

_MAX_LINKS = 40  # links that the kernel follows in one path
# The same for every process
_HARMLESS = re.compile(
    r"/dev/(null|zero|full|random|urandom|shm(/.*)?)"
    r"|/proc/(cpuinfo|meminfo|version|uptime|loadavg|filesystems|stat|devices|cmdline)"
)


def escapes(path: str, target: str) -> bool:
    """Whether a link at ``path`` leads to something that differs from process to process, if no other link is
    on the way.

    >>> escapes("/srv/a", "../proc/self/cmdline"), escapes("/srv/a", "/dev/null")
    (True, False)
    """
    full = os.path.normpath(os.path.join(os.path.dirname(path), target))
    return re.match(r"/+(proc|dev)(/|$)", full) is not None and _HARMLESS.fullmatch(full) is None


def links_in(*trees: tuple[str, str]) -> list[bytes]:
    """List the symbolic links below some folders. Folders that are too deep to be opened are left out.

    Args:
        trees: pairs of a folder and the path by which the machine knows it.
    """
    return [os.fsencode(name) + path for folder, name in trees for path in _links(os.fsencode(folder))]


def remove_escaping(paths: Iterable[bytes]) -> None:
    """Remove those links that lead into /proc or /dev. The root must be that of the inspection."""
    for path in [path for path in paths if _follows_out(path)]:
        # Another link on the way may be removed already
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(path)


def _links(folder: bytes) -> Iterator[bytes]:
    waiting = [b""]
    while waiting:
        parent = waiting.pop()
        try:
            entries = list(os.scandir(folder + parent))
        except OSError:  # too deep: no path leads there
            continue
        for entry in entries:
            path = parent + b"/" + entry.name
            if entry.is_symlink():
                yield path
            elif entry.is_dir(follow_symlinks=False):
                waiting.append(path)


def _follows_out(path: bytes) -> bool:
    """Whether following a link passes through /proc or /dev, wherever it ends. Links are followed as in the
    kernel, but also beyond a part that does not exist yet.
    """
    done, waiting, followed = b"", path.split(b"/")[::-1], 0
    while waiting:
        part = waiting.pop()
        if part in (b"", b"."):
            continue
        if part == b"..":
            done = done.rpartition(b"/")[0]
            continue
        here = done + b"/" + part
        if here == b"/dev" and waiting and waiting[-1] == b"shm":  # ordinary files of the machine
            done = here
            continue
        if here in (b"/proc", b"/dev"):
            rest = b"/".join([here, *(each for each in reversed(waiting) if each not in (b"", b"."))])
            return _HARMLESS.fullmatch(os.fsdecode(rest)) is None
        try:
            target = os.readlink(here)
        except OSError:
            done = here
            continue
        followed += 1
        if followed > _MAX_LINKS:
            return False  # the kernel stops here
        if target.startswith(b"/"):
            done = b""
        waiting += target.split(b"/")[::-1]
    return False
