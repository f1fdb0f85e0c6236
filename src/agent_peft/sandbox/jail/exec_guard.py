"""Programs of the agent that an inspection executes run as another user, from whom the inspection is hidden.

The kernel asks process 1 before each ``execve`` of the inspection (a filter that notifies:
seccomp_unotify(2)). If the program is not the host's, or if a shell or interpreter is given a script that is
not the host's, process 1 replaces the path by that of a launcher. The launcher gives up root's user and
continues with the original path. No code of the agent has run in that process before, so that it cannot
change the path meanwhile. The kernel does not ask again about processes of the other user.
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

from agent_peft.sandbox.jail import processes, seccomp, syscalls

FOLDER = "/_d"  # in the inspection's root: one file for each process to launch, which holds the original path
LAUNCHER = "/_"  # so short that it fits in place of any path
_USER = 65533  # an id that no account has
# The other user may read and write all files; it may not signal, trace or inspect processes of root.
_GIVE_UP = "--inh-caps=-all,+dac_override --ambient-caps=-all,+dac_override --bounding-set=-all,+dac_override"
_NOTIF, _RESPONSE = struct.Struct("=QIIiIQ6Q"), struct.Struct("=QqiI")
_RECV, _SEND = 0xC0502100, 0xC0182101
_CONTINUE = 1
_EACCES = 13
_SHELLS = re.compile(r"(ba|da|z|k|mk|a|c|tc|fi)?sh")
_INTERPRETERS = re.compile(
    r"(python|perl|ruby|node|nodejs|php|lua|tclsh|expect|make|gmake|java|gdb|bc|dc)[0-9.]*"
)
_WITH_FILE = re.compile(r"[gm]?awk|sed|ed|ex|vi|vim.*")  # these take a program from a file only by an option
_CODE = re.compile(rb"-[a-zA-Z]*[ce]|-E")  # the next argument is a program, and later ones are data
_FILE = re.compile(rb"-[fSu]|--file|--exec")
# These take the commands that they run from their arguments. Others may take a shell's words from a file.
_RUNNERS = re.compile(
    r"((ba|da)?sh|timeout|env|nice|nohup|setsid|stdbuf|xargs|find|su|time)|(python|perl)[0-9.]*"
)
_MAX_ARGUMENTS, _MAX_PATH = 64, 4096
_MAX_KILL_ROUNDS = 50  # against processes that keep forking


def launcher(single_id: bool) -> str:
    """Return the launcher's script."""
    user = "" if single_id else f"--reuid={_USER} --regid={_USER} --clear-groups "
    caps = "--inh-caps=-all --ambient-caps=-all --bounding-set=-all" if single_id else _GIVE_UP
    read_path = f'IFS= read -r -d "" path <{FOLDER}/$$ || exit 126'
    return f'#!/bin/bash -p\n{read_path}\nexec setpriv {user}{caps} -- "$path" "$@"\n'


class ExecGuard:
    """Answers the kernel's questions about the processes of one inspection."""

    def __init__(self, listener: int, folder: str, remove_links: Callable[[], None]) -> None:
        """
        Args:
            listener: the descriptor from which the kernel's questions are read.
            folder: the path of ``FOLDER`` in this process.
            remove_links: removes links made meanwhile that would show root's programs their own arguments.
        """
        self.listener, self._folder, self._remove_links = listener, folder, remove_links
        self._launching: set[int] = set()
        self._launched: set[int] = set()

    def answer(self) -> bool:
        """Answer one question. Return False when no further one can come."""
        buffer = bytearray(_NOTIF.size)
        try:
            fcntl.ioctl(self.listener, _RECV, buffer)
        except FileNotFoundError:  # the asking process has ended
            return True
        except OSError:
            return False
        identifier, pid, _, _, _, _, *arguments = _NOTIF.unpack(buffer)
        error, flags = 0, _CONTINUE
        try:
            if not self._allow(pid, arguments, buffer):
                error, flags = -_EACCES, 0
        except (OSError, struct.error, ValueError):  # it has ended, or its arguments are unreadable: refuse
            error, flags = -_EACCES, 0
        with contextlib.suppress(OSError):  # the asking process has ended
            fcntl.ioctl(self.listener, _SEND, _RESPONSE.pack(identifier, 0, error, flags))
        return True

    def _allow(self, pid: int, arguments: Sequence[int], question: bytearray) -> bool:
        if _credentials(pid) != (0, syscalls.CAPABILITIES):
            return True  # it belongs to the other user already
        if pid in self._launching:
            self._launching.discard(pid)
            return True
        if self._launched:
            self._clean_up()
        number = struct.unpack_from("=i", question, 16)[0]
        with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
            if number == seccomp.exec_numbers()[1]:  # execveat is refused
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
        """Before root's next program: kill the processes that the other user left, and remove its links."""
        for _ in range(_MAX_KILL_ROUNDS):
            others = {each.pid for each in processes.live_processes() if _is_other(each.pid)}
            if not others or others & self._launched:  # root waits for them, or reads their output
                break
            processes.signal_each(signal.SIGKILL, others)
        self._remove_links()

    def _is_agents(self, pid: int, path: bytes, words: Sequence[bytes]) -> bool:
        root = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_CLOEXEC)
        try:
            folder = os.fsencode(os.readlink(f"/proc/{pid}/cwd"))
            program = _resolve(root, posixpath.join(folder, path))
            if program is None:
                return False  # execve will fail
            if not _is_hosts(program):
                return True
            name = os.path.basename(program)
            if _SHELLS.fullmatch(name) and not _RUNNERS.fullmatch(
                os.path.basename(os.readlink(f"/proc/{pid}/exe"))
            ):
                return True
            for word in _programs(name, words[1:]):
                script = _resolve(root, posixpath.join(folder, word))
                if script is not None and not _is_hosts(script) and _is_file(root, script):
                    return True
            return False
        finally:
            os.close(root)


def _programs(name: str, words: Sequence[bytes]) -> Iterator[bytes]:
    """List the arguments of a program that may name a file from which it takes commands."""
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
    """Whether a path of an inspection holds a file of the host: the inspection sees the host's /usr."""
    return path.startswith("/usr/") and not path.startswith("/usr/local/") and os.path.lexists(path)


def _is_file(root: int, path: str) -> bool:
    descriptor = syscalls.open_in(root, path, os.O_PATH)
    try:
        return stat.S_ISREG(os.fstat(descriptor).st_mode)
    finally:
        os.close(descriptor)


def _resolve(root: int, path: bytes) -> str | None:
    """Follow a path in the root of another process. Return None if nothing is there."""
    try:
        descriptor = syscalls.open_in(root, os.fsdecode(path), os.O_PATH)
    except OSError:
        return None
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def _text(memory: int, address: int) -> bytes:
    text = b""
    while b"\0" not in text and len(text) < _MAX_PATH:
        # One page at a time: the next page may not exist
        chunk = os.pread(memory, 4096 - (address + len(text)) % 4096, address + len(text))
        if not chunk:
            break
        text += chunk
    return text.partition(b"\0")[0]


def _words(memory: int, address: int) -> list[bytes]:
    words = []
    for i in range(_MAX_ARGUMENTS if address else 0):
        (pointer,) = struct.unpack("=Q", os.pread(memory, 8, address + 8 * i))
        if pointer == 0:
            break
        words.append(_text(memory, pointer))
    return words


def _credentials(pid: int) -> tuple[int, int]:
    """Return the user and the permitted capabilities of a process."""
    with open(f"/proc/{pid}/status", "rb") as file:
        text = file.read()
    user, permitted = (re.search(rb"^%s:\s*(\S+)" % name, text, re.MULTILINE) for name in (b"Uid", b"CapPrm"))
    if user is None or permitted is None:
        raise ProcessLookupError(3, "no such process")
    return int(user[1]), int(permitted[1], 16)


def _is_other(pid: int) -> bool:
    """Whether a process came from the launcher, itself or through its parents."""
    try:
        user, capabilities = _credentials(pid)
    except OSError:  # it has ended
        return False
    return user == _USER or (user, capabilities) == (0, 0)
