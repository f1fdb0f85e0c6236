"""Tools in conversations, and the parts of a reply with calls."""

from __future__ import annotations

import json

import pytest

from agent_peft.agents.serving.choices import ChoiceStream, Draw
from agent_peft.agents.serving.conversation import ChatMessage, Tool, plain_messages, split_calls
from agent_peft.agents.serving.prompts import Prompt
from agent_peft.agents.serving.requests import ChatRequest
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.types import AgentPeftError, Message

types = pytest.importorskip("openai.types")
LS = Tool.model_validate({"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}})
CALL = '<tool_call>\n{"name": "ls", "arguments": {"name": "a b"}}\n</tool_call>'


def messages(*contents):
    return [ChatMessage.model_validate(content) for content in contents]


def test_a_conversation_with_tools_in_plain_messages():
    call = {"id": "1", "type": "function", "function": {"name": "ls", "arguments": '{"name": "a b"}'}}
    told = plain_messages(
        messages(
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": t} for t in ("What is ", "here?")]},
            {"role": "assistant", "content": "I look.", "tool_calls": [call], "refusal": None},
            {"role": "tool", "content": "x", "tool_call_id": "1"},
            {"role": "tool", "content": "y", "tool_call_id": "2"},
        ),
        [LS],
    )  # fmt: skip
    assert [message.role for message in told] == ["system", "user", "assistant", "user"]
    assert told[0].content.startswith("Be brief.\n\n# Tools\n")
    assert '<tools>\n{"type": "function", "function": {"name": "ls"' in told[0].content
    assert told[1:] == [
        Message("user", "What is here?"),
        Message("assistant", "I look.\n" + CALL),
        Message("user", "<tool_response>\nx\n</tool_response>\n<tool_response>\ny\n</tool_response>"),
    ]
    assert plain_messages(messages({"role": "user", "content": "x"}), [LS])[0].role == "system"
    strict = Tool.model_validate(
        {"type": "function", "function": {**LS.function.model_dump(), "strict": True}}
    )
    user = messages({"role": "user", "content": "x"})
    assert plain_messages(user, [strict]) == plain_messages(user, [LS])  # strict is not read
    call["function"]["arguments"] = "7"
    with pytest.raises(AgentPeftError, match="JSON object"):
        plain_messages(messages({"role": "assistant", "tool_calls": [call]}), [])


@pytest.mark.parametrize(
    ("text", "content", "names"),
    [
        ("no call", "no call", []),
        (CALL, "", ["ls"]),
        ("a look.\n" + CALL + "\n" + CALL, "a look.\n", ["ls", "ls"]),
        (CALL.removesuffix("</tool_call>"), "", ["ls"]),
        (CALL + " done", " done", ["ls"]),
        ("<tool_call>nothing</tool_call>", "<tool_call>nothing</tool_call>", []),
        ('{"name": "ls", "arguments": {}}', "", ["ls"]),
        ('{"name": "rm", "arguments": {}}', '{"name": "rm", "arguments": {}}', []),  # no tool of the request
    ],
)
def test_calls_and_content_are_told_apart_also_in_a_stream(policies, text, content, names):
    assert split_calls(text, [LS])[0] == content
    chat = policies["base"].chat
    draw = Draw(Prompt((1,)), 0, SamplingConfig(), on_change=lambda _: None, streamed=True)
    request = ChatRequest(messages=messages({"role": "user", "content": "x"}), tools=[LS])
    stream, parts = ChoiceStream(0, draw, chat, request), []
    for place, token in enumerate(chat.action_tokens(text)):
        draw.take(place, token, -0.5, ())
        parts += stream.parts()
        assert not any(part.finish_reason for part in parts)
    draw.act((), (), 0)
    parts += stream.parts()
    assert "".join(part.delta.content for part in parts) == content
    calls = parts[-1].delta.tool_calls or []
    assert [call.function.name for call in calls] == names
    assert [call.index for call in calls] == list(range(len(names)))
    whole = ChoiceStream(0, draw, chat, request).whole()
    assert whole.message.content == (content if content.strip() or not names else None)
    assert whole.finish_reason == parts[-1].finish_reason == ("tool_calls" if names else "stop")
    types.chat.ChatCompletionMessage.model_validate(whole.message.model_dump(), strict=True)
    for part in parts:
        types.chat.chat_completion_chunk.ChoiceDelta.model_validate(part.delta.model_dump(), strict=True)
    for call in whole.message.tool_calls or ():
        assert isinstance(json.loads(call.function.arguments), dict)
        assert "index" not in call.model_dump()


def test_a_stream_holds_back_what_may_begin_a_stop_string(policies):
    chat = policies["base"].chat
    draw = Draw(Prompt((1,)), 0, SamplingConfig(stop=("abc",)), on_change=lambda _: None, streamed=True)
    request = ChatRequest(messages=messages({"role": "user", "content": "x"}), stop="abc")
    stream, parts = ChoiceStream(0, draw, chat, request), []
    for place, token in enumerate(chat.action_tokens("xababc")):
        draw.take(place, token, -0.5, ())
        parts.append("".join(part.delta.content for part in stream.parts()))
    draw.act((), (), 0)
    assert parts[:6] == ["x", "", "", "ab", "", ""]
    (last,) = stream.parts()
    assert last.delta.content == "" and last.finish_reason == "stop"
