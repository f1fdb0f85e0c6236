"""The text of a reply that is still growing, and where in it the tokens are marks of the tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agent_peft.policies.marks import CUT
from agent_peft.policies.tokenization import ChatTokenizer
from agent_peft.replies import Call, cast, held_length, read_calls

UNFINISHED = "\ufffd"  # what a decoder writes for a part of a character
MEMORY = 16  # tokens that are decoded again with a new one, since a token's text may depend on its neighbours


def reply_text(chat: ChatTokenizer, tokens: Sequence[int], stops: Sequence[str]) -> str:
    """The text of a whole reply, up to the first stop string."""
    text = chat.decode_action(tokens)
    return text[: min((place for stop in stops if (place := text.find(stop)) >= 0), default=len(text))]


def decoded(chat: ChatTokenizer, tokens: Sequence[int]) -> str:
    """The text of all tokens, control tokens included."""
    text = chat.tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


class TextStream:
    """The parts of a reply's text, each as soon as it is certain: whole characters, and nothing that may be
    the beginning of a stop string. Together they are ``reply_text``.
    """

    def __init__(self, chat: ChatTokenizer, stops: Sequence[str]) -> None:
        self._chat, self._stops = chat, stops
        self._hidden = chat.end_of_turn.union(chat.tokenizer.all_special_ids)  # at a reply's end
        self._tokens: list[int] = []
        self._begin = self._read = 0  # the decoded tokens are those before ``_read``
        self._pending = ""
        self._length = 0  # of the decoded text
        self._stopped = False
        self.sent = ""
        self.marks: list[int] = []  # where in the text a token is a mark of the tokenizer

    def push(self, token: int) -> str:
        """The text that is certain since the last call."""
        self._tokens.append(token)
        if self._stopped or token in self._hidden:
            return ""
        before = decoded(self._chat, self._tokens[self._begin : self._read])
        now = decoded(self._chat, self._tokens[self._begin :])
        if len(now) <= len(before) or now.endswith(UNFINISHED):
            return ""
        new, place = now[len(before) :], 0
        for mark in filter(None, map(self._chat.marks.text, self._tokens[self._read :])):
            if (found := new.find(mark, place)) >= 0:
                self.marks.append(self._length + found)
                place = found + len(mark)
        self._begin, self._read = max(self._begin, len(self._tokens) - MEMORY), len(self._tokens)
        self._pending += new
        self._length += len(new)
        if places := [place for stop in self._stops if (place := self._pending.find(stop)) >= 0]:
            self._stopped = True  # ``finish`` finds the first of them
            self._pending = self._pending[: min(places)]
        held = 0 if self._stopped else held_length(self._pending, self._stops)
        certain = self._pending[: len(self._pending) - held]
        self._pending = self._pending[len(certain) :]
        self.sent += certain
        return certain

    def finish(self) -> str:
        """The rest."""
        whole = reply_text(self._chat, self._tokens, self._stops)
        rest, self.sent = whole[len(self.sent) :], whole
        return rest


def marked_text(chat: ChatTokenizer, tokens: Sequence[int]) -> str:
    """The text of a whole reply, with a ``CUT`` before each mark that is a token, and not typed."""
    stream = TextStream(chat, ())
    text = "".join(map(stream.push, tokens)) + stream.finish()
    parts = [text[start:end] for start, end in zip([0, *stream.marks], [*stream.marks, None], strict=True)]
    return CUT.join(parts)


def as_token(chat: ChatTokenizer, mark: str) -> str:
    """How `marked_text` writes a mark: where the tokenizer has it as a token, only that token is the mark."""
    return CUT + mark if chat.marks.at_start(mark) else mark


def marked_calls(
    chat: ChatTokenizer, text: str, dialect: str, schemas: Mapping[str, Mapping[str, Any]]
) -> tuple[str, tuple[Call, ...]]:
    """The text without its calls, and the calls, of a `marked_text` without thoughts.

    Args:
        schemas: the JSON schema of each tool's parameters, for a dialect that writes values as texts.
    """
    first, *others = text.split(CUT)
    marked = [(chat.marks.at_start(other), other) for other in others]
    reading = chat.cut(first) + "".join(mark + chat.cut(other[len(mark) :]) for mark, other in marked)
    before, calls = read_calls(reading, dialect)
    if dialect == "qwen3_coder":
        calls = tuple(cast(call, schemas.get(call.name, {})) for call in calls)
    return before.replace(CUT, ""), tuple(map(_whole, calls))


def _whole(call: Call) -> Call:
    """The call without cuts."""
    try:
        arguments = json.loads(json.dumps(dict(call.arguments), ensure_ascii=False).replace(CUT, ""))
    except RecursionError:
        return Call(call.name.replace(CUT, ""), fault="The arguments of a tool call are nested too deeply.")
    return replace(call, name=call.name.replace(CUT, ""), arguments=arguments)
