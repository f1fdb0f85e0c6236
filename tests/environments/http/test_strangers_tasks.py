"""What strangers may do with a server's episodes: whole tasks that fit nothing, replies made to break, and
slots held for ever.
"""

import asyncio
import gc
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent_peft.environments import load_environment
from agent_peft.environments.base import Environment, Episode
from agent_peft.environments.http import messages
from agent_peft.environments.http.client import DefectError
from agent_peft.environments.http.guard import Limits
from agent_peft.environments.http.messages import Refusal
from agent_peft.environments.http.server import Host
from agent_peft.environments.http.sessions import Session, Sessions
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
from tests.environments.http.strangers import places, put, session, until

PRODUCTS = {"kind": "arithmetic", "operation": "multiplication", "num_tasks": 12, "digits": 2}
DB = {"kind": "db_bench", "generate": {"num_tasks": 6}}
PROBLEMS = {"kind": "gsm8k", "tasks": str(Path(__file__).parents[1] / "own_problems.jsonl")}


class Panic(BaseException):
    """As a library in Rust raises where it panics."""


class Odd(Environment):
    """What an action says happens."""

    def __init__(self):
        self.open, self.gate = 0, threading.Event()

    @property
    def tasks(self):
        return (Task("a", (), {"n": 1}),)

    def episode(self, task, seed):
        return OddEpisode(self)


class OddEpisode(Episode):
    def __init__(self, world):
        self.world = world
        world.open += 1
        self.over = False

    def start(self):
        return [Message("user", "continue")]

    def step(self, action):
        match action:
            case "panic":
                raise Panic("at the disco")
            case "exit":
                raise SystemExit(3)
            case "nothing":
                return None
            case "bytes":
                return StepResult(b"bytes")
            case "memory":
                raise MemoryError
            case "lost":
                raise InfrastructureError("the world\nis gone")
            case "wait":
                self.world.gate.wait(20)
        return StepResult(
            action,
            action == "done",
            Outcome.CORRECT if action == "done" else Outcome.UNKNOWN,
            StopReason.FINISHED if action == "done" else None,
        )

    def close(self):
        if not self.over:
            self.world.open -= 1
        self.over = True


@pytest.fixture
def world():
    return Odd()


def in_loop(world, scenario, **limits):
    async def run():
        table = Sessions({"train": world}, replace(Limits(), **limits))
        try:
            return await scenario(table)
        finally:
            for session in list(table.open):
                await session.leave()
            await table.shutdown()

    return asyncio.run(run())


# -- whole tasks ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hosts(serving_all_along):
    return {
        settings["kind"]: serving_all_along({"train": load_environment(settings)})
        for settings in (PRODUCTS, DB, PROBLEMS)
    }


@pytest.mark.parametrize("a", ["A" * 1000, None, 1.5, True, [1], -1, 10**9, 10**4000])
@pytest.mark.parametrize("b", [2, 400_000])
def test_operands_are_whole_numbers_of_a_few_digits(hosts, a, b):
    with session(hosts["arithmetic"]) as one:
        refused = one.reset(task={"id": "x", "content": {"a": a, "b": b}})
        assert refused["code"] == "VALIDATION_ERROR"
        assert "whole numbers of at most 9 digits" in refused["message"]


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)


@settings(
    max_examples=30, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
@given(st.sampled_from(["arithmetic", "db_bench", "gsm8k"]), st.data(), json_values)
def test_a_task_that_one_thing_is_wrong_with_is_refused_or_played(hosts, kind, drawn, value):
    host = hosts[kind]
    environment = host.sessions.environments["train"]
    task = drawn.draw(st.sampled_from(list(environment.tasks)[:5]))
    content = json.loads(json.dumps(task.content))
    content = put(content, drawn.draw(st.sampled_from(list(places(content)))), value)
    with session(host) as one:
        opened = one.ask("reset", {"task": {"id": "x", "content": content}})
        codes = ("VALIDATION_ERROR", "EXECUTION_ERROR")
        assert opened["type"] == "observation" or opened["data"]["code"] in codes, opened
        for action in environment.demonstration(task) if opened["type"] == "observation" else ():
            stepped = one.ask("step", {"text": action})
            assert stepped["type"] == "observation" or stepped["data"]["code"] in codes, stepped
    asked = httpx.post(
        f"{host.url}/demonstration",
        json={"task": {"id": "x", "content": content}},
        trust_env=False,
        timeout=30,
    )
    assert asked.status_code in (200, 422), asked.text


def whole(name, size):
    return messages.ResetRequest(task=messages.TaskMessage(id=name, content={"x": "a" * size}))


def test_a_task_may_have_so_many_bytes_and_all_of_them_together(world):
    async def scenario(table):
        one, two, three, four, five = (Session(table) for _ in range(5))
        with pytest.raises(Refusal, match="1000 bytes at most"):
            await one.reset(whole("long", 1000))
        for each in (one, two, three):
            await each.reset(whole("a", 800))
        with pytest.raises(Refusal, match="whole tasks of all episodes") as refused:
            await four.reset(whole("d", 800))
        assert refused.value.code == messages.FULL
        await five.reset(messages.ResetRequest(task="a"))
        await two.leave()
        await four.reset(whole("d", 800))
        for content in ({"x": float("nan")}, {"x": "\ud800"}):
            with pytest.raises(Refusal, match="cannot be used here"):
                await five.reset(messages.ResetRequest(task=messages.TaskMessage(id="odd", content=content)))

    in_loop(world, scenario, task_bytes=1000, tasks_bytes=2700)


def test_of_an_episode_that_is_over_its_task_is_forgotten(world):
    class Content(dict):
        """A content that can be referenced weakly."""

        __hash__ = object.__hash__

    there = weakref.WeakSet()

    async def play(table, number):
        one = Session(table)
        task = messages.TaskMessage(id=str(number), content=Content(x="a" * 1000))
        there.add(task.content)
        await one.reset(messages.ResetRequest(task=task))
        await (one.step(messages.Action(text="done")) if number % 2 else one.leave())
        return one

    async def scenario(table):
        kept = [await play(table, number) for number in range(20)]
        gc.collect()
        assert not there
        assert not table.open
        assert all(one.state.done for one in kept)

    in_loop(world, scenario)


# -- whose episodes ------------------------------------------------------------------------------------------


def test_an_episode_belongs_to_the_client_that_began_it(serving, world):
    """No message of another session reaches it, not even with its id."""
    host = serving({"train": world})
    with session(host) as ann, session(host) as bob:
        ann.reset(episode_id="e1")
        for kind, content in (
            ("step", {"text": "theirs", "episode_id": "e1"}),
            ("step", {"text": "theirs"}),
            ("close", {"episode_id": "e1"}),
        ):
            if kind == "close":
                bob.send(kind, content)
            else:
                assert bob.ask(kind, content)["type"] == "error"
        with session(host) as eve:
            assert eve.reset(episode_id="e1")["metadata"]["episode_id"] == "e1"  # an episode of her own
            assert eve.step("hers")["metadata"]["index"] == 0
            assert ann.ask("state")["data"]["step_count"] == 0
            assert ann.step("mine")["observation"]["text"] == "mine"
    assert until(lambda: world.open == 0)


def test_episodes_without_a_client_that_are_still_at_a_step_are_not_without_number(world):
    async def scenario(table):
        for _ in range(3):
            left = Session(table)
            await left.reset(messages.ResetRequest())
            left.over = True
        with pytest.raises(Refusal, match="the most it may"):
            await Session(table).reset(messages.ResetRequest())

    in_loop(world, scenario, episodes=1, threads=2)


# -- what an environment raises ------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["panic", "exit", "nothing", "bytes", "memory"])
def test_whatever_an_environment_does_at_an_action_is_a_defect_and_frees_the_episode(
    serving, world, action, caplog
):
    host = serving({"train": world})
    elsewhere = load_environment({"kind": "remote", "url": host.url})
    episode = elsewhere.episode(elsewhere.tasks[0], 0)
    episode.start()
    told = {
        "nothing": r"task 'a': OddEpisode\.step \(test_strangers_tasks\.py:\d+\) returned None; give an agent_peft",  # noqa: E501
        "bytes": r"returned a StepResult whose observation is b'bytes'; give an agent_peft",
    }.get(action, "the environment raised")
    with caplog.at_level(logging.ERROR), pytest.raises(DefectError, match=told):
        episode.step(action)
    assert re.search(told, caplog.text)
    assert world.open == 0
    assert not host.sessions.open
    episode.close()
    own = elsewhere.episode(
        Task("own", (), {"n": 2}), 0
    )  # a task that is sent whole makes no difference to the agent
    own.start()
    with pytest.raises(DefectError):
        own.step(action)
    own.close()
    elsewhere.close()


def test_a_world_that_fails_can_be_begun_again_and_its_actions_replayed(serving, world):
    host = serving({"train": world})
    elsewhere = load_environment({"kind": "remote", "url": host.url})
    for _ in range(2):
        episode = elsewhere.episode(elsewhere.tasks[0], 7)
        episode.start()
        assert episode.step("one").observation == "one"
        with pytest.raises(InfrastructureError, match="the world is gone"):
            episode.step("lost")
        episode.close()
    assert world.open == 0
    elsewhere.close()


def test_a_server_that_is_too_slow_is_an_infrastructure_failure_and_its_episode_is_freed(serving, world):
    host = serving({"train": world})
    elsewhere = load_environment({"kind": "remote", "url": host.url, "timeout": 0.5, "patience": 0.0})
    episode = elsewhere.episode(elsewhere.tasks[0], 7)
    episode.start()
    with pytest.raises(InfrastructureError, match="timed out"):
        episode.step("wait")
    episode.close()
    again = elsewhere.episode(elsewhere.tasks[0], 7)
    again.start()
    assert again.step("done").outcome is Outcome.CORRECT
    again.close()
    world.gate.set()
    assert until(lambda: not host.sessions.open)
    assert world.open == 0
    elsewhere.close()


def test_an_action_longer_than_any_context_is_an_action(serving, world):
    elsewhere = load_environment({"kind": "remote", "url": serving({"train": world}).url})
    episode = elsewhere.episode(elsewhere.tasks[0], 7)
    episode.start()
    with pytest.raises(InfrastructureError, match="too big"):  # the observation, which is the action
        episode.step("\U0010ffff" * (messages.MAX_ACTION_CHARS + 5))
    episode.close()
    assert until(lambda: world.open == 0)
    elsewhere.close()


def test_an_environment_without_a_sandbox_is_served_with_a_token_only(world):
    class Bare(Odd):
        sandboxed = False

    with pytest.raises(AgentPeftError, match=r"without a sandbox, so whoever .* --token"):
        Host({"train": world, "evaluation": Bare()}, Address("127.0.0.1", 0), Limits())
    host = Host({"train": Bare()}, Address("127.0.0.1", 0), Limits(), token="s3cret")
    host._socket.close()
    host.sessions._threads.shutdown()


def test_what_the_shell_without_a_sandbox_says_of_itself():
    generated = {"kind": "os_interaction", "generate": {"num_tasks": 1}}
    assert load_environment(generated).sandboxed
    assert not load_environment({**generated, "sandbox": "none"}).sandboxed


def test_a_demonstration_that_raises_is_passed_over(serving, world, caplog):
    environment = load_environment(PRODUCTS)
    known, tried = environment.demonstration, []

    def demonstration(task):
        tried.append(task.id)
        return known(task) if len(tried) > 2 else 1 / 0

    environment.demonstration = demonstration
    url = serving({"train": environment}).url
    with caplog.at_level(logging.ERROR):
        for _ in range(2):
            found = httpx.get(f"{url}/examples", params={"count": 1}, trust_env=False).json()["examples"]
            assert [each["task"] for each in found] == [environment.tasks[2].id]
    assert len(tried) == 3


def test_pages_are_bounded_in_bytes(serving, monkeypatch):
    monkeypatch.setattr(messages, "MAX_PAGE_BYTES", 200)
    environment = load_environment(PRODUCTS)
    host = serving({"train": environment})
    assert 0 < len(httpx.get(f"{host.url}/tasks", trust_env=False).json()["tasks"]) < 12
    elsewhere = load_environment({"kind": "remote", "url": host.url})
    assert list(elsewhere.tasks) == list(environment.tasks)
    elsewhere.close()


# -- a step that does not end --------------------------------------------------------------------------------

STUCK = """\
import sys, time
from agent_peft.environments.base import Environment, Episode
from agent_peft.environments.http.guard import Limits
from agent_peft.environments.http.transport import Address
from agent_peft.environments.http.server import serve
from agent_peft.types import Message, Task

class Stuck(Environment, Episode):
    tasks = (Task("a"),)
    def episode(self, task, seed): return self
    def start(self): return [Message("user", "wait")]
    def step(self, action):
        while action == "sleep": time.sleep(600)
        while True: pass
    def close(self): pass

serve({"train": Stuck()}, Address("127.0.0.1", 0), Limits(shutdown_seconds=0.5))
"""


@pytest.mark.parametrize("action", [pytest.param("sleep", marks=pytest.mark.slow), "spin"])
def test_a_step_that_does_not_end_stops_neither_the_server_nor_its_end(action):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, "-c", STUCK],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        try:
            url = process.stdout.readline().split(" on ")[1].split(" ")[0]
            with session(SimpleNamespace(url=url)) as one:
                one.reset()
                one.send("step", {"text": action})
                with pytest.raises(TimeoutError):
                    one.receive(timeout=0.5)
                assert httpx.get(f"{url}/health", trust_env=False, timeout=20).status_code == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 1
            assert "a step that did not end" in process.stderr.read()
        finally:
            process.kill()


# -- many hostile replies ------------------------------------------------------------------------------------

REPLIES = (
    *(
        "",
        "\0",
        "\ud800",
        "x" * 200_000,
        "9" * 5000,
        "[" * 3000,
        "Final Answer: [('\\UFFFFFFFF',)]",
        "Act: finish",
        "$" * 2000,
    ),
    "Action: Operation\n```sql\nUPDATE t SET a = CASE WHEN rowid = 1 THEN x'' ELSE x'01' END\n```",
    "Action: Operation\n```sql\nSELECT 1; DROP TABLE t; ATTACH '/etc/passwd' AS p\n```",
    "Action: Answer\nFinal Answer: " + "[" * 2000,
    "Action: Answer\nFinal Answer: [(9e999, None, float('nan'))]",
)


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def play_hostile_replies(serving, episodes):
    """So many episodes, and by how many bytes and descriptors the server and the client (one process) have
    grown after the first half.
    """
    elsewhere, hosts = [], []
    for settings_of in (PRODUCTS, DB, PROBLEMS):
        hosts.append(serving({"train": load_environment(settings_of)}))
        elsewhere.append(load_environment({"kind": "remote", "url": hosts[-1].url}))
    before = descriptors = 0
    for number in range(episodes):
        if number == episodes // 2:
            until(lambda: not any(host.sessions.connected for host in hosts))
            gc.collect()
            before, descriptors = resident(), len(os.listdir("/proc/self/fd"))
        environment = elsewhere[number % 3]
        task = environment.tasks[number % len(environment.tasks)]
        if number % 4 == 0:  # sent whole
            task = replace(task, id=f"own-{number}")
        episode = environment.episode(task, number)
        episode.start()
        for turn in range(3):
            result = episode.step(REPLIES[(number + turn) % len(REPLIES)])
            assert result.outcome is not Outcome.CORRECT
            if result.done:
                break
        episode.close()
    until(lambda: not any(host.sessions.connected for host in hosts))
    gc.collect()
    until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors)  # a socket is closed after its session
    grown = resident() - before, len(os.listdir("/proc/self/fd")) - descriptors
    assert until(lambda: not any(host.sessions.open for host in hosts))
    for environment in elsewhere:
        environment.close()
    return grown


@pytest.mark.slow
def test_a_thousand_hostile_replies_leave_nothing(serving):
    grown, descriptors = play_hostile_replies(serving, 1000)
    assert grown < 32 << 20
    assert descriptors <= 0
