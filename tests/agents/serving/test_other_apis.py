"""``/v1/responses`` and ``/v1/messages``: the same conversation as a chat, in other words."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from pathlib import Path

import pytest

from agent_peft.agents.serving.anthropic_messages import MessagesRequest
from agent_peft.agents.serving.openai_responses import ResponsesRequest
from agent_peft.agents.serving.prompts import chat_prompt
from agent_peft.agents.serving.requests import ChatRequest
from agent_peft.policies.policy import Policy

from .conftest import USER, post
from .templates import HERMES, QWEN, policy_of, tokens_of

types = pytest.importorskip("openai.types")

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How many?"},
    {"role": "assistant", "content": "So:", "reasoning_content": "I look.",
     "tool_calls": [{"id": "1", "function": {"name": "ls", "arguments": '{"path": "/"}'}},
                    {"id": "2", "function": {"name": "ls", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "1", "content": "two"},
    {"role": "tool", "tool_call_id": "2", "content": "one"},
    {"role": "user", "content": "And now?"},
]  # fmt: skip
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
LS = {"name": "ls", "description": "Lists.", "parameters": SCHEMA}
RESPONSES = {
    "instructions": "Be brief.",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "How many?"}]},
        {"type": "reasoning", "id": "a", "summary": [],
         "content": [{"type": "reasoning_text", "text": "I look."}]},
        {"type": "message", "role": "assistant", "id": "b", "status": "completed",
         "content": [{"type": "output_text", "text": "So:", "annotations": []}]},
        {"type": "function_call", "call_id": "1", "name": "ls", "arguments": '{"path": "/"}'},
        {"type": "function_call", "call_id": "2", "name": "ls", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "two"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "one"}]},
        {"role": "user", "content": "And now?"},
    ],
    "tools": [{"type": "function", "strict": True, **LS}],
    "store": False, "include": [], "truncation": "disabled", "parallel_tool_calls": True,
}  # fmt: skip
MESSAGES = {
    "max_tokens": 100,
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": "How many?"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "I look.", "signature": ""},
            {"type": "text", "text": "So:"},
            {"type": "tool_use", "id": "1", "name": "ls", "input": {"path": "/"}},
            {"type": "tool_use", "id": "2", "name": "ls", "input": {}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "1", "content": "two", "is_error": False},
            {"type": "tool_result", "tool_use_id": "2", "content": [{"type": "text", "text": "one"}]},
            {"type": "text", "text": "And now?"}]},
    ],
    "tools": [{"name": "ls", "description": "Lists.", "input_schema": SCHEMA}],
    "metadata": {"user_id": "x"}, "thinking": {"type": "adaptive"}, "context_management": {"edits": []},
}  # fmt: skip
REPLY = (
    '<think>\nI look.\n</think>\n\nSo:\n<tool_call>\n{"name": "ls", "arguments": {"path": "/"}}\n</tool_call>'
)
READ = ["I look.", "So:", "ls", {"path": "/"}]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Policy:
    """A policy that calls ``ls`` in its first reply to ``How many?``, and writes ``Two.`` after a longer
    prompt.
    """
    policy = policy_of(tmp_path_factory.mktemp("tiny"), QWEN.replace("CALL", HERMES))
    chat = {"messages": CHAT[1:2], "tools": [{"type": "function", "function": LS}]}
    begin = len(chat_prompt(policy.chat, ChatRequest.model_validate(chat)).tokens) - 1
    reply, end = tokens_of(policy, REPLY), tokens_of(policy, "Two.")
    weight = policy.base.transformer.wpe.weight.data
    for place, token in enumerate(reply, begin):
        weight[place, token] = 9.0
    weight[begin + len(reply) :, end[0]] = 1.0  # unless the token before is one of the answer
    for before, token in itertools.pairwise(end):
        policy.base.transformer.wte.weight.data[before, token] = 5.0
    return policy


def test_requests_of_other_apis_are_the_same_chat():
    chat = ChatRequest.model_validate({"messages": CHAT, "tools": [{"type": "function", "function": LS}]})
    for request in (ResponsesRequest.model_validate(RESPONSES), MessagesRequest.model_validate(MESSAGES)):
        read = request.as_chat()
        parts, expected = (
            [(m.role, m.text, m.thought, m.tool_calls, m.tool_call_id) for m in one.messages]
            for one in (read, chat)
        )
        assert parts == expected
        assert [tool.model_dump() for tool in read.tools] == [tool.model_dump() for tool in chat.tools]
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    keys = {"thinking": {"type": "disabled"}, "tool_choice": choice}
    read = MessagesRequest.model_validate(MESSAGES | keys).as_chat()
    assert (read.reasoning_effort, read.parallel_tool_calls, read.max_tokens) == ("none", False, 100)


def events_of(answer):
    events = [event.split("\n") for event in answer.text.split("\n\n") if event]
    for name, data in events:
        assert name == f"event: {json.loads(data[6:])['type']}"
    return [json.loads(data[6:]) for _, data in events]


def test_a_response_whole_and_as_a_stream(serving, tiny):
    url = serving(max_tokens=2000, tiny=tiny).url
    body = {"input": "How many?", "tools": RESPONSES["tools"], "temperature": 0}
    whole = post(url, "responses", **body).json()
    types.responses.Response.model_validate_json(json.dumps(whole), strict=True)
    thought, text, call = whole["output"]
    read = [thought["content"][0]["text"], text["content"][0]["text"], call["name"]]
    assert [*read, json.loads(call["arguments"])] == READ
    assert (whole["status"], whole["usage"]["output_tokens"]) == ("completed", len(tokens_of(tiny, REPLY)))
    events = events_of(post(url, "responses", **body, stream=True))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    last = events[-1]["response"]
    assert events[-1]["type"] == "response.completed" and last["usage"] == whole["usage"]
    for one, other in zip(last["output"], whole["output"], strict=True):
        assert {**one, "id": 0, "call_id": 0} == {**other, "id": 0, "call_id": 0}
    for kind, expected in (("reasoning_text", "I look."), ("output_text", "So:")):
        deltas = [event["delta"] for event in events if event["type"] == f"response.{kind}.delta"]
        assert "".join(deltas) == expected and len(deltas) > 1
    cut = post(url, "responses", **body, max_output_tokens=16).json()
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


def test_a_message_whole_and_as_a_stream(serving, tiny):
    url = serving(max_tokens=2000, tiny=tiny).url
    body = {"messages": CHAT[1:2], "tools": MESSAGES["tools"], "temperature": 0, "max_tokens": 200}
    whole = post(url, "messages", **body).json()
    thought, text, call = whole["content"]
    assert [thought["thinking"], text["text"], call["name"], call["input"]] == READ
    assert whole["stop_reason"] == "tool_use"
    events = events_of(post(url, "messages", **body, stream=True))
    kinds = [event["type"] for event in events]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    assert events[-2]["usage"] == whole["usage"] and events[-2]["delta"]["stop_reason"] == "tool_use"
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == "I look."
    assert "".join(delta.get("text", "") for delta in deltas) == "So:"
    assert json.loads("".join(delta.get("partial_json", "") for delta in deltas)) == {"path": "/"}
    starts = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [start["type"] for start in starts] == ["thinking", "text", "tool_use"] and starts[2][
        "input"
    ] == {}
    assert post(url, "messages", **{**body, "max_tokens": 5}).json()["stop_reason"] == "max_tokens"


@pytest.mark.parametrize(
    ("path", "keys", "message"),
    [
        ("responses", {"previous_response_id": "x"}, "body.previous_response_id"),
        ("responses", {"tool_choice": "required"}, "tool_choice: required needs tools"),
        ("responses", {"tools": [{"type": "web_search"}]}, "body.tools.0"),
        ("responses", {"input": [{"role": "user"}]}, "a message of the role user needs a content"),
        ("responses", {"temperature": -1}, "temperature"),
        ("messages", {"tool_choice": {"type": "any"}}, "tool_choice: required needs tools"),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "body.messages.0"),
        (
            "responses",
            {"input": [{"type": "function_call", "call_id": "1"}]},
            "messages.0.tool_calls.0.function",
        ),
        ("messages", {"tools": [{"name": "rm -rf", "input_schema": {}}]}, "tools.0.function.name"),
        ("messages", {"max_tokens": 0}, "max_tokens"),
        ("messages", {"nonsense": 1}, "body.nonsense"),
    ],
)
def test_what_other_apis_cannot_have_is_refused_in_one_line(serving, path, keys, message):
    answer = post(serving().url, path, **{"input": "1"} | keys if path == "responses" else
                  {"messages": USER, "max_tokens": 3} | keys)  # fmt: skip
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"] and "\n" not in answer.json()["error"]["message"]


@pytest.mark.slow
def test_the_official_sdks_connect(serving, tiny):
    python = os.environ.get("AGENT_PEFT_SDK_PYTHON")
    if not python:
        pytest.skip("AGENT_PEFT_SDK_PYTHON names no Python with the packages openai and anthropic")
    url = serving(max_tokens=2000, tiny=tiny).url
    script = Path(__file__).with_name("sdk_clients.py")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [python, str(script), url], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    read = json.loads(done.stdout)
    assert read["responses"] == read["responses stream"] == READ
    assert read["messages"] == read["messages stream"] == [*READ, "tool_use"]
    assert (read["responses end"], read["messages end"]) == ("Two.", ["Two.", "end_turn", 5])
    assert read["responses events"][-1] == "response.completed"
