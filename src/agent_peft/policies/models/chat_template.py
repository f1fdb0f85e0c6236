"""Chat templates for tokenizers that have none, also when they are saved, and a fixed date for templates that
write today's date.
"""

from __future__ import annotations

import datetime
import logging
import re
from pathlib import Path

from transformers import PreTrainedTokenizerBase

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
