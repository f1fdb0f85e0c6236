"""The client of the machines: one fork server per process, which forks one init per machine."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agent_peft.sandbox.base import MachineLost
from agent_peft.sandbox.host import ADVICE, check_host, descriptor_limit, explain_refusal, map_ids
from agent_peft.types import AgentPeftError, InfrastructureError

logger = logging.getLogger(__name__)

_TICKS = os.sysconf("SC_CLK_TCK")
_SECONDS = 60.0  # for an init to answer; the snapshot of a full machine takes longest
_MAX_SCRIPT = 1 << 18  # characters of a script that are searched for names
# The fork server uses the standard library alone. Importing the packages above the jail would import much
# more, hence that process has empty modules in their place.
_START = """
import sys, types
folder = sys.argv.pop(1)
for name in ("agent_peft", "agent_peft.sandbox"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [folder]
from agent_peft.sandbox.jail import fork_server_main
fork_server_main.main(int(sys.argv[1]), sys.argv[2])
"""


class ForkServer:
    """The process that forks an init for each machine. It ends with our process, and all machines with it."""

    def __init__(self) -> None:
        """Start the process.

        Raises:
            AgentPeftError: this computer cannot make sandboxes; one line says what to install.
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
        """Fork an init, which gets the descriptors."""
        socket.send_fds(
            self._channel, [json.dumps({**limits, "descriptors": descriptor_limit()}).encode()], descriptors
        )

    def running(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        self._channel.close()
        self._process.wait()

    def detach(self) -> None:
        """Release a server that has ended, or that belongs to our parent process. Do not wait for it."""
        self._channel.close()
        self._process.returncode = self._process.returncode or 0  # so that subprocess does not warn

    def _wait_until_ready(self) -> None:
        while True:
            message = json.loads(self._channel.recv(65536) or "{}")
            if "map" in message:
                self.single_id = not map_ids(message["map"])
                self._channel.send(b"x")
            elif "ready" in message:
                return
            else:
                reason = message.get("error", "the fork server died")
                raise AgentPeftError(
                    f"this machine does not let us make a sandbox ({reason}): {explain_refusal()}, {ADVICE}"
                )


class Machine:
    """The connection to process 1 of one machine."""

    def __init__(self, limits: Mapping[str, Any]) -> None:
        """
        Raises:
            InfrastructureError: the machine could not be made.
        """
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._alive, alive = os.pipe2(os.O_CLOEXEC)
        self._channel.settimeout(_SECONDS)
        try:
            with theirs, open(alive, "wb"):
                self._server = fork_server()
                self._server.request(limits, [theirs.fileno(), alive])
            reply = self._receive()
            if "error" in reply:
                raise OSError(reply["error"])
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise InfrastructureError(f"a sandbox could not be made: {error}") from error
            raise

    def ask(self, what: str, descriptors: Sequence[int] = (), **arguments: Any) -> dict[str, Any]:
        """Send a request and return the reply.

        Raises:
            MachineLost: the request failed, and the machine cannot be used any more.
        """
        reply = self._ask(what, descriptors, arguments)
        if "error" in reply:
            raise MachineLost(f"a sandbox failed to {what}: {reply['error']}")
        if reply.get("unkillable"):
            raise MachineLost("processes of a sandbox cannot be killed")
        return reply

    def transfer_file(self, what: str, descriptor: int, **arguments: Any) -> None:
        """Read or write a file.

        Args:
            what: "read" to copy a file to the descriptor, "write" to copy the descriptor to a file.

        Raises:
            OSError: the file cannot be read or written.
            MachineLost: the machine cannot be used any more.
        """
        reply = self._ask(what, [descriptor], arguments)
        if "error" in reply:
            raise OSError(reply["errno"], reply["error"])

    def spawn(
        self, namespace: str, argv: Sequence[str], descriptors: Sequence[int], script: str = ""
    ) -> None:
        """Start a process in a mount namespace of the machine.

        Args:
            namespace: "agent", "clean" or "inspection"; see ``jail/mounts.py``.
            descriptors: its input, output, errors, the descriptor for its exit code, and others to keep open.
            script: the script of an inspection, which shows the settings that the script names.
        """
        self.ask("spawn", descriptors, namespace=namespace, argv=list(argv), script=script[:_MAX_SCRIPT])

    def wake(self) -> None:
        """Announce a command, so that process 1 checks the memory more often."""
        with contextlib.suppress(OSError):
            self._channel.send(b"{}")

    def signal(self, number: int, since: float) -> int:
        return int(self.ask("signal", number=int(number), since=int(since * _TICKS))["count"])

    def signal_shell(self, number: int) -> None:
        self.ask("signal_shell", number=int(number))

    def cpu_seconds(self) -> float:
        return float(self.ask("cpu")["seconds"])

    def close(self) -> None:
        """Close the connection, upon which process 1 ends, and wait until the whole machine has ended."""
        self._channel.close()
        poll = select.poll()
        poll.register(self._alive, select.POLLIN)
        if poll.poll(_SECONDS * 1000):  # the parent of process 1 closes the other end after the whole machine
            os.read(self._alive, 1)
        else:
            logger.warning("a sandbox was closed and did not end within %g seconds", _SECONDS)
        os.close(self._alive)

    def _ask(self, what: str, descriptors: Sequence[int], arguments: Mapping[str, Any]) -> dict[str, Any]:
        try:
            socket.send_fds(self._channel, [json.dumps({"do": what, **arguments}).encode()], descriptors)
        except OSError as error:
            raise self._lost(f"a sandbox has ended: {error}") from error
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
        """Choose the error. No process of a machine can reach the fork server: if it ended, the agent is not
        the cause.
        """
        return (
            MachineLost(text)
            if self._server.running()
            else InfrastructureError(f"{text}; the process that makes sandboxes has ended")
        )


_lock = threading.Lock()
_servers: dict[int, ForkServer] = {}  # by process id: a fork must not use its parent's socket


def fork_server() -> ForkServer:
    """Return the fork server of this process. It is started at the first call, and again if it died."""
    with _lock:
        server = _servers.get(os.getpid())
        if server is None or not server.running():
            for each in _servers.values():  # it died, or it belongs to our parent
                each.detach()
            _servers.clear()
            server = _servers[os.getpid()] = ForkServer()
        return server


@atexit.register
def stop() -> None:
    """End the fork server of this process and all machines. The next sandbox starts a new server."""
    with _lock:
        server = _servers.pop(os.getpid(), None)
    if server is not None:
        server.close()
