"""Tools, calls, results and thoughts in the chat template's own text: what a demonstration trains, what the
sampler reads, and how a reply is read back.
"""

# ruff: noqa: E501 (chat templates)
from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from agent_peft.environments.tool_calls import declare
from agent_peft.policies.config import PretrainedConfig
from agent_peft.policies.loading import load_policy
from agent_peft.policies.models.chat_template import check_dialect
from agent_peft.policies.models.pretrained import load_tokenizer
from agent_peft.policies.models.tokenizer import CHATML_TOOLS, character_tokenizer
from agent_peft.policies.native import NativeFormat, as_template, template_at_hand
from agent_peft.policies.tokenization import ChatTokenizer
from agent_peft.replies import DIALECTS
from agent_peft.seeding import derive
from agent_peft.types import AgentPeftError, Message, ToolCall
from tests.agents.serving.templates import CODER, HERMES, MARKS, QWEN, policy_of

TOOLS = [declare("ls", "Lists.", path={"type": "string"}, n={"type": "integer"})]
# how one call is written, by dialect; all calls of a reply in one list, where the dialect has that
CALLS = {
    "hermes": HERMES,
    "qwen3_coder": CODER.replace("{{ v }}", "{{ v if v is string else v | tojson }}"),
    "mistral": "[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ call.id }}[ARGS]{{ f.arguments | tojson }}",
    "deepseek_v3": "<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>{{ f.arguments | tojson }}<｜tool▁call▁end｜>",
    "llama3_json": "{{ {'name': f.name, 'parameters': f.arguments} | tojson }}",
    "pythonic": "<|tool_call_start|>[{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}={{ v | tojson }}{{ ', ' if not loop.last }}{% endfor %})]<|tool_call_end|>",
}
KEEPS_NOTHING = QWEN.replace(" and loop.index0 > ns.last", " and loop.last")


def chat_of(template: str, marks: list[str] = MARKS, **keys: str) -> ChatTokenizer:
    tokenizer = character_tokenizer("".join(chr(code) for code in range(32, 127)) + "\n｜▁")
    tokenizer.add_tokens(marks[2:])
    tokenizer.add_tokens(MARKS[:2], special_tokens=True)
    tokenizer.eos_token, tokenizer.chat_template = "<|im_end|>", template
    return ChatTokenizer(tokenizer, **keys)


def of_dialect(dialect: str) -> str:
    one = CALLS[dialect].replace("call.id", "f.arguments.path and 'call00001'")
    return QWEN.replace("CALL", one)


LOOP = [
    Message("system", "Be brief."),
    Message("user", "How many? <tool_call>"),
    Message("assistant", "", (ToolCall("ls", {"path": "/a\nb", "n": 2}, "call00001"),), "I look."),
    Message("tool", 'two "<|im_end|>"'),
    Message("assistant", "Two.", (), "So two."),
]


TEMPLATES = {dialect: of_dialect(dialect) for dialect in CALLS} | {
    "chatml_tools": CHATML_TOOLS,
    "opened": of_dialect("hermes").replace(
        "{% endif %}{% endif %}", "{% else %}<think>\n{% endif %}{% endif %}"
    ),
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_prompt_and_target_are_the_templates_own_text(template: str) -> None:
    chat = chat_of(TEMPLATES[template])
    assert chat.open_thought == ("<think>\n" if template == "opened" else "")
    format, tokens = NativeFormat(chat, TOOLS), list[int]()
    for place, reply in enumerate(LOOP):
        if reply.role != "assistant":
            continue
        if not tokens:
            tokens += format.opening(LOOP[:place])
        action = format.action_tokens(LOOP[:place], reply)
        read = format.read(action)
        assert (read.thought, read.text, read.closed) == (reply.thought, reply.content, True)
        calls = [(call.name, call.arguments, call.fault) for call in read.calls]
        assert calls == [(call.name, call.arguments, "") for call in reply.tool_calls]
        tokens += action
        if new := LOOP[place + 1 : place + 2]:
            for exact in (True, False):
                following = format.following(LOOP[: place + 1], new, action, exact=exact)
                assert following == format.following(LOOP[: place + 1], new, action[:-1], exact)[1:]
            tokens += following
    own = chat.render(as_template(LOOP), False, tools=TOOLS)
    assert chat.tokenizer.decode(tokens) == own.rstrip("\n")
    # a mark in a content is text
    assert tokens.count(chat.marks.tokens["<|im_end|>"]) == own.count("<|im_end|>") - 1
    if template in ("hermes", "chatml_tools", "opened"):
        assert tokens.count(chat.marks.tokens["<tool_call>"]) == own.count("<tool_call>") - 1


def test_a_reply_that_only_types_a_mark_calls_nothing() -> None:
    chat = chat_of(of_dialect("hermes"))
    call = '<tool_call>\n{"name": "ls", "arguments": {"path": "</tool_call>", "n": 1}}\n</tool_call>'
    sampled = [*chat.tokenizer.encode(call, add_special_tokens=False), chat.tokenizer.eos_token_id]
    format = NativeFormat(chat, TOOLS)
    (one,) = format.read(sampled).calls
    assert one.arguments == {"path": "</tool_call>", "n": 1}
    letters = [t for piece in "<tool_call>" for t in chat.tokenizer.encode(piece, add_special_tokens=False)]
    assert format.read([*letters, *sampled[1:]]).calls == ()
    think = [t for piece in "<think>" for t in chat.tokenizer.encode(piece, add_special_tokens=False)]
    assert len(format.read([*think, *sampled]).calls) == 1  # nor opens it a thought
    inside = chat.tokenizer.encode(f"<think>{call}", add_special_tokens=False)
    assert (format.read(inside).calls, format.read(inside).closed) == ((), False)
    after = format.read([*inside, *chat.tokenizer.encode("</think>", add_special_tokens=False), *sampled])
    assert (after.closed, len(after.calls)) == (True, 1)
    cut = format.read(sampled[: len(sampled) // 2])
    assert [call.fault for call in cut.calls] == ["The tool call is not JSON."]


def test_a_template_that_drops_a_thought_after_a_result_is_told_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    chat = chat_of(KEEPS_NOTHING.replace("CALL", HERMES))
    format = NativeFormat(chat, TOOLS)
    action = format.action_tokens(LOOP[:2], LOOP[2])
    for _ in range(2):
        text = chat.tokenizer.decode(format.following(LOOP[:3], LOOP[3:4], action))
    assert text.startswith("\n<|im_start|>user\n<tool_response>\ntwo") and text.endswith("assistant\n")
    assert caplog.text.count("a result changes the thought") == 1
    with pytest.raises(
        AgentPeftError, match=r"changes the text before it: .*I look.* becomes .*tool_call"
    ) as e:
        format.following(LOOP[:3], LOOP[3:4], action, exact=True)
    assert "\n" not in str(e.value)


def test_a_later_message_of_the_user_rewrites_and_is_refused_where_all_must_be_exact() -> None:
    format = NativeFormat(chat_of(of_dialect("hermes")), TOOLS)
    action = format.action_tokens(LOOP[:4], LOOP[4])
    with pytest.raises(AgentPeftError, match="or turns: last of a conv"):
        format.following(LOOP, [Message("user", "And now?")], action, exact=True)


NO_TOOLS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


@pytest.mark.parametrize(
    ("template", "what"),
    [
        (
            of_dialect("hermes") + "{{ messages | length }}",
            "a new message changes the text before it",
        ),
        (NO_TOOLS, "does not write call, tools"),
        (QWEN.replace("CALL", "[{{ f.name }}|{{ f.arguments.words }}]"), "does not write calls in a dialect"),
    ],
)
def test_a_template_without_tools_is_one_line(template: str, what: str) -> None:
    with pytest.raises(AgentPeftError, match=what) as error:
        NativeFormat(chat_of(template), TOOLS)
    assert "policy.chat_template" in str(error.value) and "\n" not in str(error.value)


def test_a_call_that_is_not_read_back_is_not_demonstrated() -> None:
    """As LFM2.5's, which quotes no quote."""
    calls = "<|tool_call_start|>[{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}='{{ v }}'{% endfor %})]"
    format = NativeFormat(chat_of(QWEN.replace("CALL", calls)), TOOLS)
    format.action_tokens(LOOP[:2], Message("assistant", "", (ToolCall("ls", {"path": "a"}),)))
    with pytest.raises(AgentPeftError, match=r"a call that pythonic does not read back: .*ls.path="):
        format.action_tokens(LOOP[:2], Message("assistant", "", (ToolCall("ls", {"path": "'a'"}),)))


def test_a_recorded_call_needs_no_dialect() -> None:
    chat = chat_of(QWEN.replace("CALL", "[{{ f.name }}|{{ f.arguments }}]"))
    text = chat.tokenizer.decode(NativeFormat(chat, TOOLS, acts=False).action_tokens(LOOP[:2], LOOP[2]))
    assert "[ls|{'path': " in text


def test_a_thought_that_the_template_leaves_out_is_refused() -> None:
    format = NativeFormat(chat_of(NO_TOOLS))
    with pytest.raises(AgentPeftError, match="leaves out the thought 'hm'"):
        format.action_tokens([Message("user", "x")], Message("assistant", "y", (), "hm"))


def test_a_dialect_must_read_the_templates_calls() -> None:
    chat = chat_of(of_dialect("hermes"), dialect="hermes")
    check_dialect(chat.tokenizer, "hermes")
    assert NativeFormat(chat, TOOLS).read([]).calls == ()
    with pytest.raises(
        AgentPeftError, match=r"policy.tools: .* no calls that mistral reads; set auto \(hermes"
    ):
        check_dialect(chat.tokenizer, "mistral")


def test_another_template_in_place_of_the_models_own(tmp_path: Path) -> None:
    model, file = tmp_path / "model", tmp_path / "own.jinja"
    policy_of(model, NO_TOOLS)
    file.write_text(of_dialect("pythonic"))
    for template, text in (("chatml_tools", CHATML_TOOLS), (file, file.read_text())):
        policy = load_policy({"model": str(model), "chat_template": template, "lora": None, "device": "cpu"})
        assert policy.chat.tokenizer.chat_template == policy.chat.template == text
        NativeFormat(policy.chat, TOOLS)
        policy.save(tmp_path / "saved")
        assert load_tokenizer(str(tmp_path / "saved")).chat_template == text
    facts = template_at_hand(PretrainedConfig(model=str(model), chat_template=file))
    assert facts is not None and facts.dialect == "pythonic"
    for keys, message in (
        ({"chat_template": tmp_path / "none"}, "none: "),
        (
            {"chat_template": file, "tools": "hermes"},
            r"policy.tools: .* that hermes reads; set auto \(pythonic",
        ),
    ):
        with pytest.raises(AgentPeftError, match=message):
            load_policy({"model": str(model), "lora": None, "device": "cpu", **keys})


@pytest.mark.parametrize("dialect", DIALECTS)
def test_any_tokens_are_read_in_time_linear_in_them(dialect: str) -> None:
    chat = chat_of(of_dialect(dialect))
    format, rng = NativeFormat(chat, TOOLS), random.Random(derive(0, dialect))
    one = format.action_tokens(LOOP[:2], LOOP[2])
    marks = [*chat.marks.tokens.values(), *chat.tokenizer.encode('{"[(,', add_special_tokens=False)]
    start = time.process_time()
    for length in (0, 1, 5, 50, 4000):
        mixed = [rng.choice([*marks, *one]) for _ in range(length)]
        for action in (mixed, one[: length % 60] + mixed, one * (length // len(one))):
            read = format.read(action)
            assert all(call.fault or call.name for call in read.calls)
    assert time.process_time() - start < 5
