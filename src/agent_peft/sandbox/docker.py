"""The sandbox of an engine: a container per episode, by Docker's SDK, which Podman's engine answers too.

Slower than namespaces and with an image of its own. Grading happens in a new container of the same image,
which gets the files that the episode changed, but no library and no program in place of one that the image
has.
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
from agent_peft.sandbox.jail.grading import SETTINGS
from agent_peft.sandbox.shell import SHELL, Shell, run_alone
from agent_peft.types import InfrastructureError

IMAGE = "debian:bookworm-slim"
_ENVIRONMENT = {"HOME": "/root", "LANG": "C.UTF-8", "TERM": "dumb", "PAGER": "cat"}
_CLEAN = "/usr/sbin:/usr/bin:/sbin:/bin"
# The script comes through the input, up to a null character, so that nothing it starts finds it.
_SCRIPT = (
    "/bin/bash",
    "--noprofile",
    "--norc",
    "-c",
    'IFS= read -r -d ""; exec </dev/null; eval "unset REPLY; $REPLY"',
    "bash",
)
# Process 1: it cannot be killed from inside, waits for orphans, and ends when our end of its input closes, as
# it does when we die.
_WAIT = ["/bin/bash", "-c", "while read -r; do :; done"]
# Signals what began at or after a tick, but not the shell (named by a mark), process 1 and itself; prints how
# many there were.
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
    """What an engine says of a container that does not do what it should any more."""
    try:
        yield
    except (docker_api.errors().DockerException, OSError) as error:  # the SDK's requests raise OSErrors
        raise MachineLost(f"a container failed: {error}") from error


class DockerSandbox(Sandbox):
    """A container without a network. ``engine`` is docker or podman."""

    def __init__(self, limits: SandboxLimits, engine: str = "docker", image: str = IMAGE) -> None:
        """
        Raises:
            AgentPeftError: no SDK, or no engine.
        """
        self._limits, self._image = limits, image
        self._client = docker_api.connect(engine)
        self._container: str | None = None
        self._lifeline: Any = None
        self._shell: Shell | None = None
        self._mark = secrets.token_hex(8)
        self._graded = False

    def start(self) -> None:
        if self._container is not None:
            raise RuntimeError("a sandbox starts once")
        self._create()

    def run(self, command: str, timeout: float) -> CommandResult:
        if self._graded:
            raise RuntimeError("the sandbox was graded: nothing runs in it any more")
        with _container():
            result = (
                self._shell.run(command, timeout) if self._shell is not None and self._shell.alive() else None
            )
            return (
                result
                if result is not None
                else self._new_shell().run(command, timeout) or CommandResult("", None)
            )

    def run_fresh(self, script: str, timeout: float, kill_others: bool = False) -> CommandResult:
        with _container():
            if kill_others and not self._graded:
                self._replace(docker_api.graded_changes(self._changes(), script))
                self._graded = True
            began = time.clock_gettime(time.CLOCK_BOOTTIME)
            streams = self._execute(
                _SCRIPT, stdin=True, path=_CLEAN, settings=SETTINGS if self._graded else {}
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
        content, deleted = docker_api.gather(self._changes(), self._fetch)
        return json.dumps({"deleted": deleted}).encode() + b"\n" + content

    def restore(self, snapshot: bytes) -> None:
        self._remove()
        self._create()
        self._apply(snapshot)
        self._graded = False

    def close(self) -> None:
        self._remove()
        self._client.close()

    def signal(self, number: int, since: float) -> int:
        """Part of ``Processes``. By the container's own bash: who replaced it is stopped by its
        replacement, when grading.
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
            # stdin_open without detach: the input closes for good with the first client that leaves, which is
            # this process.
            made = self._client.create_container(
                self._image,
                _WAIT,
                entrypoint=[],
                stdin_open=True,
                host_config=host,
                working_dir="/root",
                hostname="sandbox",
                user="0",
            )
            self._container = made["Id"]
            self._lifeline = self._client.attach_socket(self._id, params={"stdin": 1, "stream": 1})
            self._client.start(self._id)
        except docker_api.errors().ImageNotFound as error:
            raise InfrastructureError(f"no image {self._image}: docker pull {self._image}") from error
        except docker_api.errors().DockerException as error:
            raise InfrastructureError(f"a container did not start: {error}") from error

    def _remove(self) -> None:
        if self._shell is not None:
            self._shell.close()
            self._shell = None
        if self._container is None:
            return
        self._lifeline.close()
        try:
            self._client.remove_container(self._container, force=True, v=True)
        except docker_api.errors().APIError as error:
            if error.status_code not in (404, 409):  # it is gone, or going: it removes itself
                raise InfrastructureError(f"a container was not removed: {error}") from error
        self._container = None

    def _replace(self, changes: Sequence[Mapping[str, Any]]) -> None:
        """A new container with these changes instead of this one."""
        self._client.pause(self._id)  # so that nothing changes under the copy
        content, deleted = docker_api.gather(changes, self._fetch, ways_out=False)
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
        made = self._client.exec_create(
            self._id, list(argv), stdin=stdin, environment=environment, workdir="/root", user="0"
        )
        channel = self._client.exec_start(made["Id"], socket=True)
        return FrameStreams(
            getattr(channel, "_sock", channel), lambda: self._client.exec_inspect(made["Id"])["ExitCode"]
        )

    def _finish(self, argv: Sequence[str]) -> str:
        made = self._client.exec_create(
            self._id, list(argv), environment=_ENVIRONMENT | {"PATH": _CLEAN}, user="0"
        )
        return str(self._client.exec_start(made["Id"]).decode("utf-8", "replace"))

    def _signal(self, since: str, number: int) -> int:
        said = self._finish(
            [
                "/bin/bash",
                "--noprofile",
                "--norc",
                "-c",
                _SIGNAL,
                "signal",
                since,
                str(int(number)),
                self._mark,
            ]
        ).split()
        return int(said[-1]) if said and said[-1].isdigit() else 0

    def _new_shell(self) -> Shell:
        state = self._shell.state if self._shell is not None and self._shell.killed else b""
        if self._shell is not None:
            self._shell.close()
        # What follows -s is $1 of the shell, and how we find it among the processes.
        streams = self._execute(
            [*SHELL, "-s", self._mark], stdin=True, path=f"/usr/local/sbin:/usr/local/bin:{_CLEAN}"
        )
        self._shell = Shell(streams, self, self._limits, state)
        return self._shell
