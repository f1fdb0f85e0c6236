"""A proxy that does to HTTP what networks do: it loses requests and responses, repeats them, cuts them
short and keeps them back.
"""

from __future__ import annotations

import socket
import threading
from collections import Counter
from contextlib import suppress
from random import Random

FAULTS = (
    "lose the request",
    "lose the response",
    "repeat the request",
    "repeat the request later",
    "repeat the response",
    "cut the response",
)


class ChaosProxy:
    """Listens on ``port``, and passes requests on to ``upstream``; a share of ``trouble`` of them meets a
    fault.

    What happens to the n-th request depends on the seed and n alone.
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
            line.close()
        for thread in self._threads:
            thread.join(20)

    def _accept(self) -> None:
        while True:
            try:
                line, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self._open.add(line)
            thread = threading.Thread(target=self._serve, args=(line,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, line: socket.socket) -> None:
        line.settimeout(20)
        with line:
            try:
                while request := read_message(line):
                    if not self._pass(line, request):
                        return
            except OSError:
                pass  # either end hung up, or the server was killed
            finally:
                with self._lock:
                    self._open.discard(line)

    def _pass(self, line: socket.socket, request: bytes) -> bool:
        with self._lock:
            fault = self.random.choice(FAULTS) if self.random.random() < self.trouble else "none"
            self.met[fault] += 1
        if fault == "lose the request":
            return False
        if fault == "repeat the request":
            twin = threading.Thread(target=self._ask_quietly, args=(request,))
            twin.start()
            response = self._ask(request)
            twin.join()
        else:
            response = self._ask(request)
        if not response or fault == "lose the response":
            return False
        if fault == "cut the response":
            line.sendall(response[: len(response) // 2])
            return False
        line.sendall(response * (2 if fault == "repeat the response" else 1))
        if fault == "repeat the request later":  # when the next one has been answered, often
            twin = threading.Timer(0.02, self._ask_quietly, [request])
            self._threads.append(twin)
            twin.start()
        return True

    def _ask(self, request: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", self.upstream), timeout=20) as line:
            line.sendall(request)
            return read_message(line)

    def _ask_quietly(self, request: bytes) -> None:
        with suppress(OSError):
            self._ask(request)


def read_message(line: socket.socket) -> bytes:
    """One HTTP message whose length is told; empty where the other end has hung up."""
    held = b""
    while b"\r\n\r\n" not in held:
        piece = line.recv(65536)
        if not piece:
            return b""
        held += piece
    head, _, body = held.partition(b"\r\n\r\n")
    lengths = [
        int(field.split(b":")[1])
        for field in head.split(b"\r\n")
        if field.lower().startswith(b"content-length:")
    ]
    while len(body) < sum(lengths):
        piece = line.recv(65536)
        if not piece:
            return b""
        body += piece
    return head + b"\r\n\r\n" + body
