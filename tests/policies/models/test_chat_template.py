# ruff: noqa: E501 (chat templates)
from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from agent_peft.policies.models.chat_template import probe_template, with_keys
from agent_peft.policies.models.tokenizer import character_tokenizer
from agent_peft.policies.tokenization import ChatTokenizer
from agent_peft.types import AgentPeftError, Message

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


def trl_templates() -> list[Path]:
    """The originals in TRL's wheel, without its patches for training."""
    found = importlib.util.find_spec("trl")
    paths = Path(found.origin).parent.glob("chat_templates/*.jinja") if found and found.origin else ()
    return sorted(path for path in paths if not path.stem.endswith("_training"))


@pytest.mark.slow
def test_the_templates_of_trl():
    """Keys in the template's text render as keys that are passed."""
    if not (paths := trl_templates()):
        pytest.skip("trl is not installed; its wheel holds the templates")
    compared = 0
    for path in paths:
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
