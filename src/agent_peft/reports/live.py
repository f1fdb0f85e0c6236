"""A report that a browser on this machine reads while the runs continue."""

from __future__ import annotations

import hashlib
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any

from agent_peft.reports.content import PageContent, read_content
from agent_peft.reports.page import Library, embedded_json, page, script_of
from agent_peft.runs.overview import summarize_run
from agent_peft.types import AgentPeftError

HOST = "127.0.0.1"
SECONDS = 20.0  # until a connection that sends nothing, or does not read its answer, is closed
CONNECTIONS = 32  # at once; a browser has six
_NAMES = ("127.0.0.1", "localhost")


class LiveReport:
    """The runs as they are at each request. They are read again only where a file has changed: a page asks
    every few seconds, on a machine that trains.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._lock = Lock()
        self._library: Library | None = None
        self._content: PageContent | None = None
        self._state: object = None
        self._values = ""

    def values(self) -> str:
        """What the page shows, as JSON."""
        with self._lock:
            state = [_state(folder) for folder in self._folders]
            if self._content is not None and state == self._state:
                return self._values
            self._content = read_content(self._folders)
            if self._library is None:
                self._library = Library(self._content)
                if first := next(iter(self._content.files), None):
                    self._library.text(first)  # it finds out whether there is a tokenizer
            self._library.content = self._content
            values = self._content.values
            self._values = embedded_json({**values, "made": None, "missing_words": self._library.missing})
            self._state = state
            return self._values

    def episodes(self, key: str) -> str | None:
        """The script with the episodes ``key``; None if there are none."""
        if self._content is None:
            self.values()
        with self._lock:
            assert self._content is not None and self._library is not None
            return script_of(key, self._library.text(key)) if key in self._content.files else None


def _state(folder: Path) -> object:
    """The state of a run: its files, and whether its process is alive."""
    files = []
    for place in (folder, folder / "trajectories", folder / "evaluations"):
        with suppress(OSError), os.scandir(place) as entries:
            for entry in entries:
                status = entry.stat()
                files.append((entry.path, status.st_mtime_ns, status.st_size))
    return sorted(files), summarize_run(folder)


def live_server(folders: Sequence[Path], port: int) -> ThreadingHTTPServer:
    """A server on loopback. It answers only requests whose ``Host`` is this machine, so that a page of
    another site cannot read the runs through a name that it lets point here (DNS rebinding).
    """
    report = LiveReport(folders)
    report.values()
    try:
        server = _Server((HOST, port), _handler(report))
    except (OSError, OverflowError) as error:
        raise AgentPeftError(
            f"port {port} cannot be used ({getattr(error, 'strerror', None) or error}); name another with "
            "--port, or 0 for a free one"
        ) from error
    return server


class _Server(ThreadingHTTPServer):
    """Has at most ``CONNECTIONS`` connections, each with a thread: one more closes the oldest."""

    daemon_threads = True

    def __init__(self, *arguments: Any) -> None:
        self._open: dict[Any, None] = {}  # the oldest first
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open[request] = None
        for oldest in list(self._open)[:-CONNECTIONS]:
            self._open.pop(oldest, None)
            with suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # else a browser has gone away
            super().handle_error(request, client_address)


def _handler(report: LiveReport) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = SECONDS

        def do_GET(self) -> None:
            _, port = self.connection.getsockname()
            if self.headers.get("Host") not in {f"{name}:{port}" for name in _NAMES}:
                self._answer(403, "text/plain", "this report answers to 127.0.0.1 and localhost only\n")
                return
            path = self.path.partition("?")[0]
            try:
                content = self._content(path)
            except AgentPeftError as error:
                self._answer(500, "text/plain", f"{error}\n")
                return
            if content is None:
                self._answer(404, "text/plain", "there is no such page\n")
            else:
                self._answer(200, *content)

        def _content(self, path: str) -> tuple[str, str] | None:
            if path == "/":
                return "text/html", page(None, {})
            if path == "/values.json":
                return "application/json", report.values()
            if path.startswith("/episodes/") and path.endswith(".js"):
                script = report.episodes(path.removeprefix("/episodes/").removesuffix(".js"))
                return None if script is None else ("text/javascript", script)
            return None

        def _answer(self, status: int, kind: str, text: str) -> None:
            content = text.encode()
            mark = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            if status == 200 and self.headers.get("If-None-Match") == mark:
                status, content = 304, b""
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-cache")
            self.send_header("ETag", mark)
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("Referrer-Policy", "no-referrer")
            self.send_header("Cross-Origin-Resource-Policy", "same-origin")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *arguments: object) -> None:
            """Nothing: a browser asks every few seconds."""

    return Handler
