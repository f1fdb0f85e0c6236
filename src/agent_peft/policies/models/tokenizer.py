"""Chat templates for tokenizers that have none, such as the one of characters for models from scratch, and a
fixed date for templates that write today's date.
"""

from __future__ import annotations

import datetime
import logging
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from agent_peft.types import AgentPeftError

logger = logging.getLogger(__name__)

# For tokenizers without a template (base models). A bos token comes before it if the tokenizer writes one.
PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | capitalize }}:\n{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:\\n' }}{% endif %}"
)
BARE_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)

# For models that were tuned on ChatML without tools, such as SmolLM2. Calls are written as by Qwen 2.5.
CHATML_TOOLS = """{%- set first = messages[0].content if messages[0].role == 'system' else '' %}
{%- if tools %}<|im_start|>system
{{ first + '\n\n' if first }}Tools:
{% for tool in tools %}{{ tool.function | tojson }}
{% endfor %}To call one, write
<tool_call>
{"name": <name>, "arguments": <object>}
</tool_call><|im_end|>
{% elif first %}<|im_start|>system
{{ first }}<|im_end|>
{% endif %}
{%- for m in messages %}{% if m.role == 'tool' %}<|im_start|>tool
{{ m.content }}<|im_end|>
{% elif m.role != 'system' or not loop.first %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}{{ '\n' if m.content or not loop.first }}<tool_call>
{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TEMPLATES = {"chatml_tools": CHATML_TOOLS}

DATE = datetime.datetime(2024, 7, 26)  # the date that Llama 3's templates fall back on
_WRITES_DATE = re.compile(r"""\bstrftime_now\(\s*(?:format\s*=\s*)?(["'])(?P<form>[^"'\\{}]*)\1\s*\)""")


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, template: str | None, folder: Path) -> None:
    """Write a tokenizer for ``AutoTokenizer.from_pretrained``, with ``template`` where it has no chat
    template of its own.
    """
    own = tokenizer.chat_template
    tokenizer.chat_template = own or template
    try:
        tokenizer.save_pretrained(folder)
    finally:
        tokenizer.chat_template = own


def undated(template: str | dict[str, str]) -> str | None:
    """The template with ``DATE`` in place of today's date, or None where it writes no date.

    >>> undated("{{ strftime_now('%d %b %Y') }}")
    "{{ '26 Jul 2024' }}"
    """
    text = template.get("default", "") if isinstance(template, dict) else template
    if "strftime_now(" not in text:
        return None
    text = _WRITES_DATE.sub(lambda call: repr(DATE.strftime(call["form"])), text)
    if "strftime_now(" in text:
        raise AgentPeftError(
            "the chat template writes the present time, so no two runs would read the same tokens; write a "
            "date into it"
        )
    logger.warning(
        "the chat template writes today's date; here it is always %s, so that prompts stay the same",
        f"{DATE:%d %b %Y}",
    )
    return text


def character_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character, after ``<pad> <bos> <eos>``.

    Its chat template writes ``<bos>`` and then the contents one after the other, with an ``<eos>`` after
    each of the assistant's. It writes no roles and no generation prompt. A character outside the alphabet
    is an error.

    >>> character_tokenizer("01+=").encode("1+0=")
    [4, 5, 3, 6]
    """
    if not alphabet:
        raise AgentPeftError("policy.alphabet: an alphabet needs at least one character")
    if twice := ", ".join(repr(character) for character, count in Counter(alphabet).items() if count > 1):
        raise AgentPeftError(f"policy.alphabet: {twice} is there more than once; leave the others out")
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<bos>", "<eos>", *alphabet])}
    # <unk> is not in the vocabulary, so an unknown character raises
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)  # type: ignore[no-untyped-call]
    tokenizer.chat_template = BARE_TEMPLATE
    return tokenizer


_BYTES: Mapping[int, str] = bytes_to_unicode()  # type: ignore[no-untyped-call]
_BYTE_OF = {character: byte for byte, character in _BYTES.items()}
_BYTE_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")


def spelled_bytes(spelled: str, byte_level: bool) -> bytes:
    """The bytes of a token, from its spelling in the vocabulary: in GPT-2's byte alphabet or
    SentencePiece's.
    """
    if byte_level and all(character in _BYTE_OF for character in spelled):
        return bytes(_BYTE_OF[character] for character in spelled)
    if byte := _BYTE_FALLBACK.fullmatch(spelled):
        return bytes([int(byte.group(1), 16)])
    return spelled.replace("\u2581", " ").encode()  # SentencePiece's mark of a blank
