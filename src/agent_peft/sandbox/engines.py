"""A sandbox in a container of Docker or Podman, by their command lines.

It is slower than ``oci`` and needs an image. An inspection runs in a new container of the same image, which
gets the changed files, except libraries and replacements of programs that the image has.
"""

from __future__ import annotations

import io
import os
import secrets
import shutil
import subprocess
import tarfile
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import IO

from agent_peft.sandbox.base import CommandResult, MachineLost, Sandbox, SandboxLimits
from agent_peft.sandbox.bundle import ENVIRONMENTS
from agent_peft.sandbox.inspection import is_hidden
from agent_peft.sandbox.links import escaping
from agent_peft.sandbox.shell import SHELL, PersistentShell, Shell, run_alone
from agent_peft.sandbox.streams import PipeStreams
from agent_peft.types import AgentPeftError, InfrastructureError

ENGINES = ("docker", "podman")
IMAGE = "debian:bookworm-slim"
_SECONDS = 120.0
_ARRIVAL = 0.03  # seconds: a client may deliver the two streams in another order than they were written
_BASH = ("/bin/bash", "--noprofile", "--norc", "-c")
# The script comes through the input, up to a null character, so that no program it starts can read it.
_SCRIPT = (*_BASH, 'IFS= read -r -d ""; exec </dev/null 2>&1; eval "unset REPLY; $REPLY"', "bash")
# Reads the given number of folders, and then other paths.
_REMOVE = r"""
if [ "$1" != 0 ]; then
  mapfile -d "" -t -n "$1"
  printf '%s\0' "${MAPFILE[@]}" | xargs -0 rm -f --
fi
xargs -0r rm -rf --
"""
# Process 1 cannot be killed from inside and waits for orphans. It ends when our end of its input closes,
# which also happens when our process dies.
_PROCESS_1 = (*_BASH, "echo up; while read -r; do :; done")
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


class EngineSandbox(Sandbox):
    """A container without a network."""

    def __init__(self, limits: SandboxLimits, engine: str, image: str = IMAGE) -> None:
        where(engine)
        self._limits, self._engine, self._image = limits, engine, image
        self._first: subprocess.Popen[bytes] | None = None
        self._name = ""
        self._mark = secrets.token_hex(8)
        self._inspecting = False
        self._shell = PersistentShell(self._start_shell)

    def start(self) -> None:
        if self._first is not None:
            raise RuntimeError("a sandbox starts once")
        self._create()

    def run(self, command: str, timeout: float) -> CommandResult:
        if self._inspecting:
            raise RuntimeError("the sandbox was inspected: its machine has ended")
        self._check()
        return self._shell.run(command, timeout)

    def run_fresh(self, script: str, timeout: float) -> CommandResult:
        return self._run_script(script, timeout, "clean")

    def inspect(self, script: str, timeout: float) -> CommandResult:
        self._check()
        if not self._inspecting:
            self._inspecting = True
            self._shell.close()
            with self._removal_at_our_end():
                self._call("pause", self._name, may_fail=True)  # no file changes while they are read
                changed, folders, others = self._changes(script)
            self._remove()
            self._create()
            # What is in the way of a path goes: a folder of the image only if the path is none.
            given = b"".join(path + b"\0" for path in (*folders, *others))
            remove = (*_BASH, _REMOVE, "remove", str(len(folders)))
            self._call("exec", "-i", self._name, *remove, given=given, may_fail=True)
            # With --archive both engines make root the owner of all, against Docker's manual
            self._call("cp", "--archive=false", "-", f"{self._name}:/", given=changed)
        return self._run_script(script, timeout, "inspection")

    def close(self) -> None:
        self._shell.close()
        self._remove()

    def signal(self, number: int, since: float) -> int:
        """Uses the container's own bash. An agent that replaced it may evade signals here, but not the
        inspection, which runs in a new container.
        """
        return self._signal(str(int(since * 100)), number)

    def signal_shell(self, number: int) -> None:
        self._signal("shell", number)

    def cpu_seconds(self) -> float:
        return 0.0  # each process has its own limit

    def _create(self) -> None:
        self._name = f"agent-peft-{secrets.token_hex(8)}"
        command = [self._engine, "run", *run_options(self._limits), "--name", self._name]
        self._first = subprocess.Popen(
            [*command, self._image, *_PROCESS_1],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self._first.stdout is not None and self._first.stderr is not None
        if self._first.stdout.readline() != b"up\n":
            lines = self._first.stderr.read().decode("utf-8", "replace").strip().splitlines()
            self._remove()
            raise InfrastructureError(f"a container of {self._image} did not start: {(lines or ['?'])[-1]}")

    def _remove(self) -> None:
        if self._first is None:
            return
        first, self._first = self._first, None
        subprocess.run(
            [self._engine, "rm", "--force", self._name], stdin=subprocess.DEVNULL, capture_output=True
        )
        for stream in (first.stdin, first.stdout, first.stderr):
            if stream is not None:
                stream.close()
        first.wait(_SECONDS)

    def _removal_at_our_end(self) -> subprocess.Popen[bytes]:
        """A process that removes the container when its input closes, also by our death: process 1 of a
        paused container does not notice that, and Podman's export waits for us with the container's lock.
        """
        remove = 'read -r _; pkill -KILL -f "export $1"; exec "$0" rm --force "$1"'
        command = ["/bin/sh", "-c", remove, self._engine, self._name]
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _check(self) -> None:
        if self._first is None:
            raise RuntimeError("the sandbox is not running")
        if self._first.poll() is not None:
            raise MachineLost("the container has ended")

    def _run_script(self, script: str, timeout: float, environment: str) -> CommandResult:
        self._check()
        began = time.clock_gettime(time.CLOCK_BOOTTIME)
        streams = self._spawn(_SCRIPT, environment)
        try:
            streams.write(script.replace("\0", "").encode("utf-8", "surrogateescape") + b"\0")
            return run_alone(streams, _OfScript(self), self._limits, began, timeout)
        finally:
            streams.close()

    def _start_shell(self, state: bytes) -> Shell:
        # The word after -s becomes $1 of the shell. It marks the shell among the processes.
        streams = self._spawn([*SHELL, "-s", self._mark], "agent")
        return Shell(streams, self, self._limits, state)

    def _spawn(self, argv: Sequence[str], environment: str) -> PipeStreams:
        variables = [f"--env={name}={value}" for name, value in ENVIRONMENTS[environment].items()]
        streams = PipeStreams(_ARRIVAL)
        streams.spawn([self._engine, "exec", "-i", "--workdir=/root", *variables, self._name, *argv])
        return streams

    def _signal(self, since: str, number: int) -> int:
        arguments = "signal", since, str(int(number)), self._mark
        out = self._call("exec", self._name, *_BASH, _SIGNAL, *arguments, may_fail=True)
        words = out.decode("utf-8", "replace").split()
        return int(words[-1]) if words and words[-1].isdigit() else 0

    def _changes(self, script: str) -> tuple[bytes, list[bytes], list[bytes]]:
        """Return a tar of the changes that ``script`` sees, its folders, and all other paths that changed or
        were deleted.
        """
        lines = self._call("diff", self._name).decode("utf-8", "surrogateescape").splitlines()
        visible = trusted_changes({line[2:]: line[0] for line in lines if line[1:2] == " "}, script)
        with subprocess.Popen(
            [self._engine, "export", self._name], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as export:
            assert export.stdout is not None
            try:
                content, packed = pack(export.stdout, {path for path, kind in visible.items() if kind != "D"})
                while export.stdout.read(1 << 20):  # Podman does not end before all is read
                    pass
            except BaseException:
                export.kill()
                raise
        if export.returncode:
            raise MachineLost(f"{self._engine} export failed: exit code {export.returncode}")
        others = [os.fsencode(path) for path, kind in visible.items() if kind == "D"]
        others += [path for path, is_folder in packed.items() if not is_folder]
        return content, [path for path, is_folder in packed.items() if is_folder], others

    def _call(self, *arguments: str, given: bytes = b"", may_fail: bool = False) -> bytes:
        try:
            done = subprocess.run(
                [self._engine, *arguments], input=given, capture_output=True, timeout=_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise MachineLost(f"{self._engine} {arguments[0]} failed: {error}") from error
        if done.returncode and not may_fail:
            reason = " ".join(done.stderr.decode("utf-8", "replace").split())
            raise MachineLost(f"{self._engine} {arguments[0]} failed: {reason}")
        return done.stdout


class _OfScript:
    """The processes of a script are all that started with it. The agent's shell is not one of them."""

    def __init__(self, container: EngineSandbox) -> None:
        self.signal, self.cpu_seconds = container.signal, container.cpu_seconds

    def signal_shell(self, number: int) -> None: ...


def where(engine: str) -> str:
    """Return the version of an engine that answers."""
    program = shutil.which(engine)
    if program is None:
        raise AgentPeftError(f"sandbox: {engine} is not installed, or not on PATH")
    side = "Server" if engine == "docker" else "Client"
    command = [program, "version", "--format", f"{{{{.{side}.Version}}}}"]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise AgentPeftError(f"sandbox: {engine} does not answer: {error}") from error
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no reason was given"]
        raise AgentPeftError(f"sandbox: {engine} does not answer ({lines[-1]}); start it")
    return f"here, {engine} {done.stdout.strip()}"


def run_options(limits: SandboxLimits) -> list[str]:
    """Return the options of ``run`` that enforce a container's limits."""
    memory, file_size = f"{limits.memory_mb}m", limits.file_size_mb << 20
    capabilities = (
        "AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETPCAP", "SETUID",
        "SYS_CHROOT",
    )  # fmt: skip
    ulimits = {"fsize": file_size, "core": 1, "nofile": 1024, "cpu": int(limits.cpu_seconds) + 1}
    ulimits["nproc"] = 4096  # of the user; by default Podman asks for more than it may
    return [
        "--rm",
        "--interactive",
        "--stop-signal=KILL",  # process 1 ignores others, and Podman would wait for ten seconds
        "--network=none",
        "--hostname=sandbox",
        "--user=0",
        "--workdir=/root",
        "--entrypoint=",
        f"--memory={memory}",
        f"--memory-swap={memory}",  # memory and swap together: no swap
        f"--shm-size={memory}",
        f"--pids-limit={limits.processes}",
        "--cap-drop=ALL",
        *(f"--cap-add={name}" for name in capabilities),
        "--security-opt=no-new-privileges",
        *(f"--ulimit={name}={value}:{value}" for name, value in ulimits.items()),
    ]


def trusted_changes(changes: Mapping[str, str], script: str) -> dict[str, str]:
    """Select the changes of a container that ``script`` sees during an inspection: data, and those settings
    and programs that the script names. A program that replaces one of the image is never among them.
    ``changes``: by path, A (added), C (changed) or D (deleted).

    >>> changes = {"/usr/bin/stat": "C", "/usr/bin/new": "A", "/etc/passwd": "C"}
    >>> trusted_changes(changes, "stat /etc/passwd && new")
    {'/usr/bin/new': 'A', '/etc/passwd': 'C'}
    """
    folders = ("proc", "sys", "dev", "bin", "sbin", "lib", "lib64")
    return {
        path: kind
        for path, kind in changes.items()
        if not is_hidden(path, script)
        and not (path.startswith("/usr/") and not path.startswith("/usr/local/") and kind != "A")
        and path.split("/")[1] not in (*folders, "usr" if path == "/usr" else "")
    }


def pack(export: IO[bytes], wanted: Iterable[str]) -> tuple[bytes, dict[bytes, bool]]:
    """Select the wanted paths of a container's tar. Links into /proc and /dev are left out. Return a tar, and
    of each path in it whether it is a folder.
    """
    names, content = {path.strip("/") for path in wanted}, io.BytesIO()
    links: dict[bytes, bytes] = {}
    members = []
    with tarfile.open(fileobj=export, mode="r|") as source:
        for member in source:
            name = member.name.removeprefix("./").strip("/")
            if member.issym():
                links[b"/" + os.fsencode(name)] = os.fsencode(member.linkname)
            if name in names:
                file = source.extractfile(member) if member.isreg() else None
                members.append((member, file.read() if file is not None else b""))
    refused, packed = escaping(links), dict[bytes, bool]()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.PAX_FORMAT) as target:
        for member, text in members:
            path = b"/" + os.fsencode(member.name.removeprefix("./").strip("/"))
            if path not in refused:
                target.addfile(member, io.BytesIO(text))
                packed[path] = member.isdir()
        # Zeros would follow, up to the length of a tape's record. Podman refuses them
        end = target.offset + 2 * tarfile.BLOCKSIZE
    return content.getvalue()[:end], packed
