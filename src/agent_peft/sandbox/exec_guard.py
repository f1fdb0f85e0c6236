"""Programs of the agent that an inspection executes run as another user, from whom the inspection is hidden.

The kernel asks us before each ``execve`` of the inspection (a filter that notifies: seccomp_unotify(2); the
runtime sends us its descriptor). If the program is not the host's, or if a shell or interpreter is given a
script that is not the host's, we replace the path by that of a launcher. The launcher gives up root's user
and continues with the original path. No code of the agent has run in that process before, so that it cannot
change the path meanwhile. Where a machine has one user only, such programs are refused.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import posixpath
import re
import select
import signal
import socket
import stat
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path

from agent_peft.sandbox.frozen import Frozen
from agent_peft.sandbox.links import escaping
from agent_peft.sandbox.processes import Processes

FOLDER = "/_d"  # in the inspection's root: one file for each process to launch, which holds the original path
LAUNCHER = "/_"  # so short that it fits in place of any path
_USER = 65533  # an id that no account has
# The other user may read and write all files; it may not signal, trace or inspect processes of root.
_GIVE_UP = "--inh-caps=-all,+dac_override --ambient-caps=-all,+dac_override --bounding-set=-all,+dac_override"
_NOTIF, _RESPONSE = struct.Struct("=QIIiIQ6Q"), struct.Struct("=QqiI")
_RECV, _SEND = 0xC0502100, 0xC0182101
_CONTINUE = 1
_SECONDS = 60.0
_EACCES = 13
_EXECVEAT = {"x86_64": 322, "aarch64": 281}.get(platform.machine())
_OPENAT2, _RESOLVE_IN_ROOT = 437, 0x10
_LIBC = ctypes.CDLL(None, use_errno=True)
_SHELLS = re.compile(r"(ba|da|z|k|mk|a|c|tc|fi)?sh")
_INTERPRETERS = re.compile(
    r"(python|perl|ruby|node|nodejs|php|lua|tclsh|expect|make|gmake|java|gdb|bc|dc)[0-9.]*|ld[-.].*"
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


_LAUNCHER = f"""#!/bin/bash -p
IFS= read -r -d "" path <{FOLDER}/$$ || exit 126
exec setpriv --reuid={_USER} --regid={_USER} --clear-groups {_GIVE_UP} -- "$path" "$@"
"""


class ExecGuard:
    """Answers the kernel's questions about the processes of one inspection, in a thread."""

    def __init__(self, bundle: Path, ids: Mapping[str, Sequence[tuple[int, int, int]]]) -> None:
        """``bundle``: the folder of the machine's bundle. ``ids``: the ranges of its users: inside, outside,
        count.
        """
        self.socket = bundle / "asked"  # the runtime connects here and sends the kernel's listener
        self._folder = bundle / "launching"
        self._folder.mkdir()
        self._folder.chmod(0o755)
        launcher = bundle / "launcher"
        launcher.write_text(_LAUNCHER)
        launcher.chmod(0o755)
        self.mounts = [(str(self._folder), FOLDER), (str(launcher), LAUNCHER)]
        self._root, self._other = (outer_id(ids["uid"], user) for user in (0, _USER))
        self._launching: set[int] = set()
        self._launched: set[int] = set()
        self._known: Future[tuple[Processes, Frozen]] = Future()
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(self.socket))
        self._server.listen()
        self._stop, self._stopped = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="sandbox-guard", daemon=True)
        self._thread.start()

    def watch(self, processes: Processes, files: Frozen) -> None:
        """Name the inspection's processes and files. Until then, no program of the agent runs."""
        self._known.set_result((processes, files))

    def close(self) -> None:
        os.close(self._stopped)
        self._thread.join()
        self._server.close()
        os.close(self._stop)
        if self._known.done():
            self._known.result()[1].close()

    def _run(self) -> None:
        listeners: set[int] = set()
        new: set[int] = set()  # those that have not asked: their first question is about our own program
        poll = select.poll()
        for descriptor in (self._stop, self._server.fileno()):
            poll.register(descriptor, select.POLLIN)
        try:
            while True:
                for descriptor, _ in poll.poll():
                    if descriptor == self._stop:
                        return
                    if descriptor == self._server.fileno():
                        for each in _accept(self._server):
                            listeners.add(each)
                            new.add(each)
                            poll.register(each, select.POLLIN)
                        continue
                    try:
                        if self._answer(descriptor, descriptor in new):
                            new.discard(descriptor)
                    except OSError:  # no further question can come
                        poll.unregister(descriptor)
                        listeners.discard(descriptor)
                        new.discard(descriptor)
                        os.close(descriptor)
        finally:
            for descriptor in listeners:
                os.close(descriptor)

    def _answer(self, listener: int, is_ours: bool) -> bool:
        """Answer one question. Return False if it was withdrawn: a signal that interrupts execve does that,
        and the same question comes again. Raises `OSError`: no further question can come.
        """
        buffer = bytearray(_NOTIF.size)
        try:
            fcntl.ioctl(listener, _RECV, buffer)
        except FileNotFoundError:
            return False
        identifier, pid, _, _, _, _, *arguments = _NOTIF.unpack(buffer)
        error, flags = 0, _CONTINUE
        try:
            if not is_ours and not self._allow(pid, arguments, buffer):
                error, flags = -_EACCES, 0
        except (OSError, TimeoutError, struct.error, ValueError):
            error, flags = -_EACCES, 0  # it has ended, or its arguments are unreadable
        try:
            fcntl.ioctl(listener, _SEND, _RESPONSE.pack(identifier, 0, error, flags))
        except FileNotFoundError:
            return False
        return True

    def _allow(self, pid: int, arguments: Sequence[int], question: bytearray) -> bool:
        if self._other != self._root and _user(pid) == self._other:
            return True
        if pid in self._launching:
            self._launching.discard(pid)
            return True
        if self._launched:
            self._clean_up()
        number = struct.unpack_from("=i", question, 16)[0]
        with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
            if number == _EXECVEAT:
                return False
            path = _text(memory.fileno(), arguments[0])
            words = _words(memory.fileno(), arguments[1])
            if path == LAUNCHER.encode() or not self._is_agents(pid, path, words):
                return True
            if len(path) < len(LAUNCHER) or self._other == self._root:  # no other user: refused
                return False
            self._known.result(_SECONDS)
            with open(self._folder / _status(pid, "NSpid")[-1], "wb") as file:  # its id in the machine
                file.write(path + b"\0")
            os.pwrite(memory.fileno(), LAUNCHER.encode() + b"\0", arguments[0])
        self._launching.add(pid)
        self._launched.add(pid)
        return True

    def _clean_up(self) -> None:
        """Before root's next program: kill the processes that the other user left, and remove its links."""
        processes, files = self._known.result()
        for _ in range(_MAX_KILL_ROUNDS):
            others = {each.pid for each in processes.live() if _user(each.pid) == self._other}
            if not others or others & self._launched:  # root waits for them, or reads their output
                break
            for pid in others:
                processes.signal_one(pid, signal.SIGKILL)
        for path in escaping(files.links()):
            files.unlink(path)
        if not others:
            self._launched.clear()

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
            return _reads_input(name, words[1:]) and _may_hold_program(f"/proc/{pid}/fd/0")
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


def _reads_input(name: str, words: Sequence[bytes]) -> bool:
    """Whether a program takes commands from its input."""
    reads = _SHELLS.fullmatch(name) or _INTERPRETERS.fullmatch(name)
    return reads is not None and all(word.startswith(b"-") and not _CODE.fullmatch(word) for word in words)


def _may_hold_program(path: str) -> bool:
    """Whether the input of a process may be the agent's: a file or a pipe."""
    mode = os.stat(path).st_mode
    return stat.S_ISREG(mode) or stat.S_ISFIFO(mode)


def _is_hosts(path: str) -> bool:
    """Whether a path of an inspection holds a file of the host: the inspection sees the host's /usr."""
    return path.startswith("/usr/") and not path.startswith("/usr/local/") and os.path.lexists(path)


def _is_file(root: int, path: str) -> bool:
    descriptor = _open_in(root, path)
    try:
        return stat.S_ISREG(os.fstat(descriptor).st_mode)
    finally:
        os.close(descriptor)


def _resolve(root: int, path: bytes) -> str | None:
    """Follow a path in the root of another process. Return None if nothing is there."""
    try:
        descriptor = _open_in(root, os.fsdecode(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def _open_in(root: int, path: str) -> int:
    """Open a path as a process does whose root is the folder of the descriptor ``root``."""
    how = struct.pack("=QQQ", os.O_PATH | os.O_CLOEXEC, 0, _RESOLVE_IN_ROOT)
    result = int(
        _LIBC.syscall(_OPENAT2, ctypes.c_int(root), os.fsencode(path), how, ctypes.c_size_t(len(how)))
    )
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    return result


def _accept(server: socket.socket) -> list[int]:
    """Take the listeners that the runtime sends: its message is the state of the container, as JSON."""
    channel, _ = server.accept()
    with channel:
        channel.settimeout(10)
        try:
            _, descriptors, _, _ = socket.recv_fds(channel, 1 << 16, 8)
        except OSError:
            return []
    return list(descriptors)


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


def _status(pid: int, name: str) -> list[str]:
    with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith(f"{name}:"):
                return line.split()[1:]
    raise ProcessLookupError(3, "no such process")


def _user(pid: int) -> int | None:
    """Return the user of a process, as our own /proc numbers it; None if the process has ended."""
    try:
        return int(_status(pid, "Uid")[0])
    except OSError:
        return None


def outer_id(ranges: Sequence[tuple[int, int, int]], inside: int) -> int:
    """Return the id outside of a machine; that of its root for an id that it does not have.

    >>> outer_id([(0, 1000, 1), (1, 100000, 65535)], 65533), outer_id([(0, 1000, 1)], 65533)
    (165532, 1000)
    """
    for first, outside, count in ranges:
        if first <= inside < first + count:
            return outside + inside - first
    return ranges[0][1]
