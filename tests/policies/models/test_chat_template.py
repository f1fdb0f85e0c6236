# ruff: noqa: E501 (chat templates)
from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from agent_peft.policies.models.chat_template import probe_template, with_keys
from agent_peft.policies.models.tokenizer import character_tokenizer
from agent_peft.policies.native import NativeFormat, as_template
from agent_peft.policies.tokenization import ChatTokenizer
from agent_peft.types import AgentPeftError, Message, ToolCall

# with a key, thoughts that a later user message drops, and a tool loop
THINKING = """{%- for m in messages %}
{%- if m.role == 'tool' %}{{- 'R' + m.content + ';' }}
{%- else %}{{- m.role[0] + ':' }}
    {%- if m.reasoning_content and loop.last %}{{- '<think>' + m.reasoning_content + '</think>' }}{%- endif %}
    {{- m.content + ';' }}
    {%- for call in m.tool_calls or [] %}{{- 'C' + call.function | tojson + ';' }}{%- endfor %}
{%- endif %}{%- endfor %}
{%- if tools %}{{- tools | tojson }}{%- endif %}
{%- if effort is defined and effort not in ['low', 'high'] %}{{- raise_exception('effort?') }}{%- endif %}
{%- if effort == 'low' %}{{- 'brief;' }}{%- endif %}
{%- if add_generation_prompt %}{{- 'a:' + ('<think>' if enable_thinking | default(true) else '<think></think>') }}
{%- endif %}"""
PLAIN = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
KEYS = {"enable_thinking": False, "effort": "low"}


def tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    made = character_tokenizer("".join(chr(code) for code in range(32, 127)) + "\n")
    made.chat_template = template
    return made


def test_the_facts_of_a_template_that_thinks_and_calls_tools():
    facts = probe_template(tokenizer(THINKING))
    assert facts.keys == ("effort", "enable_thinking")
    assert (facts.prompt, facts.prompts) == (
        ";a:<think>",
        {True: ";a:<think>", False: ";a:<think></think>"},
    )
    assert facts.thoughts == "dropped when a user message follows"
    assert facts.tools == ("tools", "call", "several calls", "result")
    assert "keys: effort, enable_thinking; prompt ends ';a:<think>'" in str(facts)


def test_the_facts_of_a_template_that_drops_calls_in_silence():
    facts = probe_template(tokenizer(PLAIN))
    assert (facts.keys, facts.prompts, facts.tools) == ((), {}, ("result",))
    assert facts.thoughts == "kept"  # inline
    assert str(facts) == "keys: none; prompt ends ';a:'; thoughts: kept; tools: result"


@pytest.mark.parametrize(
    ("call", "dialect"),
    [
        ("<tool_call>\n{{ f | tojson }}\n</tool_call>", "hermes"),
        (
            "<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>",
            "qwen3_coder",
        ),
        ("{{ {'name': f.name, 'parameters': f.arguments} | tojson }}", "llama3_json"),
        ("[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}", "mistral"),
        (
            "[{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}={{ v | tojson }}{% endfor %})]",
            "pythonic",
        ),
        ("<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>{{ f.arguments | tojson }}", "deepseek_v3"),
        ("call {{ f.name }}", None),
    ],
)
def test_the_dialect_is_the_one_that_reads_a_rendered_call_back(call, dialect):
    calls = "{% for c in m.tool_calls or [] %}{% set f = c.function %}" + call + "{% endfor %}"
    facts = probe_template(tokenizer(PLAIN.replace("{{ m.content }}", "{{ m.content }}" + calls)))
    assert facts.dialect == dialect
    assert (f"(calls: {dialect})" in str(facts)) is (dialect is not None)


def test_keys_reach_every_rendering_and_the_saved_tokenizer(tmp_path):
    keyed = tokenizer(THINKING)
    with_keys(keyed, KEYS)
    messages = [Message("user", "hi")]
    expected = "u:hi;brief;a:<think></think>"
    chat = ChatTokenizer(keyed)
    assert chat.decode_action(chat.opening(messages)) == expected
    keyed.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    turn = [{"role": "user", "content": "hi"}]
    render = {"tokenize": False, "add_generation_prompt": True}
    assert again.apply_chat_template(turn, **render) == expected
    # a client may still choose
    assert again.apply_chat_template(turn, enable_thinking=True, **render).endswith("a:<think>")


@pytest.mark.parametrize(
    ("template", "key", "value", "message"),
    [
        (THINKING, "enable_thinkin", False, "has no effect on the chat template; did you mean 'enable_th"),
        (THINKING, "enable_thinking", "false", "'false' has no effect .*; give another value"),
        (THINKING, "effort", "much", "refuses 'much'; give another value"),
        (THINKING, "messages", "x", "has no effect"),
        (THINKING, "m", True, "has no effect"),
        (PLAIN, "enable_thinking", False, "it takes no keys: leave it out"),
        (None, "enable_thinking", False, "the model has no chat template; leave the key out"),
    ],
)
def test_a_key_without_effect_is_refused(template, key, value, message):
    with pytest.raises(AgentPeftError, match=rf"policy\.template.*{message}"):
        with_keys(tokenizer(template), {key: value})


@pytest.mark.parametrize("first", ["\n  ", "  ", "{%- if true %}{% endif %}\n"])
def test_the_defaults_leave_the_rest_of_the_template_as_it_is(first):
    plain, keyed = tokenizer(first + THINKING), tokenizer(first + THINKING)
    with_keys(keyed, {"enable_thinking": True})
    turn = [{"role": "user", "content": "hi"}]
    assert keyed.apply_chat_template(turn, tokenize=False) == plain.apply_chat_template(turn, tokenize=False)


TRL = "trl==1.16.0"


@pytest.fixture(scope="module")
def trl_templates(unpacked_wheel: Callable[[str], Path]) -> list[Path]:
    """All in TRL's wheel, its patches for training included."""
    return sorted(unpacked_wheel(TRL).glob("trl/chat_templates/*.jinja"))


@pytest.mark.slow
def test_the_templates_of_trl(trl_templates):
    """Keys in the template's text render as keys that are passed."""
    compared = 0
    for path in (path for path in trl_templates if not path.stem.endswith("_training")):
        made = tokenizer(path.read_text())
        for key in probe_template(made).keys:
            for value in (False, "low"):
                made.chat_template = path.read_text()
                turn = [{"role": "user", "content": "hi"}]
                try:
                    passed = made.apply_chat_template(turn, tokenize=False, **{key: value})
                    with_keys(made, {key: value})
                except (AgentPeftError, TemplateError, TypeError):  # a value of another type
                    continue
                assert made.apply_chat_template(turn, tokenize=False) == passed, (path.name, key, value)
                compared += 1
    assert compared >= 20


MARKS = re.compile(
    r"<\|[a-z_]+\|>|<\|END_OF_TURN_TOKEN\|>|<end_of_turn>|<｜[^｜]+｜>|<turn\|>|</s>|<EOS>|<eos>|\[e~\["
)
ENDS = re.compile(r"end|eot|eos|EOS|return|/s|turn\|")
TALK = [
    Message("system", "Be brief."),
    Message("user", "How many?"),
    Message("assistant", "Two."),
    Message("user", "And now?"),
    Message("assistant", "Three."),
]
CALLS = [
    *TALK[:2],
    Message("assistant", "", (ToolCall("ls", {"path": "/a", "n": 2}, "call00001"),)),
    Message("tool", "two"),
    Message("assistant", "Two."),
]
PROPERTIES = {"path": {"type": "string", "description": "x"}, "n": {"type": "integer", "description": "x"}}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "required": ["path"]}
TOOLS = [{"type": "function", "function": {"name": "ls", "description": "List.", "parameters": PARAMETERS}}]


def chat_with(template: str) -> ChatTokenizer:
    """A tokenizer of characters, and of the template's marks."""
    made = character_tokenizer("".join(sorted({*map(chr, range(32, 127)), *template, "\n"})))
    marks = sorted(set(MARKS.findall(template)))
    made.add_tokens(marks, special_tokens=True)
    made.bos_token, made.eos_token = "^", next(filter(ENDS.search, marks), "$")
    made.chat_template = template
    return ChatTokenizer(made)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:message by message")
@pytest.mark.parametrize(
    ("messages", "tools", "equal", "refused"),
    [(TALK, [], 39, 33), (CALLS, TOOLS, 25, 47)],
    ids=["talk", "calls"],
)
def test_demonstrations_are_the_own_text_of_trls_templates_or_refused(
    trl_templates, messages, tools, equal, refused
):
    """What chat SFT reads and trains, message by message. No template gives another text in silence."""
    refusals: dict[str, str] = {}
    for path in trl_templates:
        try:
            chat, tokens = chat_with(path.read_text()), list[int]()
            written = NativeFormat(chat, tools, acts=False)
            for place, reply in enumerate(messages):
                if reply.role != "assistant":
                    continue
                tokens = tokens or written.opening(messages[:place])
                tokens += (action := written.action_tokens(messages[:place], reply))
                if new := messages[place + 1 : place + 2]:
                    tokens += written.following(messages[: place + 1], new, action, exact=True)
        except AgentPeftError as error:
            refusals[path.stem] = str(error)
            continue
        own = chat.render(as_template(messages), False, tools=tools or None)
        text = chat.tokenizer.decode(tokens)
        assert own.startswith(text) and not own.removeprefix(text).strip(), path.stem
    assert (len(trl_templates) - len(refusals), len(refusals)) == (equal, refused), refusals
    assert not any("\n" in line for line in refusals.values())
