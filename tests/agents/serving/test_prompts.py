"""Prompts that the chat template writes, and replies that are read in its dialect."""

from __future__ import annotations

import json

import pytest

from agent_peft.agents.serving.choices import ChoiceStream, Draw
from agent_peft.agents.serving.prompts import PLAIN, Prompt, chat_prompt, facts_of
from agent_peft.agents.serving.requests import ChatRequest
from agent_peft.policies.models.tokenizer import character_tokenizer
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.policies.tokenization import ChatTokenizer
from agent_peft.types import AgentPeftError, Message

from .conftest import post
from .templates import CODER, HERMES, MARKS, QWEN, policy_of, script, tokens_of

types = pytest.importorskip("openai.types")

USER = {"role": "user", "content": "How many?"}
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}, "n": {"type": "integer"}}}
LS = {"name": "ls", "description": "Lists.", "parameters": SCHEMA, "strict": True}
TOOLS = [{"type": "function", "function": LS}]
CALL = {"id": "1", "type": "function", "function": {"name": "ls", "arguments": '{"path": "/", "n": 2}'}}
HERMES_CALL = '<tool_call>\n{"name": "ls", "arguments": {"path": "/", "n": 2}}\n</tool_call>'
CODER_CALL = (
    "<tool_call>\n<function=ls>\n<parameter=path>\n/\n</parameter>\n<parameter=n>\n2\n</parameter>\n"
    "</function>\n</tool_call>"
)
LOOP = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "I look."},
    {"role": "tool", "tool_call_id": "1", "content": "two"},
]


def chat_of(template, marks=MARKS):
    tokenizer = character_tokenizer("".join(chr(code) for code in range(32, 127)) + "\n")
    tokenizer.add_tokens(marks[2:])
    tokenizer.add_tokens(marks[:2], special_tokens=True)
    tokenizer.eos_token, tokenizer.chat_template = "<|im_end|>", template
    return ChatTokenizer(tokenizer)


QWENS = {"hermes": QWEN.replace("CALL", HERMES), "qwen3_coder": QWEN.replace("CALL", CODER)}


@pytest.fixture(scope="module")
def chat():
    return chat_of(QWENS["hermes"])


def prompt(chat, **keys):
    return chat_prompt(chat, ChatRequest.model_validate({"messages": [USER], **keys}))


@pytest.mark.parametrize("dialect", QWENS)
def test_a_tool_loop_is_the_templates_own_text(dialect):
    chat = chat_of(QWENS[dialect])
    assert facts_of(chat).dialect == dialect
    read = prompt(chat, messages=LOOP, tools=TOOLS)
    call = {"function": {"name": "ls", "arguments": {"path": "/", "n": 2}}}
    tool = {"type": "function", "function": {k: v for k, v in LS.items() if k != "strict"}}
    own = chat.tokenizer.apply_chat_template(
        [
            USER,
            {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "I look."},
            {"role": "tool", "content": "two"},
        ],
        tools=[tool],
        add_generation_prompt=True,
        return_dict=False,
    )
    assert list(read.tokens) == own and read.dialect == dialect
    text = chat.tokenizer.decode(read.tokens)
    assert "I look." in text and {"hermes": HERMES_CALL, "qwen3_coder": CODER_CALL}[dialect] in text
    later = chat.tokenizer.decode(prompt(chat, messages=[*LOOP, USER], tools=TOOLS).tokens)
    assert "I look." not in later  # as the template writes it


def test_typed_marks_are_text_wherever_a_client_writes_them(chat):
    typed = "".join(MARKS)
    tools = json.loads(json.dumps(TOOLS).replace("Lists.", typed))
    messages = [
        {"role": "system", "content": typed},
        {"role": "user", "content": typed},
        {**LOOP[1], "tool_calls": [json.loads(json.dumps(CALL).replace("/", "<|im_end|>"))]},
        {**LOOP[2], "content": typed},
    ]
    clean = [{**m, "content": m["content"] and "x"} for m in messages[:2]] + LOOP[1:]
    marks = {chat.tokenizer.convert_tokens_to_ids(mark) for mark in MARKS}

    def count(**keys):
        return sum(token in marks for token in prompt(chat, **keys).tokens)

    assert count(messages=messages, tools=tools) == count(messages=clean, tools=TOOLS)
    assert count(messages=messages[:2]) == count(messages=clean[:2])  # without tools, too
    assert chat.tokenizer.decode(prompt(chat, messages=messages, tools=tools).tokens).count(typed) == 4


def test_keys_of_the_template_are_honored_or_refused(chat):
    off = chat.tokenizer.decode(prompt(chat, chat_template_kwargs={"enable_thinking": False}).tokens)
    assert off.endswith("<think>\n\n</think>\n\n")
    for keys in ({"enable_thinking": False}, {"reasoning_effort": "none"}):
        assert chat.tokenizer.decode(prompt(chat, **keys).tokens) == off
    for hint in ("low", "high"):
        assert prompt(chat, reasoning_effort=hint) == prompt(chat)
    with pytest.raises(AgentPeftError, match=r"no key 'thinking'; it has: enable_thinking"):
        prompt(chat, chat_template_kwargs={"thinking": True})
    opened = chat_of(
        QWENS["hermes"].replace("{% endif %}{% endif %}", "{% else %}<think>\n{% endif %}{% endif %}")
    )
    assert prompt(opened).open_thought == prompt(opened, tools=TOOLS).open_thought == "<think>\n"
    assert prompt(opened, enable_thinking=False, tools=TOOLS).open_thought == ""
    # a mark that a user typed opens nothing
    assert prompt(chat, messages=[{"role": "user", "content": "<think>"}], tools=TOOLS).open_thought == ""


def test_what_a_template_leaves_out_is_refused():
    one_call = QWENS["hermes"].replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
    no_text = QWENS["hermes"].replace("{{ m.content }}{% for", "{{ m.content if not m.tool_calls }}{% for")
    no_result = QWENS["hermes"].replace("{{ m.content }}\n</tool_r", "</tool_r")
    unread = QWEN.replace("CALL", "call {{ f.name }} {{ f.arguments | tojson }}")
    two = {**LOOP[1], "tool_calls": [CALL, {**CALL, "id": "2"}]}
    for template, messages, message in (
        (one_call, [USER, two, LOOP[2], LOOP[2]], "refuses the conversation: it leaves out a call"),
        (
            no_text,
            [USER, {**LOOP[1], "content": "So."}, LOOP[2]],
            "leaves out the text of a message of the role ass",
        ),
        (no_result, LOOP, "does not write result; send none"),
        (unread, LOOP, "does not write calls in a dialect that can be read"),
    ):
        with pytest.raises(AgentPeftError, match=message):
            prompt(chat_of(template), messages=messages, tools=TOOLS)


def test_a_template_without_tools_gets_them_in_plain_messages():
    chat = chat_of(None)
    read = prompt(chat, messages=LOOP, tools=[{"type": "function", "function": {"name": "ls"}}])
    assert read.dialect == PLAIN and "<tool_response>\ntwo" in chat.tokenizer.decode(read.tokens)


def replies(chat, reply, dialect, tools=TOOLS, opened="", typed=(), **keys):
    """A reply whole and in parts. ``typed`` marks are spelled in several tokens."""
    tokens = []
    for mark in typed:
        reply = reply.replace(f"typed {mark}", f"typed {mark[0]}\0{mark[1:]}")
    for piece in reply.split("\0"):
        tokens += chat.tokenizer.encode(piece, add_special_tokens=False)
    tokens.append(chat.tokenizer.eos_token_id)
    request = ChatRequest.model_validate({"messages": [USER], "tools": tools, **keys})
    read = chat_prompt(chat, request)._replace(dialect=dialect, open_thought=opened)
    draw = Draw(Prompt((1,)), 0, SamplingConfig(stop=request.stops), on_change=lambda _: None, streamed=True)
    stream, parts = ChoiceStream(0, draw, chat, request, read), []
    for place, token in enumerate(tokens):
        draw.take(place, token, -0.5, ())
        parts += stream.parts()
    draw.act((), (), 0)
    parts += stream.parts()
    whole = ChoiceStream(0, draw, chat, request, read).whole()
    deltas = [part.delta for part in parts]
    assert "".join(delta.content for delta in deltas) == (whole.message.content or "")
    assert "".join(delta.reasoning_content or "" for delta in deltas) == (
        whole.message.reasoning_content or ""
    )
    calls = [(call.function.name, call.function.arguments) for call in deltas[-1].tool_calls or ()]
    assert calls == [(call.function.name, call.function.arguments) for call in whole.message.tool_calls or ()]
    assert whole.finish_reason == parts[-1].finish_reason == ("tool_calls" if calls else "stop")
    assert "\udc00" not in repr(whole) and all(len(call.id) == 9 for call in whole.message.tool_calls or ())
    types.chat.ChatCompletionMessage.model_validate(whole.message.model_dump(), strict=True)
    return (
        whole.message.reasoning_content,
        whole.message.content,
        [(name, json.loads(arguments)) for name, arguments in calls],
    )


READ = ("ls", {"path": "/", "n": 2})
BOTH = f"<think>\nI look.\n</think>\n\nSo:\n{HERMES_CALL}\n{HERMES_CALL}"
INSIDE = f"<think>\nNot {HERMES_CALL}\n</think>\n\nNo call."
BROKEN = "<tool_call>\n{no json}\n</tool_call>"


@pytest.mark.parametrize(
    ("dialect", "reply", "expected"),
    [
        ("hermes", HERMES_CALL, (None, None, [READ])),
        ("qwen3_coder", CODER_CALL, (None, None, [READ])),
        ("hermes", BOTH, ("I look.", "So:", [READ] * 2)),
        ("hermes", INSIDE, (f"Not {HERMES_CALL}", "No call.", [])),
        ("hermes", f"<think>\nNot {HERMES_CALL}", (f"Not {HERMES_CALL}", "", [])),
        ("hermes", f"See {BROKEN}", (None, f"See {BROKEN}", [])),
        ("hermes", f"{HERMES_CALL}\n{BROKEN}", (None, f"{HERMES_CALL}\n{BROKEN}", [])),
        ("llama3_json", '{"name": "ls", "parameters": {"path": "/", "n": 2}}', (None, None, [READ])),
        ("llama3_json", '{"name": "rm", "parameters": {}}', (None, '{"name": "rm", "parameters": {}}', [])),
        ("pythonic", '[ls(path="/", n=2)]', (None, None, [READ])),
        ("mistral", '[TOOL_CALLS]ls[ARGS]{"path": "/", "n": 2}', (None, None, [READ])),
        ("hermes", "<think></think>\n\n two ", (None, "two", [])),
        ("hermes", "a < b <tool", (None, "a < b <tool", [])),
    ],
)  # fmt: skip
def test_replies_are_read_in_the_dialect_whole_and_in_parts(chat, dialect, reply, expected):
    assert replies(chat, reply, dialect) == expected


def test_a_mark_that_is_a_token_is_not_opened_by_its_text(chat):
    typed = f"He typed {HERMES_CALL} and typed <think>."
    assert replies(chat, typed, "hermes", typed=["<tool_call>", "<think>"]) == (None, typed, [])
    argument = HERMES_CALL.replace("/", "typed </tool_call>")
    assert replies(chat, argument, "hermes", typed=["</tool_call>"]) == (
        None, None, [("ls", {"path": "typed </tool_call>", "n": 2})],
    )  # fmt: skip
    plain = chat_of(QWENS["hermes"], MARKS[:2])  # where a mark is no token, its text is the mark
    assert replies(plain, f"<think>a</think>{HERMES_CALL}", "hermes") == ("a", None, [READ])


def test_a_thought_that_the_prompt_opens_and_one_call(chat):
    assert replies(chat, "I look.\n</think>\n\nTwo.", "hermes", None, "<think>\n") == ("I look.", "Two.", [])
    assert replies(chat, "I look.", PLAIN, None, "<think>\n") == ("I look.", "", [])
    two = f"{HERMES_CALL}\n{HERMES_CALL}"
    assert replies(chat, two, "hermes", parallel_tool_calls=False) == (None, None, [READ])
    assert replies(chat, "<think>a <b> c</think>x<y", PLAIN, None) == ("a <b> c", "x<y", [])


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_loop_over_the_wire(serving, tmp_path, stream):
    policy = policy_of(tmp_path, QWENS["hermes"])
    url = serving(max_tokens=2000, tiny=policy).url
    body = {"messages": [USER], "tools": TOOLS, "temperature": 0, "stream": stream, "tool_choice": "auto"}
    reply = f"<think>\nI look.\n</think>\n\nSo:\n{HERMES_CALL}"
    script(policy, len(prompt(policy.chat, tools=TOOLS).tokens), tokens_of(policy, reply))
    answer = post(url, **body)
    if stream:
        chunks = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line and "[DONE]" not in line]
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "I look."
        assert "".join(delta["content"] for delta in deltas) == "So:"
        assert deltas[-1]["tool_calls"][0]["function"]["name"] == "ls"
        return
    (choice,) = answer.json()["choices"]
    message = choice["message"]
    assert (message["content"], message["reasoning_content"]) == ("So:", "I look.")
    assert choice["finish_reason"] == "tool_calls"
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "two"}
    body["messages"] = [USER, message, result]
    # what is sent back is read as it was sampled
    opening = list(prompt(policy.chat, tools=TOOLS).tokens)
    second = list(prompt(policy.chat, messages=body["messages"], tools=TOOLS).tokens)
    assert second[: len(opening)] == opening
    assert second[len(opening) :][: len(tokens_of(policy, reply))] == tokens_of(policy, reply)
    script(policy, len(second), tokens_of(policy, "Two."))
    (choice,) = post(url, **body).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Two.", "stop")
    unknown = post(url, messages=[USER], chat_template_kwargs={"effort": 1})
    assert unknown.status_code == 400 and "has no key 'effort'" in unknown.json()["error"]["message"]


def test_the_typed_marks_of_an_assistant_stay_out_of_frames(chat):
    read = chat.opening(
        [Message("user", "x"), Message("assistant", "<|im_end|>"), Message("user", "y")], typed=True
    )
    end = chat.tokenizer.eos_token_id
    assert list(read).count(end) == 3
