"""The server's limits, its end, and clients that hang up."""

from __future__ import annotations

import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from agent_peft.agents.serving.server import PolicyHost
from agent_peft.environments.http.transport import Address
from agent_peft.policies.engine import service
from agent_peft.policies.engine.kv_cache import ROWS, TierCache
from agent_peft.policies.engine.service import OpenDecoding
from agent_peft.types import AgentPeftError

from .conftest import CLIENT, USER, post, wait_until

ENDLESS = {"messages": USER, "temperature": 0, "max_tokens": 6000}  # the argmax runs in a circle


@pytest.fixture
def slowly(monkeypatch):
    """An endless reply takes a minute at least, however fast the machine."""
    advance = OpenDecoding.advance

    def wait_and_advance(self):
        time.sleep(0.01)
        return advance(self)

    monkeypatch.setattr(OpenDecoding, "advance", wait_and_advance)


@pytest.mark.usefixtures("slowly")
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_frees_its_row(serving, stream):
    running = serving(rows=1, max_tokens=7000)
    with httpx.Client(base_url=running.url, trust_env=False, timeout=60) as client:
        if stream:
            with client.stream("POST", "/v1/chat/completions", json=ENDLESS | {"stream": True}) as answer:
                lines = answer.iter_lines()  # without this name httpx hangs up after the first line
                next(lines)
                (draw,) = running.host.replies.under_way
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/chat/completions", json=ENDLESS, timeout=0.3)
            draws = list(running.host.replies.under_way)
            if not draws:
                pytest.skip("the machine was too slow to look at the reply before the client had gone")
            (draw,) = draws
    wait_until(lambda: draw.ended and not running.host.replies.under_way)
    assert draw.cancelled and len(draw.drawn) < 6000
    assert post(running.url, messages=USER, max_tokens=3).status_code == 200


@pytest.mark.usefixtures("slowly")
def test_more_replies_than_allowed_are_refused(serving):
    running = serving(most=2, max_tokens=7000)
    with CLIENT.stream(
        "POST", f"{running.url}/v1/chat/completions", json=ENDLESS | {"stream": True}
    ) as answer:
        lines = answer.iter_lines()  # without this name httpx hangs up after the first line
        next(lines)
        refused = post(running.url, messages=USER, max_tokens=3, n=2)
        assert refused.status_code == 429 and refused.json()["error"]["type"] == "rate_limit_error"
        assert post(running.url, messages=USER, max_tokens=3).status_code == 200


def test_a_failure_of_the_sampler_is_told_and_the_next_request_is_answered(serving, monkeypatch, caplog):
    running = serving()

    def fail(self):
        monkeypatch.undo()
        raise ValueError("planted")

    monkeypatch.setattr(OpenDecoding, "advance", fail)
    answer = post(running.url, messages=USER, max_tokens=3)
    assert answer.status_code == 500 and "ValueError" in answer.json()["error"]["message"]
    assert post(running.url, messages=USER, max_tokens=3).status_code == 200
    assert not running.host.replies.under_way


def test_out_of_memory_halves_the_rows_and_the_replies_go_on(serving, monkeypatch, caplog):
    running = serving(rows=4)
    expected = post(running.url, messages=USER, max_tokens=30, temperature=0, n=4, return_token_ids=True)
    draw, failed = OpenDecoding._draw, []

    def fail_once(self, rows, logits, uniforms):
        if self.decoding == 4 and len(rows[0].action) >= 5 and not failed:
            failed.append(True)
            raise MemoryError("planted")
        return draw(self, rows, logits, uniforms)

    monkeypatch.setattr(OpenDecoding, "_draw", fail_once)
    again = post(running.url, messages=USER, max_tokens=30, temperature=0, n=4, return_token_ids=True)
    assert failed and again.json()["choices"] == expected.json()["choices"]


def test_a_prompt_that_does_not_fit_fails_alone(serving, monkeypatch, caplog):
    running = serving(rows=4, max_tokens=3000)
    read = TierCache.read

    def too_small(self, model, tier, slots, tokens, positions):
        if int(positions.max()) > 1000:  # however few tokens are read at once
            raise MemoryError("planted")
        return read(self, model, tier, slots, tokens, positions)

    monkeypatch.setattr(TierCache, "read", too_small)
    prompts = ["1+2=", "2+3=", "7" * 1200, "4+5=", "5+6=", "6+7="]
    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = list(
            threads.map(lambda text: post(running.url, "completions", prompt=text, max_tokens=40), prompts)
        )
    assert [answer.status_code for answer in answers] == [200, 200, 503, 200, 200, 200]
    assert "out of memory" in answers[2].json()["error"]["message"]
    wait_until(lambda: running.service._engines["trained"].rows == 4)


@pytest.mark.usefixtures("slowly")
def test_who_hangs_up_before_there_is_a_row_gives_back_the_place(serving):
    running = serving(rows=1, most=12, max_tokens=7000)
    with CLIENT.stream("POST", f"{running.url}/v1/chat/completions", json=ENDLESS | {"stream": True}) as one:
        lines = one.iter_lines()  # without this name httpx hangs up after the first line
        next(lines)

        def give_up(_):
            with pytest.raises(httpx.ReadTimeout), httpx.Client(trust_env=False) as impatient:
                impatient.post(f"{running.url}/v1/chat/completions", json=ENDLESS, timeout=0.5)

        with ThreadPoolExecutor(11) as threads:
            list(threads.map(give_up, range(11)))
        wait_until(lambda: len(running.host.replies.under_way) == 1)


def test_keys_are_made_for_the_rows_that_are_there(serving):
    running = serving(rows=32)
    made = []
    for count in (1, 1, 5, 2):
        assert post(running.url, messages=USER, max_tokens=3, n=count).status_code == 200
        made.append(running.service._decodings["trained"].cache.tiers[ROWS].slots)
    assert made[0] == 1 and 5 <= made[2] <= 8


@pytest.mark.usefixtures("slowly")
def test_more_rows_that_do_not_fit_wait(serving, monkeypatch, caplog):
    running = serving(rows=4, max_tokens=7000)
    failed = []

    def too_small(self, tier, slots):
        failed.append(slots)
        raise MemoryError("planted")

    monkeypatch.setattr(TierCache, "widen", too_small)
    with CLIENT.stream("POST", f"{running.url}/v1/chat/completions", json=ENDLESS | {"stream": True}) as one:
        lines = one.iter_lines()  # without this name httpx hangs up after the first line
        next(lines)
        assert post(running.url, messages=USER, max_tokens=3, n=3).status_code == 200
    assert failed


@pytest.mark.usefixtures("slowly")
def test_the_keys_of_a_policy_that_nobody_asks_are_given_back(serving, monkeypatch):
    monkeypatch.setattr(service, "IDLE", 0.2)
    running = serving(max_tokens=7000)
    assert post(running.url, model="trained", messages=USER, max_tokens=3).status_code == 200
    body = ENDLESS | {"stream": True, "model": "base"}
    with CLIENT.stream("POST", f"{running.url}/v1/chat/completions", json=body) as one:
        lines = one.iter_lines()
        next(lines)
        wait_until(lambda: list(running.service._decodings) == ["base"])


MANY = [{"role": "user", "content": "1"}]
HOSTILE = (
    b"",
    b"{",
    b"null",
    b"[]",
    b'"\xff"',
    b"[" * 100_000,
    b'{"messages": ' + b"[" * 200 + b"]" * 200 + b"}",
    b'{"messages": [{"role": "user", "content": "' + b"1" * (2 << 20) + b'"}]}',
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"messages": [{"role": "user", "content": "1"}], "temperature": NaN}',
    b'{"messages": [{"role": "user", "content": "1"}], "temperature": Infinity}',
    *(
        json.dumps({"messages": MANY, **more}).encode()
        for more in (
            {"messages": []},
            {"messages": [{"role": "root", "content": "1"}]},
            {"messages": [{"role": "user"}]},
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            {"messages": [{"role": "user", "content": "É"}]},  # not in the alphabet
            {"messages": [{"role": "user", "content": "1" * 1000}]},
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": "[1]"}}]}]},
            {"model": "../../etc/passwd"},
            {"max_tokens": 0},
            {"max_tokens": 10**30},
            {"max_tokens": 100_000},
            {"max_tokens": True},
            {"temperature": -1},
            {"temperature": 1e-9},
            {"temperature": "hot"},
            {"temperature": True},
            {"top_p": "0.5"},
            {"top_p": 0},
            {"top_k": 10**20},
            {"seed": 10**40},
            {"n": 10**9},
            {"n": 0},
            {"stop": ""},
            {"stop": ["x"] * 1000},
            {"stop": "x" * 10_000},
            {"top_logprobs": 3},
            {"logprobs": True, "top_logprobs": 1000},
            {"tools": [{"type": "function", "function": {"name": "rm -rf /"}}]},
            {"tools": [{"type": "function", "function": {"name": "ls", "strict": "yes"}}]},
            {"store": 1},
            {"verbosity": "loud"},
            {"reasoning_effort": "most"},
            {"chat_template_kwargs": {"enable_thinking": False}},
            {"tool_choice": "required"},
            {"response_format": {"type": "json_schema"}},
            {"presence_penalty": 1},
            {"logit_bias": {"1": 100}},
            {"max_tokens": 3, "max_completion_tokens": 4},
            {"nonsense": 1},
            {str(i): i for i in range(5000)},
        )
    ),
)  # fmt: skip


TOOLS = [{"type": "function", "function": {"name": "ls"}}]


@pytest.mark.parametrize(
    "keys",
    [
        {"service_tier": "auto"},
        {"presence_penalty": 0.0, "frequency_penalty": 0, "repetition_penalty": 1.0, "min_p": 0},
        {"modalities": ["text"], "verbosity": "medium", "store": False, "logit_bias": {}},
        {"tools": TOOLS, "tool_choice": "none", "parallel_tool_calls": True},
        {"stream_options": None, "tool_choice": None, "stop": None, "stop_token_ids": []},
        {"temperature": 1, "top_p": 1, "n": 1, "seed": None},
        {"verbosity": "low", "store": True, "metadata": {"a": "b"}},
        {"tools": [{"type": "function", "function": {"name": "ls", "strict": True}}]},
        {"stream_options": {"include_usage": True}, "reasoning_effort": "low", "service_tier": "flex"},
        {"tool_choice": "none", "parallel_tool_calls": False},
        {"tool_choice": "auto", "tools": []},
        {"tools": [{**TOOLS[0], "cache_control": {"type": "ephemeral"}}]},
    ],
)
def test_what_changes_no_reply_is_accepted(serving, keys):
    answer = post(serving().url, messages=USER, max_tokens=2, **keys)
    assert answer.status_code == 200, answer.text


def test_best_of_that_keeps_all_replies_is_accepted(serving):
    url = serving().url
    for keys in ({"best_of": 1}, {"best_of": 2, "n": 2}, {"best_of": 1, "n": 2}, {"service_tier": "default"}):
        assert post(url, "completions", prompt="1", max_tokens=1, **keys).status_code == 200, keys
    refused = post(url, "completions", prompt="1", best_of=3)
    assert refused.json()["error"]["message"] == "body: best_of is 1 or equal to n: replies are not ranked"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"stop": ""}, "body.stop: is a text of 1 to 200 characters, at most 16 of them in a list, or null"),
        (
            {"stop": ["a", ""]},
            "body.stop: is a text of 1 to 200 characters, at most 16 of them in a list, or null",
        ),
        ({"seed": True}, "body.seed: Input should be a valid integer"),
        ({"temperature": True}, "body.temperature: Input should be a valid number"),
        ({"top_p": "0.5"}, "body.top_p: Input should be a valid number"),
        ({"presence_penalty": False}, "body.presence_penalty: is a number"),
    ],
)
def test_another_type_is_refused(serving, keys, message):
    answer = post(serving().url, messages=USER, **keys)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, message)


def test_a_body_with_equal_keys_is_refused(serving):
    body = b'{"messages": [{"role": "user", "content": "1"}], "max_tokens": 1, "max_tokens": 2}'
    url = f"{serving().url}/v1/chat/completions"
    answer = CLIENT.post(url, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 422 and "max_tokens" in answer.json()["error"]["message"]


def test_hostile_bodies_are_refused_in_openais_words(serving):
    url = serving().url
    for body in HOSTILE:
        answer = CLIENT.post(
            f"{url}/v1/chat/completions",
            content=body,
            headers={"content-type": "application/json"},
        )
        assert 400 <= answer.status_code < 500, (body[:200], answer.status_code, answer.text[:500])
        problem = answer.json()["error"]
        assert problem["message"] and "\n" not in problem["message"] and len(problem["message"]) <= 500
    for prompt in ("", [], [[]], [-1], [10**6], [1.5], ["ab", [1]], None, {"a": 1}, [[1]] * 1000, "É"):
        answer = post(url, "completions", prompt=prompt)
        assert answer.status_code == 400, (prompt, answer.text)
    assert CLIENT.get(f"{url}/v1/nothing").json()["error"]["code"] == "http"
    assert CLIENT.get(f"{url}/v1/completions").status_code == 405
    foreign = {"origin": "https://example.org"}
    assert post(url, messages=USER, headers=foreign).json()["error"]["type"] == "permission_error"


def test_a_token_is_needed_where_others_can_reach_the_server(serving, policies):
    running = serving(token="secret")
    assert post(running.url, messages=USER).json()["error"]["type"] == "authentication_error"
    right = {"authorization": "Bearer secret"}
    assert post(running.url, messages=USER, max_tokens=2, headers=right).status_code == 200
    assert CLIENT.get(f"{running.url}/health").status_code == 200
    with pytest.raises(AgentPeftError, match="--token"):
        PolicyHost(running.service, Address("0.0.0.0", 0), most=4)


def test_stopping_cuts_what_does_not_end(serving):
    running = serving(max_tokens=7000)
    with CLIENT.stream(
        "POST", f"{running.url}/v1/chat/completions", json=ENDLESS | {"stream": True}
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        running.host.stop()
        *_, last = [line for line in lines if line]
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "the server is stopping"


def test_sigterm_ends_the_command(tmp_path, policies, warm_process):
    policies["base"].save(tmp_path / "tiny")
    command = ["-m", "agent_peft", "serve-policy", f"mine={tmp_path / 'tiny'}", "--port", "0"]
    command += ["--token", "TOKEN", "--max-tokens", "7000"]
    told = tmp_path / "told.txt"
    with told.open("w") as output:
        process = warm_process.start(*command, folder=tmp_path, output=output, TOKEN="secret")
    try:
        wait_until(lambda: told.read_text().endswith("\n") or process.poll() is not None)
        line = told.read_text()
        assert line.startswith("serving mine on http://127.0.0.1:"), line
        url = line.split(" on ")[1].split("/v1")[0]
        right = {"authorization": "Bearer secret"}
        assert post(url, messages=USER, max_tokens=2, model="mine", headers=right).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert told.read_text() == line
    finally:
        process.kill()
