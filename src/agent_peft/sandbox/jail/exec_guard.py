"""What an evaluation executes of the agent's runs as another user, from whom the rest of the evaluation is
hidden.

The kernel asks process 1 before each ``execve`` of the evaluation (a filter that notifies:
seccomp_unotify(2)). Where the program, or a script that a shell or interpreter is given, is not the host's,
another path is put in place of the one that was asked for: that of a launcher, which gives up root's user and
goes on with what was asked for. Nothing of the agent's has run in that process before, so nobody changes the
path behind our back; what has run as the other user is not asked about again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import posixpath
import re
import signal
import stat
import struct
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from agent_peft.sandbox.jail import processes, syscalls

# in the evaluation's view: a file for each process that is to be launched, which holds the path it asked for
PLACE = "/_d"
LAUNCHER = "/_"  # so short that it fits where any path was
_USER = 65533  # nobody's, and not even his
# It may read and write files as root's would; it may not signal, trace or look into processes of root's.
_GIVE_UP = "--inh-caps=-all,+dac_override --ambient-caps=-all,+dac_override --bounding-set=-all,+dac_override"
_NOTIF, _RESPONSE = struct.Struct("=QIIiIQ6Q"), struct.Struct("=QqiI")
_RECV, _SEND = 0xC0502100, 0xC0182101
_CONTINUE = 1
_EACCES = 13
_SHELLS = re.compile(r"(ba|da|z|k|mk|a|c|tc|fi)?sh")
_INTERPRETERS = re.compile(
    r"(python|perl|ruby|node|nodejs|php|lua|tclsh|expect|make|gmake|java|gdb|bc|dc)[0-9.]*"
)
_WITH_FILE = re.compile(
    r"[gm]?awk|sed|ed|ex|vi|vim.*"
)  # take a program from a file only where an option says so
_CODE = re.compile(rb"-[a-zA-Z]*[ce]|-E")  # what follows is a program; a file's name behind it is not
_FILE = re.compile(rb"-[fSu]|--file|--exec")
# They run what their arguments say. Other programs that ask for a shell may have its words out of a file.
_RUNNERS = re.compile(
    r"((ba|da)?sh|timeout|env|nice|nohup|setsid|stdbuf|xargs|find|su|time)|(python|perl)[0-9.]*"
)
_MOST_ARGUMENTS, _MOST_PATH = 64, 4096
_MOST_ROUNDS = 50  # of killing what forks anew


def launcher(single_id: bool) -> str:
    user = "" if single_id else f"--reuid={_USER} --regid={_USER} --clear-groups "
    caps = "--inh-caps=-all --ambient-caps=-all --bounding-set=-all" if single_id else _GIVE_UP
    return f'#!/bin/bash -p\nIFS= read -r -d "" path <{PLACE}/$$ || exit 126\nexec setpriv {user}{caps} -- "$path" "$@"\n'


class ExecGuard:
    """Answers for one evaluation's processes."""

    def __init__(self, listener: int, folder: str, remove_links: Callable[[], None]) -> None:
        """Args:
        listener: the descriptor that the kernel's questions come from.
        folder: where this process sees ``PLACE``.
        remove_links: takes away what was made meanwhile and would show root's programs their own arguments.
        """
        self.listener, self._folder, self._remove_links = listener, folder, remove_links
        self._launching: set[int] = set()
        self._launched: set[int] = set()
        self._all = syscalls.mask_of(syscalls.CAPABILITIES)

    def answer(self) -> bool:
        """Answer one question. Returns False when there will be no more."""
        buffer = bytearray(_NOTIF.size)
        try:
            fcntl.ioctl(self.listener, _RECV, buffer)
        except FileNotFoundError:  # who asked is gone
            return True
        except OSError:
            return False
        identifier, pid, _, _, _, _, *arguments = _NOTIF.unpack(buffer)
        error, flags = 0, _CONTINUE
        try:
            if not self._allow(pid, arguments, buffer):
                error, flags = -_EACCES, 0
        except (
            OSError,
            struct.error,
            ValueError,
        ):  # who asked is gone, or what it asked for cannot be read: it shall not run
            error, flags = -_EACCES, 0
        with contextlib.suppress(OSError):  # who asked is gone
            fcntl.ioctl(self.listener, _SEND, _RESPONSE.pack(identifier, 0, error, flags))
        return True

    def _allow(self, pid: int, arguments: Sequence[int], question: bytearray) -> bool:
        if not _is_roots(pid, self._all):
            return True  # it is another user's already
        if pid in self._launching:
            self._launching.discard(pid)
            return True
        if self._launched:
            self._clean_up()
        number = struct.unpack_from("=i", question, 16)[0]
        with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
            if number == syscalls.exec_numbers()[1]:  # execveat: only as execve can
                return False
            path = _text(memory.fileno(), arguments[0])
            words = _words(memory.fileno(), arguments[1])
            if not self._is_agents(pid, path, words):
                return True
            if len(path) < len(LAUNCHER):
                return False
            with open(f"{self._folder}/{pid}", "wb") as file:
                file.write(path + b"\0")
            os.pwrite(memory.fileno(), LAUNCHER.encode() + b"\0", arguments[0])
        self._launching.add(pid)
        self._launched.add(pid)
        return True

    def _clean_up(self) -> None:
        """Between what ran as the other user and root's next program: end what it left running, and take
        away links that it made.
        """
        for _ in range(_MOST_ROUNDS):
            others = {each.pid for each in processes.living() if _is_other(each.pid)}
            if not others or others & self._launched:  # what root waits for, or pipes from, goes on
                break
            processes.signal_each(signal.SIGKILL, others)
        self._remove_links()

    def _is_agents(self, pid: int, path: bytes, words: Sequence[bytes]) -> bool:
        root = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_CLOEXEC)
        try:
            place = os.fsencode(os.readlink(f"/proc/{pid}/cwd"))
            found = _resolve(root, posixpath.join(place, path))
            if found is None:
                return False  # the kernel will say so
            if not _is_hosts(found):
                return True
            name = os.path.basename(found)
            if _SHELLS.fullmatch(name) and not _RUNNERS.fullmatch(
                os.path.basename(os.readlink(f"/proc/{pid}/exe"))
            ):
                return True
            for word in _programs(name, words[1:]):
                given = _resolve(root, posixpath.join(place, word))
                if given is not None and not _is_hosts(given) and _is_file(root, given):
                    return True
            return False
        finally:
            os.close(root)


def _programs(name: str, words: Sequence[bytes]) -> Iterator[bytes]:
    """Of the arguments of a program, those that may name a file that it takes orders from."""
    if _WITH_FILE.fullmatch(name):
        for before, word in pairwise(words):
            if _FILE.fullmatch(before):
                yield word
            yield from [word.partition(b"=")[2]] if word.startswith(b"--file=") else []
    elif _SHELLS.fullmatch(name) or _INTERPRETERS.fullmatch(name):
        for word in words:
            if _CODE.fullmatch(word):
                return
            if word and not word.startswith(b"-"):
                yield word


def _is_hosts(path: str) -> bool:
    """What the host has in /usr is the host's there, whatever the agent wrote; all else is not."""
    return path.startswith("/usr/") and not path.startswith("/usr/local/") and os.path.lexists(path)


def _is_file(root: int, path: str) -> bool:
    descriptor = syscalls.open_in(root, path, os.O_PATH)
    try:
        return stat.S_ISREG(os.fstat(descriptor).st_mode)
    finally:
        os.close(descriptor)


def _resolve(root: int, path: bytes) -> str | None:
    """The path of what ``path`` leads to in another process's root, None where that is nothing."""
    try:
        descriptor = syscalls.open_in(root, os.fsdecode(path), os.O_PATH)
    except OSError:
        return None
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def _text(memory: int, address: int) -> bytes:
    found = b""
    while b"\0" not in found and len(found) < _MOST_PATH:
        # A page at a time: what lies behind the text need not be there
        piece = os.pread(memory, 4096 - (address + len(found)) % 4096, address + len(found))
        if not piece:
            break
        found += piece
    return found.partition(b"\0")[0]


def _words(memory: int, address: int) -> list[bytes]:
    words = []
    for i in range(_MOST_ARGUMENTS if address else 0):
        (pointer,) = struct.unpack("=Q", os.pread(memory, 8, address + 8 * i))
        if pointer == 0:
            break
        words.append(_text(memory, pointer))
    return words


def _credentials(pid: int) -> tuple[int, int]:
    """The user and the permitted capabilities of a process."""
    with open(f"/proc/{pid}/status", "rb") as file:
        text = file.read()
    user, permitted = (re.search(rb"^%s:\s*(\S+)" % name, text, re.MULTILINE) for name in (b"Uid", b"CapPrm"))
    if user is None or permitted is None:
        raise ProcessLookupError(3, "no such process")
    return int(user[1]), int(permitted[1], 16)


def _is_roots(pid: int, capabilities: int) -> bool:
    return _credentials(pid) == (0, capabilities)


def _is_other(pid: int) -> bool:
    """Whether a process is one that was launched, or begun by one."""
    try:
        user, capabilities = _credentials(pid)
    except OSError:  # it has ended
        return False
    return user == _USER or (user, capabilities) == (0, 0)
