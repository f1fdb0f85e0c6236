"""Replies that must have a form: a call of a tool (``tool_choice``), JSON (``response_format``).

A grammar says which tokens may come next, and the others are masked before temperature and ``top_p``. The
log-probabilities are then those under the mask, and not the policy's: nothing here is for training. Thoughts
are free; the form begins after them. Masks are computed by llguidance (https://github.com/guidance-ai).
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import torch

from agent_peft.agents.serving.conversation import PLAIN, Tool
from agent_peft.agents.serving.requests import ChatRequest
from agent_peft.environments.tool_calls import write_tool_call
from agent_peft.lookup import install, needed
from agent_peft.policies.marks import CUT
from agent_peft.policies.native import NativeFormat, format_of
from agent_peft.policies.reply_text import marked_text
from agent_peft.policies.thinking import ThinkingBudget
from agent_peft.policies.tokenization import ChatTokenizer
from agent_peft.replies import THOUGHTS
from agent_peft.types import AgentPeftError, Message, ToolCall

# as templates write JSON. Without it a policy that knows little writes blanks for ever
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ARGUMENTS = {"xsentinel": "x"}
_WRITTEN = re.compile(r'\{\s*"xsentinel"\s*:\s*"x"\s*\}')
_USER = Message("user", "x")


Grammar = Callable[[Sequence[int]], "Constraint"]
"""Makes the constraint of one reply to a prompt."""


class Constraint:
    """Which tokens one reply may continue with."""

    def __init__(self, chat: ChatTokenizer, matcher: Any, prompt: Sequence[int]) -> None:
        self._chat, self._start, self._prompt = chat, matcher, prompt
        self._openings = self._thought_marks()
        self._begin()

    def _begin(self) -> None:
        self._matcher, self._read, self._begun = self._start.deep_copy(), 0, False
        self._thoughts = ThinkingBudget(self._chat, sys.maxsize, self._prompt)

    def allowed(self, action: Sequence[int], size: int) -> torch.Tensor | None:
        """The tokens that may follow ``action``, as a mask (size,). None allows all. Raises
        `AgentPeftError`: the grammar is too large to continue.
        """
        if len(action) < self._read:  # it is drawn again
            self._begin()
        for token in action[self._read :]:
            if not self._begun:
                inside = self._thoughts.open
                self._thoughts.push(token)
                self._begun = not inside and not self._thoughts.open
            if self._begun:  # what a string of JSON holds opens no thought
                self._matcher.consume_token(token)
        self._read = len(action)
        if not self._begun and self._thoughts.open:
            return None
        bits = self._matcher.compute_bitmask()
        if error := self._matcher.get_error():
            raise AgentPeftError(f"the form of the reply: {error[:200]}")
        allowed = torch.frombuffer(bytearray(bits), dtype=torch.uint8)[:, None] >> torch.arange(8) & 1
        mask = torch.zeros(size, dtype=torch.bool)
        mask[: allowed.numel()] = allowed.flatten()[:size].bool()
        if not action:
            mask[self._openings] = True
        return mask

    def _thought_marks(self) -> list[int]:
        """The tokens that may open a thought before the form: where the template has thoughts, unless the
        prompt has closed one.
        """
        tokens, end = self._chat.marks.tokens, set(self._prompt[-4:])
        template = str(self._chat.template or self._chat.tokenizer.chat_template)
        return [
            tokens[mark]
            for mark, closing in THOUGHTS.items()
            if mark in tokens and mark in template and tokens.get(closing) not in end
        ]


def grammar_of(chat: ChatTokenizer, request: ChatRequest, dialect: str) -> Grammar | None:
    """The form that a request asks for: a call of one of its tools, JSON, or either. None if it asks for
    none. What cannot be forced is an `AgentPeftError`.
    """
    forms: list[str] = []
    schema = None if request.response_format is None else request.response_format.form
    tools = request.forced or (request.offered if schema is not None else ())
    if schema is not None and not request.forced:
        forms.append(_json(schema))
    for tool in tools:
        before, after = _frame(chat, tool, dialect)
        arguments = {"type": "object", **(tool.function.parameters or {})}
        forms.append(f"{_literal(chat, before)} {_json(arguments)} {_literal(chat, after)}")
    if not forms:
        return None
    rules = "\n".join(f"form{number}: {form}" for number, form in enumerate(forms))
    names = " | ".join(f"form{number}" for number in range(len(forms)))
    grammar = f"start: /\\n{{0,2}}/ ({names})\n{rules}\n"
    return partial(Constraint, chat, _matcher_of(chat, grammar))


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": _LAYOUT})


def _literal(chat: ChatTokenizer, text: str) -> str:
    """A `marked_text` in Lark, its marks as tokens."""
    first, *others = text.split(CUT)
    parts = [json.dumps(first)] if first else []
    for other in others:
        mark = chat.marks.at_start(other)
        parts.append(f"<[{chat.marks.tokens[mark]}]>")
        parts += [json.dumps(other[len(mark) :])] if other[len(mark) :] else []
    return " ".join(parts)


def _frame(chat: ChatTokenizer, tool: Tool, dialect: str) -> tuple[str, str]:
    """What stands before and after the arguments of a call, as a `marked_text`."""
    name = tool.function.name
    if dialect == PLAIN:
        text = write_tool_call(name, **_ARGUMENTS)
    else:
        written = format_of(chat, [tool.model_dump(exclude_none=True)], acts=True)
        text = _written_call(written, name)
    parts = _WRITTEN.split(text.strip())
    if len(parts) != 2:
        raise AgentPeftError(
            f"the calls of this model ({dialect}) do not hold their arguments as JSON, so they cannot be "
            "forced; leave out tool_choice, and response_format where there are tools"
        )
    return parts[0], parts[1]


def _written_call(written: NativeFormat, name: str) -> str:
    call = ToolCall(name, _ARGUMENTS, "call00000")
    try:
        tokens = written.action_tokens([_USER], Message("assistant", "", (call,)))
    except AgentPeftError:  # the prompt opens a thought
        tokens = written.action_tokens([_USER], Message("assistant", "", (call,), "x"))
    text = marked_text(written.chat, tokens[:-1])
    for closing in THOUGHTS.values():  # what a template may write of a thought before the call
        text = text.rpartition(closing)[2]
    return text


def _matcher_of(chat: ChatTokenizer, grammar: str) -> Any:
    with needed(f"tool_choice and response_format need llguidance: {install('constraint')}"):
        from llguidance import LLMatcher
    matcher = LLMatcher(_tokens_of(chat), grammar, log_level=0)
    if error := matcher.get_error():
        raise AgentPeftError(f"the form of the reply: {' '.join(error.split())[:300]}")
    return matcher


@lru_cache(maxsize=16)
def _tokens_of(chat: ChatTokenizer) -> Any:
    """The tokenizer as llguidance reads it. Takes a second for a large vocabulary."""
    from llguidance import LLTokenizer, TokenizerWrapper

    ends = sorted(chat.end_of_turn)
    return LLTokenizer(TokenizerWrapper(_Vocabulary(chat, ends[0])), eos_token=ends)


class _Vocabulary:
    """What `llguidance.TokenizerWrapper` reads."""

    bos_token_id = None

    def __init__(self, chat: ChatTokenizer, end: int) -> None:
        self.eos_token_id = end
        self.tokens = [chat.token_bytes(token) for token in range(len(chat.tokenizer))]
        self.special_token_ids = sorted({*chat.marks.tokens.values(), *chat.end_of_turn})
        self._chat = chat

    def __call__(self, text: bytes) -> list[int]:
        return self._chat.encode_rendered(self._chat.cut(text.decode("utf-8", "replace")))
