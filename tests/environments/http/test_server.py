"""The server: what it executes, how often, for whom, and what it says to strangers."""

import asyncio
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import pytest

from agent_peft.environments import load_environment
from agent_peft.environments.base import Environment, Episode
from agent_peft.environments.http import messages
from agent_peft.environments.http.episodes import Episodes
from agent_peft.environments.http.limits import Limits
from agent_peft.environments.http.messages import Refusal
from agent_peft.environments.http.server import Address, Host, check_tasks
from agent_peft.types import (
    AgentPeftError,
    InfrastructureError,
    Message,
    Outcome,
    StepResult,
    StopReason,
    Task,
)


class Ledger(Environment):
    """Writes down what is executed. An action says what the episode is to do."""

    def __init__(self):
        self.executed, self.closed, self.gate = [], [], threading.Event()
        self.gate.set()

    @property
    def tasks(self):
        return (Task("a", ("one",), {"n": 1}), Task("b", (), {"n": 2}))

    def episode(self, task, seed):
        if task.id == "broken":
            raise KeyError("n")
        return LedgerEpisode(self, task, seed)


class LedgerEpisode(Episode):
    def __init__(self, world, task, seed):
        self.world, self.name = world, (task.id, seed)

    def start(self):
        self.world.executed.append((*self.name, "start"))
        return [Message("system", "be brief"), Message("user", f"task {self.name[0]}")]

    def step(self, action):
        self.world.executed.append((*self.name, action))
        self.world.gate.wait(20)
        if action == "fail":
            raise InfrastructureError("the disk is full")
        if action == "mistake":
            raise AgentPeftError("two\nlines")
        if action == "crash":
            raise ZeroDivisionError("by zero")
        if action == "finish":
            return StepResult("", True, Outcome.CORRECT, StopReason.FINISHED)
        return StepResult(f"heard {action}", valid=action != "nonsense")

    def close(self):
        self.world.closed.append(self.name)


@pytest.fixture
def world():
    return Ledger()


def client(host, **more):
    return httpx.Client(base_url=host.url, trust_env=False, timeout=30, **more)


@pytest.fixture
def api(serving, world):
    with client(serving({"train": world})) as found:
        yield found


def reset(api, name="e", **more):
    return api.post("/reset", json={"episode_id": name, "task": "a", "seed": 5, **more})


def step(api, index, text="hello", name="e", **more):
    return api.post("/step", json={"episode_id": name, "index": index, "action": {"text": text}, **more})


def test_an_episode_in_openenvs_words(api, world):
    opened = reset(api).json()
    assert opened["observation"]["text"] == "task a"
    assert opened["observation"]["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "task a"},
    ]
    assert (opened["reward"], opened["done"], opened["metadata"]["episode_id"]) == (None, False, "e")
    heard = step(api, 0, "nonsense").json()
    assert heard["observation"] == {"text": "heard nonsense", "messages": []}
    assert heard["metadata"] == {
        "episode_id": "e",
        "index": 0,
        "outcome": "unknown",
        "stop_reason": None,
        "valid": False,
    }
    assert api.get("/state", params={"episode_id": "e"}).json()["step_count"] == 1
    done = step(api, 1, "finish").json()
    assert (done["reward"], done["done"], done["metadata"]["outcome"], done["metadata"]["stop_reason"]) == (
        1.0,
        True,
        "correct",
        "finished",
    )
    assert world.closed == [("a", 5)]  # without being asked


def test_a_repeated_request_is_answered_as_before_and_executed_once(api, world):
    assert reset(api).json() == reset(api).json()
    assert step(api, 0).json() == step(api, 0).json()
    assert step(api, 1, "finish").json() == step(api, 1, "finish").json()
    assert [what for *_, what in world.executed] == ["start", "hello", "finish"]


def test_requests_that_arrive_while_the_first_is_executed_wait_for_it(api, world):
    reset(api)
    world.gate.clear()
    with ThreadPoolExecutor(8) as threads:
        answers = [threads.submit(step, api, 0) for _ in range(8)]
        while len(world.executed) < 2:
            time.sleep(0.01)
        world.gate.set()
        found = [answer.result().json() for answer in answers]
    assert found == [found[0]] * 8
    assert len(world.executed) == 2


def test_a_client_that_hangs_up_stops_nothing(api, world):
    reset(api)
    world.gate.clear()
    with pytest.raises(httpx.ReadTimeout):
        api.post("/step", json={"episode_id": "e", "index": 0, "action": {"text": "hello"}}, timeout=0.3)
    world.gate.set()
    assert step(api, 0).json()["observation"]["text"] == "heard hello"
    assert len(world.executed) == 2


@pytest.mark.parametrize(
    ("index", "text", "status", "code"),
    [
        (0, "something else", 409, "conflict"),  # under an index that is taken
        (2, "hello", 409, "conflict"),  # one is left out
    ],
)
def test_steps_come_in_their_order(api, world, index, text, status, code):
    reset(api)
    step(api, 0)
    refused = step(api, index, text)
    assert (refused.status_code, refused.json()["code"]) == (status, code)
    assert len(world.executed) == 2


def test_an_episode_id_names_one_task_and_one_seed(api, world):
    reset(api)
    assert reset(api, seed=6).status_code == 409
    assert reset(api, task="b").status_code == 409
    assert len(world.executed) == 1


def test_after_its_end_an_episode_takes_no_step(api, world):
    reset(api)
    step(api, 0, "finish")
    assert (step(api, 1).status_code, step(api, 1).json()["code"]) == (410, "episode_ended")
    assert (
        api.post("/close", json={"episode_id": "e"}).json()
        == api.post("/close", json={"episode_id": "e"}).json()
        == {"status": "ok"}
    )
    assert step(api, 0, "finish").status_code == 410  # its client wants no more answers
    assert world.closed == [("a", 5)]


def test_a_reset_that_comes_after_its_close_starts_nothing(api, world):
    assert api.post("/close", json={"episode_id": "e"}).status_code == 200
    assert reset(api).status_code == 410
    assert world.executed == []


def test_another_servers_episode_is_unknown(api, world):
    opened = reset(api).json()
    assert step(api, 0, server_id=opened["metadata"]["server_id"]).status_code == 200
    refused = step(api, 1, server_id="of-a-server-that-was-killed")
    assert (refused.status_code, refused.json()["code"]) == (404, "unknown_episode")
    assert step(api, 0, name="never").json()["code"] == "unknown_episode"


@pytest.mark.parametrize(
    ("action", "status", "code", "told"),
    [
        ("fail", 502, "infrastructure", "the disk is full"),
        ("mistake", 422, "mistake", "two lines"),
        ("crash", 500, "broken", "ZeroDivisionError: by zero"),
    ],
)
def test_what_an_environment_raises_is_told_in_one_line_and_remembered(
    api, world, action, status, code, told
):
    reset(api)
    for _ in range(2):
        refused = step(api, 0, action)
        assert (refused.status_code, refused.json()["code"]) == (status, code)
        assert told in refused.json()["detail"]
        assert "\n" not in refused.json()["detail"]
    assert len(world.executed) == 2
    assert world.closed == [("a", 5)]


def test_a_task_that_is_sent_whole(api, world):
    own = {"id": "mine", "skills": ["x"], "content": {"n": [1, {"deep": None}]}}
    assert reset(api, task=own).json()["metadata"]["task"] == "mine"
    refused = reset(api, "f", task={"id": "broken"})
    assert (refused.status_code, refused.json()["code"]) == (
        422,
        "mistake",
    )  # who sends a task is answerable for it
    assert "KeyError" in refused.json()["detail"]
    assert reset(api, "g", task="nowhere").status_code == 404
    assert (
        reset(api, "h", environment="nowhere").json()["detail"]
        == "there is no environment 'nowhere' here; choose train"
    )


def test_without_a_task_the_seed_chooses_one_and_without_a_seed_the_next_comes(api):
    chosen = [api.post("/reset", json={"seed": 3}).json()["metadata"]["task"] for _ in range(3)]
    assert len(set(chosen)) == 1
    assert [api.post("/reset", json={}).json()["metadata"]["task"] for _ in range(4)] == ["a", "b", "a", "b"]


def test_tasks_come_in_pages(api):
    page = api.get("/tasks", params={"offset": 1, "limit": 1}).json()
    assert page == {"total": 2, "tasks": [{"id": "b", "skills": [], "content": {"n": 2}}]}
    assert api.get("/tasks", params={"environment": "nowhere"}).status_code == 404
    assert api.get("/tasks", params={"offset": -1}).status_code == 422


def test_pings(serving, world):
    host = serving(
        {"train": world}
    )  # as: curl -X POST -H "Content-Type: application/json" -d '{}' http://127.0.0.1:8000/api/ping
    assert httpx.post(f"{host.url}/api/ping", json={}, trust_env=False).json() == {"status": "ok"}


def test_lone_surrogates_travel(api):
    reset(api)
    body = b'{"episode_id": "e", "index": 0, "action": {"text": "\\ud800"}}'
    answer = api.post("/step", content=body, headers={"content-type": "application/json"})
    assert answer.content.isascii()
    assert json.loads(answer.content)["observation"]["text"] == "heard \ud800"


# -- strangers -----------------------------------------------------------------------------------------------


def test_a_token_is_needed_off_loopback(world):
    with pytest.raises(AgentPeftError, match="a token is needed"):
        Host({"train": world}, Address("0.0.0.0", 0), Limits())


def test_a_wrong_token_is_refused(serving, world):
    host = serving({"train": world}, token="correct-horse")
    with client(host) as stranger:
        for header in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "correct-horse"},
            {"authorization": "bearer correct-horse"},
        ):
            refused = stranger.get("/tasks", headers=header)
            assert (refused.status_code, refused.json()["code"], refused.headers["www-authenticate"]) == (
                401,
                "token",
                "Bearer",
            )
        assert stranger.get("/openapi.json").status_code == 401
        assert stranger.post("/api/ping", json={}).status_code == 200
        assert stranger.get("/tasks", headers={"authorization": "Bearer correct-horse"}).status_code == 200
    assert httpx.get(f"{host.url}/examples", trust_env=False).status_code == 401


def test_a_web_page_may_not_speak_to_ones_loopback(api):
    assert api.get("/tasks", headers={"origin": "https://example.org"}).status_code == 403
    assert api.get("/tasks", headers={"host": "example.org"}).status_code == 403
    assert api.get("/tasks", headers={"origin": "http://localhost:3000"}).status_code == 200
    plain = api.post(
        "/step", content=b"{}", headers={"content-type": "text/plain"}
    )  # what a form may send anywhere
    assert plain.status_code == 422


MALFORMED = [
    b"",
    b"{",
    b"null",
    b"[]",
    b'"x"',
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"seed": 1e999}',
    b'{"seed": ' + b"9" * 5000 + b"}",
    b"NaN",
    b'{"seed": true}',
    b'{"seed": 1.0}',
    b'{"seed": "1"}',
    b'{"seed": 1, "seed": 2}',
    b'{"task": {"id": "x", "content": {"a": 1, "a": 2}}}',
    b'{"episode_id": "e", "index": false, "action": {"text": "hello"}}',
]


def test_malformed_bodies_get_one_line(api):
    for path in ("/reset", "/step", "/close", "/demonstration"):
        for body in MALFORMED:
            answer = api.post(path, content=body, headers={"content-type": "application/json"})
            if path == "/reset" and body in (b"", b"null"):  # an OpenEnv client may reset without a word
                assert answer.status_code == 200
                continue
            assert answer.status_code in (400, 422), (path, body[:20])
            assert set(answer.json()) == {"detail", "code"}
            assert "\n" not in answer.json()["detail"]


def test_bodies_and_actions_have_limits(serving, world):
    with client(serving({"train": world}, limits=Limits(body_bytes=1000, action_chars=100))) as api:
        reset(api)
        assert step(api, 0, "x" * 101).status_code == 413
        assert step(api, 0, "x" * 1000).json()["code"] == "too_long"
        chunks = api.post(
            "/step", content=(b"x" * 300 for _ in range(10)), headers={"content-type": "application/json"}
        )  # no length told
        assert chunks.status_code == 413
        assert step(api, 0, "x" * 100).status_code == 200


def test_a_body_that_never_comes_is_not_waited_for(serving, world):
    host = serving({"train": world}, limits=Limits(body_seconds=0.3))
    with socket.create_connection(("127.0.0.1", int(host.url.rsplit(":", 1)[1])), timeout=20) as line:
        line.sendall(
            b"POST /step HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 10\r\n\r\n{"  # noqa: E501
        )
        assert line.recv(1000).startswith(b"HTTP/1.1 408")


def test_episodes_have_a_limit(serving, world):
    with client(serving({"train": world}, limits=Limits(episodes=2))) as api:
        assert [reset(api, name).status_code for name in "abc"] == [200, 200, 429]
        assert "--max-episodes" in reset(api, "c").json()["detail"]
        api.post("/close", json={"episode_id": "a"})
        assert reset(api, "c").status_code == 200


def test_unknown_paths_methods_and_keys(api):
    assert api.get("/nowhere").status_code == 404
    assert api.get("/step").status_code == 405
    refused = reset(api, temperature=1)
    assert (refused.status_code, refused.json()["detail"]) == (
        422,
        "body.temperature: Extra inputs are not permitted",
    )


def test_the_request_id_is_echoed_if_it_is_one(api):
    assert (
        api.get("/health", headers={messages.REQUEST_ID: "abc123"}).headers[messages.REQUEST_ID] == "abc123"
    )
    assert messages.REQUEST_ID not in api.get("/health", headers={messages.REQUEST_ID: "a b"}).headers
    assert messages.REQUEST_ID not in api.get("/health", headers={messages.REQUEST_ID: "a" * 65}).headers


# -- what is idle, and the end -------------------------------------------------------------------------------


def in_loop(world, scenario, **limits):
    """A scenario on a table of episodes whose clock is turned by hand."""
    now = [0.0]

    async def run():
        table = Episodes({"train": world}, replace(Limits(), **limits), clock=lambda: now[0])
        try:
            return await scenario(table, now)
        finally:
            await table.shutdown()

    return asyncio.run(run())


def test_idle_episodes_are_closed_unless_their_client_still_speaks(world):
    async def scenario(table, now):
        for name, speaker in (("one", "ann"), ("two", "bob"), ("three", None)):
            await table.reset(messages.ResetRequest(episode_id=name, seed=1), speaker)
        now[0] = 9
        await table.step(
            messages.StepRequest(episode_id="one", index=0, action=messages.Action(text="x")), "ann"
        )
        await table.reset(messages.ResetRequest(episode_id="four", seed=1), "bob")
        now[0] = 11
        assert await table.reap() == 1
        assert set(table.open) == {"one", "two", "four"}
        now[0] = 25
        assert await table.reap() == 3
        with pytest.raises(Refusal, match="because it was idle"):
            await table.step(
                messages.StepRequest(episode_id="one", index=1, action=messages.Action(text="x"))
            )

    in_loop(world, scenario, idle_seconds=10)
    assert len(world.closed) == 4


def test_what_is_remembered_is_bounded(world, monkeypatch):
    monkeypatch.setattr("agent_peft.environments.http.episodes.MAX_ENDED", 3)

    async def scenario(table, now):
        for number in range(10):
            await table.reset(messages.ResetRequest(episode_id=str(number), seed=1))
            await table.step(
                messages.StepRequest(episode_id=str(number), index=0, action=messages.Action(text="finish"))
            )
        assert list(table.ended) == ["7", "8", "9"]

    in_loop(world, scenario)


def test_the_end_waits_for_a_step_and_closes_everything(serving, world):
    host = serving({"train": world})
    with client(host) as api, ThreadPoolExecutor(1) as threads:
        reset(api, "idle")
        reset(api, "busy", seed=6)
        world.gate.clear()
        answer = threads.submit(step, api, 0, name="busy")
        while len(world.executed) < 3:
            time.sleep(0.01)
        host.stop()
        time.sleep(0.2)
        assert world.closed == []
        world.gate.set()
        assert answer.result().status_code == 200
    deadline = time.monotonic() + 30
    while len(world.closed) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sorted(world.closed) == [("a", 5), ("a", 6)]


def test_a_port_that_is_taken_is_a_mistake(serving, world):
    taken = int(serving({"train": world}).url.rsplit(":", 1)[1])
    with pytest.raises(AgentPeftError, match=rf"port {taken} \(Address already in use\); set .*--port"):
        Host({"train": world}, Address("127.0.0.1", taken), Limits())
    with pytest.raises(AgentPeftError, match="a port is a number from 0 to 65535"):
        Host({"train": world}, Address("127.0.0.1", 1 << 16), Limits())


def test_tasks_that_are_no_json_are_refused_at_the_start(world):
    class Odd(Ledger):
        tasks = (Task("odd", (), {"n": float("nan")}),)

    with pytest.raises(AgentPeftError, match="task 'odd' cannot be sent"):
        check_tasks({"train": Odd()})


def test_examples_are_demonstrations_as_the_environment_answers_them(serving):
    environment = load_environment({"kind": "db_bench", "generate": {"num_tasks": 6}})
    host = serving({"train": environment})
    found = httpx.get(f"{host.url}/examples", params={"count": 2}, trust_env=False).json()["examples"]
    assert [example["task"] for example in found] == [task.id for task in environment.tasks[:2]]
    roles = [message["role"] for message in found[0]["messages"]]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    assert [m["content"] for m in found[0]["messages"] if m["role"] == "assistant"] == list(
        environment.demonstration(environment.tasks[0])
    )
    assert httpx.get(f"{host.url}/examples", params={"count": 65}, trust_env=False).status_code == 422


def test_no_demonstrations_are_said(serving, world):
    refused = httpx.get(f"{serving({'train': world}).url}/examples", trust_env=False)
    assert (refused.status_code, refused.json()["code"]) == (404, "no_examples")
