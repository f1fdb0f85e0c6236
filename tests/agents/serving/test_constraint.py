"""Replies that must be a call of a tool, or JSON of a schema. The models draw uniformly from what is allowed,
so nothing but the grammar gives a reply its form.
"""

from __future__ import annotations

import json
import sys

import pytest

from agent_peft.agents.serving.constraint import grammar_of
from agent_peft.agents.serving.prompts import chat_prompt
from agent_peft.agents.serving.requests import ChatRequest

from .conftest import post
from .templates import MARKS, policy_of, script
from .test_prompts import QWENS, USER

pytest.importorskip("llguidance")

PLAIN_TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TEMPLATES = {
    "hermes": QWENS["hermes"],
    "plain": PLAIN_TEMPLATE,
}
SCHEMA = {
    "type": "object",
    "properties": {
        "side": {"enum": ["left", "right"]},
        "n": {"type": "integer", "minimum": 3, "maximum": 40},
    },
    "required": ["side", "n"],
    "additionalProperties": False,
}
MOVE = {"type": "function", "function": {"name": "move", "parameters": SCHEMA}}

NO_THOUGHT = {"reasoning_effort": "none"}  # one drawn at random would not end
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
QUIT = {"type": "function", "function": {"name": "quit", "parameters": NO_ARGUMENTS}}
JSON = {"type": "json_schema", "json_schema": {"name": "move", "schema": SCHEMA, "strict": True}}


def fits(content):
    return content["side"] in ("left", "right") and content["n"] in range(3, 41) and len(content) == 2


@pytest.fixture(scope="module", params=TEMPLATES)
def policy(request, tmp_path_factory):
    return policy_of(tmp_path_factory.mktemp(request.param), TEMPLATES[request.param])


@pytest.fixture
def url(policy, serving):
    return serving(max_tokens=2000, tiny=policy).url


def thought(policy, **body):
    """Let the policy begin its reply with a thought in which it names a call."""
    prompt = chat_prompt(policy.chat, ChatRequest.model_validate({"messages": [USER], **body})).tokens
    encode = policy.chat.tokenizer.encode
    script(
        policy, len(prompt), encode('<think>\nI call {"name": "quit"}.\n</think>', add_special_tokens=False)
    )


def test_a_call_is_forced(url):
    body = {"messages": [USER], "tools": [MOVE, QUIT], "seed": 0, **NO_THOUGHT}
    called = set()
    for choice in post(url, tool_choice="required", n=4, **body).json()["choices"]:
        (call,) = choice["message"]["tool_calls"]
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
        called.add(call["function"]["name"])
        arguments = json.loads(call["function"]["arguments"])
        assert fits(arguments) if call["function"]["name"] == "move" else arguments == {}
    assert called == {"move", "quit"}
    named = {"type": "function", "function": {"name": "move"}}
    for choice in post(url, tool_choice=named, n=4, **body).json()["choices"]:
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "move" and fits(json.loads(call["function"]["arguments"]))


def test_json_is_forced_and_also_where_tools_may_be_called(url):
    for choice in post(url, messages=[USER], response_format=JSON, n=4, seed=0, **NO_THOUGHT).json()[
        "choices"
    ]:
        assert choice["finish_reason"] == "stop" and fits(json.loads(choice["message"]["content"]))
    kinds = set()
    keys = {"tools": [QUIT], "response_format": JSON, "n": 8, "seed": 1, "logprobs": True, "top_logprobs": 3}
    for choice in post(url, messages=[USER], **keys, **NO_THOUGHT).json()["choices"]:
        called = bool(choice["message"].get("tool_calls"))
        assert called or fits(json.loads(choice["message"]["content"]))
        kinds.add(called)
        # log-probabilities are those under the mask: of one allowed token 0, and the others are not listed
        assert any(
            one["logprob"] == 0 and len(one["top_logprobs"]) == 1 for one in choice["logprobs"]["content"]
        )
    assert kinds == {False, True}


def test_the_other_apis_force_the_same(url):
    none = {"reasoning": {"effort": "none"}}
    flat = {"name": "move", "parameters": SCHEMA, "type": "function"}
    for choice in ("required", {"type": "function", "name": "move"}):
        body = post(url, "responses", input="x", tools=[flat], tool_choice=choice, **none).json()
        assert fits(json.loads(body["output"][-1]["arguments"])) and body["tool_choice"] == choice
    form = {"format": {"type": "json_schema", "name": "move", "schema": SCHEMA, "strict": True}}
    body = post(url, "responses", input="x", text=form, **none).json()
    assert fits(json.loads(body["output"][-1]["content"][0]["text"]))
    tool = {"name": "move", "input_schema": SCHEMA}
    for choice in ({"type": "any"}, {"type": "tool", "name": "move"}):
        keys = {"messages": [USER], "max_tokens": 300, "tools": [tool], "tool_choice": choice}
        keys["thinking"] = {"type": "disabled"}
        assert fits(post(url, "messages", **keys).json()["content"][-1]["input"])


def test_a_thought_is_free_and_the_form_begins_after_it(serving, tmp_path):
    policy = policy_of(tmp_path, QWENS["hermes"])
    url = serving(max_tokens=2000, tiny=policy).url
    body = {"tools": [MOVE, QUIT], "tool_choice": {"type": "function", "function": {"name": "move"}}}
    thought(policy, **body)
    for stream in (False, True):
        answer = post(url, messages=[USER], temperature=0, stream=stream, **body)
        if not stream:
            (choice,) = answer.json()["choices"]
            assert choice["message"]["reasoning_content"] == 'I call {"name": "quit"}.'
            (call,) = choice["message"]["tool_calls"]
            assert call["function"]["name"] == "move" and fits(json.loads(call["function"]["arguments"]))
        else:
            assert '"name":"move"' in answer.text.replace(" ", "")


def test_what_cannot_be_forced_is_one_line(serving, tmp_path, monkeypatch):
    url = serving(max_tokens=2000, tiny=policy_of(tmp_path, QWENS["qwen3_coder"])).url

    def refused(**body):
        answer = post(url, messages=[USER], **body)
        message = answer.json()["error"]["message"]
        assert answer.status_code == 400 and "\n" not in message
        return message

    assert "do not hold their arguments as JSON" in refused(tools=[MOVE], tool_choice="required")
    assert "required needs tools" in refused(tool_choice="required")
    named = {"type": "function", "function": {"name": "fly"}}
    assert "'fly' is none of the tools" in refused(tools=[MOVE], tool_choice=named)
    assert "need each other" in refused(response_format={"type": "json_schema"})
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}
    assert "the form of the reply" in refused(
        response_format={"type": "json_schema", "json_schema": {"schema": schema}}
    )
    monkeypatch.setitem(sys.modules, "llguidance", None)
    assert "pip install '.[constraint]'" in refused(response_format={"type": "json_object"})


def test_an_action_that_is_drawn_again_has_the_same_masks(policy):
    chat = policy.chat
    request = ChatRequest.model_validate({"messages": [USER], "response_format": JSON})
    grammar = grammar_of(chat, request, "plain")
    action = chat.tokenizer.encode('{"side": "left", "n": 12}', add_special_tokens=False)
    constraint = grammar((0,))
    masks = [constraint.allowed(action[:place], 200) for place in range(len(action) + 1)]
    assert all(mask[token] for mask, token in zip(masks, action, strict=False))
    assert set(masks[-1].nonzero().flatten().tolist()) == set(chat.end_of_turn)
    for place in (5, 3, 20):
        assert constraint.allowed(action[:place], 200).equal(masks[place])


def test_a_text_that_looks_like_a_mark_opens_no_thought(tmp_path):
    """Where the tokenizer has no token for it."""
    policy = policy_of(tmp_path, PLAIN_TEMPLATE, MARKS[:2])
    request = ChatRequest.model_validate({"messages": [USER], "response_format": {"type": "json_object"}})
    constraint = grammar_of(policy.chat, request, "plain")((0,))
    action = policy.chat.tokenizer.encode('{"a": "<think>", "b": 1}', add_special_tokens=False)
    allowed = constraint.allowed(action, 200)
    assert set(allowed.nonzero().flatten().tolist()) == set(policy.chat.end_of_turn)
