"""The files that an agent left: opened before it acts, read when all its processes have ended.

Programs of the host read them, in the machine's user namespace, so that they may read whatever its root may.
Nothing of the machine is executed.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_peft.sandbox.base import MachineLost
from agent_peft.sandbox.base_image import SYSTEM, BaseImage
from agent_peft.sandbox.inspection import LIBRARIES, PROGRAMS, is_hidden, words_of
from agent_peft.sandbox.links import escaping
from agent_peft.sandbox.machine import Machine

_SECONDS = 60.0
_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}
# The file systems of a machine that hold changes
TREES = {"": b"/", "usr": b"/usr/", "dev/shm": b"/dev/shm/"}
_OURS = {b"/usr", b"/proc", b"/dev", b"/sys", *(f"/{name}".encode() for name in SYSTEM)}  # never copied
# Type, starting point, path below it, target of a link, time of the last change, each ended by "\0"
_LIST = 'find "$@" -xdev -printf "%y\\0%H\\0%P\\0%l\\0%C@\\0"'
_PACK = (
    'cd "$1" && ulimit -f "$2" && tar --create --format=posix --numeric-owner --sparse --acls --xattrs '
    "--no-recursion --null --verbatim-files-from --files-from=-"
)
_UNPACK = 'cd "$1" && tar --extract --no-same-owner'


@dataclass(frozen=True)
class _Entry:
    kind: bytes  # as find prints it: f, d, l, …
    path: bytes  # absolute in the machine
    target: bytes  # of a link
    changed: bytes  # seconds since 1970


class Frozen:
    """The file systems of a machine. They outlive it, and nothing can write to them once it has ended."""

    def __init__(self, machine: Machine, image: BaseImage) -> None:
        """Open them, before anything of the agent runs. Raises `MachineLost`: the machine has ended."""
        self._image = image
        self._kilobytes = machine.limits.memory_mb << 10  # twice as much as the files of a machine
        self._opened: list[int] = []
        first = machine.processes.first
        try:
            self._user = self._open(f"/proc/{first}/ns/user", os.O_RDONLY)
            flags = os.O_PATH | os.O_DIRECTORY
            self._trees = {name: self._open(f"/proc/{first}/root/{name}", flags) for name in TREES}
        except OSError as error:
            self.close()
            raise MachineLost(f"the machine has ended: {error}") from error

    def close(self) -> None:
        for descriptor in self._opened:
            os.close(descriptor)
        self._opened = []

    def choose(self, script: str) -> tuple[list[bytes], list[bytes]]:
        """List what an inspection by ``script`` sees of the agent's.

        Returns:
            the absolute paths of the files that were made or changed, and of those that were deleted.

        Raises:
            MachineLost: the files cannot be read.
        """
        entries = self._list(_of_usr(script))
        refused = escaping({each.path: each.target for each in entries if each.kind == b"l"})
        known = self._image.known
        changed = [
            each.path
            for each in entries
            if each.kind != b"s"  # its listener has ended
            and each.path not in refused
            and each.path not in _OURS
            and self._image.known_of(each.path) != (_nanoseconds(each.changed), each.kind == b"d")
            and not is_hidden(os.fsdecode(each.path), script)
        ]
        kinds = {each.path: each.kind == b"d" for each in entries}
        gone = [
            path
            for path, (_, is_folder) in known.items()
            if kinds.get(path) != is_folder and path not in _OURS and not is_hidden(os.fsdecode(path), script)
        ]
        return changed, gone

    def links(self) -> dict[bytes, bytes]:
        """Return all symbolic links: their absolute paths and targets."""
        return {each.path: each.target for each in self._list(["local"]) if each.kind == b"l"}

    def unlink(self, path: bytes) -> None:
        """Remove a file. No folder on the way may be a link. Raises `OSError`: it cannot be removed."""
        tree, below = _place(path)
        *folders, name = below.split(b"/")
        here = os.dup(self._trees[tree])
        flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            for folder in folders:
                above, here = here, os.open(folder, flags, dir_fd=here)
                os.close(above)
            os.unlink(name, dir_fd=here)
        finally:
            os.close(here)

    def pack(self, tree: str, paths: Iterable[bytes], output: int) -> bool:
        """Write a tar of those paths that lie in a tree to a file. Return whether there are any."""
        below = [place[1] for place in map(_place, paths) if place[0] == tree]
        if below:
            self._run(_PACK, [self._trees[tree]], b"\0".join(below), output, str(self._kilobytes))
            os.lseek(output, 0, os.SEEK_SET)
        return bool(below)

    def unpack(self, tree: str, paths: Iterable[bytes], folder: Path) -> None:
        """Copy those paths that lie in a tree to a folder of the host that belongs to the machine's root."""
        with ExitStack() as stack:
            target = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, target)
            content = in_memory(b"", stack)
            self.pack(tree, paths, content)
            self._run(_UNPACK, [target], content, subprocess.DEVNULL)

    def _list(self, of_usr: Sequence[str]) -> list[_Entry]:
        """List the files of the machine, of /usr only what is below ``of_usr``."""
        starts = {f"/proc/self/fd/{self._trees[name]}/.": TREES[name] for name in ("", "dev/shm")}
        usr = f"/proc/self/fd/{self._trees['usr']}"
        starts |= {f"{usr}/{name}": b"/usr/" + os.fsencode(name) for name in of_usr}
        above = {os.fsencode(start): path.rstrip(b"/") for start, path in starts.items()}
        fields = self._run(_LIST, (), b"", subprocess.PIPE, *starts).split(b"\0")[:-1]
        return [
            _Entry(kind, above[start] + (b"/" + path if path else b""), target, changed)
            for kind, start, path, target, changed in zip(*(iter(fields),) * 5, strict=True)
            if path or start.startswith(os.fsencode(usr))
        ]

    def _run(
        self, script: str, folder: Sequence[int], given: bytes | int, output: int, *arguments: str
    ) -> bytes:
        """Run a bash script of the host in the machine's user namespace, with a folder's descriptor as its
        first argument.
        """
        enter = ["nsenter", f"--user=/proc/self/fd/{self._user}"]
        keep = ["--preserve-credentials"] if os.geteuid() != 0 else []
        bash = ["/bin/bash", "--noprofile", "--norc", "-c", script, "bash"]
        arguments = (*(f"/proc/self/fd/{each}" for each in folder), *arguments)
        source: Any = {"input": given} if isinstance(given, bytes) else {"stdin": given}
        try:
            done = subprocess.run(
                [*enter, *keep, *bash, *arguments],
                **source,
                stdout=output,
                stderr=subprocess.DEVNULL,  # a file that cannot be read is left out
                timeout=_SECONDS,
                pass_fds=(self._user, *self._trees.values(), *folder),
                env=_ENVIRONMENT,
                cwd="/",
            )
        except subprocess.TimeoutExpired as error:
            raise MachineLost("the files of a machine take too long to read") from error
        return done.stdout or b""

    def _open(self, path: str, flags: int) -> int:
        descriptor = os.open(path, flags | os.O_CLOEXEC)
        self._opened.append(descriptor)
        return descriptor


def _of_usr(script: str) -> list[str]:
    """List the paths of /usr where an inspection may see files of the agent, relative to /usr."""
    of_host = {name for folder in PROGRAMS for name in os.listdir(f"/usr/{folder}")}
    named = sorted(words_of(script) - of_host - {".", ".."})
    programs = [f"{folder}/{name}" for folder in PROGRAMS for name in named]
    folders = [name for name in named if not os.path.lexists(f"/usr/{name}") and name not in LIBRARIES]
    return ["local", "src", *programs, *folders]


def _place(path: bytes) -> tuple[str, bytes]:
    """Return the tree of an absolute path, and the path relative to the tree."""
    tree = next(name for name in ("usr", "dev/shm", "") if path.startswith(TREES[name]))
    return tree, path.removeprefix(TREES[tree])


def in_memory(content: bytes, stack: ExitStack) -> int:
    """Open a file in memory with this content, positioned at its beginning, until ``stack`` closes it."""
    descriptor = os.memfd_create("content", os.MFD_CLOEXEC)
    stack.callback(os.close, descriptor)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _nanoseconds(seconds: bytes) -> int:
    whole, _, fraction = seconds.partition(b".")
    return int(whole) * 10**9 + int(fraction[:9].ljust(9, b"0"))
