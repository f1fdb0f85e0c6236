"""An environment elsewhere: what its episodes say, and what is raised when the world between fails."""

import http.server
import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import ClassVar

import pytest

from agent_peft.environments import Mistake, load_environment
from agent_peft.environments.http.guard import Limits
from agent_peft.environments.http.messages import Demonstration
from agent_peft.types import AgentPeftError, InfrastructureError, Outcome, Task
from tests.environments.http.strangers import until

DB = {"kind": "db_bench", "generate": {"num_tasks": 12, "seed": 2}}
SUMS = {"kind": "arithmetic", "num_tasks": 12, "digits": 2}


@pytest.fixture
def remote(serving):
    """remote(settings of an environment, **keys): the environment, and it served and seen through the
    wire.
    """
    opened = []

    def found(settings, limits=None, **keys):
        local = load_environment(settings)
        host = serving({"train": local}, **({"limits": limits} if limits else {}))
        opened.append(load_environment({"kind": "remote", "url": host.url, **keys}))
        return local, opened[-1], host

    yield found
    for environment in opened:
        environment.close()


def record(environment, task, seed, replies):
    episode = environment.episode(task, seed)
    try:
        return [*episode.start(), *(episode.step(reply) for reply in replies)]
    finally:
        episode.close()


@pytest.mark.parametrize("replies", [(Mistake("1"), "2"), ("1", Mistake("2"), "3"), ("1",)])
def test_mistakes_of_a_demonstration_stay_mistakes(replies):
    sent = Demonstration.of(replies).model_dump_json()
    read = Demonstration.model_validate_json(sent).replies()
    assert read == replies and list(map(type, read)) == list(map(type, replies))


@pytest.mark.parametrize("settings", [SUMS, DB], ids=lambda settings: settings["kind"])
def test_it_cannot_be_told_from_the_one_that_is_served(remote, settings):
    local, elsewhere, _ = remote(settings)
    assert list(elsewhere.tasks) == list(local.tasks)
    for task in local.tasks:
        golds = local.demonstration(task)
        assert list(elsewhere.demonstration(task)) == list(golds)
        for replies in (
            golds,
            ["Action: Operation\n```sql\nSELECT random();\n```"][: 1 if settings is DB else 0],
            ["no idea \ud800"],
        ):
            assert record(elsewhere, task, 7, replies) == record(local, task, 7, replies)


def test_a_task_that_the_server_does_not_have(remote):
    local, elsewhere, _ = remote(SUMS)
    own = Task("1+1", ("addition",), {"a": 1, "b": 1})
    assert record(elsewhere, own, 0, ["2"]) == record(local, own, 0, ["2"])
    assert elsewhere.demonstration(own) == ("2",)
    known_by_name = Task(local.tasks[0].id, (), {"a": 1, "b": 2})  # the same name, another content
    assert record(elsewhere, known_by_name, 0, ["3"])[-1].outcome is Outcome.CORRECT


def test_tasks_come_in_as_many_pages_as_are_needed(remote, monkeypatch):
    monkeypatch.setattr("agent_peft.environments.http.server.PAGE", 5)
    local, elsewhere, _ = remote(SUMS)
    assert list(elsewhere.tasks) == list(local.tasks)


def test_very_many_tasks_are_fetched_as_they_are_looked_at(remote):
    local, elsewhere, _ = remote({"kind": "arithmetic", "digits": 9})
    assert len(elsewhere.tasks) == len(local.tasks) > 10**16
    assert [elsewhere.tasks[i] for i in (0, 17, -1)] == [local.tasks[i] for i in (0, 17, -1)]
    assert list(elsewhere.tasks[100:400:7]) == list(local.tasks[100:400:7])
    with pytest.raises(IndexError):
        elsewhere.tasks[len(local.tasks)]
    task = elsewhere.tasks[5]
    assert record(elsewhere, task, 0, local.demonstration(task))[-1].outcome is Outcome.CORRECT


def test_episodes_that_are_over_leave_nothing_on_the_server(remote):
    _, elsewhere, host = remote(SUMS)
    record(elsewhere, elsewhere.tasks[0], 0, ["1"])
    record(elsewhere, elsewhere.tasks[0], 1, [])
    assert until(lambda: not host.sessions.open)


def test_the_evaluation_environment_is_chosen_by_name(serving):
    train, heldout = load_environment(SUMS), load_environment({**SUMS, "split": "heldout"})
    host = serving({"train": train, "evaluation": heldout})
    elsewhere = load_environment({"kind": "remote", "url": host.url, "environment": "evaluation"})
    assert list(elsewhere.tasks) == list(heldout.tasks)
    elsewhere.close()
    with pytest.raises(AgentPeftError, match="no environment 'test' here; choose train or evaluation"):
        load_environment({"kind": "remote", "url": host.url, "environment": "test"})


def test_examples_go_between_the_system_message_and_the_task(remote):
    local, elsewhere, _ = remote(DB, examples=2)
    for task in local.tasks[:4]:
        episode = elsewhere.episode(task, 0)
        opening = episode.start()
        episode.close()
        own = local.episode(task, 0)
        system, user = own.start()
        own.close()
        assert (opening[0], opening[-1]) == (system, user)
        assert [message.role for message in opening[1:-1]] == ["user", "assistant"] * (
            (len(opening) - 2) // 2
        )
        assert user not in opening[:-1]  # a task is never shown its own solution
    assert opening[-1] not in opening[:-1]


def test_examples_that_are_too_many(remote):
    with pytest.raises(
        AgentPeftError, match=r"has 12 solved tasks, and examples . 1 are needed; set examples to 11"
    ):
        remote(SUMS, examples=12)


# -- the world between ---------------------------------------------------------------------------------------


def test_no_server_is_a_mistake_of_one_line():
    with pytest.raises(AgentPeftError, match=r"no server answers .* start it with: agent-peft serve CONFIG"):
        load_environment({"kind": "remote", "url": "http://127.0.0.1:9", "patience": 0.1})
    for url in ("127.0.0.1:8000", "ftp://host", "http://", "http://host?x=1"):
        with pytest.raises(AgentPeftError, match=r"is not the URL of a server; write it as http://HOST:PORT"):
            load_environment({"kind": "remote", "url": url})


def test_a_server_that_lost_the_episode_is_an_infrastructure_failure(remote):
    _, elsewhere, host = remote(SUMS)
    episode = elsewhere.episode(elsewhere.tasks[0], 0)
    episode.start()
    for connection in list(host._server.server_state.connections):
        connection.loop.call_soon_threadsafe(connection.transport.abort)
    with pytest.raises(InfrastructureError, match="step: "):
        episode.step("1")
    episode.close()
    assert until(lambda: not host.sessions.open)
    again = elsewhere.episode(elsewhere.tasks[0], 0)
    again.start()
    assert again.step("1").done
    again.close()


def test_a_server_that_is_gone_is_waited_for_once(remote):
    _, elsewhere, host = remote(SUMS, patience=1.0)
    episodes = [elsewhere.episode(elsewhere.tasks[0], seed) for seed in range(5)]
    for episode in episodes:
        episode.start()
    host.stop()
    time.sleep(0.5)
    begun = time.monotonic()
    for episode in episodes:
        with pytest.raises(InfrastructureError):
            episode.step("1")
        episode.close()
    assert time.monotonic() - begun < 4  # not 5 × patience


def test_more_episodes_than_the_server_holds_is_a_mistake(remote):
    _, elsewhere, _ = remote(SUMS, limits=Limits(episodes=1), patience=0.3)
    first, second = (elsewhere.episode(elsewhere.tasks[0], seed) for seed in range(2))
    first.start()
    with pytest.raises(AgentPeftError, match=r"--max-episodes.* \(asked again for 0\.3 s\)"):
        second.start()
    first.close()
    second.close()


def test_a_policy_that_is_too_slow_loses_its_episode(remote):
    _, elsewhere, host = remote(SUMS, limits=Limits(idle_seconds=0.5))
    episode = elsewhere.episode(elsewhere.tasks[0], 0)
    episode.start()
    assert until(lambda: not host.sessions.open)
    with pytest.raises(InfrastructureError, match="no step for too long"):
        episode.step("1")
    episode.close()


def test_a_full_server_is_asked_again_until_it_has_room(remote):
    _, elsewhere, _ = remote(SUMS, limits=Limits(episodes=2))
    seeds = range(12)

    def play_slowly(seed):
        episode = elsewhere.episode(elsewhere.tasks[seed], seed)
        episode.start()
        time.sleep(0.02)
        result = episode.step(elsewhere.demonstration(elsewhere.tasks[seed])[0])
        episode.close()
        return result.outcome

    with ThreadPoolExecutor(len(seeds)) as threads:
        assert list(threads.map(play_slowly, seeds)) == [Outcome.CORRECT] * len(seeds)


def test_tokens(serving, monkeypatch):
    host = serving({"train": load_environment(SUMS)}, token="s3cret")
    settings = {"kind": "remote", "url": host.url, "token": "TALLY_TOKEN"}
    monkeypatch.delenv("TALLY_TOKEN", raising=False)
    with pytest.raises(AgentPeftError, match="'TALLY_TOKEN' is not set"):
        load_environment(settings)
    for wrong in ("wrong", "in two words"):
        monkeypatch.setenv("TALLY_TOKEN", wrong)
        with pytest.raises(AgentPeftError, match="token"):
            load_environment(settings)
    monkeypatch.setenv("TALLY_TOKEN", "s3cret")
    elsewhere = load_environment(settings)
    assert len(elsewhere.tasks) == 12
    elsewhere.close()


class Odd(http.server.BaseHTTPRequestHandler):
    """A server that answers what its test sets."""

    answers: ClassVar[list] = []

    def do_GET(self):
        status, body = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def odd():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Odd)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_busy_server_is_asked_again(odd):
    task = b'{"total": 1, "tasks": [{"id": "t", "skills": [], "content": {}}]}'
    busy = json.dumps({"detail": "ask again", "code": "busy"}).encode()
    Odd.answers = [(502, b"<html>"), (503, busy), (200, task)]
    elsewhere = load_environment({"kind": "remote", "url": odd})
    assert [task.id for task in elsewhere.tasks] == ["t"]
    elsewhere.close()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((200, b"hello"), "is not JSON"),
        ((404, b"hello"), "HTTP 404.* is not JSON"),
        ((200, b'{"total": 1}'), "another version of agent-peft, or is another program"),
        ((200, b"[]"), "another version of agent-peft"),
        ((503, b"<html>"), "HTTP 503"),
        ((500, json.dumps({"detail": "it broke", "code": "broken"}).encode()), "it broke"),
    ],
)
def test_what_is_no_server_of_ours_is_told(odd, answer, message):
    Odd.answers = [answer]
    with pytest.raises(AgentPeftError, match=message):
        load_environment({"kind": "remote", "url": odd, "patience": 0.1})


def test_a_hanging_server_is_not_waited_for(remote):
    local, elsewhere, _ = remote(SUMS, timeout=0.5, patience=0.0)
    gate = threading.Event()
    patient = local.demonstration
    local.demonstration = lambda task: gate.wait(20) and patient(task)
    try:
        with pytest.raises(InfrastructureError, match="Timeout"):
            elsewhere.demonstration(elsewhere.tasks[0])
    finally:
        gate.set()


@pytest.mark.parametrize("package", ["httpx", "websockets", "fastapi"])
def test_what_is_not_installed_is_named_with_its_extra(package):
    ask = (
        "import agent_peft.environments.http.server"
        if package == "fastapi"
        else "load_environment({'kind': 'remote', 'url': 'http://localhost:1'})"
    )
    script = f"""
import sys
sys.modules[{package!r}] = None
from agent_peft.environments import load_environment
from agent_peft.types import AgentPeftError
try:
    {ask}
except AgentPeftError as error:
    assert {package!r} in str(error) and "pip install '.[server]'" in str(error), error
    sys.exit(0)
sys.exit(1)
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


def test_several_servers_share_the_episodes_and_have_the_same_tasks(serving):
    hosts = [serving({"train": load_environment({**SUMS, "digits": digits})}) for digits in (2, 2, 1)]
    urls = [host.url for host in hosts]
    shared = load_environment({"kind": "remote", "url": urls[:2]})
    try:
        task = shared.tasks[0]
        for seed in range(4):
            with closing(shared.episode(task, seed)) as episode:
                episode.start()
                assert episode._connection.url == urls[seed % 2]
    finally:
        shared.close()
    with pytest.raises(AgentPeftError, match=f"{urls[2]}: has other tasks than {urls[0]}; serve one CONFIG"):
        load_environment({"kind": "remote", "url": [urls[0], urls[2]]})
