"""Sets of the hub, at a server of our own that answers as the hub does."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from huggingface_hub import constants

from agent_peft.environments.task_files import download
from agent_peft.environments.task_files.download import HubSet, hub_rows
from agent_peft.files import MEGABYTE
from agent_peft.types import AgentPeftError

COMMIT = "0" * 40
ROWS = b'{"question": "1+1=", "answer": 2}\n'


class _Hub(BaseHTTPRequestHandler):
    """One set at every name."""

    sizes: ClassVar[Mapping[str, int]] = {}
    asked: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.asked.append(path)
        content = ROWS
        if "/tree/" in path:
            content = self.told([{"type": "file", "path": name, "size": size, "oid": name}
                                 for name, size in self.sizes.items()])  # fmt: skip
        elif path.startswith("/api/"):
            content = self.told({"id": "own/sums", "sha": COMMIT, "private": False, "siblings": []})
        self.send_response(200)
        for header in (("ETag", '"rows"'), ("X-Repo-Commit", COMMIT), ("Content-Length", str(len(content)))):
            self.send_header(*header)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def told(self, content: Any) -> bytes:
        return json.dumps(content).encode()

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[str]]]:
    """``hub(**sizes)``: a hub whose sets have files of these sizes, and the paths that it is asked for."""
    servers = []

    def start(sizes: Mapping[str, int]) -> list[str]:
        handler = type("Hub", (_Hub,), {"sizes": sizes, "asked": []})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            constants.ENDPOINT + "/{repo_id}/resolve/{revision}/{filename}",
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
        return handler.asked

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_set_that_is_too_large_is_refused_before_a_byte_of_it_is_fetched(hub, tmp_path):
    parts = {f"data/train-{part}.jsonl": 40 * MEGABYTE for part in range(256)}
    asked = hub(parts)
    with pytest.raises(
        AgentPeftError, match=r"^own/sums: its files take 10,240 MB, and 64 MB is the most that is read; take"
    ):
        hub_rows("own/sums", "train")
    with pytest.raises(AgentPeftError, match="its files take 80 MB"):
        download.download(HubSet("own/sums", {"train.jsonl": "data/train-1[01].jsonl"}), tmp_path / "out")
    of_it = [path for path in asked if "own/sums" in path]  # the client also asks what it may call itself
    assert of_it == ["/api/datasets/own/sums/tree/main"] * 2
    assert not (tmp_path / "out").exists()


def test_only_the_files_of_the_split_count(hub):
    asked = hub({"data/train.jsonl": 1 << 40, "data/test.jsonl": len(ROWS)})
    assert hub_rows("own/sums", "test") == [{"question": "1+1=", "answer": 2}]
    assert not [path for path in asked if "train" in path]


def test_what_the_hub_does_not_tell_is_checked_after_it_is_fetched(hub, monkeypatch):
    hub({"data/test.jsonl": len(ROWS)})
    hub_rows("own/sums", "test")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub_rows("own/sums", "test") == [{"question": "1+1=", "answer": 2}]
    monkeypatch.setattr(download, "MAX_BYTES", len(ROWS) - 1)
    with pytest.raises(AgentPeftError, match="own/sums: its files take 0 MB"):
        hub_rows("own/sums", "test")
