"""The one module that imports Docker's SDK, and the parsing of an engine's answers."""

from __future__ import annotations

import io
import os
import select
import socket
import struct
import tarfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import PurePosixPath
from typing import Any

from agent_peft.sandbox.base import SandboxLimits
from agent_peft.sandbox.jail.inspection import is_hidden
from agent_peft.sandbox.jail.links import escapes
from agent_peft.sandbox.streams import StreamKind
from agent_peft.types import AgentPeftError

ENGINES = ("docker", "podman")
_KINDS = {1: StreamKind.OUTPUT, 2: StreamKind.CONTROL}


def connect(engine: str) -> Any:
    """Connect a low-level client to Docker's or Podman's engine.

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
        _check_socket(where)
        return docker.APIClient(base_url=where, version="auto", timeout=60)
    except (OSError, docker.errors.DockerException) as error:
        raise AgentPeftError(
            f"sandbox: {engine}: no engine answers ({error}); start it, or set DOCKER_HOST to its address"
        ) from error


def listening_at(engine: str) -> str:
    """Say in words where an engine listens. The engine itself is asked nothing.

    Raises:
        OSError: nobody listens there.
    """
    where = address(engine)
    _check_socket(where)
    sdk = "" if find_spec("docker") else "; its SDK is not installed: pip install 'agent-peft[docker]'"
    return f"here, at {where}{sdk}" if where.startswith("unix://") else f"at {where}, which is not asked{sdk}"


def _check_socket(where: str) -> None:
    """Raise OSError if nobody listens on a local socket: the SDK would leave its own socket open."""
    if where.startswith("unix://"):
        with socket.socket(socket.AF_UNIX) as channel:
            channel.connect(where.removeprefix("unix://"))


def errors() -> Any:
    """Return the module of the SDK's errors. Call it only after ``connect``."""
    import docker.errors

    return docker.errors


def address(engine: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return the URL of an engine's socket.

    >>> address("docker", {}), address("podman", {"XDG_RUNTIME_DIR": "/nowhere"})
    ('unix:///var/run/docker.sock', 'unix:///run/podman/podman.sock')
    >>> address("podman", {"DOCKER_HOST": "tcp://1.2.3.4:5"})
    'tcp://1.2.3.4:5'
    """
    if "DOCKER_HOST" in environment:
        return environment["DOCKER_HOST"]
    if engine == "docker":
        return "unix:///var/run/docker.sock"
    rootless = f"{environment.get('XDG_RUNTIME_DIR', '/run/user/0')}/podman/podman.sock"
    return f"unix://{rootless}" if os.path.exists(rootless) else "unix:///run/podman/podman.sock"


def host_config(limits: SandboxLimits) -> dict[str, Any]:
    """Return the arguments of ``create_host_config`` that enforce a container's limits."""
    memory, file_size = limits.memory_mb << 20, limits.file_size_mb << 20
    return {
        "network_mode": "none",
        "mem_limit": memory,
        "memswap_limit": memory,  # memory and swap together: no swap
        "pids_limit": limits.processes,
        "cap_drop": ["ALL"],
        "cap_add": ["AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL",
                    "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"],
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


def trusted_changes(changes: Iterable[Mapping[str, Any]], script: str) -> list[Mapping[str, Any]]:
    """Select the changes of a container that ``script`` sees during an inspection: data, and those settings
    and programs that the script names. A program that replaces one of the image is never among them.

    >>> paths = {"/usr/bin/stat": 0, "/usr/bin/new": 1, "/etc/passwd": 0}
    >>> changes = [{"Path": path, "Kind": kind} for path, kind in paths.items()]
    >>> [change["Path"] for change in trusted_changes(changes, "stat /etc/passwd && new")]
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


def pack_changes(
    changes: Iterable[Mapping[str, Any]], fetch: Callable[[str], Iterable[bytes]], escaping_links: bool = True
) -> tuple[bytes, list[str]]:
    """Pack the changed files into one tar. Return it with the paths that were deleted.

    Args:
        changes: an engine's diff: ``Path`` and ``Kind`` (0 modified, 1 added, 2 deleted).
        fetch: returns the engine's tar of a path; the tar of a folder holds all its entries.
        escaping_links: include links into /proc and /dev.
    """
    content, deleted, seen = io.BytesIO(), [], set[str]()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.PAX_FORMAT) as target:
        for change in sorted(changes, key=lambda each: str(each["Path"])):
            path = str(change["Path"])
            if change["Kind"] == 2:
                deleted.append(path)
                continue
            with tarfile.open(fileobj=_Reader(fetch(path)), mode="r|") as source:
                for member in source:  # only the first: changed entries of a folder have their own change
                    member.name = path.strip("/")
                    if member.issym() and not escaping_links and escapes(path, member.linkname):
                        break
                    if member.name not in seen:
                        seen.add(member.name)
                        target.addfile(member, source.extractfile(member) if member.isreg() else None)
                    break
    return content.getvalue(), deleted


class _Reader(io.RawIOBase):
    """A file that reads from chunks of bytes."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks, self._left = iter(chunks), b""

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        while size < 0 or len(self._left) < size:
            chunk = next(self._chunks, None)
            if chunk is None:
                break
            self._left += chunk
        size = len(self._left) if size < 0 else size
        content, self._left = self._left[:size], self._left[size:]
        return content


def folders_of(path: str) -> Sequence[str]:
    """List the folders above a path, from the top.

    >>> folders_of("/srv/a/b")
    ['srv', 'srv/a']
    """
    return [str(each).strip("/") for each in reversed(PurePosixPath(path).parents) if str(each) != "/"]


class FrameStreams:
    """Streams over the socket of a container's exec. A frame is a header of 8 bytes (stream, length) and its
    content.
    """

    def __init__(self, channel: socket.socket, exit_code: Callable[[], int | None]) -> None:
        self._channel, self._exit_code = channel, exit_code
        self._channel.setblocking(False)
        self._received, self._pending, self._ended = b"", b"", False

    def write(self, content: bytes) -> None:
        self._pending += content
        self._send()

    def read(self, timeout: float) -> Sequence[tuple[StreamKind, bytes]]:
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
        chunks = self._frames()
        if not chunk:
            self._ended = True
            code = self._exit_code()
            chunks.append((StreamKind.END, b"-1" if code is None else str(code).encode()))
        return chunks

    def rest(self) -> Sequence[tuple[StreamKind, bytes]]:
        return [] if self._ended else [each for each in self.read(0.002) if each[0] is not StreamKind.END]

    def close(self) -> None:
        self._channel.close()

    def _frames(self) -> list[tuple[StreamKind, bytes]]:
        chunks = []
        while len(self._received) >= 8:
            kind, length = struct.unpack(">BxxxL", self._received[:8])
            if len(self._received) < 8 + length:
                break
            if kind in _KINDS:
                chunks.append((_KINDS[kind], self._received[8 : 8 + length]))
            self._received = self._received[8 + length :]
        return chunks

    def _send(self) -> None:
        try:
            while self._pending:
                self._pending = self._pending[self._channel.send(self._pending[: 1 << 16]) :]
        except BlockingIOError:
            pass
        except OSError:
            self._pending = b""  # the process ended; ``read`` reports that
