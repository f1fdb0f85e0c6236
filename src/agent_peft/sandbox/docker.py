"""A sandbox in a container, through Docker's SDK. Podman's engine answers the same requests.

It is slower than namespaces and needs an image. Inspection happens in a new container of the same image. That
container gets the changed files, except libraries and replacements of programs that the image has.
"""

from __future__ import annotations

import io
import json
import secrets
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from agent_peft.sandbox import docker_api
from agent_peft.sandbox.base import CommandResult, MachineLost, Sandbox, SandboxLimits
from agent_peft.sandbox.docker_api import FrameStreams
from agent_peft.sandbox.jail.inspection import SETTINGS
from agent_peft.sandbox.shell import SHELL, PersistentShell, Shell, run_alone
from agent_peft.types import InfrastructureError

IMAGE = "debian:bookworm-slim"
_ENVIRONMENT = {"HOME": "/root", "LANG": "C.UTF-8", "TERM": "dumb", "PAGER": "cat"}
_CLEAN = "/usr/sbin:/usr/bin:/sbin:/bin"
# The script comes through the input, up to a null character, so that no program it starts can read it.
_SCRIPT = (
    "/bin/bash",
    "--noprofile",
    "--norc",
    "-c",
    'IFS= read -r -d ""; exec </dev/null; eval "unset REPLY; $REPLY"',
    "bash",
)
# Process 1: it cannot be killed from inside and waits for orphans. It ends when our end of its input closes,
# which also happens when our process dies.
_WAIT = ["/bin/bash", "-c", "while read -r; do :; done"]
# Signals the processes that started at or after a tick, except process 1, itself and the shell, which has a
# mark in its arguments. Prints their number.
_SIGNAL = r"""
n=0
for folder in /proc/[0-9]*; do
  pid=${folder#/proc/}
  { read -r line <"$folder/stat"; } 2>/dev/null || continue
  rest=${line##*) }; set -- "$1" "$2" "$3" $rest
  is_shell=; tr '\0' ' ' <"$folder/cmdline" 2>/dev/null | grep -qF -- "$3" && [ "$5" = 0 ] && is_shell=1
  if [ "$pid" = 1 ] || [ "$pid" = $$ ] || [ "$4" = Z ]; then continue; fi
  if [ "$1" = shell ]; then [ -n "$is_shell" ] && kill -"$2" "$pid"; continue; fi
  if [ -z "$is_shell" ] && [ "${23}" -ge "$1" ]; then kill -"$2" "$pid" 2>/dev/null && n=$((n + 1)); fi
done
echo "$n"
"""


@contextmanager
def _container() -> Iterator[None]:
    """Turn an engine's error about a container into MachineLost."""
    try:
        yield
    except (docker_api.errors().DockerException, OSError) as error:  # the SDK's requests raise OSError
        raise MachineLost(f"a container failed: {error}") from error


class DockerSandbox(Sandbox):
    """A container without a network. ``engine`` is docker or podman."""

    def __init__(self, limits: SandboxLimits, engine: str = "docker", image: str = IMAGE) -> None:
        """
        Raises:
            AgentPeftError: the SDK is not installed, or no engine answers.
        """
        self._limits, self._image = limits, image
        self._client = docker_api.connect(engine)
        self._container: str | None = None
        self._lifeline: Any = None
        self._shell = PersistentShell(self._start_shell)
        self._mark = secrets.token_hex(8)
        self._inspecting = False

    def start(self) -> None:
        if self._container is not None:
            raise RuntimeError("a sandbox starts once")
        self._create()

    def run(self, command: str, timeout: float) -> CommandResult:
        if self._inspecting:
            raise RuntimeError("the sandbox is being inspected: call restore before run")
        with _container():
            return self._shell.run(command, timeout)

    def run_fresh(self, script: str, timeout: float, kill_others: bool = False) -> CommandResult:
        with _container():
            if kill_others and not self._inspecting:
                self._replace(docker_api.trusted_changes(self._changes(), script))
                self._inspecting = True
            began = time.clock_gettime(time.CLOCK_BOOTTIME)
            streams = self._execute(
                _SCRIPT, stdin=True, path=_CLEAN, settings=SETTINGS if self._inspecting else {}
            )
            try:
                streams.write(script.replace("\0", "").encode("utf-8", "surrogateescape") + b"\0")
                return run_alone(streams, self, self._limits, began, timeout)
            finally:
                streams.close()

    def read_file(self, path: str, limit: int = 1 << 20) -> bytes:
        try:
            pieces, _ = self._client.get_archive(self._id, path)
        except docker_api.errors().NotFound as error:
            raise FileNotFoundError(2, f"no file {path}") from error
        with tarfile.open(fileobj=io.BytesIO(b"".join(pieces))) as archive:
            member = archive.next()
            source = archive.extractfile(member) if member is not None and member.isreg() else None
            if source is None:
                raise FileNotFoundError(2, f"{path} is not a regular file")
            return source.read(limit)

    def write_file(self, path: str, content: bytes, mode: int = 0o644) -> None:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for folder in docker_api.folders_of(path):
                entry = tarfile.TarInfo(folder)
                entry.type, entry.mode = tarfile.DIRTYPE, 0o755
                if not self._exists(f"/{folder}"):
                    archive.addfile(entry)
            entry = tarfile.TarInfo(path.strip("/"))
            entry.size, entry.mode = len(content), mode
            archive.addfile(entry, io.BytesIO(content))
        self._client.put_archive(self._id, "/", packed.getvalue())

    def snapshot(self) -> bytes:
        content, deleted = docker_api.pack_changes(self._changes(), self._fetch)
        return json.dumps({"deleted": deleted}).encode() + b"\n" + content

    def restore(self, snapshot: bytes) -> None:
        self._remove()
        self._create()
        self._apply(snapshot)
        self._inspecting = False

    def close(self) -> None:
        self._remove()
        self._client.close()

    def signal(self, number: int, since: float) -> int:
        """Uses the container's own bash. An agent that replaced it may evade signals here, but not the
        inspection, which runs in a new container.
        """
        return self._signal(str(int(since * 100)), number)

    def signal_shell(self, number: int) -> None:
        self._signal("shell", number)

    def cpu_seconds(self) -> float:
        usage = self._client.stats(self._id, stream=False, one_shot=True)
        return float(usage["cpu_stats"]["cpu_usage"]["total_usage"]) / 1e9

    @property
    def _id(self) -> str:
        if self._container is None:
            raise RuntimeError("the sandbox is not running")
        return self._container

    def _create(self) -> None:
        try:
            host = self._client.create_host_config(**docker_api.host_config(self._limits))
            # stdin_open without detach: the input closes for good when its first client leaves. This process
            # is that client.
            container = self._client.create_container(
                self._image,
                _WAIT,
                entrypoint=[],
                stdin_open=True,
                host_config=host,
                working_dir="/root",
                hostname="sandbox",
                user="0",
            )
            self._container = container["Id"]
            self._lifeline = self._client.attach_socket(self._id, params={"stdin": 1, "stream": 1})
            self._client.start(self._id)
        except docker_api.errors().ImageNotFound as error:
            raise InfrastructureError(f"no image {self._image}: docker pull {self._image}") from error
        except docker_api.errors().DockerException as error:
            raise InfrastructureError(f"a container did not start: {error}") from error

    def _remove(self) -> None:
        self._shell.close()
        if self._container is None:
            return
        self._lifeline.close()
        try:
            self._client.remove_container(self._container, force=True, v=True)
        except docker_api.errors().APIError as error:
            if error.status_code not in (404, 409):  # it removes itself, or did so already
                raise InfrastructureError(f"a container was not removed: {error}") from error
        self._container = None

    def _replace(self, changes: Sequence[Mapping[str, Any]]) -> None:
        """Replace this container by a new one with these changes."""
        self._client.pause(self._id)  # no file changes while it is copied
        content, deleted = docker_api.pack_changes(changes, self._fetch, escaping_links=False)
        self._client.unpause(self._id)
        self._remove()
        self._create()
        self._apply(json.dumps({"deleted": deleted}).encode() + b"\n" + content)

    def _apply(self, snapshot: bytes) -> None:
        head, _, content = snapshot.partition(b"\n")
        deleted = json.loads(head)["deleted"]
        if deleted:
            names = "\0".join(deleted).encode()
            self.write_file("/run/deleted", names, 0o600)
            self._finish(["/bin/bash", "-c", "xargs -0 rm -rf -- </run/deleted; rm -f /run/deleted"])
        self._client.put_archive(self._id, "/", content)

    def _changes(self) -> Sequence[Mapping[str, Any]]:
        skipped = ("/proc", "/sys", "/dev")
        return [
            change for change in self._client.diff(self._id) or [] if not change["Path"].startswith(skipped)
        ]

    def _fetch(self, path: str) -> Any:
        return self._client.get_archive(self._id, path)[0]

    def _exists(self, path: str) -> bool:
        try:
            pieces, _ = self._client.get_archive(self._id, path)
        except docker_api.errors().NotFound:
            return False
        pieces.close()
        return True

    def _execute(
        self, argv: Sequence[str], stdin: bool, path: str, settings: Mapping[str, str] | None = None
    ) -> FrameStreams:
        environment = {**_ENVIRONMENT, **(settings or {}), "PATH": path}
        execution = self._client.exec_create(
            self._id, list(argv), stdin=stdin, environment=environment, workdir="/root", user="0"
        )
        channel = self._client.exec_start(execution["Id"], socket=True)
        return FrameStreams(
            getattr(channel, "_sock", channel), lambda: self._client.exec_inspect(execution["Id"])["ExitCode"]
        )

    def _finish(self, argv: Sequence[str]) -> str:
        execution = self._client.exec_create(
            self._id, list(argv), environment=_ENVIRONMENT | {"PATH": _CLEAN}, user="0"
        )
        return str(self._client.exec_start(execution["Id"]).decode("utf-8", "replace"))

    def _signal(self, since: str, number: int) -> int:
        bash = ["/bin/bash", "--noprofile", "--norc", "-c"]
        words = self._finish([*bash, _SIGNAL, "signal", since, str(int(number)), self._mark]).split()
        return int(words[-1]) if words and words[-1].isdigit() else 0

    def _start_shell(self, state: bytes) -> Shell:
        # The word after -s becomes $1 of the shell. It marks the shell among the processes.
        streams = self._execute(
            [*SHELL, "-s", self._mark], stdin=True, path=f"/usr/local/sbin:/usr/local/bin:{_CLEAN}"
        )
        return Shell(streams, self, self._limits, state)
