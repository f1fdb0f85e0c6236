# ruff: noqa: E501 (chat templates as their authors wrote them)
from __future__ import annotations

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from agent_peft.policies.sampling import StopMatcher
from agent_peft.policies.tokenization import ChatTokenizer
from agent_peft.types import AgentPeftError, Message, Task, Trajectory, Turn

SMOLLM2 = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""

QWEN25 = """{%- if messages[0]['role'] == 'system' %}{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant") %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

QWEN3 = """{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" %}
        {%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}{%- set reasoning = '' %}
        {%- if '</think>' in message.content %}
            {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
            {%- set reasoning = message.content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning) %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

QWEN3_NO_THINKING = QWEN3.replace(
    "{{- '<|im_start|>assistant\\n' }}", "{{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' }}"
)

GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}{%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}{%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else "") }}
    {{- message['content'] | trim -}}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{'<start_of_turn>model\\n'}}{%- endif -%}"""

MISTRAL = """{{ bos_token }}{% set ns = namespace(system='') %}
{%- if messages[0]['role'] == 'system' %}{% set ns.system = messages[0]['content'] %}{% set messages = messages[1:] %}{% endif %}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + (ns.system + '\\n\\n' if loop.last and ns.system else '') + message['content'] + '[/INST]' }}
    {%- elif message['role'] == 'assistant' %}{{- ' ' + message['content'] + eos_token }}
    {%- else %}{{ raise_exception('only user and assistant roles') }}{%- endif %}
{%- endfor %}"""

LLAMA2 = """{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{%- elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + ' ' + eos_token }}
{%- else %}{{ raise_exception('no system role') }}{% endif %}{% endfor %}"""

ROUNDS = """{% for message in messages %}{% if message['role'] == 'user' %}[Round {{ loop.index }}] {{ message['content'] }}
{% else %}{{ message['content'] }}{{ eos_token }}{% endif %}{% endfor %}"""

NO_SYSTEM = """{% for m in messages %}{% if m['role'] != 'system' %}<|im_start|>{{ m['role'] }}
{{ m['content'] }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

TEMPLATES = {
    "smollm2": SMOLLM2,
    "qwen2.5": QWEN25,
    "qwen3": QWEN3,
    "qwen3-no-thinking": QWEN3_NO_THINKING,
    "gemma": GEMMA,
}
APPEND_ONLY = ["smollm2", "qwen2.5", "gemma"]
CONTROLS = [
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<bos>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|hidden|>",
    "[INST]",
    "[/INST]",
]
CORPUS = [
    "SELECT name FROM table WHERE id = 10; system user assistant model You are a helpful assistant.\n\nHello the there\n```sql\n"
] * 3


@functools.cache
def byte_level(template: str | None) -> PreTrainedTokenizerFast:
    """A small byte-level BPE as SmolLM2's and Qwen's are: merges learned from a few words, every byte a
    token of last resort.
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in CONTROLS if text != "<|hidden|>"]
    )
    backend.add_tokens(
        [
            AddedToken(text, special=False, normalized=False)
            for text in ("<|hidden|>", "<think>", "</think>", "\n\n\n")
        ]
    )
    gemma = template in (GEMMA, MISTRAL, LLAMA2)
    eos = "<|endoftext|>" if gemma else "<|im_end|>"
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token=eos, pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = template
    return tokenizer


@functools.cache
def sentencepiece() -> PreTrainedTokenizerFast:
    """Gemma's kind: blanks are written ▁, bytes that are no token are spelled <0x0A>."""
    bytes_ = (f"<0x{b:02X}>" for b in range(256))
    letters = "▁abcdehlmorstuw\n"
    words = ["he", "hel", "hell", "hello", "▁w"]
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", *bytes_, *letters, *words]
    merges = [("h", "e"), ("he", "l"), ("hel", "l"), ("hell", "o"), ("▁", "w")]
    backend = Tokenizer(
        models.BPE(
            {p: i for i, p in enumerate(pieces)}, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
        )
    )
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens(["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    )
    tokenizer.chat_template = GEMMA
    return tokenizer


@functools.cache
def chat(name: str) -> ChatTokenizer:
    if name == "sentencepiece":
        return ChatTokenizer(sentencepiece())
    return ChatTokenizer(byte_level(TEMPLATES[name]))


hostile = st.lists(
    st.sampled_from([*CONTROLS, "<think>", "\n", " ", "a", "é", "🙂", "user\n"]), max_size=5
).map("".join)
texts = st.text(max_size=20) | hostile
plain_texts = st.lists(
    st.sampled_from(["SELECT", "name", "42", "déjà", "vu.", "(x)", "🙂", "user"]), min_size=1, max_size=6
).map(" ".join)
every_chat = pytest.mark.parametrize("name", [*TEMPLATES, "sentencepiece"])


@every_chat
@given(
    system=texts, user=texts, turns=st.lists(st.tuples(texts, st.booleans(), texts), min_size=1, max_size=4)
)
@settings(max_examples=25, deadline=None)
def test_every_prompt_extends_the_one_before(name, system, user, turns):
    c = chat(name)
    observation = c.opening([Message("system", system), Message("user", user)])
    prompt = list(observation)
    stream: list[Turn] = []
    for reply, ends, answer in turns:
        action = c.action_tokens(reply)
        action = action if ends else action[:-1]
        stream.append(Turn(tuple(observation), tuple(action), (0.0,) * len(action)))
        observation = c.following(answer, action)
        longer = prompt + action + observation
        assert longer[: len(prompt) + len(action)] == prompt + action
        # however the action ended, its turn is closed exactly once before the user speaks
        assert sum(t in c.end_of_turn for t in (*action, *observation)) == 1 + user_closings(c)
        prompt = longer
    trajectory = Trajectory(Task("t"), (*stream, Turn(tuple(observation), (), ())))
    assert list(trajectory.tokens) == prompt
    sampled = [t for t, mask in zip(trajectory.tokens, trajectory.action_mask, strict=True) if mask]
    assert sampled == [t for turn in stream for t in turn.action]


def user_closings(c: ChatTokenizer) -> int:
    return sum(t in c.end_of_turn for t in c.following("x", [next(iter(c.end_of_turn))]))


@every_chat
@given(plain_texts, plain_texts, st.lists(st.tuples(plain_texts, plain_texts), max_size=3))
@settings(max_examples=25, deadline=None)
def test_canonical_texts_give_the_templates_own_tokens(name, system, user, turns):
    c = chat(name)
    messages = [Message("system", system), Message("user", user)]
    tokens = c.opening(messages)
    for reply, answer in turns:
        action = c.action_tokens(reply)
        tokens += action + c.following(answer, action)
        messages += [Message("assistant", reply), Message("user", answer)]
    if name == "qwen3-no-thinking":
        assert not turns or tokens != rendered(c, messages)  # why it is not append-only
    else:
        assert tokens == rendered(c, messages)
        assert c.opening(messages) == tokens
        cut = messages[:1] + messages[-1:]
        assert c.opening(cut) == rendered(c, cut)


def rendered(c: ChatTokenizer, messages: list[Message]) -> list[int]:
    conversation = [{"role": m.role, "content": m.content} for m in messages]
    return list(c.tokenizer.apply_chat_template(conversation, add_generation_prompt=True)["input_ids"])


@every_chat
@given(texts, texts, texts)
@settings(max_examples=40, deadline=None)
def test_contents_never_become_control_tokens(name, system, user, answer):
    c = chat(name)
    controls = {i for i, token in c.tokenizer.added_tokens_decoder.items() if token.special}

    def shown(tokens: list[int]) -> list[int]:
        return [t for t in tokens if t in controls]

    tokens = c.opening([Message("system", system), Message("user", user)])
    assert shown(tokens) == shown(c.opening([Message("system", "a"), Message("user", "a")]))
    after = c.following(answer, [])
    assert shown(after) == shown(c.following("a", []))
    if (
        name != "sentencepiece"
    ):  # it has no token for most characters but bytes, and no way back to a blank at the start
        assert answer in c.tokenizer.decode(after)
        assert (user.strip() if name == "gemma" else user) in c.tokenizer.decode(tokens)
    assert not controls.intersection(c.action_tokens(user)[:-1])


def test_a_control_token_not_marked_special_is_guarded_too():
    template = SMOLLM2.replace("<|im_end|>", "<|hidden|>")
    tokenizer = byte_level(template)
    c = ChatTokenizer(tokenizer)
    hidden = tokenizer.convert_tokens_to_ids("<|hidden|>")
    assert hidden in c.end_of_turn and c.action_tokens("a")[-1] == hidden
    # the tokenizer alone would let it in
    assert tokenizer.encode("<|hidden|>", split_special_tokens=True) == [hidden]
    tokens = c.following("a<|hidden|><|hidden|>b", [hidden])
    assert tokens.count(hidden) == 1 and "a<|hidden|><|hidden|>b" in tokenizer.decode(tokens)


def test_thoughts_in_a_demonstration_are_the_models_own_tokens():
    tokenizer = byte_level(QWEN3)
    assert chat("qwen3").action_tokens("<think>x</think>")[0] == tokenizer.convert_tokens_to_ids("<think>")


def test_what_follows_an_action_smollm2():
    c = chat("smollm2")
    end = c.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert c.end_of_turn == {end}
    ended, cut = c.following("ok", [5, end]), c.following("ok", [5])
    assert cut == [end, *ended]
    assert c.tokenizer.decode(ended) == "\n<|im_start|>user\nok<|im_end|>\n<|im_start|>assistant\n"
    assert c.decode_action(c.action_tokens("SELECT 1;")) == "SELECT 1;"
    assert "named SmolLM" in c.tokenizer.decode(c.opening([Message("user", "hi")]))
    assert "named SmolLM" not in c.tokenizer.decode(
        c.opening([Message("system", "s"), Message("user", "hi")])
    )


def test_gemma_ends_turns_in_its_own_way():
    c = chat("gemma")
    own, eos = c.tokenizer.convert_tokens_to_ids(["<end_of_turn>", "<|endoftext|>"])
    assert c.end_of_turn == {own, eos} and c.action_tokens("x")[-1] == own
    assert (
        c.tokenizer.decode(c.following("ok", [own]))
        == "\n<start_of_turn>user\nok<end_of_turn>\n<start_of_turn>model\n"
    )
    # either ends a turn, and neither is doubled
    assert c.following("ok", [7, eos]) == c.following("ok", [7, own])
    opening = c.tokenizer.decode(c.opening([Message("system", "Be brief."), Message("user", " hi \n")]))
    # trimmed, as the template does
    assert opening == "<bos><start_of_turn>user\nBe brief.\n\nhi<end_of_turn>\n<start_of_turn>model\n"
    assert " ok \n<end_of_turn>" in c.tokenizer.decode(c.following(" ok \n", []))  # verbatim


def test_refused_roles_are_joined():
    c = chat("gemma")
    tokens = c.opening(
        [Message("user", "a"), Message("user", "b"), Message("assistant", "c"), Message("system", "d")]
    )
    expected = [Message("user", "a\n\nb"), Message("assistant", "c"), Message("user", "d")]
    assert tokens == c.opening(expected)
    with pytest.raises(
        AgentPeftError, match=r"refuses the conversation \(assistant\): Conversation roles must alternate"
    ):
        c.opening([Message("assistant", "a")])
    with pytest.raises(AgentPeftError, match="at least one message"):
        c.opening([])


def test_a_template_that_drops_the_system_message_gets_it_in_the_users():
    c = ChatTokenizer(byte_level(NO_SYSTEM))
    assert "user\nBe brief.\n\nhi<|im_end|>" in c.tokenizer.decode(
        c.opening([Message("system", "Be brief."), Message("user", "hi")])
    )


def test_a_blank_before_the_end_token_belongs_to_the_turn():
    c = ChatTokenizer(byte_level(LLAMA2))
    assert c.tokenizer.decode(c.action_tokens("x")) == " x <|endoftext|>" and c.end_of_turn == {
        c.tokenizer.eos_token_id
    }
    assert c.tokenizer.decode(c.following("y", [5])) == " <|endoftext|>[INST] y [/INST]"
    assert c.tokenizer.decode(c.following("y", c.action_tokens("x"))) == "[INST] y [/INST]"
    assert c.rewriting is None and c.opening(
        [Message("user", "a"), Message("assistant", "x"), Message("user", "y")]
    ) == [
        *c.opening([Message("user", "a")]),
        *c.action_tokens("x"),
        *c.following("y", c.action_tokens("x")),
    ]


@pytest.mark.parametrize(
    "template, why", [(QWEN3, "drops the thoughts"), (QWEN3_NO_THINKING, "rewrites"), (MISTRAL, "rewrites")]
)
def test_templates_that_rewrite_earlier_turns_warn_once_a_second_turn_comes(template, why, caplog):
    c = ChatTokenizer(byte_level(template))
    opening = c.opening([Message("user", "hi")])
    assert c.rewriting and not caplog.messages, "episodes of one turn lose nothing"
    action = c.action_tokens("<think>so</think>yes")
    for _ in range(2):
        assert "ok" in c.tokenizer.decode(c.following("ok", action))
        (line,) = caplog.messages
    assert f"a new turn {why}" in line and "\n" not in line
    assert "<think>so</think>yes" in c.tokenizer.decode(opening + action + c.following("ok", action)), (
        "as it was sampled"
    )


@pytest.mark.parametrize("name", APPEND_ONLY)
def test_templates_that_only_append_say_so(name):
    assert chat(name).rewriting is None


LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- else %}{%- set date_string = "?" %}{%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\nToday Date: " + date_string + "\n\n" + system + "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""

GLM = """[gMASK]{% for m in messages %}<|{{ m['role'] }}|>
{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""


def with_controls(template: str, *controls: str) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(byte_level(None).backend_tokenizer.to_str()),
        bos_token="<bos>",
        eos_token=controls[0],
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(controls)})
    tokenizer.chat_template = template
    return tokenizer


def test_another_end_of_the_models_ends_a_turn_in_the_templates_place():
    """Llama 3 has three ends, of which its tokenizer names one."""
    tokenizer = with_controls(LLAMA3, "<|eot_id|>", "<|eom_id|>", "<|start_header_id|>", "<|end_header_id|>")
    eot, eom = tokenizer.convert_tokens_to_ids(["<|eot_id|>", "<|eom_id|>"])
    c, alone = ChatTokenizer(tokenizer, [eot, eom]), ChatTokenizer(tokenizer)
    assert c.end_of_turn == {eot, eom} and alone.end_of_turn == {eot}
    assert c.action_tokens("x")[-1] == eot and c.decode_action([*c.action_tokens("x")[:-1], eom]) == "x"
    answer = "<|start_header_id|>user<|end_header_id|>\n\nok<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    assert (
        c.tokenizer.decode(c.following("ok", [5, eot]))
        == c.tokenizer.decode(c.following("ok", [5, eom]))
        == answer
    )
    assert c.tokenizer.decode(c.following("ok", [5])) == "<|eot_id|>" + answer


def test_an_end_never_takes_the_place_of_the_next_messages_header():
    """GLM closes no turn: the next header does, which the model samples, or another end instead of it."""
    tokenizer = with_controls(GLM, "<|endoftext|>", "<|user|>", "<|assistant|>", "<|observation|>")
    eos, user, other = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|user|>", "<|observation|>"])
    c = ChatTokenizer(tokenizer, [eos, user, other])
    assert c.end_of_turn == {eos, user, other}
    assert c.tokenizer.decode(c.following("ok", [5, user])) == "\nok<|assistant|>\n"
    for action in ([5, eos], [5, other], [5]):
        assert c.tokenizer.decode(c.following("ok", action)) == "<|user|>\nok<|assistant|>\n"


def test_a_template_never_learns_the_date(caplog):
    tokenizer = with_controls(LLAMA3, "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>")
    assert "26 Jul 2024" not in tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False
    )
    c = ChatTokenizer(tokenizer)
    assert "Today Date: 26 Jul 2024\n\nBe brief.<|eot_id|>" in c.tokenizer.decode(
        c.opening([Message("system", "Be brief."), Message("user", "hi")])
    )
    assert [line for line in caplog.messages if "always 26 Jul 2024" in line] == caplog.messages != []


def test_roles_that_there_are_not():
    with pytest.raises(
        AgentPeftError, match="a message has the role 'human'; the roles are system, user, assistant"
    ):
        chat("smollm2").opening([Message("human", "hi")])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (ROUNDS, "frames each turn differently"),
        ("{% set form = '%H' %}{{ strftime_now(form) }}" + SMOLLM2, "writes the present time"),
        ("{% for m in messages %}\n{{ m['content' }}{% endfor %}", "is broken: line 2: .*; repair it"),
    ],
    ids=["numbered rounds", "a clock", "a mistake"],
)
def test_templates_that_are_refused(template, message):
    with pytest.raises(AgentPeftError, match=f"the chat template {message}") as raised:
        ChatTokenizer(byte_level(template))
    assert "\n" not in str(raised.value)


def test_no_template_means_the_plain_one():
    c = ChatTokenizer(byte_level(None))
    opening = c.tokenizer.decode(c.opening([Message("system", "Be brief."), Message("user", "hi")]))
    assert opening == "System:\nBe brief.\n\nUser:\nhi\n\nAssistant:\n"
    action = c.action_tokens("yes")
    assert (
        c.tokenizer.decode(action + c.following("continue", action))
        == "yes<|im_end|>\n\nUser:\ncontinue\n\nAssistant:\n"
    )
    assert c.rewriting is None


def test_bos_is_written_where_the_tokenizer_writes_it():
    backend = Tokenizer.from_str(byte_level(None).backend_tokenizer.to_str())
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", backend.token_to_id("<bos>"))]
    )
    c = ChatTokenizer(
        PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", eos_token="<|im_end|>")
    )
    assert c.tokenizer.decode(c.opening([Message("user", "hi")])) == "<bos>User:\nhi\n\nAssistant:\n"
    assert c.following("a", [])[0] != c.tokenizer.bos_token_id


def test_a_turn_must_be_able_to_end():
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(byte_level(None).backend_tokenizer.to_str())
    )
    with pytest.raises(AgentPeftError, match="no end-of-sequence token"):
        ChatTokenizer(tokenizer)


def test_prefix_spaces_are_noticed():
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(byte_level(None).backend_tokenizer.to_str()),
        eos_token="<|im_end|>",
        chat_template=SMOLLM2,
    )
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(prepend_scheme="first"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    with pytest.warns(UserWarning, match="message by message"):
        ChatTokenizer(tokenizer)


def test_decoding_is_lenient_and_drops_special_tokens_only_at_the_end():
    c = chat("smollm2")
    end, start = c.tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|im_start|>"])
    whole = c.action_tokens("é")[:-1]
    assert len(whole) == 2
    assert c.decode_action([start, *whole, end, end]) == "<|im_start|>é"
    assert c.decode_action(whole[:1]) == "\ufffd"
    assert c.decode_action([]) == c.decode_action([end]) == ""


stops = st.lists(st.text(alphabet="ab`\né🙂 ", min_size=1, max_size=4), min_size=1, max_size=3)


@pytest.mark.parametrize("name", ["smollm2", "sentencepiece"])
@given(text=st.text(alphabet="ab`\né🙂 hello", max_size=30), stop=stops)
@settings(max_examples=200, deadline=None)
def test_stop_strings_are_seen_at_the_first_token_that_completes_one(name, text, stop):
    c = chat(name)
    matcher = StopMatcher([s.encode() for s in stop], c.token_bytes)
    tokens = c.tokenizer.encode(text, add_special_tokens=False)
    pieces = [c.token_bytes(token) for token in tokens]
    assert b"".join(pieces) == text.encode()
    seen = [matcher.push(token) for token in tokens]
    assert seen == [
        any(s in b"".join(pieces[: i + 1]).decode(errors="ignore") for s in stop) for i in range(len(tokens))
    ]


def test_the_bytes_of_a_token_are_what_it_decodes_to():
    for name in ("smollm2", "sentencepiece"):
        c = chat(name)
        for token in range(len(c.tokenizer)):
            assert c.token_bytes(token).decode(errors="replace") == c.tokenizer.decode([token]), token
        assert c.token_bytes(len(c.tokenizer) + 5) == b""  # padded embeddings


def test_stop_matchers_are_independent_and_none_never_stops():
    c = ChatTokenizer(byte_level(SMOLLM2))
    tokens = c.action_tokens("SELECT 1\n```\nmore")
    first, second, none = (
        StopMatcher(stop, c.token_bytes) for stop in ([b"```\n", b"</sql>"], [b"```\n"], [])
    )
    pushed = [first.push(t) for t in tokens]
    assert pushed.index(True) < len(tokens) - 1 and all(pushed[pushed.index(True) :])
    assert not second.matched and not second.push(tokens[0])
    assert not any(none.push(t) for t in tokens)


def test_the_real_smollm2(smollm2):
    c = ChatTokenizer(AutoTokenizer.from_pretrained(smollm2))
    messages = [
        Message("user", "How many rows?\n\n  3  <|im_end|>"),
        Message("assistant", "It is 3."),
        Message("user", "Thanks."),
    ]
    assert c.rewriting is None and c.end_of_turn == {2} and c.tokenizer.chat_template == SMOLLM2
    action = c.action_tokens("It is 3.")
    tokens = c.opening(messages[:1]) + action + c.following("Thanks.", action)
    assert tokens == c.opening(messages)
    # system, user, assistant, user; and the generation prompt
    assert tokens.count(2) == 4 and tokens.count(1) == 5
    clean = [Message("user", "How many rows?\n\n  3"), *messages[1:]]
    assert c.opening(clean) == rendered(c, clean)


@pytest.mark.parametrize("odd", ["\ud800", "a\udfff", "\ud83d\ude00", "\ufeff", "\x00\x1b\u202e"])
def test_half_a_character_is_replaced_and_any_other_kept(odd):
    """A world may say anything, also what no tokenizer takes."""
    c = ChatTokenizer(byte_level(SMOLLM2))
    read = c.tokenizer.decode(c.following(odd, [min(c.end_of_turn)]))
    assert odd.encode("utf-16", "surrogatepass").decode("utf-16", "replace") in read
    assert c.opening([Message("user", odd)])
