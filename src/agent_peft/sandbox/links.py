"""Symbolic links whose target differs from process to process: those into ``/proc`` and ``/dev``.

During an inspection such a link would show a program its own command line, or the text that a file is
compared with. Hence they are removed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

_MAX_LINKS = 40  # links that the kernel follows in one path
# The same for every process
_HARMLESS = re.compile(
    r"/dev/(null|zero|full|random|urandom|shm(/.*)?)"
    r"|/proc/(cpuinfo|meminfo|version|uptime|loadavg|filesystems|stat|devices|cmdline)"
)


def escaping(links: Mapping[bytes, bytes]) -> set[bytes]:
    """List those of a machine's links that lead into /proc or /dev, wherever they end. They are followed as
    in the kernel, but also beyond a part that does not exist yet. ``links``: all symbolic links of the
    machine: absolute paths and targets.

    >>> sorted(escaping({b"/srv/a": b"/here/self/cmdline", b"/here": b"proc", b"/srv/b": b"a.txt"}))
    [b'/here', b'/srv/a']
    """
    return {path for path in links if _follows_out(path, links)}


def _follows_out(path: bytes, links: Mapping[bytes, bytes]) -> bool:
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
        target = links.get(here)
        if target is None:
            done = here
            continue
        followed += 1
        if followed > _MAX_LINKS:
            return False  # the kernel stops here
        if target.startswith(b"/"):
            done = b""
        waiting += target.split(b"/")[::-1]
    return False
