"""Our clients against a server that means no good: what it answers is bounded and checked, and ends in one
line.
"""

import base64
import gzip
import hashlib
import io
import json
import re
import subprocess
import sys
import threading
from contextlib import ExitStack, closing, suppress

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from agent_peft.environments import load_environment
from agent_peft.environments.http.client import MAX_ANSWER_BYTES, Connection, DefectError
from agent_peft.types import AgentPeftError, InfrastructureError, StepResult
from tests.environments.http.strangers import answering, places, put

FUZZ = settings(
    max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
TOLD = (AgentPeftError, InfrastructureError)


def http(body, head, status=b"200 OK", headers=()):
    lines = [b"HTTP/1.1 " + status, b"Connection: close", *headers]
    return b"\r\n".join([*lines, b"Content-Length: %d" % len(body), b"", b""]) + body


def remote(url, **more):
    return load_environment({"kind": "remote", "url": url, "patience": 0.0, "timeout": 5.0, **more})


def one_line(error):
    text = str(error.value)
    assert len(text) < 1500
    assert "\n" not in text and "\x1b" not in text
    return text


def test_what_websockets_asserts_of_a_server_is_the_servers_failure(monkeypatch):
    """It asserts, now and then, that a server reads the request before it refuses."""

    def refused(*_, **__):
        raise AssertionError

    connection = Connection("http://127.0.0.1:9", None, timeout=5.0)
    monkeypatch.setattr(connection, "_connect", refused)
    with closing(connection), pytest.raises(InfrastructureError, match="connecting: AssertionError"):
        connection.attempt(lambda: connection.connect(ExitStack()), "/ws")


# -- how much ------------------------------------------------------------------------------------------------


def bomb(megabytes):
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb") as file:
        for _ in range(megabytes):
            file.write(b" " * (1 << 20))
    return packed.getvalue()


PEAK = """
import re, sys
from pathlib import Path
from agent_peft.environments import load_environment
peak = lambda: int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])
before = peak()
try:
    load_environment(dict(kind=sys.argv[2], url=sys.argv[1], **({"patience": 0.0} if sys.argv[2] == "remote" else {"num_tasks": 1})))
except Exception as error:
    print(type(error).__name__, str(error)[:200])
print(peak() - before)
"""  # noqa: E501


def answer_endlessly(line, head):
    line.sendall(http(b"", head).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked"))
    for _ in range(300):
        line.sendall(b"100000\r\n" + b" " * 0x100000 + b"\r\n")


def answer_with_brackets(line, head):
    line.sendall(http(b'{"total": 1, "tasks": [' + b"[]," * 8_000_000 + b"[]]}", head))


def answer_compressed(line, head):
    line.sendall(http(bomb(300), head, headers=(b"Content-Encoding: gzip",)))


KINDS = [pytest.param("remote"), pytest.param("openenv", marks=pytest.mark.slow)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("answer", [answer_compressed, answer_endlessly, answer_with_brackets])
def test_an_answer_takes_no_more_memory_than_it_may(kind, answer):
    with answering(answer) as url:
        found = subprocess.run(
            [sys.executable, "-c", PEAK, url, kind], capture_output=True, text=True, timeout=100
        )
    told, grown = found.stdout.splitlines()
    assert told.startswith("AgentPeftError")
    assert int(grown) < 200_000  # KiB; the pages that it reads have up to 32 MiB


def test_an_answer_that_comes_by_the_byte_is_not_waited_for():
    stop = threading.Event()

    def dribble(line, head):
        line.sendall(http(b" " * 1000, head)[:-1000])
        while not stop.wait(0.05):
            line.sendall(b" ")

    with answering(dribble) as url:
        with pytest.raises(AgentPeftError, match=r"takes more than 0\.5 s"):
            remote(url, timeout=0.5)
        stop.set()


def test_cookies_are_not_kept():
    def answer(line, head):
        assert b"\r\ncookie:" not in head.lower()
        line.sendall(
            http(b'{"total": 1, "tasks": [{"id": "t"}]}', head, headers=(b"Set-Cookie: a=" + b"b" * 1000,))
        )

    with answering(answer) as url:
        elsewhere = remote(url)
        elsewhere._fetch_tasks(elsewhere.connection)
        elsewhere.close()


@pytest.mark.parametrize("pages", [[2, 1], [0, 1], [10**30, 1], [-1, 1], [20_000, 3], [1.5, 1]])
def test_totals_that_are_not_true(pages):
    total, tasks = pages
    page = json.dumps({"total": total, "tasks": [{"id": str(n)} for n in range(tasks)]}).encode()
    with answering(
        lambda line, head: line.sendall(
            http(page, head) if b"offset=1 " not in head else http(b'{"total": 2, "tasks": []}', head)
        )
    ) as url:
        if total in (10**30, -1, 1.5):
            with pytest.raises(AgentPeftError, match="another version"):
                remote(url)
            return
        elsewhere = remote(url)
        if total == 20_000:
            with pytest.raises(InfrastructureError, match="page 0 of its tasks has 3"):
                elsewhere.tasks[5]
        assert len(elsewhere.tasks) in (1, 2, 20_000)
        elsewhere.close()


def test_all_tasks_together_are_bounded(monkeypatch):
    monkeypatch.setattr("agent_peft.environments.http.remote.MAX_SET_BYTES", 10_000)
    page = json.dumps({"total": 9999, "tasks": [{"id": "t", "content": {"x": "a" * 900}}]}).encode()
    with (
        answering(lambda line, head: line.sendall(http(page, head))) as url,
        pytest.raises(AgentPeftError, match="serve fewer"),
    ):
        remote(url)


# -- what ----------------------------------------------------------------------------------------------------

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**40), 10**40)
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(["\x1b[2J", "\ud800"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=8) | st.sampled_from(["detail", "code"]), inner, max_size=3)
    ),
    max_leaves=8,
)
TASKS = {"total": 1, "tasks": [{"id": "t", "skills": [], "content": {}}]}
RESET = {
    "observation": {"text": "go", "messages": [{"role": "user", "content": "go"}]},
    "reward": None,
    "done": False,
    "metadata": {"episode_id": "e", "step_count": 0, "environment": "train", "task": "t", "done": False},
}
STEP = {
    "observation": {"text": "heard", "messages": []},
    "reward": None,
    "done": False,
    "metadata": {"episode_id": "e", "index": 0, "outcome": "unknown", "stop_reason": None, "valid": True},
}


def frame(text, opcode=1):
    size = len(text)
    length = (
        bytes([size])
        if size < 126
        else b"\x7e" + size.to_bytes(2, "big")
        if size < 1 << 16
        else b"\x7f" + size.to_bytes(8, "big")
    )
    return bytes([0x80 | opcode]) + length + text


class Script:
    """What is answered to each path, and one frame for each message of a session."""

    def __init__(self):
        self.pages, self.frames, self.handshake = {}, [], b""

    def __call__(self, line, head):
        path = head.split(b" ")[1].split(b"?")[0].decode()
        if path != "/ws":
            answer, status = self.pages.get(path, ({"actions": ["a"]}, b"200 OK"))
            line.sendall(
                http(answer if isinstance(answer, bytes) else json.dumps(answer).encode(), head, status)
            )
            return
        key = re.search(rb"sec-websocket-key: (\S+)", head, re.IGNORECASE)[1]
        accept = base64.b64encode(hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
        switching = (
            b"HTTP/1.1 101 Switching\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: "
            + accept
            + b"\r\n\r\n"
        )
        line.sendall(self.handshake or switching)
        for answer in self.frames:
            sent = line.recv(65536)
            if not sent or sent[0] & 15 == 8:  # a close
                return
            line.sendall(answer)
        line.recv(65536)


@pytest.fixture(scope="module")
def scripted():
    script = Script()
    with answering(script) as url:
        yield script, url


def said(content, kind="observation"):
    return frame(json.dumps({"type": kind, "data": content}).encode())


def play(script, url, frames, tasks=(TASKS, b"200 OK"), demonstration=({"actions": ["a"]}, b"200 OK")):
    """Loading, a demonstration and a step: each ends in a result or one line."""
    script.pages = {"/tasks": tasks, "/demonstration": demonstration}
    script.frames, script.handshake = frames, b""
    with suppress(*TOLD, DefectError):
        elsewhere = remote(url)
        try:
            task = elsewhere.tasks[0] if elsewhere.tasks else None
            if task is not None:
                with suppress(*TOLD, DefectError):
                    elsewhere.demonstration(task)
                episode = elsewhere.episode(task, 0)
                try:
                    episode.start()
                    assert isinstance(episode.step("a"), StepResult)
                finally:
                    episode.close()
        finally:
            elsewhere.close()


def put_somewhere(drawn, content, value):
    return put(content, drawn.draw(st.sampled_from(list(places(content)))), value)


@FUZZ
@given(st.sampled_from(["tasks", "reset", "step", "demonstration"]), st.data(), values)
def test_an_answer_that_one_thing_is_wrong_with(scripted, wrong, drawn, value):
    right = {"tasks": TASKS, "reset": RESET, "step": STEP, "demonstration": {"actions": ["a"]}}
    right[wrong] = put_somewhere(drawn, right[wrong], value)
    play(
        *scripted,
        [said(right["reset"]), said(right["step"])],
        (right["tasks"], b"200 OK"),
        (right["demonstration"], b"200 OK"),
    )


@FUZZ
@given(
    st.sampled_from(
        [
            b"400 Bad",
            b"401 No",
            b"404 None",
            b"410 Gone",
            b"429 Full",
            b"500 Broken",
            b"502 Lost",
            b"201 Made",
            b"301 Moved",
            b"999 Odd",
        ]
    ),
    values | st.binary(max_size=40),
)
@example(b"404 None", {"detail": ["x"], "code": ["infrastructure"]})
@example(b"404 None", {"detail": "\x1b[2J" + "x" * 10_000, "code": "mistake"})
@example(b"502 Lost", [])
@example(b"500 Broken", b"[" * 50_000)
@example(b"200 OK", b'{"done": true}')
@example(b"200 OK", b"9" * 5000)
def test_refusals_that_are_none(scripted, status, answer):
    script, url = scripted
    play(script, url, [said(answer, "error") if isinstance(answer, dict) else said({}, "error")] * 2)
    script.pages = {"/tasks": (answer, status)}
    with pytest.raises(AgentPeftError) as error:
        remote(url)
    one_line(error)


@pytest.fixture
def playing(scripted):
    """playing(frames): an episode of a server that answers with these."""
    script, url = scripted
    script.pages, script.handshake = {"/tasks": (TASKS, b"200 OK")}, b""
    elsewhere = remote(url)

    def begin(*frames):
        script.frames = list(frames)
        return elsewhere.episode(elsewhere.tasks[0], 0)

    yield begin
    elsewhere.close()


def test_a_step_that_ends_without_a_reason_is_no_step(playing):
    episode = playing(said(RESET), said({**STEP, "done": True}))
    episode.start()
    with pytest.raises(AgentPeftError, match="has a stop reason exactly when it is the last"):
        episode.step("a")
    episode.close()
    episode = playing(said({**RESET, "observation": {"text": "", "messages": []}}))
    with pytest.raises(AgentPeftError, match="begins without a message"):
        episode.start()
    episode.close()


def test_an_answer_to_another_step_is_none(playing):
    episode = playing(said(RESET), said(STEP), said(STEP))
    episode.start()
    episode.step("a")
    with pytest.raises(InfrastructureError, match="another message"):
        episode.step("b")
    episode.close()


def test_a_defect_is_neither_a_mistake_nor_a_failure_of_the_world(playing):
    broken = {"message": "the environment raised ZeroDivisionError: \x1b[2J", "code": "EXECUTION_ERROR"}
    episode = playing(said(RESET), said(broken, "error"))
    episode.start()
    with pytest.raises(DefectError, match="ZeroDivisionError") as error:
        episode.step("a")
    one_line(error)
    assert not isinstance(error.value, TOLD)
    episode.close()


@FUZZ
@given(st.binary(max_size=80))
@example(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n")
@example(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n")
@example(b"HTTP/1.1 100 Continue\r\n\r\n")
@example(b"HTTP/1.1 200 OK\r\nX-Request-Id: \xff\r\n\r\n")
@example(b"HTTP/1.1 99999 OK\r\n\r\n")
@example(b"HTTP/1.1 307 Away\r\nLocation: http://[\r\n\r\n")
def test_what_is_no_http(answer):
    with answering(lambda line, head: line.sendall(answer)) as url, pytest.raises(AgentPeftError) as error:
        remote(url)
    one_line(error)


# -- an OpenEnv server ---------------------------------------------------------------------------------------

SCHEMA = {
    "action": {"properties": {"text": {"type": "string"}}, "required": ["text"]},
    "observation": {"properties": {"text": {"type": "string"}}},
}
OBSERVED = {"type": "observation", "data": {"observation": {"text": "go"}, "reward": 0.5, "done": False}}


def play_openenv(script, url, schema, frames, handshake=b""):
    script.pages, script.frames, script.handshake = {"/schema": (schema, b"200 OK")}, frames, handshake
    with suppress(*TOLD):
        environment = load_environment({"kind": "openenv", "url": url, "num_tasks": 1, "timeout": 2.0})
        episode = environment.episode(environment.tasks[0], 0)
        try:
            episode.start()
            assert isinstance(episode.step("a"), StepResult)
        finally:
            episode.close()
            environment.close()


@FUZZ
@given(st.booleans(), st.data(), values)
def test_an_openenv_answer_that_one_thing_is_wrong_with(scripted, in_schema, drawn, value):
    right = SCHEMA if in_schema else OBSERVED
    wrong = json.dumps(put(right, drawn.draw(st.sampled_from(list(places(right)))), value)).encode()
    right_frame = frame(json.dumps(OBSERVED).encode())
    frames = (
        [right_frame, right_frame]
        if in_schema
        else [drawn.draw(st.sampled_from([right_frame, frame(wrong)])), frame(wrong)]
    )
    play_openenv(*scripted, wrong if in_schema else json.dumps(SCHEMA).encode(), frames)


@pytest.mark.parametrize(
    "data",
    [
        b"[]",
        b"null",
        b"[" * 50_000,
        b"9" * 5000,
        b"\xff\xfe",
        b'{"type": "error", "data": []}',
        b'{"type": "error", "data": {"code": ["x"], "message": {}}}',
        b'{"type": "observation", "data": {"observation": {"text": "a"}, "reward": 1' + b"0" * 400 + b"}}",
        b'{"type": "observation", "data": {"observation": {"text": "a"}, "reward": "much"}}',
        b'{"type": "observation", "data": {"observation": {"text": "a"}, "reward": NaN}}',
        b'{"type": "observation", "data": {"observation": {"text": "a"}, "done": {}}}',
        b'{"type": "observation", "data": 3}',
    ],
)
def test_openenv_answers_that_are_none(scripted, data):
    script, url = scripted
    right = frame(json.dumps(OBSERVED).encode())
    script.pages, script.handshake = {"/schema": (SCHEMA, b"200 OK")}, b""
    script.frames = [right, frame(data)]
    environment = load_environment({"kind": "openenv", "url": url, "num_tasks": 1, "timeout": 2.0})
    episode = environment.episode(environment.tasks[0], 0)
    episode.start()
    with pytest.raises(InfrastructureError) as error:
        episode.step("a")
    one_line(error)
    episode.close()


@pytest.mark.parametrize(
    "frames",
    [
        [frame(b" " * (MAX_ANSWER_BYTES + 1))],
        [
            frame(b'{"type": "observation"}').replace(b"\x81", b"\xc1", 1)
        ],  # compressed, which was not agreed on
        [frame(b"\xff\xff")],
        [frame(b"{}", 2)],
        [frame(b"", 8)],
        [b"\x01\x00" + b"\x00\x00" * 1000],
        [b"\xff" * 200],
    ],
)
def test_frames_that_are_none(scripted, frames):
    play_openenv(*scripted, json.dumps(SCHEMA).encode(), frames * 3)


@pytest.mark.parametrize(
    "location", [b"http://[", b"ws://[", b"http://127.0.0.1:99999999/ws", b"ftp://x", b"\xff", b"/ws"]
)
def test_redirects_of_a_socket(scripted, location):
    script, url = scripted
    script.pages, script.frames = {"/schema": (SCHEMA, b"200 OK")}, []
    script.handshake = b"HTTP/1.1 302 Found\r\nLocation: " + location + b"\r\nContent-Length: 0\r\n\r\n"
    with pytest.raises(AgentPeftError) as error:
        load_environment({"kind": "openenv", "url": url, "num_tasks": 1, "timeout": 2.0})
    one_line(error)
