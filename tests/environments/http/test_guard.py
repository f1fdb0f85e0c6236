"""What stands before every request: no text in it raises, and none of the tricks by which one passes for
another works.
"""

import json
import logging
import socket

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from agent_peft.environments import load_environment
from agent_peft.environments.http.guard import Limits, names_loopback
from tests.environments.http.strangers import ask, connect, read_all, request, session, status

SUMS = {"kind": "arithmetic", "num_tasks": 12, "digits": 2}
FUZZ = settings(
    max_examples=120,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture(scope="module")
def host(serving_all_along):
    return serving_all_along({"train": load_environment(SUMS)})


NAMES = (
    *(
        b"[::1",
        b"[evil]",
        b"[::1]]",
        b"]",
        b"[",
        b"localhost.evil.example",
        b"localhost@evil.example",
        b"evil.example@localhost",
        b"",
    ),
    *(
        b"localhost\tevil",
        b"localhost/evil",
        b"localhost:abc",
        b"localh\xf6st",
        b"2130706433",
        b"\xbd.example",
    ),
)


@pytest.mark.parametrize("host_header", NAMES)
def test_a_host_that_is_not_this_machine_is_refused(host, host_header):
    answer = ask(host.url, request(host=host_header))
    assert status(answer) in (400, 403)
    assert b"Traceback" not in answer


def test_without_a_host_nobody_knows_for_whom_a_request_is(host):
    """HTTP/1.0 needs none, and a page whose name leads here could ask so through a proxy."""
    for path in (b"/metadata", b"/health"):
        assert status(ask(host.url, b"GET " + path + b" HTTP/1.0\r\n\r\n")) == 400
        assert status(ask(host.url, b"GET " + path + b" HTTP/1.0\r\nHost: localhost\r\n\r\n")) == 200


@pytest.mark.parametrize(
    "origin",
    [
        b"http://[",
        b"null",
        b"file://",
        b"http://localhost@evil.example",
        b"https://evil.example",
        b"x" * 9000,
    ],
)
def test_requests_of_web_pages_are_refused_however_the_page_is_called(host, origin):
    assert status(ask(host.url, request(headers=(b"Origin: " + origin,)))) == 403
    both = (b"Origin: " + origin, b"Origin: http://localhost")
    assert status(ask(host.url, request(headers=both))) == 403


@pytest.mark.parametrize("path", ["/tasks", "/examples", "/docs"])
def test_a_page_without_an_origin_is_known_by_what_the_browser_says_of_it(host, path):
    url = host.url
    assert status(ask(url, request(path, headers=(b"Sec-Fetch-Site: cross-site",)))) == 403
    assert status(ask(url, request(path, headers=(b"Sec-Fetch-Site: same-origin",)))) == 200


@given(st.binary(max_size=60))
@example(b"localhost")
@settings(deadline=None)
def test_no_name_of_a_host_raises(name):
    assert names_loopback(name) in (True, False)


@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_a_request_of_two_lengths_is_refused_and_what_it_hides_is_not_executed(host, version, monkeypatch):
    asked = []
    environment = host.sessions.environments["train"]
    monkeypatch.setattr(environment, "demonstration", lambda task: asked.append(task.id))
    body = json.dumps({"task": environment.tasks[0].id}).encode()
    hidden = request("/demonstration", "POST", body)
    lengths = b"Transfer-Encoding: chunked\r\n" + (b"Content-Length: 4\r\n" if version == "1.1" else b"")
    answer = ask(
        host.url,
        b"POST /api/ping HTTP/%s\r\nHost: localhost\r\n%s\r\n0\r\n\r\n" % (version.encode(), lengths)
        + hidden,
    )
    assert status(answer) == 400
    assert answer.count(b"HTTP/1.1 ") == 1
    assert not asked
    assert status(ask(host.url, hidden)) == 200
    assert asked


header_names = st.sampled_from(
    b"""Host Origin Sec-Fetch-Site Authorization Content-Length Transfer-Encoding Content-Type Content-Encoding Upgrade Connection Expect
    Sec-WebSocket-Key Sec-WebSocket-Version Sec-WebSocket-Extensions Sec-WebSocket-Protocol X-Request-Id X-Client-Id X-Forwarded-For
    X-Forwarded-Proto Forwarded Cookie Range TE""".split()  # noqa: E501
)
header_values = st.sampled_from(
    b"""localhost [::1 http://[ chunked identity 0 5 99999999999999999999 -1 websocket h2c upgrade close 13 dGhlIHNhbXBsZSBub25jZQ==
    permessage-deflate 100-continue gzip a,,b;= application/json application/json;charset=" application/json;charset=utf-16
    multipart/form-data;boundary=""".split()  # noqa: E501
) | st.binary(max_size=40).map(lambda value: value.translate(None, b"\r\n\0"))
targets = st.sampled_from(
    ["/health", "/tasks", "/tasks?offset=-1", "/demonstration", "/ws", "/docs", "/docs/"]
) | st.text(st.characters(max_codepoint=126, min_codepoint=33), max_size=40)
bodies = st.sampled_from(
    [
        b"",
        b"{}",
        b"{",
        b"null",
        b"[" * 2000,
        b'{"episode_id": "e"}',
        b"\xff\xfe",
        b"0\r\n\r\n",
        b"\0",
        b'"\\ud800"',
    ]
) | st.binary(max_size=60)


@FUZZ
@given(
    st.sampled_from([b"GET", b"POST", b"PUT", b"HEAD", b"OPTIONS", b"CONNECT", b"PRI", b"get", b"\xff"]),
    targets,
    st.sampled_from([b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9", b""]),
    st.lists(st.tuples(header_names, header_values), max_size=6),
    bodies,
)
@example(b"POST", "/ws", b"HTTP/1.1", [(b"Upgrade", b"websocket"), (b"Connection", b"upgrade")], b"")
@example(b"GET", "/ws", b"HTTP/1.0", [(b"Upgrade", b"websocket"), (b"Connection", b"upgrade")], b"")
@example(
    b"GET",
    "/ws",
    b"HTTP/1.1",
    [(b"Upgrade", b"websocket"), (b"Connection", b"upgrade"), (b"Sec-WebSocket-Key", b"\xff")],
    b"",
)
@example(
    b"GET",
    "/health",
    b"HTTP/1.1",
    [(b"Upgrade", b"websocket"), (b"Connection", b"upgrade"), (b"Content-Length", b"5")],
    b"abc",
)
@example(b"POST", "/demonstration", b"HTTP/1.1", [(b"Content-Length", b"2")], b"{}\0\0\0\0\r\n\r\n")
@example(b"POST", "/demonstration", b"HTTP/1.1", [(b"Transfer-Encoding", b"chunked")], b"zz\r\n")
def test_whatever_is_sent_is_answered_without_a_traceback(
    host, caplog, method, target, version, headers, body
):
    caplog.clear()
    lines = [
        b"%s %s %s" % (method, target.encode("latin-1"), version),
        *(b"%s: %s" % header for header in headers),
    ]
    if not any(name == b"Host" for name, _ in headers):
        lines.append(b"Host: localhost")
    lines.append(b"Connection: close")
    with (
        caplog.at_level(logging.INFO, "uvicorn"),
        connect(host.url, b"\r\n".join([*lines, b"", b""]) + body) as line,
    ):
        line.shutdown(socket.SHUT_WR)  # nothing more will come
        answer = read_all(line)
    assert not answer or answer.startswith(b"HTTP/1.1 ")
    for part in answer.split(b"HTTP/1.1 ")[1:]:
        assert part[:3] == b"101" or b"200" <= part[:3] < b"500", answer[:300]
    assert not [
        record for record in caplog.records if record.exc_info or "raceback" in record.getMessage()
    ], caplog.text


# -- what a body may hold ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b'{"task": {"id": "t", "skills": [' + b"1," * 400_000 + b"1]}}",
        b'{"task": {"id": "t", "content": {"a": ' + b"[" * 900 + b"]" * 900 + b"}}}",
        b"{" + b",".join(b'"%d": 1' % number for number in range(60_000)) + b"}",
        b'{"task": {"id": "t", "content": {'
        + b",".join(b'"\\ud800%d": 1' % number for number in range(30_000))
        + b"}}}",
        b'{"task": "' + b"a" * 5000 + b'"}',
        b'{"seed": ' + b"9" * 4000 + b"}",
        b'{"environment": "train"}'.decode().encode("utf-16"),
    ],
    ids=["items", "depth", "keys", "half characters", "a long id", "digits", "UTF-16"],
)
def test_what_would_be_many_objects_or_many_errors_is_one_short_refusal(host, body):
    answer = httpx.post(
        f"{host.url}/demonstration",
        content=body,
        headers={"content-type": "application/json"},
        trust_env=False,
        timeout=20,
    )
    assert answer.status_code in (413, 422)
    assert len(answer.content) < 1000
    assert set(answer.json()) == {"detail", "code"}
    with session(host) as one:
        if body.isascii():
            one.socket.send('{"type": "reset", "data": ' + body.decode() + "}")
        else:
            one.socket.send(body.decode("utf-16"))
        text = one.socket.recv(timeout=20)
        assert json.loads(text)["type"] == "error"
        assert len(text) < 1000


def test_bodies_that_are_under_way_are_bounded_together(serving):
    host = serving({"train": load_environment(SUMS)}, limits=Limits(bodies_bytes=1000, body_seconds=5))
    head = (
        b"POST /demonstration HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: 901\r\n\r\n"
    )
    with connect(host.url, head + b" " * 900) as slow:
        for _ in range(100):
            if status(answer := ask(host.url, request("/demonstration", "POST", b" " * 600))) == 503:
                break
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["code"] == "busy"
        slow.sendall(b"x")
        assert status(slow.recv(1000)) == 422
    body = json.dumps({"task": host.sessions.environments["train"].tasks[0].id}).encode()
    assert status(ask(host.url, request("/demonstration", "POST", body + b" " * 600))) == 200
