"""A process that has imported what takes seconds, and runs Python programs in forks of itself: each in a
process of its own, with its own folder, environment and output, as ``python PROGRAM`` and ``python -m
MODULE`` would. ``tests/conftest.py`` starts one and asks it.
"""

from __future__ import annotations

import array
import json
import os
import runpy
import select
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any


class ForkedProgram:
    """A program in a fork of a warm process: what is used here of ``subprocess.Popen``."""

    def __init__(
        self,
        place: str,
        command: list[str],
        folder: Path,
        environment: Mapping[str, str],
        output: IO[Any],
        errors: IO[Any],
    ) -> None:
        self.command, self.returncode = command, None
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(place)
        request = {"command": command, "folder": str(folder), "environment": dict(environment)}
        files = array.array("i", [output.fileno(), errors.fileno()])
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)]
        self._socket.sendmsg([json.dumps(request).encode()], ancillary)
        self.pid = self._number()

    def _number(self) -> int:
        digits = b""
        while not digits.endswith(b"\n"):
            digits += (digit := self._socket.recv(1))
            assert digit, "the warm process has ended"
        return int(digits)

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._socket], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.command, timeout or 0.0)
            self.returncode = self._number()
            self._socket.close()
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it and wait, so that the socket of a test that fails does not fail a later one."""
        self.send_signal(signal.SIGKILL)
        self.wait(60)


def asked(path: str) -> dict[str, Any]:
    """Listen until stdin ends. Return a request only in the fork that is to run it."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait for a program
    print("ready", flush=True)
    while True:
        if sys.stdin in select.select([server, sys.stdin], [], [])[0]:
            os._exit(0)  # at once
        connection, _ = server.accept()
        if os.fork():
            connection.close()
            continue
        server.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        files = array.array("i")
        text, ancillary, *_ = connection.recvmsg(1 << 20, socket.CMSG_SPACE(2 * files.itemsize))
        files.frombytes(ancillary[0][2])
        program = os.fork()
        if not program:
            connection.close()
            for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), *files)):
                os.dup2(file, number)
                os.close(file)
            request: dict[str, Any] = json.loads(text)
            return request
        for file in files:
            os.close(file)
        connection.sendall(f"{program}\n".encode())
        status = os.waitpid(program, 0)[1]
        connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
        os._exit(0)


if __name__ == "__main__":
    import peft  # noqa: F401
    import torch  # noqa: F401
    import transformers  # noqa: F401

    import agent_peft.agents.serving.server
    import agent_peft.cli
    import agent_peft.runs.run  # noqa: F401
    from agent_peft.heap import VARIABLE

    request = asked(sys.argv[1])
    # a pipe can do other things than the file that was there; a file is read while it is written
    buffering = -1 if stat.S_ISFIFO(os.fstat(1).st_mode) else 1
    sys.stdout = os.fdopen(1, "w", buffering, closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    os.environ.setdefault(VARIABLE, "")  # a program here cannot start again
    is_module, *sys.argv = request["command"]
    sys.path[:] = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *sys.path[1:]]
    if is_module == "-m":
        sys.path.insert(0, os.getcwd())
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(is_module)))
        sys.argv.insert(0, is_module)
        runpy.run_path(is_module, run_name="__main__")
