"""Both ends of a connection by hand: requests that no client sends, and a server that answers what a test
sets.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from websockets.sync.client import connect as connect_socket


def until(condition: Callable[[], Any], seconds: float = 20) -> Any:
    end = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.02)
    return found


class Session:
    """What OpenEnv's client sends: ``{"type", "data"}`` over /ws."""

    def __init__(self, socket: Any) -> None:
        self.socket = socket

    def send(self, kind: str, content: Any = None) -> None:
        self.socket.send(json.dumps({"type": kind} | ({} if content is None else {"data": content})))

    def receive(self, timeout: float = 20) -> Any:
        return json.loads(self.socket.recv(timeout=timeout))

    def ask(self, kind: str, content: Any = None) -> Any:
        self.send(kind, content)
        return self.receive()

    def reset(self, **content: Any) -> Any:
        return self.ask("reset", content)["data"]

    def step(self, text: str, **more: Any) -> Any:
        return self.ask("step", {"text": text, **more})["data"]


@contextmanager
def session(host: Any, **more: Any) -> Iterator[Session]:
    with connect_socket(host.url.replace("http", "ws") + "/ws", proxy=None, **more) as opened:
        yield Session(opened)


def port_of(url: str) -> int:
    return int(url.rsplit(":", 1)[1])


def connect(url: str, sent: bytes = b"", timeout: float = 20) -> socket.socket:
    line = socket.create_connection(("127.0.0.1", port_of(url)), timeout=timeout)
    with suppress(OSError):  # it may be refused before it is read
        line.sendall(sent)
    return line


def ask(url: str, sent: bytes, timeout: float = 20) -> bytes:
    """All that is answered until the server hangs up; it must."""
    with connect(url, sent, timeout) as line:
        return read_all(line)


def read_all(line: socket.socket) -> bytes:
    answer = b""
    with suppress(ConnectionResetError):
        while piece := line.recv(65536):
            answer += piece
    return answer


def request(
    path: str = "/health",
    method: str = "GET",
    body: bytes = b"",
    host: bytes = b"localhost",
    headers: tuple[bytes, ...] = (),
) -> bytes:
    head = [
        f"{method} {path} HTTP/1.1".encode("latin-1"),
        b"Host: " + host,
        b"Content-Type: application/json",
        b"Connection: close",
    ]
    return b"\r\n".join([*head, b"Content-Length: %d" % len(body), *headers, b"", b""]) + body


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def hung_up(line: socket.socket) -> bool:
    """Whether the server has closed the connection by now."""
    line.setblocking(False)
    try:
        while line.recv(65536):
            pass
        return True
    except BlockingIOError:
        return False
    except OSError:
        return True


@contextmanager
def answering(answer: Callable[[socket.socket, bytes], Any]) -> Iterator[str]:
    """A server on a free port that calls ``answer(line, head of the request)``, then hangs up."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    threads = []

    def serve(line: socket.socket) -> None:
        line.settimeout(20)
        with line, suppress(OSError):
            head = b""
            while b"\r\n\r\n" not in head:
                piece = line.recv(65536)
                if not piece:
                    return
                head += piece
            answer(line, head)

    def accept() -> None:
        with suppress(OSError):
            while True:
                line, _ = listener.accept()
                threads.append(threading.Thread(target=serve, args=(line,), daemon=True))
                threads[-1].start()

    accepting = threading.Thread(target=accept, daemon=True)
    accepting.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for thread in (accepting, *threads):
            thread.join(20)


def places(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of each value in a JSON content."""
    yield path
    if isinstance(content, dict | list):
        for key, inner in content.items() if isinstance(content, dict) else enumerate(content):
            yield from places(inner, (*path, key))


def put(content: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy of a JSON content with another value at a path."""
    if not path:
        return value
    copied = dict(content) if isinstance(content, dict) else list(content)
    copied[path[0]] = put(content[path[0]], path[1:], value)
    return copied
