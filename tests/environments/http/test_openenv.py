"""OpenEnv both ways: its clients drive our server, and our client drives its servers."""

import json
import logging
import threading

import pytest
from websockets.sync.server import serve

from agent_peft.environments import load_environment
from agent_peft.environments.http.guard import Limits
from agent_peft.types import AgentPeftError, InfrastructureError, Message, Outcome, StopReason
from tests.environments.http.strangers import session

SUMS = {"kind": "arithmetic", "num_tasks": 12, "digits": 1}


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        ("{", "INVALID_JSON"),
        (b"{}", "INVALID_JSON"),
        ("[" * 100_000, "INVALID_JSON"),
        ('"reset"', "UNKNOWN_TYPE"),
        ('{"type": "mcp"}', "UNKNOWN_TYPE"),
        ('{"type": "reset", "data": {"seed": "x"}}', "VALIDATION_ERROR"),
        ('{"type": "reset", "data": 3}', "VALIDATION_ERROR"),
        ('{"type": "step", "data": {"text": "1"}}', "EXECUTION_ERROR"),  # before any reset
        ('{"type": "step"}', "VALIDATION_ERROR"),
    ],
)
def test_strangers_messages_are_answered_and_the_session_goes_on(serving, sent, code):
    with session(serving({"train": load_environment(SUMS)})) as one:
        one.socket.send(sent)
        refused = one.receive()
        assert (refused["type"], refused["data"]["code"]) == ("error", code)
        assert one.ask("reset", {"seed": 1})["type"] == "observation"


# -- the other way -------------------------------------------------------------------------------------------


@pytest.fixture
def openenv(serving):
    opened = []

    def found(url, **keys):
        opened.append(load_environment({"kind": "openenv", "url": url, "num_tasks": 6, **keys}))
        return opened[-1]

    yield found
    for environment in opened:
        environment.close()


def test_our_client_plays_on_an_openenv_server(serving, openenv):
    environment = openenv(
        serving({"train": load_environment(SUMS)}).url, system_prompt="Add.", prompt="A sum:"
    )
    assert (environment.action_key, environment.observation_key) == ("text", "text")
    assert len({task.id for task in environment.tasks}) == 6
    for task in environment.tasks:
        for lie, outcome in ((0, Outcome.CORRECT), (1, Outcome.INCORRECT)):
            episode = environment.episode(task, seed=lie)
            system, user = episode.start()
            assert system == Message("system", "Add.")
            a, b = user.content.removeprefix("A sum:\n").rstrip("=").split("+")
            result = episode.step(str(int(a) + int(b) + lie))
            assert (result.done, result.outcome, result.stop_reason) == (True, outcome, StopReason.FINISHED)
            with pytest.raises(RuntimeError):
                episode.step("1")
            episode.close()
            episode.close()


SCHEMA = {
    "action": {
        "properties": {"message": {"type": "string"}, "metadata": {"type": "object"}},
        "required": ["message"],
    },
    "observation": {
        "properties": {
            "echo": {"type": "string"},
            "length": {"type": "integer"},
            "done": {},
            "reward": {},
            "metadata": {},
        }
    },
}


@pytest.fixture
def echo():
    """echo(answers): a server that speaks OpenEnv and gives these answers to steps, then ends each session
    that asks for more.
    """
    servers = []

    def serving_answers(answers, schema=SCHEMA, resets=None):
        seen = []

        def schema_page(connection, request):
            if request.path == "/schema":
                response = connection.respond(200, json.dumps(schema))
                response.headers["Content-Type"] = "application/json"
                return response
            return None

        def talk(connection):
            if resets == "no room":
                told = {"message": "Server at capacity: 1/1 sessions active", "code": "CAPACITY_REACHED"}
                return connection.send(json.dumps({"type": "error", "data": told}))
            left = list(answers)
            for text in connection:
                message = json.loads(text)
                seen.append(message)
                if message["type"] == "reset":
                    shown = {
                        "echo": "hello",
                        "length": 5,
                        "number": len(seen) if resets == "all differ" else 0,
                    }
                    answer = (
                        resets
                        if isinstance(resets, dict)
                        else {"type": "observation", "data": {"observation": shown, "done": False}}
                    )
                elif left:
                    answer = left.pop(0)
                else:
                    return
                connection.send(json.dumps(answer))

        server = serve(talk, "127.0.0.1", 0, process_request=schema_page)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{server.socket.getsockname()[1]}", seen

    yield serving_answers
    for server, thread in servers:
        server.shutdown()
        thread.join()


def heard(text, reward=None, done=False):
    return {"type": "observation", "data": {"observation": {"echo": text}, "reward": reward, "done": done}}


@pytest.mark.parametrize(
    ("answers", "keys", "outcome", "reason"),
    [
        ([heard("a", 0.2), heard("b", 1.0, True)], {}, Outcome.CORRECT, StopReason.FINISHED),
        ([heard("a", 1.0), heard("b", 0.9, True)], {}, Outcome.INCORRECT, StopReason.FINISHED),
        ([heard("a", 0.5), heard("b", 0.6, True)], {"reward": "sum"}, Outcome.CORRECT, StopReason.FINISHED),
        ([heard("a", 0.5), heard("b", 0.4, True)], {"threshold": 0.4}, Outcome.CORRECT, StopReason.FINISHED),
        ([heard("a"), heard("b", None, True)], {}, Outcome.UNKNOWN, StopReason.FINISHED),
        (
            [heard("a", 1), heard("b", True)],
            {"max_turns": 2},
            Outcome.CORRECT,
            StopReason.TURN_LIMIT,
        ),  # an echo server never says done
    ],
)
def test_how_a_reward_becomes_an_outcome(echo, openenv, answers, keys, outcome, reason):
    url, seen = echo(answers)
    environment = openenv(url, **keys)
    episode = environment.episode(environment.tasks[1], 0)
    assert episode.start() == [Message("user", "hello")]
    assert episode.step("one").observation == "a"
    result = episode.step("two")
    assert (result.done, result.outcome, result.stop_reason) == (True, outcome, reason)
    assert [message["data"] for message in seen[-2:]] == [{"message": "one"}, {"message": "two"}]
    assert seen[-3]["data"] == {"seed": environment.tasks[1].content["seed"]}
    episode.close()


def test_what_an_openenv_server_refuses_is_an_invalid_action(echo, openenv):
    refused = {"type": "error", "data": {"message": "no such move", "code": "EXECUTION_ERROR"}}
    environment = openenv(echo([refused, heard("ok", 1.0, True)])[0])
    episode = environment.episode(environment.tasks[0], 0)
    episode.start()
    result = episode.step("\ud800")
    assert (result.observation, result.valid, result.done) == ("no such move", False, False)
    assert episode.step("a2").outcome is Outcome.CORRECT


def test_a_connection_that_breaks_is_an_infrastructure_failure(echo, openenv):
    environment = openenv(echo([heard("a")])[0])
    episode = environment.episode(environment.tasks[0], 0)
    episode.start()
    episode.step("one")
    with pytest.raises(InfrastructureError):
        episode.step("two")
    episode.close()


def test_a_server_without_room_is_told(serving, openenv):
    environment = openenv(serving({"train": load_environment(SUMS)}, limits=Limits(episodes=1)).url)
    first, second = (environment.episode(environment.tasks[0], 0) for _ in range(2))
    first.start()
    with pytest.raises(AgentPeftError, match=r"engine\.rows, and a few"):
        second.start()
    first.close()
    second.close()


def test_a_server_that_hangs_up_for_want_of_room_is_told(echo, openenv):
    with pytest.raises(AgentPeftError, match="Server at capacity: 1/1 sessions active; let the server hold"):
        openenv(echo([], resets="no room")[0])


def test_a_seed_that_decides_nothing_is_told(echo, openenv, caplog):
    url, _ = echo([], schema={**SCHEMA, "observation": {}}, resets="all differ")
    with caplog.at_level(logging.WARNING):
        environment = openenv(url)
    assert "two resets with one seed differ" in caplog.text
    episode = environment.episode(environment.tasks[0], 0)
    assert json.loads(episode.start()[0].content) == {
        "echo": "hello",
        "length": 5,
        "number": 3,
    }  # no one text: all of it, as JSON
    episode.close()


@pytest.mark.parametrize(
    ("schema", "keys", "told"),
    [
        (
            {"action": {"properties": {"x": {"type": "integer"}}}},
            {},
            "an action is not one text .its keys: x.; set action_key",
        ),
        (
            {"action": {"properties": {"a": {"type": "string"}, "b": {"type": "string"}}}},
            {},
            "set action_key",
        ),
        (SCHEMA, {"reset": {"seed": 1}}, "'seed' is set for every episode"),
        (SCHEMA, {"observation_key": "nothing"}, "the first observation is empty; set prompt"),
    ],
)
def test_what_cannot_be_played_is_told(echo, openenv, schema, keys, told):
    url, _ = echo([], schema=schema)
    with pytest.raises(AgentPeftError, match=told):
        openenv(url, **keys)


def test_no_openenv_server_is_told(openenv):
    with pytest.raises(AgentPeftError, match="no OpenEnv server answers"):
        openenv("http://127.0.0.1:9")


def test_openenvs_own_client(serving):
    client = pytest.importorskip(
        "openenv.core.generic_client", reason="OpenEnv (openenv on PyPI) is not installed"
    )
    host = serving({"train": load_environment(SUMS)})
    with client.GenericEnvClient(base_url=host.url).sync() as environment:
        a, b = environment.reset(seed=5).observation["text"].rstrip("=").split("+")
        assert environment.step({"text": str(int(a) + int(b))}).reward == 1.0
        assert environment.state()["step_count"] == 1
