"""The server: what it executes, for whom, and what it answers to strangers."""

import json
import threading
import time

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, ConnectionClosedOK, InvalidStatus

from agent_peft.environments import load_environment
from agent_peft.environments.base import Environment, Episode
from agent_peft.environments.http.guard import Limits
from agent_peft.environments.http.server import Host, check_tasks
from agent_peft.environments.http.transport import Address
from agent_peft.types import (
    AgentPeftError,
    InfrastructureError,
    Message,
    Outcome,
    StepResult,
    StopReason,
    Task,
)
from tests.environments.http.strangers import session, until


class Ledger(Environment):
    """Records what is executed. An action names what the episode does."""

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


@pytest.fixture
def host(serving, world):
    return serving({"train": world})


@pytest.fixture
def api(host):
    with httpx.Client(base_url=host.url, trust_env=False, timeout=30) as client:
        yield client


def test_an_episode_in_openenvs_words(host, world):
    with session(host) as one:
        assert one.ask("state") == {"type": "state", "data": {"episode_id": None, "step_count": 0}}
        opened = one.reset(task="a", seed=5, episode_id="e")
        assert opened["observation"]["text"] == "task a"
        assert opened["observation"]["messages"] == [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "task a"},
        ]
        assert (opened["reward"], opened["done"]) == (None, False)
        assert opened["metadata"] == one.ask("state")["data"]
        heard = one.step("nonsense", metadata={"read": "by nobody"})
        assert heard["observation"] == {"text": "heard nonsense", "messages": []}
        facts = {"episode_id": "e", "index": 0, "outcome": "unknown", "stop_reason": None, "valid": False}
        assert heard["metadata"] == facts
        assert one.ask("state")["data"] == {
            "episode_id": "e",
            "step_count": 1,
            "environment": "train",
            "task": "a",
            "done": False,
        }
        done = one.step("finish")
        assert (done["reward"], done["done"]) == (1.0, True)
        assert (done["metadata"]["outcome"], done["metadata"]["stop_reason"]) == ("correct", "finished")
        assert world.closed == [("a", 5)]  # without being asked
        assert one.ask("state")["data"]["done"]
        assert one.ask("step", {"text": "more"})["data"]["code"] == "EXECUTION_ERROR"
        assert one.reset(task="b", seed=6)["metadata"]["task"] == "b"
        one.reset(task="b", seed=7)  # ends the previous episode
        assert world.closed == [("a", 5), ("b", 6)]
        one.send("close")
        with pytest.raises(ConnectionClosedOK):
            one.receive()
    assert until(lambda: world.closed == [("a", 5), ("b", 6), ("b", 7)])
    assert [what for *_, what in world.executed] == ["start", "nonsense", "finish", "start", "start"]


@pytest.mark.parametrize(
    ("action", "code", "text"),
    [
        ("fail", "SESSION_ERROR", "the disk is full"),
        ("mistake", "VALIDATION_ERROR", "two lines"),
        ("crash", "EXECUTION_ERROR", "ZeroDivisionError: by zero"),
    ],
)
def test_what_an_environment_raises_is_one_line_and_ends_the_episode(host, world, action, code, text):
    with session(host) as one:
        one.reset(task="a", seed=5)
        refused = one.step(action)
        assert refused["code"] == code
        assert text in refused["message"]
        assert "\n" not in refused["message"]
        assert world.closed == [("a", 5)]
        assert one.step("hello")["code"] == "EXECUTION_ERROR"
    assert len(world.executed) == 2


def test_a_task_that_is_sent_whole(host):
    own = {"id": "mine", "skills": ["x"], "content": {"n": [1, {"deep": None}]}}
    with session(host) as one:
        assert one.reset(task=own)["metadata"]["task"] == "mine"
        refused = one.reset(task={"id": "broken"})
        assert refused["code"] == "VALIDATION_ERROR"  # who sends a task is answerable for it
        assert "KeyError" in refused["message"]
        assert "has no task 'nowhere'" in one.reset(task="nowhere")["message"]
        assert one.reset(environment="nowhere")["message"] == (
            "there is no environment 'nowhere' here; choose train"
        )
        assert not host.sessions.open


def test_without_a_task_the_seed_chooses_one_and_without_a_seed_the_next_comes(host):
    with session(host) as one:
        assert len({one.reset(seed=3)["metadata"]["task"] for _ in range(3)}) == 1
        assert [one.reset()["metadata"]["task"] for _ in range(4)] == ["a", "b", "a", "b"]


def test_lone_surrogates_travel(host):
    with session(host) as one:
        one.reset(task="a")
        one.socket.send('{"type": "step", "data": {"text": "\\ud800"}}')
        answer = one.socket.recv(timeout=20)
        assert answer.isascii()
        assert json.loads(answer)["data"]["observation"]["text"] == "heard \ud800"


def test_tasks_come_in_pages(api):
    page = api.get("/tasks", params={"offset": 1, "limit": 1}).json()
    assert page == {"total": 2, "tasks": [{"id": "b", "skills": [], "content": {"n": 2}}]}
    assert api.get("/tasks", params={"environment": "nowhere"}).status_code == 404
    assert api.get("/tasks", params={"offset": -1}).status_code == 422


def test_pings(api):
    assert api.post("/api/ping", json={}).json() == {"status": "ok"}


# -- strangers -----------------------------------------------------------------------------------------------


def test_a_token_is_needed_off_loopback(world):
    with pytest.raises(AgentPeftError, match="a token is needed"):
        Host({"train": world}, Address("0.0.0.0", 0), Limits())


def test_a_wrong_token_is_refused(serving, world):
    host = serving({"train": world}, token="correct-horse")
    with httpx.Client(base_url=host.url, trust_env=False, timeout=30) as stranger:
        for header in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "correct-horse"},
            {"authorization": "bearer correct-horse"},
            {"x-api-key": "wrong"},
            {"x-api-key": "correct-horse", "authorization": "Bearer wrong"},
        ):
            refused = stranger.get("/tasks", headers=header)
            assert (refused.status_code, refused.json()["code"], refused.headers["www-authenticate"]) == (
                401,
                "token",
                "Bearer",
            )
            with pytest.raises(InvalidStatus) as denied, session(host, additional_headers=header):
                pass
            assert denied.value.response.status_code == 401
        assert stranger.get("/openapi.json").status_code == 401
        assert stranger.get("/examples").status_code == 401
        assert stranger.post("/api/ping", json={}).status_code == 200
        right = {"authorization": "Bearer correct-horse"}
        assert stranger.get("/tasks", headers=right).status_code == 200
        assert stranger.get("/tasks", headers={"x-api-key": "correct-horse"}).status_code == 200
        with session(host, additional_headers=right) as one:
            assert one.reset(task="a")["metadata"]["task"] == "a"


def test_a_web_page_may_not_speak_to_ones_loopback(host, api):
    assert api.get("/tasks", headers={"origin": "https://example.org"}).status_code == 403
    assert api.get("/tasks", headers={"host": "example.org"}).status_code == 403
    assert api.get("/tasks", headers={"origin": "http://localhost:3000"}).status_code == 200
    with pytest.raises(InvalidStatus), session(host, origin="https://example.org"):
        pass
    plain = {"content-type": "text/plain"}  # what a form may send anywhere
    assert api.post("/demonstration", content=b'{"task": "a"}', headers=plain).status_code == 422


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
    b'{"text": false}',
]


def test_malformed_bodies_get_one_line(host, api):
    for body in MALFORMED:
        answer = api.post("/demonstration", content=body, headers={"content-type": "application/json"})
        assert answer.status_code in (400, 422), body[:20]
        assert set(answer.json()) == {"detail", "code"}
        assert "\n" not in answer.json()["detail"]
    with session(host) as one:
        for body in MALFORMED:
            for kind in (b"reset", b"step", b"neither"):
                if body == b"\xff\xfe":  # no text, so not even a message
                    continue
                one.socket.send((b'{"type": "%s", "data": %s}' % (kind, body)).decode())
                refused = one.receive()
                assert refused["type"] == "error", (kind, body[:20])
                assert "\n" not in refused["data"]["message"]
        assert one.reset(task="a")["metadata"]["task"] == "a"


def test_messages_and_actions_have_limits(serving, world):
    host = serving({"train": world}, limits=Limits(message_bytes=1000, body_bytes=1000, action_chars=100))
    with session(host) as one:
        one.reset(task="a")
        assert one.step("x" * 101)["code"] == "VALIDATION_ERROR"
        assert one.step("x" * 100)["observation"]["text"] == "heard " + "x" * 100
        with pytest.raises(ConnectionClosed):
            one.step("x" * 1000)
    chunks = httpx.post(
        f"{host.url}/demonstration",
        content=(b"x" * 300 for _ in range(10)),
        headers={"content-type": "application/json"},
        trust_env=False,
    )  # no length in the header
    assert chunks.status_code == 413


def test_episodes_have_a_limit(serving, world):
    host = serving({"train": world}, limits=Limits(episodes=2))
    with session(host) as first, session(host) as third:
        with session(host) as second:
            first.reset(task="a")
            second.reset(task="a")
            refused = third.reset(task="a")
            assert refused["code"] == "CAPACITY_REACHED"
            assert "--max-episodes" in refused["message"]
        assert until(lambda: len(host.sessions.open) == 1)
        assert third.reset(task="a")["metadata"]["task"] == "a"


def test_unknown_paths_methods_and_keys(host, api):
    for path in ("/nowhere", "/reset", "/step", "/close", "/state"):
        assert api.post(path, json={}).status_code == 404
    assert api.get("/demonstration").status_code == 405
    with session(host) as one:
        refused = one.ask("reset", {"temperature": 1})["data"]
    assert refused["message"] == "temperature: Extra inputs are not permitted"


# -- the end -------------------------------------------------------------------------------------------------


def test_a_client_that_leaves_at_a_step_frees_its_place(serving, world):
    """The step is executed to its end, and the episode closed after it."""
    host = serving({"train": world}, limits=Limits(episodes=1))
    world.gate.clear()
    with session(host) as one:
        one.reset(task="a", seed=1)
        one.send("step", {"text": "hello"})
        assert until(lambda: len(world.executed) == 2)
    with session(host) as other:
        assert until(lambda: "metadata" in other.reset(task="a", seed=2))
        assert not world.closed
        world.gate.set()
        assert until(lambda: world.closed == [("a", 1)])


def test_a_second_message_during_a_step_ends_the_session(host, world):
    world.gate.clear()
    with session(host) as one:
        one.reset(task="a", seed=1)
        one.send("step", {"text": "hello"})
        one.send("step", {"text": "again"})
        with pytest.raises(ConnectionClosed, match="one message at a time"):
            one.receive()
    world.gate.set()
    assert until(lambda: world.closed == [("a", 1)])
    assert [what for *_, what in world.executed] == ["start", "hello"]


def test_the_end_waits_for_a_step_and_closes_everything(host, world):
    with session(host) as idle, session(host) as busy:
        idle.reset(task="a", seed=5)
        busy.reset(task="a", seed=6)
        world.gate.clear()
        busy.send("step", {"text": "hello"})
        assert until(lambda: len(world.executed) == 3)
        host.stop()
        time.sleep(0.5)
        assert ("a", 6) not in world.closed
        world.gate.set()
        assert until(lambda: sorted(world.closed) == [("a", 5), ("a", 6)])


def test_a_port_that_is_taken_is_a_mistake(host, world):
    taken = int(host.url.rsplit(":", 1)[1])
    with pytest.raises(AgentPeftError, match=rf"port {taken} \(Address already in use\); set .*--port"):
        Host({"train": world}, Address("127.0.0.1", taken), Limits())
    with pytest.raises(AgentPeftError, match="a port is a number from 0 to 65535"):
        Host({"train": world}, Address("127.0.0.1", 1 << 16), Limits())


def test_tasks_that_are_no_json_are_refused_at_the_start():
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


def test_no_demonstrations_are_said(api):
    refused = api.get("/examples")
    assert (refused.status_code, refused.json()["code"]) == (404, "no_examples")


def test_an_environment_that_declares_tools_is_not_served(serving):
    native = load_environment("db_bench", generate={"num_tasks": 1}, protocol="native")
    remote = load_environment({"kind": "remote", "url": serving({"train": native}).url})
    episode = remote.episode(remote.tasks[0], 0)
    with pytest.raises(AgentPeftError, match="declare tools is not served; choose another protocol"):
        episode.start()
    episode.close()
    remote.close()
    native.close()
