"""Chat templates: those of tokenizers that have none of their own, and one date for those that write
today's.
"""

from __future__ import annotations

import datetime
import logging
import re

from agent_peft.types import AgentPeftError

logger = logging.getLogger(__name__)

# Used where a tokenizer has no template of its own (base models); bos comes before it where the tokenizer
# itself writes one.
PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | capitalize }}:\n{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:\\n' }}{% endif %}"
)
BARE_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)

DATE = datetime.datetime(2024, 7, 26)  # what Llama 3's templates write where nobody tells them the date
_WRITES_DATE = re.compile(r"""\bstrftime_now\(\s*(?:format\s*=\s*)?(["'])(?P<form>[^"'\\{}]*)\1\s*\)""")


def undated(template: str | dict[str, str]) -> str | None:
    """The same template with ``DATE`` wherever it writes today's date, None where it writes none.

    Raises:
        AgentPeftError: it writes the present time in a form that it makes up.

    >>> undated("{{ strftime_now('%d %b %Y') }}")
    "{{ '26 Jul 2024' }}"
    """
    text = template.get("default", "") if isinstance(template, dict) else template
    if "strftime_now(" not in text:
        return None
    text = _WRITES_DATE.sub(lambda call: repr(DATE.strftime(call["form"])), text)
    if "strftime_now(" in text:
        raise AgentPeftError(
            "the chat template writes the present time, so that no two runs would read the same; write a date into it"
        )
    logger.warning(
        "the chat template writes today's date; here it is always %s, so that prompts stay the same",
        f"{DATE:%d %b %Y}",
    )
    return text
