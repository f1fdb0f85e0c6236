"""A proxy that does to connections what networks do: it loses messages, repeats them, cuts them short, and
delays them.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from contextlib import suppress
from random import Random

FAULTS = (
    "lose the request",
    "lose the response",
    "repeat the request",
    "repeat the response",
    "cut the response",
    "delay the response",
)


class ChaosProxy:
    """Listens on ``port``, and passes bytes on to ``upstream``. A share of ``trouble`` of what clients send
    meets a fault; what is lost or cut takes its connection along, as TCP does.
    """

    def __init__(self, upstream: int, trouble: float, seed: int) -> None:
        self.upstream, self.trouble, self.random = upstream, trouble, Random(seed)
        self.met: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._open: set[socket.socket] = set()
        self._threads[0].start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            lines = list(self._open)
        for line in lines:
            with suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(20)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                line, _ = self._listener.accept()
                thread = threading.Thread(target=self._serve, args=(line,), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self, line: socket.socket) -> None:
        upstream = ("127.0.0.1", self.upstream)
        with line, suppress(OSError), socket.create_connection(upstream, timeout=20) as server:
            with self._lock:
                self._open |= {line, server}
            fault = [""]  # of the request whose response comes next
            back = threading.Thread(target=self._answer, args=(server, line, fault), daemon=True)
            back.start()
            while piece := line.recv(65536):
                with self._lock:
                    troubled = self.random.random() < self.trouble
                    fault[0] = self.random.choice(FAULTS) if troubled else ""
                    self.met[fault[0]] += 1
                if fault[0] == "lose the request":
                    break
                server.sendall(piece * (2 if fault[0] == "repeat the request" else 1))
            for each in (server, line):
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
            back.join(20)
            with self._lock:
                self._open -= {line, server}

    def _answer(self, server: socket.socket, line: socket.socket, fault: list[str]) -> None:
        with suppress(OSError):
            while piece := server.recv(65536):
                if fault[0] == "lose the response":
                    break
                if fault[0] == "cut the response":
                    line.sendall(piece[: len(piece) // 2])
                    break
                if fault[0] == "delay the response":
                    time.sleep(0.05)
                line.sendall(piece * (2 if fault[0] == "repeat the response" else 1))
        for each in (server, line):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
