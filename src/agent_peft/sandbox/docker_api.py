"""The one place that imports Docker's SDK, and what of an engine's answers can be understood without one."""

from __future__ import annotations

import io
import os
import select
import socket
import struct
import tarfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from agent_peft.sandbox.base import SandboxLimits
from agent_peft.sandbox.jail.grading import is_hidden, leads_out
from agent_peft.sandbox.streams import Source
from agent_peft.types import AgentPeftError

_SOURCES = {1: Source.OUTPUT, 2: Source.CONTROL}


def connect(engine: str) -> Any:
    """A low-level client of Docker's or Podman's engine.

    Raises:
        AgentPeftError: the SDK is not installed, or no engine answers.
    """
    try:
        import docker
    except ImportError as error:
        raise AgentPeftError(
            f"sandbox: {engine} needs Docker's SDK: pip install 'agent-peft[docker]'"
        ) from error
    where = address(engine)
    try:
        _knock(where)
        return docker.APIClient(base_url=where, version="auto", timeout=60)
    except (OSError, docker.errors.DockerException) as error:
        raise AgentPeftError(
            f"sandbox: {engine}: no engine answers ({error}); start it, or set DOCKER_HOST to where it listens"
        ) from error


def _knock(where: str) -> None:
    """See whether anybody listens on a local socket: the SDK would leave one open where nobody does."""
    if where.startswith("unix://"):
        with socket.socket(socket.AF_UNIX) as channel:
            channel.connect(where.removeprefix("unix://"))


def errors() -> Any:
    """The SDK's errors, for what has connected."""
    import docker.errors

    return docker.errors


def address(engine: str, environment: Mapping[str, str] = os.environ) -> str:
    """
    >>> address("docker", {}), address("podman", {"XDG_RUNTIME_DIR": "/nowhere"}), address("podman", {"DOCKER_HOST": "tcp://1.2.3.4:5"})
    ('unix:///var/run/docker.sock', 'unix:///run/podman/podman.sock', 'tcp://1.2.3.4:5')
    """
    if "DOCKER_HOST" in environment:
        return environment["DOCKER_HOST"]
    if engine == "docker":
        return "unix:///var/run/docker.sock"
    own = f"{environment.get('XDG_RUNTIME_DIR', '/run/user/0')}/podman/podman.sock"
    return f"unix://{own}" if os.path.exists(own) else "unix:///run/podman/podman.sock"


def host_config(limits: SandboxLimits) -> dict[str, Any]:
    """The arguments of ``create_host_config`` that hold a container within its limits."""
    memory, file_size = limits.memory_mb << 20, limits.file_size_mb << 20
    return {
        "network_mode": "none",
        "mem_limit": memory,
        "memswap_limit": memory,  # memory and swap together: no swap
        "pids_limit": limits.processes,
        "cap_drop": ["ALL"],
        "cap_add": ["AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"],
        "security_opt": ["no-new-privileges:true"],
        "auto_remove": True,
        "ipc_mode": "private",
        "shm_size": memory,
        "ulimits": [
            {"Name": "fsize", "Soft": file_size, "Hard": file_size},
            {"Name": "core", "Soft": 0, "Hard": 0},
            {"Name": "nofile", "Soft": 1024, "Hard": 1024},
        ],
    }  # fmt: skip


def graded_changes(changes: Iterable[Mapping[str, Any]], script: str) -> list[Mapping[str, Any]]:
    """Of what a container changed, what ``script`` sees when it grades: data, and of settings and programs
    those that it names, but no program in place of one that was there before.

    >>> changes = [{"Path": "/usr/bin/stat", "Kind": 0}, {"Path": "/usr/bin/new", "Kind": 1}, {"Path": "/etc/passwd", "Kind": 0}]
    >>> [change["Path"] for change in graded_changes(changes, "stat /etc/passwd && new")]
    ['/usr/bin/new', '/etc/passwd']
    """
    return [c for c in changes if not is_hidden(c["Path"], script) and not _replaces(c)]


def _replaces(change: Mapping[str, Any]) -> bool:
    path = change["Path"]
    return (path.startswith("/usr/") and change["Kind"] != 1) or path.strip("/") in (
        "bin",
        "sbin",
        "lib",
        "lib64",
    )


def gather(
    changes: Iterable[Mapping[str, Any]], fetch: Callable[[str], Iterable[bytes]], ways_out: bool = True
) -> tuple[bytes, list[str]]:
    """Changed files as one tar, and the paths that were deleted.

    Args:
        changes: of an engine's diff: ``Path`` and ``Kind`` (0 modified, 1 added, 2 deleted); parents come
            before children.
        fetch: the engine's tar of a path, folders with all that is in them.
        ways_out: keep links into /proc and /dev.
    """
    content, deleted, seen = io.BytesIO(), [], set[str]()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.PAX_FORMAT) as target:
        for change in sorted(changes, key=lambda each: str(each["Path"])):
            path = str(change["Path"])
            if change["Kind"] == 2:
                deleted.append(path)
                continue
            with tarfile.open(fileobj=_Reader(fetch(path)), mode="r|") as source:
                for member in (
                    source
                ):  # the first is the path itself; in folders, what changed comes with a change of its own
                    member.name = path.strip("/")
                    if member.issym() and not ways_out and leads_out(path, member.linkname):
                        break
                    if member.name not in seen:
                        seen.add(member.name)
                        target.addfile(member, source.extractfile(member) if member.isreg() else None)
                    break
    return content.getvalue(), deleted


class _Reader(io.RawIOBase):
    """A file over pieces of bytes."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces, self._left = iter(pieces), b""

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        while size < 0 or len(self._left) < size:
            piece = next(self._pieces, None)
            if piece is None:
                break
            self._left += piece
        size = len(self._left) if size < 0 else size
        found, self._left = self._left[:size], self._left[size:]
        return found


def folders_of(path: str) -> Sequence[str]:
    """
    >>> folders_of("/srv/a/b")
    ['srv', 'srv/a']
    """
    return [str(each).strip("/") for each in reversed(PurePosixPath(path).parents) if str(each) != "/"]


class FrameStreams:
    """Streams over the socket of a container's exec: frames of 8 bytes of header (stream, length) and
    content.
    """

    def __init__(self, channel: socket.socket, exit_code: Callable[[], int | None]) -> None:
        self._channel, self._exit_code = channel, exit_code
        self._channel.setblocking(False)
        self._received, self._pending, self._ended = b"", b"", False

    def write(self, content: bytes) -> None:
        self._pending += content
        self._send()

    def read(self, timeout: float) -> Sequence[tuple[Source, bytes]]:
        if self._ended:
            return []
        poll = select.poll()
        poll.register(self._channel, select.POLLIN | (select.POLLOUT if self._pending else 0))
        if not poll.poll(max(timeout, 0) * 1000):
            return []
        self._send()
        try:
            chunk = self._channel.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            chunk = b""
        self._received += chunk
        found = self._frames()
        if not chunk:
            self._ended = True
            code = self._exit_code()
            found.append((Source.END, b"-1" if code is None else str(code).encode()))
        return found

    def rest(self) -> Sequence[tuple[Source, bytes]]:
        return [] if self._ended else [piece for piece in self.read(0.002) if piece[0] is not Source.END]

    def close(self) -> None:
        self._channel.close()

    def _frames(self) -> list[tuple[Source, bytes]]:
        found = []
        while len(self._received) >= 8:
            kind, length = struct.unpack(">BxxxL", self._received[:8])
            if len(self._received) < 8 + length:
                break
            if kind in _SOURCES:
                found.append((_SOURCES[kind], self._received[8 : 8 + length]))
            self._received = self._received[8 + length :]
        return found

    def _send(self) -> None:
        try:
            while self._pending:
                self._pending = self._pending[self._channel.send(self._pending[: 1 << 16]) :]
        except BlockingIOError:
            pass
        except OSError:
            self._pending = b""  # it has ended, which reading tells
