"""Our side of the jail: one fork server per process of ours, and one init per machine."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import platform
import pwd
import resource
import select
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agent_peft.sandbox.base import MachineLost
from agent_peft.sandbox.jail import syscalls
from agent_peft.types import AgentPeftError, InfrastructureError

logger = logging.getLogger(__name__)

_IDS = 65536
_FIRST_OUTER_ID = (
    0x70000000  # where root's machines take their ids from: nobody's, as systemd-nspawn's are above 0x80000
)
_TICKS = os.sysconf("SC_CLK_TCK")
_SECONDS = 60.0  # for an init to answer: a snapshot of a full machine is the longest
_MOST_SCRIPT = 1 << 18  # characters of it that are searched for names
_ADVICE = "or say sandbox: docker (or podman)"
# The packages above the jail are only names in that process: theirs import much, and it has the standard
# library alone.
_START = """
import sys, types
folder = sys.argv.pop(1)
for name in ("agent_peft", "agent_peft.environments", "agent_peft.environments.os_interaction"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [folder]
from agent_peft.sandbox.jail import fork_server_main
fork_server_main.main(int(sys.argv[1]), sys.argv[2])
"""


class ForkServer:
    """The process that forks an init for each machine. It ends with us, and everything it forked with it."""

    def __init__(self) -> None:
        """Start it.

        Raises:
            AgentPeftError: this machine cannot sandbox; one line says what to install.
        """
        check_host()
        self.single_id = False
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        folder = str(Path(__file__).parent)
        privileged = "privileged" if os.geteuid() == 0 else ""
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _START, folder, str(theirs.fileno()), privileged],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                cwd="/",
                env={"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"},
            )
        self._channel = ours
        self._channel.settimeout(_SECONDS)
        try:
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    def request(self, limits: Mapping[str, Any], descriptors: Sequence[int]) -> None:
        """Have an init forked, which gets the descriptors."""
        socket.send_fds(
            self._channel, [json.dumps({**limits, "descriptors": _descriptors()}).encode()], descriptors
        )

    def running(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        self._channel.close()
        self._process.wait()

    def abandon(self) -> None:
        """Forget it, without a word."""
        self._channel.close()
        self._process.returncode = self._process.returncode or 0  # which is not ours to wait for

    def _wait_until_ready(self) -> None:
        while True:
            message = json.loads(self._channel.recv(65536) or "{}")
            if "map" in message:
                self.single_id = not _give_ids(message["map"])
                self._channel.send(b"x")
            elif "ready" in message:
                return
            else:
                raise AgentPeftError(
                    f"this machine does not let us make a sandbox ({message.get('error', 'it died')}): {_cause()}, {_ADVICE}"
                )


class Machine:
    """One machine's process 1, from outside."""

    def __init__(self, limits: Mapping[str, Any]) -> None:
        """Raises:
        InfrastructureError: it could not make its machine.
        """
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._alive, gone = os.pipe2(os.O_CLOEXEC)
        self._channel.settimeout(_SECONDS)
        try:
            self._server = fork_server()
            try:
                self._server.request(limits, [theirs.fileno(), gone])
            finally:
                theirs.close()
                os.close(gone)
            reply = self._receive()
            if "error" in reply:
                raise InfrastructureError(f"a sandbox could not be made: {reply['error']}")
        except OSError as error:
            self.close()
            raise InfrastructureError(f"a sandbox could not be made: {error}") from error
        except BaseException:
            self.close()
            raise

    def ask(self, what: str, descriptors: Sequence[int] = (), **arguments: Any) -> dict[str, Any]:
        """Have something done.

        Raises:
            MachineLost: it was not, and the machine is of no more use.
        """
        reply = self._ask(what, descriptors, arguments)
        if "error" in reply:
            raise MachineLost(f"a sandbox failed to {what}: {reply['error']}")
        if reply.get("undead"):
            raise MachineLost("processes of a sandbox do not die")
        return reply

    def ask_for_file(self, what: str, descriptor: int, **arguments: Any) -> None:
        """Have a file read or written.

        Raises:
            OSError: it cannot be.
            MachineLost: the machine is of no more use.
        """
        reply = self._ask(what, [descriptor], arguments)
        if "error" in reply:
            raise OSError(reply["errno"], reply["error"])

    def spawn(self, view: str, argv: Sequence[str], descriptors: Sequence[int], script: str = "") -> None:
        """Start a process in a view of the machine, with its input, output, errors, where to write how it
        ended, and others.

        Args:
            script: what a graded view is for: it shows those settings that the script names.
        """
        self.ask("spawn", descriptors, view=view, argv=list(argv), script=script[:_MOST_SCRIPT])

    def wake(self) -> None:
        """Look after the memory more often: a command is about to run."""
        with contextlib.suppress(OSError):
            self._channel.send(b"{}")

    def signal(self, number: int, since: float) -> int:
        return int(self.ask("signal", number=int(number), since=int(since * _TICKS))["count"])

    def signal_shell(self, number: int) -> None:
        self.ask("signal_shell", number=int(number))

    def cpu_seconds(self) -> float:
        return float(self.ask("cpu")["seconds"])

    def close(self) -> None:
        """Hang up, upon which it ends, and wait until all of the machine is gone."""
        self._channel.close()
        poll = select.poll()
        poll.register(self._alive, select.POLLIN)
        if poll.poll(
            _SECONDS * 1000
        ):  # its parent held the other end, and outlived every process of the machine
            os.read(self._alive, 1)
        else:
            logger.warning("a sandbox was told to end and did not within %g seconds", _SECONDS)
        os.close(self._alive)

    def _ask(self, what: str, descriptors: Sequence[int], arguments: Mapping[str, Any]) -> dict[str, Any]:
        try:
            socket.send_fds(self._channel, [json.dumps({"do": what, **arguments}).encode()], descriptors)
        except OSError as error:
            raise self._lost(f"a sandbox is gone: {error}") from error
        return self._receive()

    def _receive(self) -> dict[str, Any]:
        try:
            message = self._channel.recv(1 << 16)
        except OSError as error:
            raise self._lost(f"a sandbox does not answer: {error}") from error
        if not message:
            raise self._lost("a sandbox died")
        reply: dict[str, Any] = json.loads(message)
        return reply

    def _lost(self, text: str) -> InfrastructureError:
        """Nothing in a machine reaches the fork server: where that has ended, it was not the agent."""
        return (
            MachineLost(text)
            if self._server.running()
            else InfrastructureError(f"{text}; the process that makes sandboxes has ended")
        )


_lock = threading.Lock()
_servers: dict[int, ForkServer] = {}  # by process id: a fork must not speak on its parent's socket


def fork_server() -> ForkServer:
    """This process's fork server, started at the first call, and again should it have died."""
    with _lock:
        mine = _servers.get(os.getpid())
        if mine is None or not mine.running():
            for each in _servers.values():  # dead, or our parent's
                each.abandon()
            _servers.clear()
            mine = _servers[os.getpid()] = ForkServer()
        return mine


def check_host() -> None:
    """
    Raises:
        AgentPeftError: this computer cannot have such machines; one line says why.
    """
    if not sys.platform.startswith("linux"):
        raise AgentPeftError(
            f"sandbox: namespaces needs Linux, and this is {platform.system()}: install Docker and say sandbox: docker"
        )
    if syscalls.seccomp_filter() is None:
        raise AgentPeftError(
            f"sandbox: namespaces knows no filter of system calls for {platform.machine()} processors, {_ADVICE}"
        )
    if not os.path.exists("/usr/bin/setpriv"):
        raise AgentPeftError(
            f"sandbox: namespaces needs setpriv: apt-get install util-linux (dnf and pacman call it the same), {_ADVICE}"
        )
    if not os.path.islink("/bin"):
        raise AgentPeftError(
            f"sandbox: namespaces needs a system whose /bin is a link to usr/bin; upgrade it (Debian: usrmerge), {_ADVICE}"
        )


def _descriptors() -> int:
    """How many descriptors a process of a machine may have. The kernel counts those in flight by user, and
    we may be the same user: with a fourth of our own, those of the machines never use up what we need to
    speak to them.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1024 if soft < 0 else min(max(soft // 4, 64), 1024)


def _give_ids(pid: int) -> bool:
    """Map 65,536 ids into a process's new user namespace, or where we cannot, our own only. Returns
    whether it was a range.
    """
    if os.geteuid() == 0:
        for kind in ("uid", "gid"):
            Path(f"/proc/{pid}/{kind}_map").write_text(f"0 {_outer_ids(kind)} {_IDS}\n")
        return True
    ranges = [
        _sub_ids(path, own) for path, own in (("/etc/subuid", os.getuid()), ("/etc/subgid", os.getuid()))
    ]
    if all(ranges) and shutil.which("newuidmap") and shutil.which("newgidmap"):
        commands = [
            [f"new{kind}map", str(pid), "0", str(own), "1", "1", str(first), str(min(count, _IDS - 1))]
            for kind, own, (first, count) in zip(
                ("uid", "gid"), (os.getuid(), os.getgid()), [each or (0, 0) for each in ranges], strict=True
            )
        ]
        if all(
            subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True).returncode == 0
            for command in commands
        ):
            return True
    Path(f"/proc/{pid}/setgroups").write_text("deny")
    Path(f"/proc/{pid}/uid_map").write_text(f"0 {os.getuid()} 1\n")
    Path(f"/proc/{pid}/gid_map").write_text(f"0 {os.getgid()} 1\n")
    return False


def _outer_ids(kind: str) -> int:
    """Where in our own user namespace there are enough ids: in the machine's first one far from any user,
    in a container at its start.
    """
    for line in Path(f"/proc/self/{kind}_map").read_text().splitlines():
        first, _, count = (int(word) for word in line.split())
        if first <= _FIRST_OUTER_ID and first + count >= _FIRST_OUTER_ID + _IDS:
            return _FIRST_OUTER_ID
    return 0


def _sub_ids(path: str, user: int) -> tuple[int, int] | None:
    """The first range that a file such as /etc/subuid gives a user: its start and length."""
    names = {str(user)}
    with contextlib.suppress(KeyError):
        names.add(pwd.getpwuid(user).pw_name)
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    for fields in (line.split(":") for line in lines):
        if len(fields) == 3 and fields[0] in names and fields[1].isdigit() and fields[2].isdigit():
            return int(fields[1]), int(fields[2])
    return None


def _cause() -> str:
    """What most likely forbids user namespaces here."""

    def read(path: str) -> str:
        try:
            return Path(path).read_text().strip()
        except OSError:
            return ""

    if read("/proc/sys/kernel/unprivileged_userns_clone") == "0" and os.geteuid() != 0:
        return "allow user namespaces with sysctl syscalls.unprivileged_userns_clone=1"
    if read("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == "1" and os.geteuid() != 0:
        return "allow user namespaces with sysctl syscalls.apparmor_restrict_unprivileged_userns=0"
    if read("/proc/sys/user/max_user_namespaces") == "0":
        return "allow user namespaces with sysctl user.max_user_namespaces=10000"
    return (
        "it needs user namespaces and overlays (Linux 5.14 or newer; "
        "inside Docker, --security-opt seccomp=unconfined --security-opt systempaths=unconfined)"
    )


@atexit.register
def stop() -> None:
    """End this process's fork server, and with it every machine. The next sandbox starts another."""
    with _lock:
        mine = _servers.pop(os.getpid(), None)
    if mine is not None:
        mine.close()
