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
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from agent_peft.environments import load_environment
from agent_peft.environments.http import messages
from agent_peft.environments.http.connection import MAX_ANSWER_BYTES, DefectError
from agent_peft.types import AgentPeftError, InfrastructureError, StepResult
from tests.environments.http.strangers import answering

FUZZ = settings(
    max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
TOLD = (AgentPeftError, InfrastructureError)


def http(body, head, status=b"200 OK", headers=()):
    found = re.search(rb"x-request-id: *(\S+)", head, re.IGNORECASE)
    lines = [
        b"HTTP/1.1 " + status,
        b"X-Request-Id: " + (found[1] if found else b""),
        b"Connection: close",
        *headers,
    ]
    return b"\r\n".join([*lines, b"Content-Length: %d" % len(body), b"", b""]) + body


def remote(url, **more):
    return load_environment({"kind": "remote", "url": url, "patience": 0.0, "timeout": 5.0, **more})


def one_line(error):
    text = str(error.value)
    assert len(text) < 1500
    assert "\n" not in text and "\x1b" not in text
    return text


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
        elsewhere._fetch_tasks()
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
    monkeypatch.setattr("agent_peft.environments.http.client.MAX_SET_BYTES", 10_000)
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
    "metadata": {"episode_id": "E", "server_id": "s", "environment": "train", "task": "t"},
}
STEP = {
    "observation": {"text": "heard", "messages": []},
    "reward": None,
    "done": False,
    "metadata": {"episode_id": "E", "index": 0, "outcome": "unknown", "stop_reason": None, "valid": True},
}


def places(content, path=()):
    yield path
    if isinstance(content, dict | list):
        for key, inner in content.items() if isinstance(content, dict) else enumerate(content):
            yield from places(inner, (*path, key))


def put(content, path, value):
    if not path:
        return value
    copied = dict(content) if isinstance(content, dict) else list(content)
    copied[path[0]] = put(content[path[0]], path[1:], value)
    return copied


class Script:
    """What is answered to each path; ``E`` stands for the episode's id."""

    def __init__(self):
        self.answers = {}

    def __call__(self, line, head):
        path = head.split(b" ")[1].split(b"?")[0].decode()
        length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
        body = head.partition(b"\r\n\r\n")[2]
        while length and len(body) < int(length[1]):
            body += line.recv(65536)
        answer, status = self.answers.get(path, ({"status": "ok"}, b"200 OK"))
        text = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        if found := re.search(rb'"episode_id": ?"(\w+)"', body):
            text = text.replace(b'"E"', b'"' + found[1] + b'"')
        line.sendall(http(text, head, status))


@pytest.fixture(scope="module")
def scripted():
    script = Script()
    with answering(script) as url:
        yield script, url


def play(script, url, kind="remote"):
    """Loading, a demonstration and two steps: each ends in a result or one line."""
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


@FUZZ
@given(st.sampled_from(["/tasks", "/reset", "/step", "/demonstration", "/close"]), st.data(), values)
def test_an_answer_that_one_thing_is_wrong_with(scripted, path, drawn, value):
    script, url = scripted
    right = {
        "/tasks": TASKS,
        "/reset": RESET,
        "/step": STEP,
        "/demonstration": {"actions": ["a"]},
        "/close": {"status": "ok"},
    }
    script.answers = {name: (answer, b"200 OK") for name, answer in right.items()}
    script.answers[path] = (
        put(right[path], drawn.draw(st.sampled_from(list(places(right[path])))), value),
        b"200 OK",
    )
    play(script, url)


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
@example(b"404 None", {"detail": ["x"], "code": ["unknown_episode"]})
@example(b"404 None", {"detail": "\x1b[2J" + "x" * 10_000, "code": "mistake"})
@example(b"502 Lost", [])
@example(b"500 Broken", b"[" * 50_000)
@example(b"200 OK", b'{"done": true}')
@example(b"200 OK", b"9" * 5000)
def test_refusals_that_are_none(scripted, status, answer):
    script, url = scripted
    script.answers = {
        "/tasks": (TASKS, b"200 OK"),
        "/reset": (RESET, b"200 OK"),
        "/step": (answer, status),
        "/close": (answer, status),
    }
    play(script, url)
    script.answers = {"/tasks": (answer, status)}
    with pytest.raises(AgentPeftError) as error:
        remote(url)
    one_line(error)


def test_a_step_that_ends_without_a_reason_is_no_step(scripted):
    script, url = scripted
    script.answers = {
        "/tasks": (TASKS, b"200 OK"),
        "/reset": (RESET, b"200 OK"),
        "/step": ({**STEP, "done": True}, b"200 OK"),
    }
    elsewhere = remote(url)
    episode = elsewhere.episode(elsewhere.tasks[0], 0)
    episode.start()
    with pytest.raises(AgentPeftError, match="a stop reason exactly when it is the last"):
        episode.step("a")
    episode.close()
    script.answers["/reset"] = ({**RESET, "observation": {"text": "", "messages": []}}, b"200 OK")
    with pytest.raises(AgentPeftError, match="begins without a message"):
        elsewhere.episode(elsewhere.tasks[0], 0).start()
    elsewhere.close()


def test_a_defect_is_neither_a_mistake_nor_a_failure_of_the_world(scripted):
    script, url = scripted
    broken = {"detail": "the environment raised ZeroDivisionError: \x1b[2J", "code": messages.BROKEN}
    script.answers = {
        "/tasks": (TASKS, b"200 OK"),
        "/reset": (RESET, b"200 OK"),
        "/step": (broken, b"500 Broken"),
    }
    elsewhere = remote(url)
    episode = elsewhere.episode(elsewhere.tasks[0], 0)
    episode.start()
    with pytest.raises(DefectError, match="ZeroDivisionError") as error:
        episode.step("a")
    one_line(error)
    assert not isinstance(error.value, TOLD)
    episode.close()
    elsewhere.close()


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


def frame(text, opcode=1):
    head = bytes([0x80 | opcode])
    size = len(text)
    return (
        head
        + (
            bytes([size])
            if size < 126
            else b"\x7e" + size.to_bytes(2, "big")
            if size < 1 << 16
            else b"\x7f" + size.to_bytes(8, "big")
        )
        + text
    )


class OpenEnvScript:
    """The page of the schema, and one frame for each message."""

    def __init__(self):
        self.schema, self.frames, self.handshake = b"", [], b""

    def __call__(self, line, head):
        if b"/schema" in head.split(b"\r\n")[0]:
            line.sendall(http(self.schema, head))
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
            said = line.recv(65536)
            if not said or said[0] & 15 == 8:  # a close
                return
            line.sendall(answer)
        line.recv(65536)


@pytest.fixture(scope="module")
def openenv():
    script = OpenEnvScript()
    with answering(script) as url:
        yield script, url


def play_openenv(script, url, schema, frames, handshake=b""):
    script.schema, script.frames, script.handshake = schema, frames, handshake
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
def test_an_openenv_answer_that_one_thing_is_wrong_with(openenv, in_schema, drawn, value):
    right = SCHEMA if in_schema else OBSERVED
    wrong = json.dumps(put(right, drawn.draw(st.sampled_from(list(places(right)))), value)).encode()
    right_frame = frame(json.dumps(OBSERVED).encode())
    frames = (
        [right_frame, right_frame]
        if in_schema
        else [drawn.draw(st.sampled_from([right_frame, frame(wrong)])), frame(wrong)]
    )
    play_openenv(*openenv, wrong if in_schema else json.dumps(SCHEMA).encode(), frames)


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
def test_openenv_answers_that_are_none(openenv, data):
    script, url = openenv
    right = frame(json.dumps(OBSERVED).encode())
    script.schema, script.frames, script.handshake = json.dumps(SCHEMA).encode(), [right, frame(data)], b""
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
def test_frames_that_are_none(openenv, frames):
    play_openenv(*openenv, json.dumps(SCHEMA).encode(), frames * 3)


@pytest.mark.parametrize(
    "location", [b"http://[", b"ws://[", b"http://127.0.0.1:99999999/ws", b"ftp://x", b"\xff", b"/ws"]
)
def test_redirects_of_a_socket(openenv, location):
    script, url = openenv
    script.schema, script.frames = json.dumps(SCHEMA).encode(), []
    script.handshake = b"HTTP/1.1 302 Found\r\nLocation: " + location + b"\r\nContent-Length: 0\r\n\r\n"
    with pytest.raises(AgentPeftError) as error:
        load_environment({"kind": "openenv", "url": url, "num_tasks": 1, "timeout": 2.0})
    one_line(error)
