"""Connections: none is kept by a client that is slow, and however many there are, the next request is
answered.
"""

import json
import logging
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from agent_peft.environments import load_environment
from agent_peft.environments.http.guard import Limits
from agent_peft.environments.http.transport import within_descriptors
from tests.conftest import case
from tests.environments.http.strangers import ask, connect, hung_up, request, session, status, until

SUMS = {"kind": "arithmetic", "num_tasks": 500, "digits": 2}
QUICK = Limits(head_seconds=0.3, body_seconds=0.3, keep_alive_seconds=1, answer_seconds=0.5)
HALF_A_HEAD = b"POST /demonstration HTTP/1.1\r\nHost: localhost\r\n"
KEPT = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
HEAD = HALF_A_HEAD + b"Content-Type: application/json\r\nContent-Length: 9\r\n\r\n"


def served(serving, limits, **more):
    return serving({"train": load_environment(SUMS)}, limits=limits, **more)


@pytest.mark.parametrize(
    ("sent", "token"),
    [
        case(b"", None, fast=False),
        case(HALF_A_HEAD + b"X: ", None, fast=False),
        case(HALF_A_HEAD, "s3cret", fast=False),
        case(KEPT + HALF_A_HEAD, None, fast=True),
    ],
)
def test_a_head_that_does_not_end_is_not_waited_for(serving, sent, token):
    """Not even if a byte of it comes now and then, or after a request that was answered."""
    with connect(served(serving, QUICK, token=token).url, sent) as line:

        def dribble():
            with suppress(OSError):
                line.setblocking(True)
                line.sendall(b"a")
            return hung_up(line)

        assert until(dribble)


def test_a_body_that_does_not_end_is_not_waited_for(serving):
    with connect(served(serving, QUICK).url, HEAD + b"{") as line:
        assert line.recv(1000).startswith(b"HTTP/1.1 408")
        assert until(lambda: hung_up(line))


def test_an_answer_that_nobody_reads_is_not_kept(serving):
    host = served(serving, QUICK)
    pages = KEPT.replace(b"/health", b"/tasks") * 400
    with connect(host.url) as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.settimeout(2)
        with suppress(OSError):
            line.sendall(pages)
        assert until(lambda: not host._server.server_state.connections)


def test_when_there_are_too_many_connections_the_slowest_make_room(serving, caplog):
    host = served(serving, Limits(connections=8, head_seconds=60))
    with ExitStack() as stack, caplog.at_level(logging.WARNING):
        slow = [stack.enter_context(connect(host.url, HALF_A_HEAD)) for _ in range(40)]
        assert httpx.get(f"{host.url}/health", trust_env=False, timeout=20).json() == {"status": "healthy"}
        assert until(lambda: sum(map(hung_up, slow)) >= 32)
        assert not hung_up(slow[-1])
        assert len(host._server.server_state.connections) <= 8
    assert (
        len([record for record in caplog.records if "one is closed for another" in record.getMessage()]) <= 20
    )


def test_slow_bodies_make_room_too(serving):
    host = served(serving, Limits(connections=8, body_seconds=60))
    with ExitStack() as stack:
        slow = [stack.enter_context(connect(host.url, HEAD + b"{")) for _ in range(20)]
        assert httpx.get(f"{host.url}/health", trust_env=False, timeout=20).status_code == 200
        assert until(lambda: sum(map(hung_up, slow)) >= 12)


def test_connections_that_are_busy_are_not_closed_for_others(serving):
    environment, gate = load_environment(SUMS), threading.Event()
    environment.demonstration = lambda task: gate.wait(20) and ["1"]
    host = serving({"train": environment}, limits=Limits(connections=4))
    asked = request("/demonstration", "POST", json.dumps({"task": environment.tasks[0].id}).encode())
    with ExitStack() as stack:
        try:
            busy = [stack.enter_context(connect(host.url, asked)) for _ in range(4)]
            assert until(lambda: len(host._server.server_state.tasks) == 4)
            refused = ask(host.url, request())
            assert not refused or status(refused) == 503  # or reset, where what was sent was not read before
        finally:
            gate.set()
        for line in busy:
            assert line.recv(1000).startswith(b"HTTP/1.1 200")


def test_connections_are_a_third_of_the_descriptors(monkeypatch):
    for descriptors, most in ((256, 85), (1024, 341), (20000, 1536), (resource.RLIM_INFINITY, 1536), (3, 2)):
        monkeypatch.setattr(
            resource, "getrlimit", lambda _, descriptors=descriptors: (descriptors, descriptors)
        )
        assert within_descriptors(Limits()).connections == most


@contextmanager
def tally(folder, descriptors):
    """A server in its own process that may have so many descriptors, and its log."""
    command = [sys.executable, str(Path(__file__).parent / "tally.py"), "0", str(folder / "tally"), "3"]

    def few():
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))

    with (
        (folder / "log").open("w+") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, preexec_fn=few) as process,
    ):
        try:
            yield process.stdout.readline().strip(), process, folder / "log"
        finally:
            process.kill()


def test_three_hundred_slow_connections_where_there_are_256_descriptors(tmp_path):
    with tally(tmp_path, 256) as (url, process, log), ExitStack() as stack:
        process.send_signal(signal.SIGSTOP)  # so that it finds all of them at once
        slow = [stack.enter_context(connect(url, HALF_A_HEAD)) for _ in range(300)]
        process.send_signal(signal.SIGCONT)
        for _ in range(3):
            assert httpx.get(f"{url}/health", trust_env=False, timeout=10).status_code == 200
        assert until(lambda: sum(map(hung_up, slow)) >= 200)
        assert len(list(Path(f"/proc/{process.pid}/fd").iterdir())) < 200
        assert len(log.read_text()) < 10_000
        assert "Too many open files" not in log.read_text()


# -- WebSockets ----------------------------------------------------------------------------------------------


def test_idle_websockets_are_closed(serving):
    host = served(serving, Limits(idle_seconds=0.5))
    with session(host) as idle, session(host) as playing:
        playing.reset()
        for each in (idle, playing):
            with pytest.raises(ConnectionClosed):
                each.socket.recv(timeout=20)
    assert until(lambda: not host.sessions.open)


def test_a_session_that_takes_no_step_is_closed_though_its_client_speaks(serving):
    host = served(serving, Limits(idle_seconds=1.0))
    with session(host) as held, session(host) as used:
        held.reset()
        used.reset()
        with pytest.raises(ConnectionClosed):
            for _ in range(200):
                held.ask("state")
                used.reset()
                time.sleep(0.05)
        assert used.ask("state")["data"]["step_count"] == 0


def test_websockets_leave_room_for_requests_and_for_those_that_play(serving):
    host = served(serving, Limits(connections=8))
    with ExitStack() as stack:
        playing = stack.enter_context(session(host))
        playing.reset(seed=1)
        idle = []
        for _ in range(30):
            # websockets' client may fail an assertion of its own if it is refused in the moment it connects
            with suppress(InvalidStatus, ConnectionClosed, AssertionError):
                idle.append(stack.enter_context(session(host)))
        assert httpx.get(f"{host.url}/health", trust_env=False, timeout=20).status_code == 200
        assert playing.ask("state")["data"]["step_count"] == 0
        assert idle[-1].ask("reset")["type"] == "observation"
        assert len(host._server.server_state.connections) <= 8


def test_a_full_house_of_playing_websockets_refuses_another(serving):
    host = served(serving, Limits(connections=4))
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(session(host)).reset()
        with pytest.raises(InvalidStatus) as refused:
            stack.enter_context(session(host))
        assert refused.value.response.status_code == 503
    assert until(lambda: not host.sessions.open)


@pytest.mark.parametrize("fragment", ["", "a"])
def test_a_message_of_endless_fragments_is_cut(serving, fragment):
    with session(served(serving, Limits())) as one, pytest.raises(ConnectionClosed):
        one.socket.send(iter(["a", *[fragment] * 5000]))
        one.socket.recv(timeout=20)


HANDSHAKE = (
    b"GET /ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


@pytest.mark.slow
def test_a_message_that_does_not_end_is_not_waited_for(serving):
    """Unlike a session that only waits, and answers pings."""
    host = served(serving, QUICK)
    with session(host) as waiting, connect(host.url, HANDSHAKE) as line:
        assert line.recv(1000).startswith(b"HTTP/1.1 101")
        line.sendall(b"\x81\x85\0\0\0\0ab")  # two of five bytes
        assert until(lambda: hung_up(line))
        waiting.socket.ping()
        assert waiting.ask("state")["type"] == "state"


def test_messages_that_are_under_way_are_bounded_together(serving):
    host = served(serving, Limits(messages_bytes=1000))
    head, message = b"\x81\xfe" + (900).to_bytes(2, "big") + bytes(4), b'{"type": "state"}'.ljust(900)
    with connect(host.url, HANDSHAKE) as slow, connect(host.url, HANDSHAKE) as late:
        for line in (slow, late):
            assert line.recv(1000).startswith(b"HTTP/1.1 101")
        slow.sendall(head + message[:800])
        assert until(lambda: host._server.config.incomplete > 700)
        late.sendall(head + message[:800])
        assert until(lambda: hung_up(late))
        slow.sendall(message[800:])
        assert b'"step_count":0' in slow.recv(1000)
    assert until(lambda: host._server.config.incomplete == 0)


@pytest.mark.slow
def test_pings_that_are_not_read_about_fill_nothing(serving):
    host = served(serving, Limits(answer_seconds=1.0))
    ping = b"\x89\xfd" + b"\0\0\0\0" + b"x" * 125  # masked with nothing
    with connect(host.url, HANDSHAKE, timeout=3) as line:
        assert line.recv(1000).startswith(b"HTTP/1.1 101")
        with suppress(OSError):
            for _ in range(500):
                line.sendall(ping * 500)
        buffers = [c.transport.get_write_buffer_size() for c in list(host._server.server_state.connections)]
        assert sum(buffers) < 1 << 20
        assert until(lambda: not host._server.server_state.connections)
