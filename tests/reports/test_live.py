"""The report that a browser reads while a run continues."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from contextlib import contextmanager

import pytest

from agent_peft.reports.live import LiveReport, live_server
from agent_peft.types import AgentPeftError


@contextmanager
def serving(*folders):
    with live_server(folders, 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def got(port, path, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    content = answer.read().decode()
    connection.close()
    return answer.status, content, answer.headers


def test_a_run_in_progress_is_read_again(run):
    with serving(run) as port:
        status, content, headers = got(port, "/values.json")
        assert status == 200 and json.loads(content)["runs"][0]["curves"]["step"] == [0, 1, 2, 3]
        again = got(port, "/values.json", **{"If-None-Match": headers["ETag"]})
        assert again[:2] == (304, "")
        lines = (run / "metrics.jsonl").read_text().removesuffix('{"step": 9')
        (run / "metrics.jsonl").write_text(lines + '{"step": 4, "stage": "rloo", "reward": 1.0}\n')
        status, content, _ = got(port, "/values.json", **{"If-None-Match": headers["ETag"]})
        assert status == 200 and json.loads(content)["runs"][0]["curves"]["step"][-1] == 4
        status, script, _ = got(port, "/episodes/r0_step_000003.js")
        assert status == 200 and script.startswith('agentPeft.take("r0_step_000003",{"words":[[')
        assert got(port, "/")[0] == 200
        for path in ("/episodes/r0_step_000009.js", "/../run.json", "/episodes/../../config.yaml.js"):
            assert got(port, path)[0] == 404


def test_what_has_not_changed_is_not_read_again(run, monkeypatch):
    report = LiveReport([run])
    values, script = report.values(), report.episodes("r0_step_000003")
    with monkeypatch.context() as patch:
        patch.setattr("agent_peft.reports.live.read_content", None)
        assert (report.values(), report.episodes("r0_step_000003")) == (values, script)
    path = run / "trajectories" / "step_000003.jsonl"
    path.write_text(path.read_text().partition("\n")[0] + "\n")
    assert report.values() != values and report.episodes("r0_step_000003") != script


def test_it_answers_this_machine_only(run):
    """A page of another site that lets its name point to 127.0.0.1 sends that name as ``Host``."""
    with serving(run) as port:
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", "127.0.0.1.evil.example", ""):
            assert got(port, "/values.json", Host=host)[0] == 403
        assert got(port, "/values.json", Host=f"localhost:{port}")[0] == 200


@pytest.mark.slow
def test_connections_that_do_not_ask_are_few_and_end(run, monkeypatch):
    monkeypatch.setattr("agent_peft.reports.live.CONNECTIONS", 4)
    before = threading.active_count()
    with serving(run) as port:
        slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
        for one in slow:
            one.sendall(b"GET / HTTP/1.1\r\nHost: ")
            assert got(port, "/values.json")[0] == 200
        assert slow[0].recv(1) == b"", "the oldest is closed"
        wait_for(lambda: threading.active_count() <= before + 1 + 4)
        for one in slow:
            one.close()
        wait_for(lambda: threading.active_count() == before + 1)


def test_a_connection_that_sends_nothing_is_closed(run, monkeypatch):
    monkeypatch.setattr("agent_peft.reports.live.SECONDS", 0.05)
    with serving(run) as port, socket.create_connection(("127.0.0.1", port)) as one:
        one.sendall(b"GET / HTTP/1.1\r\nHost: ")
        assert one.recv(1) == b""


def wait_for(happened):
    deadline = time.monotonic() + 30
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_port_that_is_taken(run):
    with serving(run) as port, pytest.raises(AgentPeftError, match="--port"):
        live_server([run], port)
