"""The parts of a sampled reply: its thoughts, and the text that acts."""

from __future__ import annotations

import re
from dataclasses import dataclass

# how thoughts open and close: of most models, Mistral's, Seed's and Gemma 4's
_THOUGHTS = {
    "<think>": "</think>",
    "[THINK]": "[/THINK]",
    "<seed:think>": "</seed:think>",
    "<|channel>thought": "<channel|>",
}
_MARK = re.compile("|".join(re.escape(mark) for pair in _THOUGHTS.items() for mark in pair))

UNCLOSED_THOUGHT = (
    "The reply ends inside its thought, so it has no action. Close the thought, then write the action."
)


@dataclass(frozen=True)
class Reply:
    """A reply in parts.

    Attributes:
        thought: what the reply's thoughts hold; None where it has none.
        text: the reply without its thoughts; empty where a thought is not closed.
        closed: whether every thought is closed.
    """

    thought: str | None
    text: str
    closed: bool = True


def read_reply(reply: str) -> Reply:
    """Split a reply. Text before a closing mark that nothing opens is a thought, which the prompt opened.

    Takes time linear in the reply, and never raises.

    >>> read_reply("<think>\\nfirst ls\\n</think>\\n\\nAct: finish")
    Reply(thought='\\nfirst ls\\n', text='Act: finish', closed=True)
    >>> read_reply("<think> Act: finish")
    Reply(thought=' Act: finish', text='', closed=False)
    """
    thoughts: list[str] = []
    texts: list[str] = []
    closing, place = None, 0
    for mark in _MARK.finditer(reply):
        if closing not in (None, mark[0]):
            continue
        part = reply[place : mark.start()]
        if closing is None and mark[0] in _THOUGHTS:
            texts.append(part)
            closing = _THOUGHTS[mark[0]]
        elif closing is None:
            thoughts += [*texts, part]
            texts.clear()
        else:
            thoughts.append(part)
            closing = None
        place = mark.end()
    if closing is not None:
        return Reply("".join([*thoughts, reply[place:]]), "", closed=False)
    if place == 0:
        return Reply(None, reply)
    return Reply("".join(thoughts), "".join([*texts, reply[place:]]).strip())


def open_thought(prompt: str) -> str:
    """The end of a prompt that opens a thought: from the opening mark on; empty where none is open.

    >>> open_thought("<|im_start|>assistant\\n<think>\\n"), open_thought("<think></think>")
    ('<think>\\n', '')
    """
    last = max(_MARK.finditer(prompt), key=lambda mark: mark.start(), default=None)
    return prompt[last.start() :] if last is not None and last[0] in _THOUGHTS else ""
