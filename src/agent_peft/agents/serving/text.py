"""The text of a reply, as its tokens come."""

from __future__ import annotations

from collections.abc import Sequence

from agent_peft.policies.tokenization import ChatTokenizer

UNFINISHED = "\ufffd"  # what a decoder writes for a part of a character
MEMORY = 16  # tokens that are decoded again with a new one, since a token's text may depend on its neighbours


def reply_text(chat: ChatTokenizer, tokens: Sequence[int], stops: Sequence[str]) -> str:
    """The text of a whole reply, up to the first stop string."""
    text = chat.decode_action(tokens)
    return text[: min((place for stop in stops if (place := text.find(stop)) >= 0), default=len(text))]


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
        self._stopped = False
        self.sent = ""

    def push(self, token: int) -> str:
        """The text that is certain since the last call."""
        self._tokens.append(token)
        if self._stopped or token in self._hidden:
            return ""
        before, now = (
            self._decode(self._tokens[self._begin : self._read]),
            self._decode(self._tokens[self._begin :]),
        )
        if len(now) <= len(before) or now.endswith(UNFINISHED):
            return ""
        self._begin, self._read = max(self._begin, len(self._tokens) - MEMORY), len(self._tokens)
        self._pending += now[len(before) :]
        if any(stop in self._pending for stop in self._stops):
            self._stopped = True  # ``finish`` finds the first of them
            self._pending = self._pending[: min(i for s in self._stops if (i := self._pending.find(s)) >= 0)]
        held = 0 if self._stopped else self._held()
        certain = self._pending[: len(self._pending) - held]
        self._pending = self._pending[len(certain) :]
        self.sent += certain
        return certain

    def finish(self) -> str:
        """The rest."""
        whole = reply_text(self._chat, self._tokens, self._stops)
        rest, self.sent = whole[len(self.sent) :], whole
        return rest

    def _held(self) -> int:
        """The length of the longest end of the text with which a stop string begins."""
        longest = max(map(len, self._stops), default=1) - 1
        return next(
            (
                length
                for length in range(min(longest, len(self._pending)), 0, -1)
                if any(stop.startswith(self._pending[-length:]) for stop in self._stops)
            ),
            0,
        )

    def _decode(self, tokens: Sequence[int]) -> str:
        text = self._chat.tokenizer.decode(
            list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text
